"""Prose and names of the project: the English of its field, without private words and turns of phrase.

A rule is a pattern and what to write instead. Names of tests are read as sentences.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GLOBS = (
    *("src/whet/**/*.py", "src/whet/**/*.pyi", "benchmarks/**/*.py", "tests/**/*.py", "tools/**/*.py"),
    *("examples/*", "examples/**/*.py"),
    *("cpp/**/*.h", "cpp/**/*.cpp", "cpp/**/*.def", "web/src/**/*.ts", "web/test/**/*.ts", "web/test/**/*.mjs"),
    *(
        "web/test/**/*.py",
        "web/example/*",
        "src/whet/serve/page/*",
        "web/*.md",
        "docs/**/*.md",
        "*.md",
        "Makefile",
        "web/Makefile",
    ),
)
GENERATED = re.compile(r"web/(src/facts\.ts|test/.*\b(node_modules|build)/)")
FILES = sorted({path for pattern in GLOBS for path in ROOT.glob(pattern) if path.is_file()} - {Path(__file__)})
FILES = [path for path in FILES if not GENERATED.match(path.relative_to(ROOT).as_posix())]

_BE = r"(is|are|was|were|be|been)"
_DOCSTRING = r'^\s*r?"""'
RULES = {
    # 1. A docstring is a verb phrase or a noun phrase.
    _DOCSTRING + r"(Of|That|Those|The same|As|What|Where|How|Who|Which|It|They|This|These)\b": "Return ..., or a noun",
    r"(?<![\w'\"`.-])Of [a-z`_]": "start with the subject",
    r"\b[Tt]h(at|ose) of\b": "repeat the noun",
    # 2. Negation, exception, exclusion, repetition.
    rf"(?<!here )(?<!here would )(?<!here will )(?<!here can )(?<!here must )(?<!here may )\b{_BE} no (?!longer\b|"
    r"(more|less|fewer|better|worse|larger|smaller|slower|faster|later|earlier) than)": "is not a",
    r"\b[Bb]ut for\b": "except",
    r"(?<!stand )(?<!stands )(?<!leave )(?<!leaves )(?<!left )(?<!let )\b[Aa]lone\b(?!\.\"$)": "only",
    r"\banew\b": "again, from scratch",
    r"\b[Mm]eanwhile\b": "while ..., at the same time",
    # 3. Possession and company.
    r"\bof (its|their|one's|our|your|his) own\b": "its own, a separate, custom",
    r"\bone's own\b": "your own, custom",
    r"\b[Bb]eside\b": "next to, with, in addition to",
    # 4. Defaults and states.
    rf"\b{_BE} left out\b": "default: ..., if omitted, excluded",
    r"\bas (it|they) (lies?|stands?|comes?|came|lay|stood)\b": "as is, unchanged, as stored",
    r"\bas (it is|they are)(?=[.,;:)]|$)": "as is, unchanged",
    # 5. The terms of the field.
    r"\bmend(s|ed)?\b": "fix",
    r"\b(are|is) turned(?! (into|on|off))\b|\bturn(ed)?_(block|heads|last|by_32)\b": "rotate",
    r"\blet in\b": "admit",
    r"\blet(s|ting)? go\b|\blet_go\b": "release",
    r"\b[Ww]ords of the vocabulary\b": "vocabulary entries",
    r"\bwould wait for itself\b": "is bound by latency",
    r"\bmeets? (V|y|its pages|a block|them in blocks)\b": "is multiplied with, is added to",
    r"\bpast the (page )?caches?\b": "bypass the cache",
    r"\bstands? above\b": "override",
    r"\b[Aa]sked? of the (system|operating system|allocator)\b": "allocate, commit",
    r"\b(low|high) halves\b|\b(low|high)_halves\b": "low nibbles, high nibbles",
    r"\btakes? turns\b": "are serialised, interleave",
    r"\b(go|goes|going|went|gone) on (with|from|where|after)\b": "resume, continue",
    r"\b[Ff]or itself\b|\bby (itself|themselves)\b": "independently, automatically, on its own",
    r"\b(looks?|looked|looking) (at|through)\b": "read, check, inspect, scan, attend to",
    r"\bwithout (a )?(word|end)\b": "silently, unbounded",
    r"\b(tells?|told|telling|kept|keeps?|stays?|summed|held|have|has|taken?) apart\b": "distinguish, separate, split",
    r"^\s*(for \()?(const )?(auto|size_t|float|f32x16|u?int\d+_t|[A-Z]\w+)[&*]* one( =| :)": "what the value is",
    r"\bdef _?(turned|joined|projected|unwrapped|parsed|measured|templated|described|found|begun|checked)\b": "a verb",
    # 6. Headings are nouns or verbs; programs print, report, return, raise.
    r"^(#+|//) (What|Where) [a-z]": "a noun phrase, or an imperative",
    r"(?<!\.)\b([Tt]ells?|[Tt]old|[Tt]elling)\b": "print, report, inform, distinguish",
    r"(?<![\"'])\b(says|said|saying|say)\b(?!\")": "print, report, name, document, specify, read",
}


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a file, with spaces in the names of tests."""
    for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        yield i, line.replace("_", " ") if re.match(r"\s*(async )?def test_", line) else line


@pytest.mark.parametrize("rule", RULES)
def test_prose_follows_the_rules(rule):
    found = [
        f"{path.relative_to(ROOT)}:{i}: {line.strip()}"
        for path in FILES
        for i, line in lines(path)
        if re.search(rule, line)
    ]
    assert not found, f"write {RULES[rule]}:\n" + "\n".join(found)
