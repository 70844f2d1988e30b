"""The documentation agrees with the code: links, navigation, defaults, quoted error messages, names of the API."""

from __future__ import annotations

import ast
import dataclasses
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from whet import ops
from whet.config.algorithms import ALGORITHMS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {name: (each.config,) for name, each in ALGORITHMS.items() if name != "online-dpo"}
PAGES["index"] = (PAGES["dpo"][0], PAGES["grpo"][0])


def test_every_page_is_in_the_navigation():
    site = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    named = re.findall(r'"([\w/-]+\.md)"', str(tomllib.loads(site)["project"]["nav"]).replace("'", '"'))
    assert sorted(named) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md"])
def test_links_outside_the_site_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
    assert [target for target in targets if not (ROOT / name).parent.joinpath(target).exists()] == []


def test_files_named_in_contributing_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    names = [name for name in re.findall(r"`([\w/]+/[\w.]+\.\w+)`", text) if "foo" not in name and "NAME" not in name]
    places = (ROOT, ROOT / "src" / "whet", ROOT / "cpp", ROOT / "tests")
    assert len(names) > 30 and [name for name in names if not any((place / name).exists() for place in places)] == []


def default_rows(page: str) -> Iterator[tuple[str, str, str]]:
    """Setting, Whet's default and TRL's ``name` = `default`` of each row of a page's table of defaults."""
    for line in (DOCS / "algorithms" / f"{page}.md").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"\| `(\w+)`[^|]*\| `([^|`]*)` \| (?:`(\w+` = `[^`]*)`)? *\|", line):
            yield found[1], found[2], found[3] or ""


def default_of(config: type, name: str) -> str:
    field = next(field for field in dataclasses.fields(config) if field.name == name)
    return str(field.default)


def trls(trl, config: type) -> type:
    """TRL's counterpart of a config."""
    from trl.experimental.cpo import CPOConfig
    from trl.experimental.orpo import ORPOConfig
    from trl.experimental.sdpo import SDPOConfig

    experimental = {config.__name__: config for config in (CPOConfig, ORPOConfig, SDPOConfig)} | {
        "SimPOConfig": CPOConfig
    }
    return experimental.get(config.__name__) or getattr(trl, config.__name__)


@pytest.mark.parametrize("page", PAGES)
def test_tables_of_defaults_have_the_defaults_of_whet_and_trl(page):
    rows = list(default_rows(page))
    assert rows
    for config in PAGES[page]:
        for name, whet, _ in rows:
            assert default_of(config, name) == whet, name
        trl = pytest.importorskip("trl")
        for _, _, other in filter(lambda row: row[2], rows):
            name, _, default = other.partition("` = `")
            assert default_of(trls(trl, config), name) == default, name


def test_quoted_error_messages_exist():
    messages = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(messages) > 20
    texts = [text for path in [*ROOT.glob("src/whet/**/*.py"), *ROOT.glob("tools/*.py")] for text in strings_of(path)]
    missing = []
    for message in messages:
        parts = [re.escape(part.strip()) for part in message.split("...") if part.strip(" .,:")]
        if not any(re.search(".*".join(parts), text, re.DOTALL) for text in texts):
            missing.append(message)
    assert not missing


def test_docstrings_list_one_parameter_per_entry():
    """A list such as ``a, b: ...`` is one parameter on the site."""
    section = re.compile(r"^(?:Args|Attributes):\n((?: .*\n?|\n)*)", re.MULTILINE)
    entry = re.compile(r"^    [*\w]+,[^:]*:.*", re.MULTILINE)
    found = []
    for path in ROOT.glob("src/whet/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                listed = "\n".join(section.findall(ast.get_docstring(node) or ""))
                found += [f"{path.relative_to(ROOT)}: {node.name}: {line}" for line in entry.findall(listed)]
    assert found == []


def strings_of(path: Path) -> Iterator[str]:
    """The string literals of a file; implicit concatenations are joined, and values of f-strings are omitted."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_api_pages_have_all_public_primitives():
    text = (DOCS / "api" / "primitives.md").read_text(encoding="utf-8")
    assert [name for name in ops.__all__ if not re.search(rf"\b{name}\b", text)] == []
