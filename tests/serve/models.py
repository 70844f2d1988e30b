"""A tiny model whose chat template offers tools in the format of Hermes."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import write_tiny_model

TOOLS_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }},{% endfor %}<tool_call>{% endif %}"
    "{% for message in messages %}"
    "<{{ message.role }}>{{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments.a }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tools_model(folder: Path) -> Path:
    """Write the model, and return its folder."""
    return write_tiny_model(folder, TOOLS_TEMPLATE, max_position=2048)
