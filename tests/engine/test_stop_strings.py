"""Stop strings: the automaton of the core against a search in the whole text, however it is cut into tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.raising import mentions

from whet import _core
from whet.models.tokenizers.token_texts import TextStream, TokenTexts
from whet.rollout.torch_engine import find_stop


def naive(texts: TokenTexts, tokens: list[int], stop: list[bytes], min_new_tokens: int) -> tuple[list[int], bool]:
    """Return the withheld bytes after every token: the longest end of the text that may begin a stop string."""
    held = []
    n_free = len(texts.bytes_of(tokens[:min_new_tokens]))
    for n in range(1, len(tokens) + 1):
        text = texts.bytes_of(tokens[:n])
        cut = find_stop(text, stop, n_free)
        if cut is not None:
            return [*held, len(text) - cut], True
        held.append(max(k for k in range(len(text) + 1) if k == 0 or any(is_begun(text[-k:], s) for s in stop)))
    return held, False


def is_begun(end: bytes, string: bytes) -> bool:
    return len(end) < len(string) and string.startswith(end)


def texts_of(*tokens: str | bytes, drops_first_space: bool = False) -> TokenTexts:
    return TokenTexts([t.encode() if isinstance(t, str) else t for t in tokens], drops_first_space)


def read(texts: TokenTexts, tokens: list[int], stop: list[bytes], min_new_tokens: int = 0) -> tuple[list[int], bool]:
    return _core.StopStrings(texts.core, stop).read(np.array(tokens, np.int32), min_new_tokens=min_new_tokens)


ALPHABET = "ab é日"
_STRINGS = st.text(ALPHABET, min_size=1, max_size=6)


@settings(max_examples=300)
@given(st.data())
def test_matches_equal_full_text_search(data: st.DataObject) -> None:
    whole = data.draw(st.text(ALPHABET, max_size=30)).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))  # anywhere, also within characters
    tokens = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    texts = TokenTexts(tokens, data.draw(st.booleans()))
    ids = list(range(len(tokens)))
    stop = [s.encode() for s in data.draw(st.lists(_STRINGS, min_size=1, max_size=4))]
    least = data.draw(st.integers(0, len(tokens)))
    held, found = read(texts, ids, stop, least)
    assert (held, found) == naive(texts, ids, stop, least)
    # A stream shows the text before the stop string, and never retracts shown text.
    stream, shown = TextStream(texts), ""
    for i, n in enumerate(held):
        is_last = i == len(held) - 1
        shown += stream.add(ids[i], n if found or not is_last else 0, is_last)
    assert shown == texts.text_of(ids[: len(held)], held[-1] if found else 0)
    if found and least == 0:
        assert not any(s.decode() in shown for s in stop)


@pytest.mark.parametrize(
    ("stop", "cut"),
    [
        (["b", "bc"], 1),  # the first to be complete
        (["bc", "abc"], 0),  # of two complete at once the longer
        (["abc", "bc"], 0),
        (["cde", "d"], 3),
        (["abcdx", "bcdy", "cd"], 2),  # found at the end of what begins two others
        (["xyz", "de"], 3),
    ],
)
def test_first_of_several_stop_strings_by_hand(stop: list[str], cut: int) -> None:
    strings = [string.encode() for string in stop]
    for texts, ids in ((texts_of(*"abcde"), list(range(5))), (texts_of("abcde"), [0]), (texts_of("ab", "cde"), [0, 1])):
        held, found = read(texts, ids, strings)
        assert found and len(texts.bytes_of(ids[: len(held)])) - held[-1] == cut
    assert find_stop(b"abcde", strings) == cut


def test_stop_strings_before_min_new_tokens_are_shown() -> None:
    texts = texts_of("a", "b", "c")
    assert read(texts, [0, 1, 2], [b"ab"], 2) == ([1, 0, 0], False)
    assert read(texts, [0, 1, 2], [b"ab"], 1) == ([1, 2], True)
    assert read(texts, [0, 1, 2], [b"ab", b"abc"], 2) == ([1, 2, 3], True)
    assert read(texts, [0, 0, 1], [b"ab"], 2) == ([1, 1, 2], True)  # begun before, complete behind


def test_multi_token_characters_are_withheld_whole() -> None:
    texts = texts_of(*("日".encode()[i : i + 1] for i in range(3)), "x", "本".encode()[:1], "本".encode()[1:])
    assert read(texts, [0, 1, 2, 3], ["日x".encode()]) == ([1, 2, 3, 4], True)
    assert read(texts, [0, 1, 2, 4, 5], ["日x".encode()]) == ([1, 2, 3, 1, 0], False)  # 本 begins like 日
    stream = TextStream(texts)
    assert [stream.add(token, 0, False) for token in (3, 4, 5, 4)] == ["x", "", "本", ""]
    assert stream.add(3, 0, True) == "\ufffdx"
    assert TextStream(texts).add(4, 0, True) == "\ufffd"


def test_dropped_first_space_is_not_part_of_the_text() -> None:
    texts = texts_of(" a", " b", "", drops_first_space=True)
    assert read(texts, [0, 1], [b" a"]) == ([0, 0], False)
    assert read(texts, [2, 0, 1], [b"a b"]) == ([0, 1, 3], True)  # a token without text does not begin it
    assert read(texts, [1, 0, 1], [b" a"]) == ([0, 2], True)
    assert texts.text_of([2, 0, 1]) == "a b" == "".join(map(TextStream(texts).add, [2, 0, 1], [0] * 3, [False] * 3))


def test_tokens_unknown_to_the_tokenizer_have_no_text() -> None:
    texts = texts_of("a")
    assert read(texts, [5, 0], [b"a"]) == ([0, 1], True)
    assert texts.text_of([7, 0]) == "a"


def test_invalid_stop_strings_are_rejected() -> None:
    texts = texts_of("a").core
    with pytest.raises(ValueError, match=mentions("an empty stop string")):
        _core.StopStrings(texts, [b""])
    for ends in ([2], [0], [1, 0]):
        with pytest.raises(ValueError, match=mentions("ends: ")):
            _core.TokenTexts(b"a", ends=np.array(ends, np.int32), drops_first_space=False)
