"""Tools, and a tiny model whose chat template offers them in the format of Hermes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cli.conftest import write_tiny_model

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"a": {"enum": [1, 2]}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("add", "now")
]
CALL = '<tool_call>\n{"name": "now", "arguments": {"a": 2}}\n</tool_call>'
TOOLS_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }},{% endfor %}<tool_call>{% endif %}"
    "{% for message in messages %}"
    "<{{ message.role }}>{{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments.a }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "thinking": {"open": "[think]", "close_pattern": r"\[/think\]\s*"},
        "tool_calls": {
            "open_pattern": r"<call (?P<name>\w+)>", "close": "</call>", "repeats": True, "content": "kv-lines",
            "content_args": {"kv_sep": "=", "value_parser": {"name": "int"}},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<eos>\s*|$"},
    },
}  # fmt: skip
"""The tools model's replies in another format than its chat template's marks name."""


def write_tools_model(folder: Path) -> Path:
    """Write the model, and return its folder."""
    return write_tiny_model(folder, TOOLS_TEMPLATE, max_position=2048)
