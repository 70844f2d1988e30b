"""``whet chat`` from the command line: in a pseudo-terminal and in a pipe."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import write_tiny_model
from tests.processes import WHET
from tests.raising import assert_mentions
from tests.real.model import real_model
from tests.rollout.test_tool_episodes import HERMES

from whet.cli import main
from whet.cli.chat import _Chat
from whet.config.episodes import EpisodeSettings
from whet.config.sampling import SamplingParams
from whet.data.rows import tokenize_completion
from whet.data.sources import read_rows
from whet.models.tokenizers import load_tokenizer, read_tokenizer
from whet.tasks.tools import ToolProcess, load_tools
from whet.text.conversation import Conversation
from whet.text.model import load_engine

GREEDY = ["--temperature", "0"]


class Terminal:
    """A ``whet chat`` in its own pseudo-terminal."""

    def __init__(self, *argv: object, **environment: str) -> None:
        self.end, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*WHET, "chat", *map(str, argv)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", **environment},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self.shown = ""

    def read(self, pattern: str = "> $") -> str:
        """Read output until the pattern matches, and return it."""
        begin, deadline = len(self.shown), time.monotonic() + 60
        while not re.search(pattern, self.shown[begin:]):
            assert time.monotonic() < deadline, self.shown
            if select.select([self.end], [], [], 1)[0]:
                try:
                    self.shown += os.read(self.end, 4096).decode(errors="replace").replace("\r\n", "\n")
                except OSError:  # the other end is closed
                    raise AssertionError(f"it has ended: {self.shown}") from None
        return self.shown[begin:]

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C at the prompt, after readline has begun to wait for a key: before, it misses the signal."""
        time.sleep(0.5)
        self.type("\x03")

    def status(self) -> int:
        with contextlib.suppress(OSError):
            while data := os.read(self.end, 4096):
                self.shown += data.decode(errors="replace")
        return self.process.wait(timeout=60)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.end)


@pytest.fixture(scope="session")
def endless(tiny_gguf, tmp_path_factory) -> Path:
    """The tiny model with ten million positions and without an EOS that can be sampled."""
    path = tmp_path_factory.mktemp("endless") / "endless.gguf"
    data = tiny_gguf.read_bytes()
    for key, old, new in ((b"llama.context_length", 512, 10_000_000), (b"tokenizer.ggml.eos_token_id", 1, 0)):
        head = key + (4).to_bytes(4, "little")
        assert head + old.to_bytes(4, "little") in data
        data = data.replace(head + old.to_bytes(4, "little"), head + new.to_bytes(4, "little"))
    path.write_bytes(data)
    return path


@pytest.fixture
def piped(capsys, monkeypatch):
    """Return a function that runs a chat on piped lines and returns its status and output."""

    def run(model: object, *lines: str, argv: Any = (), stdin: bytes | None = None) -> tuple[int, str, str]:
        capsys.readouterr()
        reading, writing = os.pipe()
        os.write(writing, stdin if stdin is not None else "".join(line + "\n" for line in lines).encode())
        os.close(writing)
        with open(reading, encoding="utf-8") as file:
            monkeypatch.setattr(sys, "stdin", file)
            status = main(["chat", str(model), *map(str, argv)])
        out = capsys.readouterr()
        return status, out.out, out.err

    return run


def thinking(tokenizer_text: str) -> str:
    """Return a template whose replies begin within thinking."""
    return tokenizer_text + "{% if add_generation_prompt %}<think>{% endif %}"


# ------------------------------------------------------------------ in a terminal


def test_conversation_in_a_terminal(endless):
    with Terminal(endless, *GREEDY, "--max-new-tokens", "20", NO_COLOR="1") as terminal:
        assert_mentions(terminal.read(), "endless.gguf", "context")
        terminal.type("Hi\n")
        first = terminal.read()
        assert "after 20 tokens)" in first and "\x1b[2m" not in first
        terminal.type("/regenerate\n")
        assert_mentions(terminal.read(), "temperature is 0", "same reply")
        terminal.type("/nope\n")
        assert_mentions(terminal.read(), "command '/nope'", "/help")
        terminal.type("/stats\n")
        assert_mentions(terminal.read(), "prompt: 20 tokens, 20 computed, 0 reused")
        terminal.type("\x04")
        assert terminal.status() == 0


def test_replies_are_streamed_and_ctrl_c_stops_one(endless, tmp_path):
    with Terminal(endless, *GREEDY, "--max-new-tokens", "9000000", "--context", "9900000") as terminal:
        terminal.read()
        terminal.type("Hi\n")
        terminal.read(r"Hi\n(.|\n){30}")  # of 9 million tokens
        terminal.type("\x03")
        stopped = terminal.read()
        assert terminal.process.poll() is None
        terminal.type(f"/save {tmp_path / 'talk.jsonl'}\n")
        assert_mentions(terminal.read(), "written to")
        [row] = read_rows(tmp_path / "talk.jsonl")
        reply = row["messages"][1]["content"]
        assert len(reply) >= 30 and reply[:20].splitlines()[0] in terminal.shown
        terminal.type("And?\n")
        terminal.read(r"And\?\n(.|\n){30}")
        terminal.type("\x03")
        terminal.read()
        terminal.type("/exit\n")
        assert terminal.status() == 0
        assert "Traceback" not in terminal.shown + stopped


def test_ctrl_c_at_the_prompt_names_the_exit_commands(endless):
    with Terminal(endless) as terminal:
        terminal.read()
        terminal.type("half a line")
        terminal.read("half a line$")
        terminal.interrupt()
        assert "ends the chat" not in terminal.read("\n> $")
        terminal.interrupt()
        assert "Ctrl-D or /exit ends the chat" in terminal.read("\n> $")
        terminal.type("/help\n")
        assert "/regenerate" in terminal.read()
        terminal.interrupt()
        assert "ends the chat" not in terminal.read("\n> $")
        terminal.type("\x04")
        assert terminal.status() == 0


def test_ctrl_c_never_ends_the_chat(endless):
    """Send hundreds: at the prompt, in replies, and while an earlier one is handled."""
    with Terminal(endless, "--max-new-tokens", "30", "--context", "400") as terminal:
        terminal.read()
        moments = random.Random(3)
        for i in range(300):
            if i % 3 == 0:
                terminal.type("Hi\n")
            time.sleep(moments.expovariate(200))
            terminal.process.send_signal(signal.SIGINT)
            while select.select([terminal.end], [], [], 0)[0]:
                os.read(terminal.end, 4096)
            assert terminal.process.poll() is None
        time.sleep(1)
        terminal.type("\x15\n")  # an empty line, for a signal between prompt and wait
        terminal.read()
        terminal.type("/stats\n")
        assert "KV cache" in terminal.read("KV cache.*\n")
        terminal.type("/exit\n")
        assert terminal.status() == 0


def test_ctrl_c_while_a_ctrl_c_is_handled(endless, monkeypatch):
    tokenizer = read_tokenizer(endless)
    lines = ["\x03", "/exit"]

    class Errors:
        """Standard error that raises the next Ctrl-C while the newline after the first is written."""

        def write(self, text: str) -> None:
            signal.raise_signal(signal.SIGINT)

        def flush(self) -> None:
            pass

    def read_line() -> str:
        if (line := lines.pop(0)) == "\x03":
            signal.raise_signal(signal.SIGINT)
        return line

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    with load_engine(str(endless), None, 100, "here") as engine:
        chat = _Chat(Conversation(engine, tokenizer, SamplingParams()), show_thinking=False)
    chat.is_terminal = True
    monkeypatch.setattr(chat, "_read", read_line)
    monkeypatch.setattr(sys, "stderr", Errors())
    previous = signal.getsignal(signal.SIGINT)
    assert chat.run() == 0 and lines == []
    assert signal.getsignal(signal.SIGINT) is previous


def test_thinking_is_one_line_in_a_terminal(endless, tmp_path, tiny_gguf):
    path = tmp_path / "template.jinja"
    path.write_text(thinking(read_tokenizer(tiny_gguf).chat_template))
    argv = [endless, *GREEDY, "--max-new-tokens", "12", "--chat-template", path]
    with Terminal(*argv) as terminal:
        terminal.read()
        terminal.type("Hi\n")
        shown = terminal.read()
        assert "\r\x1b[2mthinking ... 12 tokens\x1b[22m" in shown
        assert "\r\x1b[K\x1b[2mthought for 12 tokens\x1b[22m\n" in shown
        assert_mentions(shown, "empty", "/regenerate")
        terminal.type("/exit\n")
        assert terminal.status() == 0
    with Terminal(*argv, "--show-thinking", TERM="dumb") as terminal:
        terminal.read()
        terminal.type("Hi\n")
        shown = terminal.read()
        assert "<think>" in shown and "</think>" in shown and "\x1b" not in shown
        terminal.type("\x04")
        assert terminal.status() == 0


# ------------------------------------------------------------------ with tools

TOOLS = """
import os

def add(a: int) -> int:
    \"\"\"Add one.

    Args:
        a: a number
    \"\"\"
    return a + 1 if a < 9 else os._exit(3)
"""


def test_tools_are_called(tmp_path, monkeypatch, capsys):
    (tmp_path / "tools.py").write_text(TOOLS)
    model = write_tiny_model(tmp_path / "model", HERMES, max_position=4096)
    tokenizer = load_tokenizer(str(model))
    call = r'<tool_call>\{"name": "add", "arguments": \{"a": ([6-9]|"x")\}\}</tool_call>'
    sampling = SamplingParams(regex=f"Done|{call}", stop_token_ids=(1,), max_new_tokens=300, seed=3)
    lines = "".join(f"sum {i}\n" for i in range(12))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    functions = load_tools([f"{tmp_path / 'tools.py'}:add"])
    with contextlib.ExitStack() as stack:
        tools = stack.enter_context(ToolProcess(functions, EpisodeSettings(env_timeout_s=60.0)))
        engine = stack.enter_context(load_engine(str(model), None, None, "here"))
        engine.tokenizer = tokenizer
        conversation = Conversation(engine, tokenizer, sampling, tools=tools.schemas)
        assert _Chat(conversation, False, tools).run() == 0
    out, err = capsys.readouterr()
    assert out.count("Done") >= 8 and "<tool_call>" not in out
    shown = re.findall(r"\(add\(a=(.*?)\)\)\n\((.*)\)\n", err)
    for argument, result in shown:
        expected = str(int(argument) + 1) if argument in "678" else "expected integer" if "x" in argument else "died"
        assert expected in result
    deaths = [i for i, (argument, _) in enumerate(shown) if argument == "9"]
    assert deaths and any(argument in "678" for argument, _ in shown[deaths[0] :])  # the next call has a new process
    assert len({argument for argument, _ in shown}) >= 4


def test_flags_of_tools(error_of, piped, tiny_model, tmp_path):
    (tmp_path / "tools.py").write_text(TOOLS)
    template = tmp_path / "hermes.jinja"
    template.write_text(HERMES)
    tools = ["--tools", f"{tmp_path / 'tools.py'}:add"]
    more = ["--chat-template", template, "--max-new-tokens", "4", "--context", "480"]
    status, out, err = piped(tiny_model, "Hi", argv=[*tools, *more])
    assert status == 0 and out and "truncated" in err
    assert_mentions(error_of("chat", tiny_model, *tools), "tools", "--chat-template")
    assert_mentions(error_of("chat", tiny_model, *tools, "--unsafe-local"), "unsafe_local", "no tool runs programs")
    assert_mentions(error_of("chat", tiny_model, "--tools", "tools.py"), "tools.py", "file.py:name")


# ------------------------------------------------------------------ in a pipe


def test_lines_of_a_pipe_are_answered_in_order(piped, endless, capsys):
    argv = [*GREEDY, "--max-new-tokens", "10"]
    status, out, err = piped(endless, "Hi", "", "  And?  ", "/stats", argv=argv)
    first, second, *stats = out.split("\n")
    assert status == 0 and first and second and len(stats) == 5
    assert err == "(the reply was truncated after 10 tokens)\n" * 2  # no prompt, no greeting
    assert main(["generate", str(endless), "--prompt", "Hi", *argv]) == 0
    assert capsys.readouterr().out == first + "\n"
    # Computed: the reply's last token and "<eos><user>And?<eos><assistant>"; reused: 20 and the rest of the reply.
    assert stats[1] == "prompt: 53 tokens, 24 computed, 29 reused" and stats[2].startswith("context: 63 of ")
    assert "KV cache: 0.0 MB of at most 1073.7 MB" in stats[3]
    assert piped(endless, "/exit", "Hi", argv=argv) == (0, "", "")
    # A last line without a newline, and invalid UTF-8.
    assert piped(endless, argv=argv, stdin=b"Hi")[1] == first + "\n"
    assert piped(endless, argv=argv, stdin=b"H\xff\n")[0] == 0
    assert piped(endless, argv=argv, stdin="\ufeffHi\r\n".encode())[1] == first + "\n"


def test_folders_adapters_and_weight_formats(piped, tiny_model, tiny_gguf, tmp_path):
    from tests.tiny import with_lora
    from transformers import AutoModelForCausalLM

    argv = ["--max-new-tokens", "8", "--weights", "float32"]
    expected = piped(tiny_gguf, "Hi", "And?", argv=argv)
    assert expected[0] == 0 and piped(tiny_model, "Hi", "And?", argv=argv)[1] == expected[1]
    model = with_lora(AutoModelForCausalLM.from_pretrained(tiny_model), b_std=3.0, r=2, target_modules=["q_proj"])
    model.save_pretrained(tmp_path / "lora")
    other = piped(tiny_gguf, "Hi", "And?", argv=[*argv, "--adapter", tmp_path / "lora"])
    assert other[0] == 0 and other[1] != expected[1]


def test_errors_in_a_pipe_set_the_exit_status(piped, endless):
    argv = [*GREEDY, "--max-new-tokens", "4", "--context", "120"]
    lines = ["x" * 200, "/stat", "/save", "/clear all", "//hi", "/save --thinking", "/save --thinking  "]
    status, out, err = piped(endless, *lines, argv=argv)
    assert status == 2 and out.count("\n") == 1 and not Path("--thinking").exists()
    lines = err.splitlines()
    assert_mentions(lines[0], "message takes 218 tokens", "at most 116", 120, "4 are reserved", "--context")
    assert_mentions(lines[1], "command '/stat'", "Did you mean /stats?")
    assert_mentions(lines[2], "/save", "file")
    assert_mentions(lines[3], "command '/clear all'", "Did you mean /clear?")
    assert "after 4 tokens" in lines[4]
    assert len(lines) == 7 and lines[5:] == lines[2:3] * 2


def test_stop_strings_end_a_reply_and_are_not_printed(piped, endless):
    argv = ["--max-new-tokens", "40", "--seed", "2"]
    status, out, _ = piped(endless, "Hi", argv=argv)
    stop = next(c for c in out[1:] if c.isascii() and c.isalnum())
    found = piped(endless, "Hi", argv=[*argv, "--stop", stop])
    assert status == found[0] == 0 and found[1] == out[: out.index(stop)] + "\n"


def test_full_context_prints_the_dropped_turns(piped, endless):
    argv = ["--max-new-tokens", "4", "--context", "120"]
    status, _, err = piped(endless, *["message"] * 6, argv=argv)
    assert status == 0 and "(the context is full: " in err


def test_stats_after_clear_have_no_last_reply(piped, endless):
    out = piped(endless, "Hi", "/clear", "/stats", argv=["--max-new-tokens", "4"])[1]
    assert "last reply" not in out and "KV cache" in out


def test_commands(piped, endless, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["--max-new-tokens", "12", "--system", "Be brief."]
    lines = ["/system", "Hi", "/save a.jsonl", "/save a.jsonl", "/save no/folder.jsonl", "/regenerate", "/clear"]
    lines += ["/save b.jsonl", "/system Sing.", "/system", "Hi", "/save b.jsonl"]
    odd = ["/save " + "x" * 300, "/save a\0b", "/save ~nobody-of-this-name/a.jsonl"]
    status, out, err = piped(endless, *lines, *odd, argv=argv)
    assert status == 2 and out.splitlines()[0] == "Be brief." and "Sing." in out
    assert err.count("cannot be written") == 1 + len(odd) and "File name too long" in err and "null byte" in err
    assert_mentions(err, "'a.jsonl' exists already", "'no/folder.jsonl' cannot be written", "no turn to save")
    assert err.count("(the conversation starts over)") == 2
    [a], [b] = read_rows("a.jsonl"), read_rows("b.jsonl")
    assert [m["role"] for m in a["messages"]] == ["system", "user", "assistant"]
    assert [row["messages"][0]["content"] for row in (a, b)] == ["Be brief.", "Sing."]
    tokenizer = read_tokenizer(endless)
    assert tokenize_completion(a, tokenizer)[1][:3] == tokenizer.encode(a["messages"][-1]["content"])[:3]


def test_help_lists_the_commands(piped, endless):
    offered = re.findall(r"^(/\w+)", piped(endless, "/help")[1], re.M)
    assert set(offered) == {"/help", "/system", "/clear", "/regenerate", "/save", "/stats", "/exit"}
    assert "unknown command" not in piped(endless, *offered)[2]


def test_thinking_is_not_printed_to_a_pipe(piped, endless, tmp_path, tiny_gguf):
    path = tmp_path / "template.jinja"
    path.write_text(thinking(read_tokenizer(tiny_gguf).chat_template))
    argv = [*GREEDY, "--max-new-tokens", "12", "--chat-template", path]
    status, out, err = piped(endless, "Hi", argv=argv)
    assert (status, out) == (0, "\n") and "empty" in err
    out = piped(endless, "Hi", argv=[*argv, "--show-thinking"])[1]
    assert out.startswith("<think>") and out.rstrip().endswith("</think>")
    path.write_text(path.read_text().replace("<think>", "[THINK]") + "{# [/THINK] #}")
    assert piped(endless, "Hi", argv=argv)[1] == "\n"
    out = piped(endless, "Hi", argv=[*argv, "--show-thinking"])[1]
    assert out.startswith("[THINK]") and out.rstrip().endswith("[/THINK]")


def test_ctrl_c_in_a_pipe_stops_only_the_current_reply(endless):
    argv = [*WHET, "chat", str(endless), *GREEDY, "--max-new-tokens", "9000000", "--context", "9900000"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin and process.stdout
    try:
        process.stdin.write(b"Hi\n/save /dev/null\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(2)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 2 and out.endswith(b"\n") and b"'/dev/null' exists already" in err


def test_chat_errors_are_one_line(error_of, tiny_model, tiny_gguf, tmp_path, monkeypatch):
    assert_mentions(error_of("chat", "nope"), "whet chat", "'nope'", ".gguf")
    assert_mentions(error_of("chat", tiny_gguf, "--context", "-1"), "context is -1", ">= 0")
    assert_mentions(error_of("chat", tiny_gguf, "--context", "600"), "context is 600", "512 tokens", "--context")
    error = error_of("chat", tiny_gguf, "--temperature", "0", "--top-k", "2")
    assert_mentions(error, "top_k is 2", "no effect", "temperature is 0")
    assert_mentions(error_of("chat", tiny_gguf, "--chat-template", "nope"), "chat_template 'nope'", "read")
    assert_mentions(error_of("chat", tiny_gguf, *GREEDY, "--seed", "1"), "seed is 1", "no effect", "temperature is 0")
    bad = tmp_path / "bad.jinja"
    bad.write_text(" \n")
    assert_mentions(error_of("chat", tiny_gguf, "--chat-template", bad), f"chat_template {str(bad)!r}", "empty")
    bad.write_text("{% for %}")
    assert_mentions(error_of("chat", tiny_gguf, "--chat-template", bad), "Jinja")
    bare = tmp_path / "bare.gguf"
    bare.write_bytes(tiny_gguf.read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_templatX"))
    assert_mentions(error_of("chat", bare), "no chat template", "--chat-template", "Jinja")


def test_chat_template_for_a_model_without_one(piped, tiny_gguf, tmp_path):
    bare, path = tmp_path / "bare.gguf", tmp_path / "template.jinja"
    bare.write_bytes(tiny_gguf.read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_templatX"))
    path.write_text(read_tokenizer(tiny_gguf).chat_template, encoding="utf-8-sig")
    argv = [*GREEDY, "--max-new-tokens", "8"]
    expected = piped(tiny_gguf, "Hi", argv=argv)
    assert piped(bare, "Hi", argv=[*argv, "--chat-template", path]) == expected and expected[0] == 0
    assert piped(bare, "Hi", argv=[*argv, "--tokenizer", tiny_gguf]) == expected


def test_kv_cache_fits_a_long_context(endless):
    with load_engine(str(endless), None, 9_000_000, "here") as engine:
        memory = engine.memory
        assert memory["kv_bytes"] // memory["kv_page_bytes"] * 64 >= 9_000_000


def test_chat_imports_neither_torch_nor_transformers(tiny_gguf):
    code = "import sys; from whet.cli import main; "
    code += f"status = main(['chat', {str(tiny_gguf)!r}, '--max-new-tokens', '2']); "
    code += "print(status, [name for name in ('torch', 'transformers') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], input="Hi\n", capture_output=True, text=True, timeout=600)
    assert run.stdout.endswith("0 []\n"), run


def test_real_model_answers(piped):
    argv = [*GREEDY, "--max-new-tokens", "32", "--system", "You are a helpful assistant."]
    lines = ["What is the capital of France? One word.", "And of Italy? One word.", "/stats"]
    status, out, _ = piped(real_model(), *lines, argv=argv)
    assert status == 0 and "Paris" in out and "Rome" in out
    new = "<|im_end|>\n<|im_start|>user\nAnd of Italy? One word.<|im_end|>\n<|im_start|>assistant\n"
    assert f"{len(read_tokenizer(real_model()).encode(new))} computed" in out
