"""Rows of files, patterns, folders and datasets: content, locations, and rejected files."""

from __future__ import annotations

import csv
import gzip
import json
import ntpath
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from tests.raising import assert_raises

from whet.data.sources import Rows, _split_name, read_rows, source_files
from whet.errors import MissingExtraError, WhetTypeError, WhetValueError

ROWS = [{"prompt": "1+1=", "answer": 2, "note": None}, {"prompt": "schöne\u2028Grüße", "answer": 3, "note": "x"}]


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def places(rows: Rows) -> list[str]:
    return [Path(rows.place(i)).name for i in range(len(rows))]


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("a.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS), ["a.jsonl:1", "a.jsonl:2"]),
        ("a.jsonl", "\ufeff\r\n" + "\r\n\r\n".join(map(json.dumps, ROWS)) + "\r\n", ["a.jsonl:2", "a.jsonl:4"]),
        ("a.json", json.dumps(ROWS, indent=2), ["a.json, row 0", "a.json, row 1"]),
        ("a.json", "\n".join(json.dumps(row) for row in ROWS), ["a.json:1", "a.json:2"]),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_json_files(tmp_path: Path, name: str, content: str, where: list[str], packed: bool) -> None:
    file = tmp_path / (name + ".gz" * packed)
    file.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    assert read_rows(file) == read_rows(str(file)) == ROWS
    assert [place.replace(".gz", "") for place in places(read_rows(file))] == where


def test_parquet_files(tmp_path: Path) -> None:
    rows = [{**row, "chat": [{"role": "user", "content": "a"}], "ids": [1, 2]} for row in ROWS]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read_rows(tmp_path / "a.parquet") == rows
    assert places(read_rows(tmp_path / "a.parquet")) == ["a.parquet, row 0", "a.parquet, row 1"]


@pytest.mark.parametrize("packed", [False, True])
def test_csv_files_give_text_by_column_name(tmp_path: Path, packed: bool) -> None:
    rows = [{"prompt": "two\nlines, and a comma", "n": "1"}, {"prompt": "long " * 50_000, "n": ""}]
    file = tmp_path / "a.csv"
    with file.open("w", encoding="utf-8-sig", newline="") as stream:
        writer = csv.DictWriter(stream, ["prompt", "n"])
        writer.writeheader()
        writer.writerows(rows)
    if packed:
        file = file.rename(tmp_path / "a.csv.gz")
        file.write_bytes(gzip.compress(file.read_bytes()))
    assert read_rows(file) == rows
    assert places(read_rows(file)) == [f"{file.name}:3", f"{file.name}:4"]
    assert csv.field_size_limit() == 131072


def test_several_files_and_patterns_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl"):
        (tmp_path / name).write_text(lines({"of": name}, {"of": name}))
    assert places(read_rows(tmp_path / "*.jsonl")) == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1", "b.jsonl:2"]
    both = read_rows([tmp_path / "b.jsonl", str(tmp_path / "**" / "[ac].jsonl")])
    assert [row["of"] for row in both[::2]] == ["b.jsonl", "a.jsonl", "deep/c.jsonl"]
    assert places(both)[-1] == "c.jsonl:2"
    with pytest.raises(IndexError):
        both.place(6)


def test_a_folder_is_a_dataset_with_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    shards = {"train-00000": ["a", "b"], "train-00001": ["c"], "test-00000": ["d"]}
    (tmp_path / "shards").mkdir()
    for name, prompts in shards.items():
        table = pyarrow.table({"prompt": prompts})
        parquet.write_table(table, tmp_path / "shards" / f"{name}-of-2.parquet")
    folder = str(tmp_path / "shards")
    rows = read_rows(folder)
    assert rows == [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]
    assert rows.place(2) == f"{folder}::train, row 2"
    assert read_rows(f"{folder}::train[1:2]") == [{"prompt": "b"}]
    assert read_rows(f"{folder}:default:test") == [{"prompt": "d"}]
    assert_raises(WhetValueError, r"Unknown split .dev.*'test'.*NAME:CONFIG:SPLIT", read_rows, f"{folder}::dev")
    assert [file.name for file in source_files(f"{folder}::test")] == sorted(f"{n}-of-2.parquet" for n in shards)


def test_hub_names_with_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, split: asked.append((*names, split)) or [{"a": 1}])
    names = ["owner/sums", "owner/sums:main", "owner/sums:main:test", "owner/sums::train[:1000]"]
    rows = read_rows(names)
    assert asked == [
        ("owner/sums", None, "train"),
        ("owner/sums", "main", "train"),
        ("owner/sums", "main", "test"),
        ("owner/sums", None, "train[:1000]"),
    ]
    assert rows.place(2) == "owner/sums:main:test, row 0"
    assert source_files(names[3]) == []


def test_columns_are_renamed_to_fields(tmp_path: Path) -> None:
    rows = [{"question": "1+1=", "answer": "2", "id": "x"}, {"answer": "3", "prompt": "old"}]
    (tmp_path / "a.jsonl").write_text(lines(*rows))
    columns = {"prompt": "question", "completion": "answer"}
    assert read_rows(tmp_path / "a.jsonl", columns) == [
        {"id": "x", "prompt": "1+1=", "completion": "2"},
        {"completion": "3"},
    ]
    assert read_rows(tmp_path / "a.jsonl", {"prompt": "answer", "answer": "prompt"})[1] == {
        "prompt": "3",
        "answer": "old",
    }
    message = r"a\.jsonl' has no column 'reply' for 'completion'; it has 'question', 'answer', 'id', 'prompt'"
    assert_raises(WhetValueError, message, read_rows, tmp_path / "a.jsonl", {"completion": "reply"})


def test_sharegpt_messages_of_a_renamed_column_are_converted(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    (tmp_path / "a.jsonl").write_text(lines({"conversations": turns, "tags": [{"from": "x"}]}))
    [row] = read_rows(tmp_path / "a.jsonl", {"messages": "conversations", "labels": "tags"})
    assert row["messages"] == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    assert row["labels"] == [{"from": "x"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n\n{"a": \n', r"a\.jsonl:3: not JSON in UTF-8: Expecting value"),
        ("a.jsonl", b'{"a": 1}\n\n["a"]\n', r"a\.jsonl:3: \['a'\] is not a JSON object"),
        ("a.jsonl", b'{"a": "\xff"}\n', r"a\.jsonl:1: not JSON in UTF-8: .*0xff"),
        ("a.jsonl", b"[" * 100_000, "not JSON"),
        ("a.json", b'[{"a": 1}, 2]', r"a\.json, row 1: 2 is not a JSON object"),
        ("a.json", b'[{"a": 1}', r"a\.json: not JSON"),
        ("a.jsonl", b"\n \n", "holds no rows"),
        ("a.json", b"[]", "holds no rows"),
        ("a.csv", b"a,b\n", "holds no rows"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", r"a\.csv:3: not CSV: .*columns, 2"),
        ("a.csv", b"a,b\n1\n", r"a\.csv:2: not CSV: .*columns"),
        ("a.csv", b'a,b\n1,"2\n', r"a\.csv:1: not CSV: unexpected end of data"),
        ("a.csv", b"a,b\n\xff,2\n", "not CSV in UTF-8"),
        ("a.parquet", b"PAR1 nothing", r"a\.parquet: not Parquet"),
        ("a.jsonl.gz", b'{"a": 1}\n', r"a\.jsonl\.gz: not gzip"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n', mtime=0)[:-9], r"a\.jsonl\.gz: not gzip"),
        ("a.txt", b"a\n", r"a\.txt' does not end in \.jsonl, \.json, \.csv, one of these and \.gz, or \.parquet"),
        ("a.parquet.gz", b"PAR1", "does not end in"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert_raises(WhetValueError, message, read_rows, tmp_path / name)


def test_missing_files_and_dataset_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_raises(WhetValueError, "there is no file", read_rows, tmp_path / "nothing.jsonl")
    assert_raises(WhetValueError, "no file matches", read_rows, tmp_path / "*.jsonl")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert_raises(MissingExtraError, r"'owner/name'.*pip install 'whet\[datasets\]'", read_rows, "owner/name")
    assert_raises(MissingExtraError, "the folder .* as a dataset", read_rows, tmp_path)
    for source in (None, 5, [], [None]):
        assert_raises(WhetTypeError, "read_rows: source is .*, expected a file, a pattern", read_rows, source)


def test_a_drive_letter_belongs_to_the_path(monkeypatch):
    monkeypatch.setattr(os.path, "splitdrive", ntpath.splitdrive)
    assert _split_name("C:\\data\\rows:main:test") == ("C:\\data\\rows", "main", "test")
    assert _split_name("openai/gsm8k:main") == ("openai/gsm8k", "main", "train")
