"""Ollama's Modelfile for a GGUF file: ``ollama create NAME -f Modelfile``.

Ollama does not support Jinja: it replaces chat templates that it recognises with its own, and without one it sends the
bare prompt. Therefore TEMPLATE is written in Go's syntax if the template only adds a prefix and a suffix to each
message, by role. RENDERER and PARSER replace templates of architectures that ``whet export`` does not write.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from whet.errors import WhetError

_SYSTEM, _USER, _ANSWER, _NEXT = (f"\ue000{name}\ue001" for name in ("system", "user", "answer", "next"))
_ROLES = {_SYSTEM: "system", _USER: "user", _ANSWER: "assistant", _NEXT: "user"}


class Concatenation(NamedTuple):
    """A chat template that adds a prefix and a suffix to each message, by role.

    Attributes:
        system: (prefix, suffix); None if the template does not support system messages.
        user: (prefix, suffix).
        assistant: (prefix, suffix).
        default_system: the system message of conversations without one; empty: none.
    """

    system: tuple[str, str] | None
    user: tuple[str, str]
    assistant: tuple[str, str]
    default_system: str = ""

    def render(self, contents: Sequence[str]) -> str:
        """Render messages and the assistant's prefix, as Ollama renders ``go_template``."""
        contents = contents if _SYSTEM in contents or not self.default_system else (self.default_system, *contents)
        affixes = [getattr(self, _ROLES.get(content, "system")) for content in contents]
        messages = [f"{prefix}{content}{suffix}" for (prefix, suffix), content in zip(affixes, contents, strict=True)]
        return "".join(messages) + self.assistant[0]

    def go_template(self) -> str:
        """Return the template in Go's syntax; Ollama renders it once for each pair of prompt and response."""
        parts = {"System": self.system, "Prompt": self.user}
        blocks = [
            f"{{{{ if .{name} }}}}{part[0]}{{{{ .{name} }}}}{part[1]}{{{{ end }}}}"
            for name, part in parts.items()
            if part
        ]
        return "".join(blocks) + f"{self.assistant[0]}{{{{ .Response }}}}{self.assistant[1]}"


def render_modelfile(file: Path, tokenizer: Any) -> tuple[str, str]:
    """Return the text of a Modelfile for a GGUF file in the same folder, and a sentence on its limitation, or "".

    Args:
        tokenizer: the file's tokenizer, from ``read_tokenizer``.
    """
    stops = [tokenizer.decode([token], skip_special_tokens=False) for token in tokenizer.stop_token_ids]
    lines, limitation = [f"FROM ./{file.name}"], ""
    template = parse_template(tokenizer)
    if template is not None:
        lines.append(f'TEMPLATE """{template.go_template()}"""')
        lines += [f'SYSTEM """{template.default_system}"""'] if template.default_system else []
    elif tokenizer.chat_template is not None:
        limitation = (
            "the chat template does more than add a prefix and a suffix to each message, so the Modelfile has no "
            "TEMPLATE: if Ollama does not recognise the template, it sends bare prompts. Write a TEMPLATE by hand"
        )
    lines += [f'PARAMETER stop "{stop}"' for stop in stops if '"' not in stop]
    return "\n".join(lines) + "\n", limitation


def parse_template(tokenizer: Any) -> Concatenation | None:
    """Return a tokenizer's chat template if it is a plain concatenation, otherwise None."""
    prompt = _render(tokenizer, _USER)
    two_turns = _render(tokenizer, _USER, _ANSWER, _NEXT)
    message = _render(tokenizer, _USER, add_generation_prompt=False)
    if prompt is None or two_turns is None or message is None:
        return None
    if not prompt.startswith(message):  # Phi-3's template ends a finished conversation with EOS
        message = message.removesuffix(tokenizer.special_tokens_map.get("eos_token", ""))
    beginning, user_suffix = message.split(_USER)
    answer_prefix = prompt.removeprefix(message)
    between = two_turns.partition(_ANSWER)[2].partition(_NEXT)[0]
    with_system = _render(tokenizer, _SYSTEM, _USER)
    system, default = None, ""
    user_prefix = beginning
    if with_system is not None:
        system_prefix, _, rest = with_system.partition(_SYSTEM)
        middle = rest.partition(_USER)[0]
        system_suffix = user_suffix if middle.startswith(user_suffix) else ""
        user_prefix = middle.removeprefix(system_suffix)
        system = system_prefix, system_suffix
        if beginning != user_prefix:
            default = beginning.removeprefix(system_prefix).removesuffix(middle)
    answer_suffix = between.removesuffix(user_prefix)
    template = Concatenation(system, (user_prefix, user_suffix), (answer_prefix, answer_suffix), default)
    texts = [*(system or ()), *template.user, *template.assistant, default]
    if any(mark in text for text in texts for mark in ("{{", "}}", '"""')):
        return None
    probes = [(_USER,), (_USER, _ANSWER, _NEXT)]
    probes += [(_SYSTEM, *probe) for probe in probes] if system else []
    return template if all(template.render(probe) == _render(tokenizer, *probe) for probe in probes) else None


def _render(tokenizer: Any, *contents: str, add_generation_prompt: bool = True) -> str | None:
    """Render messages without BOS; None if the template rejects or changes them, or depends on the date."""
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
