"""TOML files of settings."""

from __future__ import annotations

from whet.config.toml import read_toml, write_toml


def test_toml_round_trip(tmp_path):
    settings = {
        "text": 'quote " slash \\ line\n tab\t del\x7f é 🎈', "empty": "", "yes": True, "n": -3, "small": 1e-30,
        "infinite": float("inf"), "names": ["a", 'b"'], "numbers": [0.1, 2.0], "table": {"deep": False},
    }  # fmt: skip
    write_toml(tmp_path / "new" / "x.toml", {"omitted": None, **settings})
    assert read_toml(tmp_path / "new" / "x.toml") == settings


def test_file_with_byte_order_mark_and_crlf(tmp_path):
    (tmp_path / "c.toml").write_bytes(b"\xef\xbb\xbfmodel = 'm'\r\nsteps = 3\r\n")
    assert read_toml(tmp_path / "c.toml") == {"model": "m", "steps": 3}
