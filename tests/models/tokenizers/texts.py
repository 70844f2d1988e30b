"""Texts that distinguish tokenizers, equal under every Python; 10,000 take a second to generate."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

SCRIPTS = [
    (0x20, 0x7F), (0x20, 0x7F), (0xA0, 0x180), (0x370, 0x400), (0x400, 0x500), (0x530, 0x590), (0x590, 0x600),
    (0x600, 0x700), (0x900, 0x980), (0xB80, 0xC00), (0xE00, 0xE80), (0x10A0, 0x1100), (0x1100, 0x1200),
    (0x1E00, 0x2000), (0x2000, 0x2070), (0x2070, 0x2150), (0x2190, 0x2400), (0x2500, 0x2600), (0x3000, 0x3100),
    (0x4E00, 0x9FA6), (0x4E00, 0x5000), (0xAC00, 0xD7A4), (0xE000, 0xE010), (0xFB00, 0xFB50), (0xFE00, 0xFE10),
    (0xFF00, 0xFFF0), (0x10000, 0x10100), (0x1D400, 0x1D500), (0x1F300, 0x1F650), (0x1F900, 0x1FA00),
    (0x20000, 0x20100), (0x0, 0x20), (0x300, 0x370), (0x80, 0xA0),
]  # fmt: skip
"""Ranges of code points, of which some are unassigned."""
STRAY = [0xFFFE, 0xFFFF, 0x378, 0x2FFE0, 0x10FFFF, 0xFDD0, 0xFFFD, 0xFEFF, 0x200B, 0x200D, 0x2028, 0x85, 0x1680]
"""Code points that are unassigned, noncharacters, or not spaces in some libraries."""
_WORDS = (
    "the of and to a in is it you that he was for on are with as I his they be at one have this from or had by hot but "
    "some what there we can out other were all your when up use word how "
    "said an each she which do their time if will "
    "I'm don't we'll they've He'S IT'S you'RE it's tokenizer model naïve café straße ŒUVRE Ελλάδα привет ПриВет мир "
    "שלום مرحبا नमस्ते สวัสดี 你好 世界 日本語 こんにちは カタカナ 안녕하세요 ﬁne Ⅷ ½ ①②③ ǅ 👍🏽 👨‍👩‍👧‍👦 🇫🇷 é ệ"
)
WORDS = _WORDS.split()
CODE = (
    "def f(x):\n    return x + 1\n", "for (int i = 0; i < n; ++i) {\n\ta[i] *= 2;\n}\n", "if x == 'y':\r\n\r\n\tpass",
    "SELECT * FROM t WHERE id >= 10;", "<div class=\"a\">&nbsp;</div>", "https://example.com/a?b=c&d=%20e#f",
    "0x1F 3.14159 1e-9 1,000,000 12345678901", "\\frac{a}{b} $x^2$ `code` ```py\n```",
    "camelCase snake_case HTTPServer", "// ....... !!!??? --- ***", "user@host:~$ ls -la | grep '^d'\n",
)  # fmt: skip
SPACES = (
    " ",
    "  ",
    "   ",
    "        ",
    "\n",
    "\n\n",
    "\n\n\n",
    "\t",
    "\t\t",
    "\r\n",
    " \n",
    "\n ",
    " \t ",
    "\u3000",
    "\xa0",
)


def make_texts(n: int, special: Sequence[str] = (), seed: int = 0) -> list[str]:
    """Generate ``n`` texts: words, code, all scripts, runs of spaces, stray code points and ``special`` texts."""
    rng = random.Random(seed)

    def below(limit: int) -> int:
        return int(rng.random() * limit)

    def one_of(items: Sequence[str]) -> str:
        return items[below(len(items))]

    def scripted() -> str:
        begin, end = SCRIPTS[below(len(SCRIPTS))]
        return "".join(chr(begin + below(end - begin)) for _ in range(1 + below(6)))

    parts: list[Callable[[], str]] = [
        lambda: one_of(WORDS),
        lambda: " " + one_of(WORDS),
        lambda: one_of(CODE),
        lambda: one_of(SPACES),
        scripted,
        lambda: str(below(10 ** (1 + below(9)))),
        lambda: chr(STRAY[below(len(STRAY))]),
        lambda: one_of(special) if special else one_of(CODE),
    ]
    shares = [6, 10, 1, 4, 5, 2, 1, 1]
    bag = [part for part, share in zip(parts, shares, strict=True) for _ in range(share)]
    texts = ["", " ", "  ", "\n", "a", " a", "a ", "  a  b  ", *WORDS, *CODE, *special]
    while len(texts) < n:
        texts.append("".join(bag[below(len(bag))]() for _ in range(1 + below(12))))
    return texts[:n]
