"""Ollama's file beside a GGUF file: ``ollama create NAME -f Modelfile``.

Ollama reads no Jinja. Of a file whose chat template it knows it takes its own one; of others it sends the bare prompt.
So TEMPLATE is written in Go's syntax where the template is a plain concatenation: a text before and behind each
message, by its role. RENDERER and PARSER, which stand in for templates of some architectures, are those of none that
``whet export`` writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from whet.errors import WhetError

_SYSTEM, _USER, _ANSWER, _NEXT = (f"\ue000{name}\ue001" for name in ("system", "user", "answer", "next"))
_ROLES = {_SYSTEM: "system", _USER: "user", _ANSWER: "assistant", _NEXT: "user"}


class Concatenation(NamedTuple):
    """A chat template that puts a text before and behind each message, by its role.

    Attributes:
        system, user, assistant: (before, behind); system is None where the template takes no such message.
        default_system: the message that is there where a conversation has none; empty: none.
    """

    system: tuple[str, str] | None
    user: tuple[str, str]
    assistant: tuple[str, str]
    default_system: str = ""

    def render(self, contents: Sequence[str]) -> str:
        """The text of messages up to where the assistant begins, as Ollama makes it of ``go_template``."""
        given = contents if _SYSTEM in contents or not self.default_system else (self.default_system, *contents)
        roles = [_ROLES.get(content, "system") for content in given]
        texts = [getattr(self, role) for role in roles]
        said = [f"{begin}{content}{end}" for (begin, end), content in zip(texts, given, strict=True)]
        return "".join(said) + self.assistant[0]

    def go_template(self) -> str:
        """The same in the language of Ollama, which runs it once for each pair of a prompt and a response."""
        parts = {"System": self.system, "Prompt": self.user}
        blocks = [
            f"{{{{ if .{name} }}}}{part[0]}{{{{ .{name} }}}}{part[1]}{{{{ end }}}}"
            for name, part in parts.items()
            if part
        ]
        return "".join(blocks) + f"{self.assistant[0]}{{{{ .Response }}}}{self.assistant[1]}"


def modelfile(file: Path, tokenizer: Any) -> tuple[str, str]:
    """The text of a Modelfile for a GGUF file in the same folder, and what it lacks, in a sentence; empty: nothing.

    Args:
        tokenizer: the file's, as ``read_tokenizer`` gives it.
    """
    stops = [tokenizer.decode([token], skip_special_tokens=False) for token in tokenizer.stop_token_ids]
    lines, lack = [f"FROM ./{file.name}"], ""
    found = read_concatenation(tokenizer)
    if found is not None:
        lines.append(f'TEMPLATE """{found.go_template()}"""')
        lines += [f'SYSTEM """{found.default_system}"""'] if found.default_system else []
    elif tokenizer.chat_template is not None:
        lack = (
            "the chat template is more than a text before and behind each message, so that the Modelfile has no "
            "TEMPLATE: where Ollama does not know the template it sends bare prompts. Write one by hand"
        )
    lines += [f'PARAMETER stop "{stop}"' for stop in stops if '"' not in stop]
    return "\n".join(lines) + "\n", lack


def read_concatenation(tokenizer: Any) -> Concatenation | None:
    """The chat template of a tokenizer, where it is a plain concatenation; else None."""
    alone = _render(tokenizer, _USER)
    several = _render(tokenizer, _USER, _ANSWER, _NEXT)
    open_end = _render(tokenizer, _USER, add_generation_prompt=False)
    if alone is None or several is None or open_end is None:
        return None
    if not alone.startswith(open_end):  # Phi-3's ends a conversation that is not continued with EOS
        open_end = open_end.removesuffix(tokenizer.special_tokens_map.get("eos_token", ""))
    before, behind_user = open_end.split(_USER)
    before_answer = alone.removeprefix(open_end)
    between = several.partition(_ANSWER)[2].partition(_NEXT)[0]
    with_system = _render(tokenizer, _SYSTEM, _USER)
    system, default = None, ""
    before_user = before
    if with_system is not None:
        before_system, _, rest = with_system.partition(_SYSTEM)
        middle = rest.partition(_USER)[0]
        behind_system = behind_user if middle.startswith(behind_user) else ""
        before_user = middle.removeprefix(behind_system)
        system = before_system, behind_system
        if before != before_user:
            default = before.removeprefix(before_system).removesuffix(middle)
    behind_answer = between.removesuffix(before_user)
    found = Concatenation(system, (before_user, behind_user), (before_answer, behind_answer), default)
    texts = [*(system or ()), *found.user, *found.assistant, default]
    if any(mark in text for text in texts for mark in ("{{", "}}", '"""')):
        return None
    probes = [(_USER,), (_USER, _ANSWER, _NEXT)]
    probes += [(_SYSTEM, *probe) for probe in probes] if system else []
    return found if all(found.render(probe) == _render(tokenizer, *probe) for probe in probes) else None


def _render(tokenizer: Any, *contents: str, add_generation_prompt: bool = True) -> str | None:
    """The text of messages, without the BOS that goes before any text; None where the template refuses or changes them.

    It is refused where it depends on the day.
    """
    if "strftime_now" in str(tokenizer.chat_template):
        return None
    messages = [{"role": _ROLES[content], "content": content} for content in contents]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except WhetError:
        return None
    if tokenizer.vocabulary.add_bos:
        text = text.removeprefix(tokenizer.special_tokens_map["bos_token"])
    return text if all(text.count(content) == 1 for content in contents) else None
