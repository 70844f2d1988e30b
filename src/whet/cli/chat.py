"""``whet chat``: a chat in a terminal, or line by line from a pipe.

Replies are printed to standard output, everything else to standard error. A line of input is a message, or a command
that begins with ``/``. Ctrl-C stops a reply and keeps its text; Ctrl-D, or the end of the input, ends the chat. If the
input is not a terminal, a rejected line makes the exit status 2.

In a terminal, the thinking of a model is shown as one line; elsewhere it is omitted. ``--show-thinking`` prints it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from tyro.conf import UseAppendAction

from whet.cli.settings import parse_flags
from whet.cli.text_options import OneModelConfig
from whet.config.episodes import EpisodeSettings
from whet.config.fields import Count, Paths, reject_ineffective
from whet.config.sampling import CHAT_MAX_NEW_TOKENS
from whet.data.messages import call_text, tool_calls
from whet.data.thinking import Tags
from whet.errors import WhetError, WhetValueError
from whet.files import replace_text
from whet.tasks.code import prepare, runs_programs
from whet.tasks.tools import ToolProcess, load_tools, truncate
from whet.text.checkpoint_model import resolve_adapter
from whet.text.conversation import Conversation, Turn
from whet.text.model import find_model, find_stop_ids, load_chat_tokenizer, load_engine

_WHERE = "whet chat"
_WITH_TEXT = ("/system", "/save")
_MOST_SHOWN = 500
"""Characters of a tool's result that are printed; the model reads more."""
_HELP = """\
/help                  print this text
/system [TEXT]         print the system prompt, or replace it and start over
/clear                 start over with the same system prompt
/regenerate            answer the last message again
/save [--thinking] FILE
                       write the conversation as a row for whet train sft
/stats                 print speed, prompt tokens computed and reused,
                       context and memory of the last reply
/exit                  end the chat, as does Ctrl-D

Ctrl-C stops a reply. Type // for a message that begins with /."""


@dataclasses.dataclass(kw_only=True)
class ChatConfig(OneModelConfig):
    """Chat with a model. Each line is a message; /help lists the commands; Ctrl-D ends the chat."""

    max_new_tokens: int = CHAT_MAX_NEW_TOKENS
    """Maximum number of tokens of a reply."""
    temperature: float = 0.7
    """Divides the logits; 0: greedy."""
    top_p: float = 0.95
    """Nucleus sampling: sample from the most probable tokens with this total probability; 1: from all."""
    seed: int = 0
    """Seed of the sampling: the same seed and messages give the same replies."""
    system: str = ""
    """System prompt; empty: the chat template's default, if it has one."""
    context: Count = 0
    """Maximum tokens of prompt and reply; the oldest turns are dropped. 0: the model's, limited by 1 GiB of cache."""
    show_thinking: bool = False
    """Print the thinking before the answer."""
    tools: UseAppendAction[Paths] = dataclasses.field(default_factory=list)
    """Functions that the model calls, in a child process: file.py:function,other or package.module:function."""
    unsafe_local: bool = False
    """Let programs of the model run without a sandbox, as this user, if a tool runs programs (whet.tasks.code)."""


def main(argv: Sequence[str]) -> int:
    """Answer until the input ends. Return 0, or 2 if a line was rejected and the input is not a terminal."""
    options = parse_flags(ChatConfig, argv, _WHERE)
    options.check()
    reject_ineffective(options, ["unsafe_local"], runs_programs(options.tools), "no tool runs programs")
    functions = prepare(load_tools(options.tools), unsafe_local=options.unsafe_local)
    path, adapter_path = resolve_adapter(options.model, options.adapter, _WHERE)
    model = find_model(path, _WHERE)
    tokenizer = load_chat_tokenizer(model, _WHERE, options.chat_template, adapter_path, options.tokenizer)
    context = options.context or None
    with contextlib.ExitStack() as stack:
        tools = stack.enter_context(ToolProcess(functions, EpisodeSettings())) if functions else None
        engine = stack.enter_context(
            load_engine(
                model, options.weights, context, _WHERE, adapter_path, kv_dtype=options.kv_dtype,
                expert_bytes=options.expert_bytes, draft=options.draft, device=options.device,
            )
        )  # fmt: skip
        engine.tokenizer = tokenizer  # for stop strings
        conversation = Conversation(
            engine,
            tokenizer,
            options.sampling(find_stop_ids(path, tokenizer, engine.config.vocab_size, _WHERE)),
            system=options.system,
            adapter=engine.add_adapter(adapter_path) if adapter_path else None,
            context=options.context or None,
            tools=tools.schemas if tools else (),
            where=_WHERE,
        )
        chat = _Chat(conversation, options.show_thinking, tools)
        if chat.is_terminal:
            _print_note(
                f"{Path(options.model).name}, {conversation.context:,} tokens of context; /help lists the commands"
            )
        return chat.run()


class _Chat:
    """The loop over input lines."""

    def __init__(self, conversation: Conversation, show_thinking: bool, tools: ToolProcess | None = None) -> None:
        self.conversation, self.show_thinking, self._tools = conversation, show_thinking, tools
        self.is_terminal = sys.stdin.isatty()
        self._status = self._n_interrupts = 0
        self._is_interruptible = False
        self.commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(_HELP),
            "/system": self._system,
            "/clear": self._clear,
            "/regenerate": lambda _: self._show(self.conversation.ask_again()),
            "/save": self._save,
            "/stats": lambda _: print(_format_stats(self.conversation)),
        }
        sys.stdin.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
        if self.is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # editing and history of input()  # noqa: F401

    def run(self) -> int:
        """Process lines until the end of the input or /exit."""
        with self._handle_interrupts():
            while self._process_next_line():
                pass
        return self._status

    def _process_next_line(self) -> bool:
        """Read and process a line; return False at the end of the chat."""
        try:
            try:
                self._is_interruptible = True
                line = self._read()
                self._n_interrupts = 0
                if line is None or line == "/exit":
                    return False
                self._handle_line(line)
            finally:
                self._is_interruptible = False
        except WhetError as error:
            print(f"whet: {' '.join(str(error).split())}", file=sys.stderr)
            self._status = 0 if self.is_terminal else 2
        except KeyboardInterrupt:
            if not self.is_terminal:
                raise
            self._n_interrupts += 1
            print(file=sys.stderr)
            if self._n_interrupts > 1:
                _print_note("Ctrl-D or /exit ends the chat")
        return True

    @contextlib.contextmanager
    def _handle_interrupts(self) -> Iterator[None]:
        """In a terminal, let Ctrl-C interrupt each line once, and not the code that handles the interrupt."""

        def interrupt(*_: object) -> None:
            if self._is_interruptible:
                self._is_interruptible = False
                raise KeyboardInterrupt

        if not self.is_terminal:
            yield
            return
        previous = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _read(self) -> str | None:
        """Return a line, stripped; None at the end of the input."""
        prompt = "> " if self.is_terminal else ""
        if prompt and not sys.stdout.isatty():
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        try:
            return input(prompt).removeprefix("\ufeff").strip()  # byte order mark of Windows
        except EOFError:
            if self.is_terminal:
                print(file=sys.stderr)
            return None

    def _handle_line(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if not line:
            return
        if not line.startswith("/") or line.startswith("//"):
            self._show(self.conversation.ask(line.removeprefix("/")))
        elif name in self.commands and (not rest or name in _WITH_TEXT):
            self.commands[name](rest.strip())
        else:
            close = difflib.get_close_matches(name, [*self.commands, "/exit"], n=1)
            hint = f"Did you mean {close[0]}?" if close else "/help lists them."
            raise WhetValueError(
                f"{_WHERE}: unknown command {line!r:.60}. {hint} Begin a message with // instead of /."
            )

    def _show(self, turn: Turn) -> None:
        """Print a reply; after calls of tools, print their results and the next reply."""
        for n_left in reversed(range(EpisodeSettings.max_turns)):
            calls = tool_calls(turn.message) if self._stream(turn) else ()
            if not calls or self._tools is None:
                return
            _print_note("\n".join(map(call_text, calls)))
            if n_left:
                results = self._tools.answer(turn.message)
                _print_note("\n".join(truncate(result["content"], _MOST_SHOWN) for result in results))
                turn = self.conversation.answer(results)
        _print_note(f"stopped after {EpisodeSettings.max_turns} turns with calls; the last one was not carried out")

    def _stream(self, turn: Turn) -> bool:
        """Print a reply as it is generated; return whether it is complete. Ctrl-C stops it."""
        is_complete = True
        if turn.n_dropped:
            dropped = f"{turn.n_dropped} oldest turns" if turn.n_dropped > 1 else "oldest turn"
            _print_note(f"the context is full: dropped the {dropped}")
        display = _Display(sys.stdout, self.conversation.tags, self.show_thinking)
        with contextlib.closing(turn.chunks()) as chunks:
            try:
                for text, is_thinking in chunks:
                    display.show(text, is_thinking, turn.n_tokens)
            except KeyboardInterrupt:
                is_complete = False
                chunks.close()
            finally:
                display.end()
        if not turn.is_kept:
            _print_note("the reply is empty and was discarded; /regenerate samples another")
        elif turn.finish_reason == "length":
            _print_note(f"the reply was truncated after {turn.n_tokens} tokens")
        return is_complete

    def _system(self, text: str) -> None:
        if text:
            self.conversation.restart(text)
            _print_note("the conversation starts over")
        else:
            print(self.conversation.system or "(the chat template's default, if it has one)")

    def _clear(self, _: str) -> None:
        self.conversation.restart()
        _print_note("the conversation starts over")

    def _save(self, rest: str) -> None:
        first, _, others = rest.partition(" ")
        with_thinking = first == "--thinking"
        name = others.strip() if with_thinking else rest
        if not name:
            raise WhetValueError(f"{_WHERE}: /save needs a file name: /save chat.jsonl")
        save(self.conversation, Path(os.path.expanduser(name)), with_thinking)
        _print_note(f"written to {name}")


def save(conversation: Conversation, path: Path, thinking: bool) -> None:
    """Write a conversation as a line of JSON: a row for ``whet train sft``.

    Raises:
        WhetValueError: the conversation is empty, the file exists, or it cannot be written.
    """
    row = conversation.row(thinking)
    try:
        exists = os.path.lexists(path)
        if not exists:
            replace_text(path, json.dumps(row, ensure_ascii=False) + "\n")
    except (OSError, ValueError) as error:  # ValueError: names with NUL, text with lone surrogates
        raise WhetValueError(
            f"{_WHERE}: {str(path)!r:.200} cannot be written: {error}. Choose another name."
        ) from error
    if exists:
        raise WhetValueError(f"{_WHERE}: {str(path)!r} exists already. Choose another name, or remove it.")


def _format_stats(conversation: Conversation) -> str:
    memory = conversation.engine.memory
    kv = (memory["kv_used_bytes"] + memory["kv_kept_bytes"]) / 1e6
    lines = [f"KV cache: {kv:.1f} MB of at most {memory['kv_bytes'] / 1e6:.1f} MB"]
    if (turn := conversation.last) is not None:
        used = turn.n_prompt + turn.n_tokens
        lines = [
            f"last reply: {turn.n_tokens} tokens, {turn.tokens_per_s:.1f} tokens/s; time to first token "
            f"{turn.first_s:.2f} s",
            f"prompt: {turn.n_prompt} tokens, {turn.n_prompt - turn.n_reused} computed, {turn.n_reused} reused",
            f"context: {used:,} of {conversation.context:,} tokens",
            *lines,
        ]
    return "\n".join(lines)


class _Display:
    """The output of a reply, whose thinking is folded into one line, printed in full, or omitted."""

    def __init__(self, out: TextIO, tags: Tags, show_thinking: bool) -> None:
        self._out, self._tags, self._shows_thinking = out, tags, show_thinking
        self._is_terminal = _is_terminal(out)
        self._n_thinking_tokens = 0
        self._is_thinking = False

    def show(self, text: str, is_thinking: bool, n_tokens: int) -> None:
        """Write a chunk; the reply has ``n_tokens`` tokens up to its end."""
        if is_thinking != self._is_thinking:
            self._end_thinking() if self._is_thinking else self._begin_thinking()
        if not is_thinking:
            self._write(text)
        elif self._shows_thinking:
            self._write(_dim(self._out, text))
        elif self._is_terminal:
            self._write("\r" + _dim(self._out, f"thinking ... {n_tokens} tokens"))
        self._is_thinking, self._n_thinking_tokens = is_thinking, n_tokens

    def end(self) -> None:
        """End the line, and the thinking if the reply was stopped within it."""
        if self._is_thinking:
            self._end_thinking()
        self._write("\n")

    def _begin_thinking(self) -> None:
        if self._shows_thinking:
            self._write(_dim(self._out, self._tags.opening))

    def _end_thinking(self) -> None:
        self._is_thinking = False
        if self._shows_thinking:
            self._write(_dim(self._out, self._tags.closing) + "\n")
        elif self._is_terminal:
            self._write("\r\x1b[K" + _dim(self._out, f"thought for {self._n_thinking_tokens} tokens") + "\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _is_terminal(out: TextIO) -> bool:
    """Whether ``out`` is a terminal that supports cursor movement."""
    return out.isatty() and os.environ.get("TERM") != "dumb"


def _dim(out: TextIO, text: str) -> str:
    return f"\x1b[2m{text}\x1b[22m" if _is_terminal(out) and not os.environ.get("NO_COLOR") else text


def _print_note(text: str) -> None:
    sys.stdout.flush()
    print(_dim(sys.stderr, f"({text})"), file=sys.stderr, flush=True)
