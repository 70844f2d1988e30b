"""Words that were private to this code stay replaced by the terms of the field."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [
    path
    for pattern in ("src/whet/**/*.py", "cpp/**/*.h", "cpp/**/*.cpp", "docs/*.md", "examples/*", "*.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md" and path.is_file()
]
REPLACED = {
    r"\bmend(s|ed)?\b": "fix",
    r"\bturn(ed)?_(block|heads|last|by_32)\b|\b(are|is) turned(?! (into|on|off))\b": "rotate",
    r"\blet in\b": "admit",
    r"\bneeds? (NumPy|the standard library) alone\b": "needs only",
    r'^\s*"""(What|Where) (?!is wrong)': "a noun phrase, or an imperative",
    r"\b[Ww]ords of the vocabulary\b": "vocabulary entries",
    r"\bdepends? on [\w' ]+ alone\b": "depends only on",
    r"\bwould wait for itself\b": "is bound by latency",
    r"\bmeets? (V|y|its pages|a block|them in blocks)\b": "is multiplied with, is added to",
    r"\bpast the caches\b": "bypass the caches",
    r"^\s*(for \()?(const )?(auto|size_t|float|f32x16|u?int\d+_t|[A-Z]\w+)[&*]* one( =| :)": "what the value is",
    r"\bstands? above\b": "override",
    r"\b(save|step|tensors|torch|A and B|safetensors) alone\b": "only",
    r"\bdef _?(turned|joined|projected|unwrapped|parsed|measured|templated)\b": "a verb",
}


@pytest.mark.parametrize("pattern", REPLACED)
def test_replaced_words_do_not_come_back(pattern):
    found = [
        f"{path.relative_to(ROOT)}:{i}: {line.strip()}"
        for path in FILES
        for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not found, f"write {REPLACED[pattern]}:\n" + "\n".join(found)
