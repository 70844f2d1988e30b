"""GPT-2's byte alphabet of byte-level BPE: a printable character for each byte."""

from __future__ import annotations


def _make_alphabet() -> dict[str, int]:
    """Map printable Latin-1 characters to themselves, and the other bytes to 256, 257, ..."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _make_alphabet()
_CHARACTERS = {byte: character for character, byte in _BYTES.items()}


def from_byte_level(token: str) -> str | bytes:
    """Return the bytes of a token; a token with any other character is returned unchanged."""
    if all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return token


def to_byte_level(text: str) -> str:
    """Spell a text in the byte alphabet."""
    return "".join(_CHARACTERS[byte] for byte in text.encode())
