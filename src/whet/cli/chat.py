"""``whet chat``: a conversation in a terminal, or line by line from a pipe.

Replies go to standard output, everything else to standard error. A line of input is a message, or a command that begins
with ``/``. Ctrl-C stops a reply, which stays as far as it came; Ctrl-D, or the end of the input, ends the chat. Where
the input is no terminal, something that was refused makes the exit status 2.

What a model thinks before it answers is one line in a terminal, and left out elsewhere; ``--show-thinking`` shows it.
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

from whet.cli.conversation import Conversation, Turn
from whet.cli.settings import parse_flags
from whet.cli.text_model import OneModelConfig, find_model, load_chat_tokenizer, load_engine, stop_ids, with_adapters
from whet.config.fields import check_range
from whet.data.thinking import Tags
from whet.errors import WhetError, WhetValueError
from whet.files import replace_text

_WHERE = "whet chat"
_WITH_TEXT = ("/system", "/save")
_HELP = """\
/help                  this text
/system [TEXT]         show the system prompt, or set another and start over
/clear                 start over with the same system prompt
/regenerate            answer the last message again
/save [--thinking] FILE
                       write the conversation as a row for whet train sft
/stats                 speed of the last reply, tokens computed and reused,
                       context and memory
/exit                  end; Ctrl-D does too

Ctrl-C stops a reply. A message that begins with / is written with //."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatConfig(OneModelConfig):
    """A conversation with a model. Each line is a message; /help lists the commands; Ctrl-D ends it."""

    max_new_tokens: int = 1024
    """Longest reply in tokens."""
    temperature: float = 0.7
    """Divides the logits; 0: always the most probable token."""
    top_p: float = 0.95
    """Sample from the most probable tokens that together have this mass; 1: from all."""
    seed: int = 0
    """Keys the sampling: the same seed and messages, the same replies."""
    system: str = ""
    """System prompt; empty: the chat template's own, if it has one."""
    context: int = 0
    """Tokens of prompt and reply, beyond which the oldest turns are dropped; 0: the model's, or what a GiB holds."""
    show_thinking: bool = False
    """Show what the model thinks before it answers."""

    def check(self) -> None:
        super().check()
        check_range(self, "context", self.context >= 0, "an integer >= 0")


def main(argv: Sequence[str]) -> int:
    """Answers until the input ends; the exit status is 0, or 2 where a line that was no terminal's was refused."""
    asked = parse_flags(ChatConfig, argv, _WHERE)
    asked.check()
    path, adapter_path = with_adapters(asked.model, asked.adapter, _WHERE)
    model = find_model(path, _WHERE)
    tokenizer = load_chat_tokenizer(asked.tokenizer or model, _WHERE, asked.chat_template)
    with load_engine(model, asked.weights, asked.context or None, _WHERE, adapter_path) as engine:
        engine.tokenizer = tokenizer  # for stop strings
        conversation = Conversation(
            engine,
            tokenizer,
            asked.sampling(stop_ids(path, tokenizer, engine.config.vocab_size, _WHERE)),
            system=asked.system,
            adapter=engine.add_adapter(adapter_path) if adapter_path else None,
            context=asked.context or None,
        )
        chat = _Chat(conversation, asked.show_thinking)
        if chat.is_terminal:
            _tell(f"{Path(asked.model).name}, a context of {conversation.context:,} tokens; /help lists the commands")
        return chat.run()


class _Chat:
    """The loop over lines of input."""

    def __init__(self, conversation: Conversation, show_thinking: bool) -> None:
        self.conversation, self.show_thinking = conversation, show_thinking
        self.is_terminal = sys.stdin.isatty()
        self._status = self._n_interrupts = 0
        self._is_interruptible = False
        self.commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(_HELP),
            "/system": self._system,
            "/clear": self._clear,
            "/regenerate": lambda _: self._show(self.conversation.ask_again()),
            "/save": self._save,
            "/stats": lambda _: print(_stats(self.conversation)),
        }
        sys.stdin.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
        if self.is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # editing and history of input()  # noqa: F401

    def run(self) -> int:
        """Until the end of the input, or /exit."""
        with self._guarded_interrupts():
            while self._answer_line():
                pass
        return self._status

    def _answer_line(self) -> bool:
        """Whether another line may follow."""
        try:
            try:
                self._is_interruptible = True
                line = self._read()
                self._n_interrupts = 0
                if line is None or line == "/exit":
                    return False
                self._do(line)
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
                _tell("Ctrl-D or /exit ends the chat")
        return True

    @contextlib.contextmanager
    def _guarded_interrupts(self) -> Iterator[None]:
        """In a terminal, Ctrl-C interrupts a line, once, and nothing else: not what handles that interrupt either."""

        def interrupt(*_: object) -> None:
            if self._is_interruptible:
                self._is_interruptible = False
                raise KeyboardInterrupt

        if not self.is_terminal:
            yield
            return
        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _read(self) -> str | None:
        """A line without the blanks around it; None at the end of the input."""
        prompt = "> " if self.is_terminal else ""
        if prompt and not sys.stdout.isatty():
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        try:
            return input(prompt).removeprefix("\ufeff").strip()  # what Windows writes in front of a text
        except EOFError:
            if self.is_terminal:
                print(file=sys.stderr)
            return None

    def _do(self, line: str) -> None:
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
            raise WhetValueError(f"{_WHERE}: there is no command {line!r:.60}. {hint} A message may begin with //.")

    def _show(self, turn: Turn) -> None:
        """Shows a reply as it comes. Ctrl-C ends it."""
        if turn.n_dropped:
            which = f"{turn.n_dropped} oldest turns are" if turn.n_dropped > 1 else "oldest turn is"
            _tell(f"the context is full: the {which} dropped")
        display = _Display(sys.stdout, self.conversation.tags, self.show_thinking)
        with contextlib.closing(turn.pieces()) as pieces:
            try:
                for text, is_thinking in pieces:
                    display.show(text, is_thinking, turn.n_tokens)
            except KeyboardInterrupt:
                pieces.close()
            finally:
                display.end()
        if not turn.is_kept:
            _tell("nothing was said, and nothing of it is kept; /regenerate asks again")
        elif turn.finish_reason == "length":
            _tell(f"the reply was cut after {turn.n_tokens} tokens")

    def _system(self, text: str) -> None:
        if text:
            self.conversation.restart(text)
            _tell("the conversation starts over")
        else:
            print(self.conversation.system or "(the chat template's own, if it has one)")

    def _clear(self, _: str) -> None:
        self.conversation.restart()
        _tell("the conversation starts over")

    def _save(self, rest: str) -> None:
        first, _, others = rest.partition(" ")
        with_thinking = first == "--thinking"
        name = others.strip() if with_thinking else rest
        if not name:
            raise WhetValueError(f"{_WHERE}: /save needs the name of a file: /save talk.jsonl")
        save(self.conversation, Path(os.path.expanduser(name)), with_thinking)
        _tell(f"written to {name}")


def save(conversation: Conversation, path: Path, thinking: bool) -> None:
    """Write a conversation as a line of JSON, a row for ``whet train sft``.

    Raises:
        WhetValueError: nothing has been said, there is such a file, or it cannot be written.
    """
    row = conversation.row(thinking)
    try:
        is_there = os.path.lexists(path)
        if not is_there:
            replace_text(path, json.dumps(row, ensure_ascii=False) + "\n")
    except (OSError, ValueError) as error:  # ValueError: names with NUL, text with lone surrogates
        raise WhetValueError(
            f"{_WHERE}: {str(path)!r:.200} cannot be written: {error}. Choose another name."
        ) from error
    if is_there:
        raise WhetValueError(f"{_WHERE}: there is a file {str(path)!r} already. Choose another name, or remove it.")


def _stats(conversation: Conversation) -> str:
    memory = conversation.engine.memory
    kv = (memory["kv_used_bytes"] + memory["kv_kept_bytes"]) / 1e6
    lines = [f"keys and values: {kv:.1f} MB of at most {memory['kv_bytes'] / 1e6:.1f} MB"]
    if (turn := conversation.last) is not None:
        used = turn.n_prompt + turn.n_tokens
        lines = [
            f"last reply: {turn.n_tokens} tokens, {turn.tokens_per_s:.1f} per second; the first after "
            f"{turn.first_s:.2f} s",
            f"its prompt: {turn.n_prompt} tokens, {turn.n_prompt - turn.n_reused} computed, {turn.n_reused} reused",
            f"context: {used:,} of {conversation.context:,} tokens",
            *lines,
        ]
    return "\n".join(lines)


class _Display:
    """A reply on a terminal or elsewhere: thinking folded into one line, in full, or left out."""

    def __init__(self, out: TextIO, tags: Tags, show_thinking: bool) -> None:
        self._out, self._tags, self._in_full = out, tags, show_thinking
        self._is_terminal = _is_terminal(out)
        self._n_thought = 0
        self._is_thinking = False

    def show(self, text: str, is_thinking: bool, n_tokens: int) -> None:
        """A piece, up to which the reply has ``n_tokens``."""
        if is_thinking != self._is_thinking:
            self._end_thinking() if self._is_thinking else self._begin_thinking()
        if not is_thinking:
            self._write(text)
        elif self._in_full:
            self._write(_dim(self._out, text))
        elif self._is_terminal:
            self._write("\r" + _dim(self._out, f"thinking ... {n_tokens} tokens"))
        self._is_thinking, self._n_thought = is_thinking, n_tokens

    def end(self) -> None:
        """Ends the line; nothing is left open where a reply was stopped."""
        if self._is_thinking:
            self._end_thinking()
        self._write("\n")

    def _begin_thinking(self) -> None:
        if self._in_full:
            self._write(_dim(self._out, self._tags.opening))

    def _end_thinking(self) -> None:
        self._is_thinking = False
        if self._in_full:
            self._write(_dim(self._out, self._tags.closing) + "\n")
        elif self._is_terminal:
            self._write("\r\x1b[K" + _dim(self._out, f"thought for {self._n_thought} tokens") + "\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _is_terminal(out: TextIO) -> bool:
    """Whether it moves its cursor."""
    return out.isatty() and os.environ.get("TERM") != "dumb"


def _dim(out: TextIO, text: str) -> str:
    return f"\x1b[2m{text}\x1b[22m" if _is_terminal(out) and not os.environ.get("NO_COLOR") else text


def _tell(text: str) -> None:
    sys.stdout.flush()
    print(_dim(sys.stderr, f"({text})"), file=sys.stderr, flush=True)
