"""Classification of a dataset's items, streams of batches for every kind of dataset, and their start positions."""

from __future__ import annotations

from collections import UserDict
from itertools import chain, islice

import numpy as np
import pyarrow
import pytest
import torch
from tests.raising import assert_raises, mentions
from tests.tiny import Items, Streamed
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

from whet.data.batches import (
    Place,
    as_row,
    as_rows,
    batch_stream,
    batches_in_order,
    check_row_counts,
    columns_as_rows,
    is_batch,
)
from whet.errors import WhetTypeError, WhetValueError

FIELDS = ("prompt", "completion")
ROWS = [{"prompt": f"{i}+2=", "completion": f"{i + 2}", "grid": np.zeros((5, 5))} for i in range(8)]
CHAT = [{"role": "user", "content": "hi"}]
START = Place()
MATRIX = torch.zeros(2, 3, dtype=torch.int64)


def row(item):
    return as_row(item, FIELDS, "Test") if not isinstance(item, str) else {"text": item}


def stream(dataset, batch_size=2, start=START, seed=0):
    return batch_stream(dataset, batch_size, seed, start, FIELDS, row)


def arguments(dataset, **settings):
    """Return the arguments of ``train_step``, without the positions."""
    return (batch for batch, _ in stream(dataset, **settings).batches)


def taken(dataset, n=None, **settings):
    """Return the prompts of the first n batches of rows."""
    return [[r["prompt"] for r in rows] for (rows,) in islice(arguments(dataset, **settings), n)]


class Sized(Streamed):
    def __len__(self):
        return len(self.items)


# --- the rule -------------------------------------------------------------------------------------------

ITEMS_THAT_ARE_ROWS = [
    {"prompt": "abcd", "completion": "efgh"},
    {"prompt": "abcd", "grid": np.zeros((4, 4))},
    {"prompt": [5, 6], "completion": [7, 8]},
    {"prompt": torch.tensor([5, 6]), "completion": torch.tensor([7, 8])},
    {"prompt": CHAT, "completion": CHAT, "tools": [{"name": "f"}]},
    {"messages": CHAT * 2},
    {"prompt": ["a", "b"], "answer": "xy"},
    {"prompt": ["a", "b"], "answer": [1, 2, 3]},
    {"prompt": MATRIX[:1], "answer": 3},
    {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]},
    {"input_ids": MATRIX[0]},
    {"question": ["a", "b"]},
    ("a", "b"),
    ([5, 6], [7]),
    (MATRIX[0], MATRIX[0]),
    (CHAT, CHAT),
    "text",
    CHAT,
    [5, 6, 7],
    (5, 6),
    [np.int64(5), torch.tensor(6)],
    MATRIX[0],
    np.arange(3),
    [],
]

ITEMS_THAT_ARE_BATCHES = [
    [{"prompt": "a"}, {"prompt": "b"}],
    ({"prompt": "a"}, {"prompt": "b"}),
    {"prompt": ["a", "b"], "completion": ("c", "d"), "grid": np.zeros((2, 5, 5))},
    {"prompt": [[5, 6], [7]], "answer": torch.tensor([1, 2])},
    {"prompt": [CHAT, CHAT], "completion": ["a", "b"]},
    {"prompt": MATRIX, "completion": MATRIX},
    {"input_ids": MATRIX, "attention_mask": MATRIX},
    {"input_ids": [[1, 2], [3]]},
    UserDict(input_ids=MATRIX),
    ["a", "b", "c"],
    [("a", "b"), ("c", "d")],
    [([5], [6]), ([7], [8])],
    [[5, 6], [7]],
    [CHAT, CHAT],
    [MATRIX[0], MATRIX[1]],
    (MATRIX, MATRIX),
    [MATRIX, MATRIX],
    ([[5], [6]], [[7], [8]]),
    (["a", "b"], ["c", "d"]),
    MATRIX,
    MATRIX.numpy(),
]


@pytest.mark.parametrize("item", ITEMS_THAT_ARE_ROWS, ids=repr)
def test_rows_are_rows(item):
    assert not is_batch(item, FIELDS)


@pytest.mark.parametrize("item", ITEMS_THAT_ARE_BATCHES, ids=repr)
def test_batches_are_batches(item):
    assert is_batch(item, FIELDS)


def test_an_ambiguous_list_of_two_texts_is_rejected():
    with pytest.raises(WhetTypeError, match=mentions("(prompt, completion)", "batch", "tuple")):
        is_batch(["a", "b"], FIELDS)
    assert is_batch(["a", "b"], ("prompt",))
    assert is_batch(("a", "b"), ("prompt",)) and not is_batch(("a",), ("prompt",))


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"prompt": "a"}, [{"prompt": "a"}]),
        ({"prompt": ["a", "b"], "n": torch.tensor([1, 2])}, [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]),
        ([("a", "b")], [{"prompt": "a", "completion": "b"}]),
        (["x", "y"], [{"text": "x"}, {"text": "y"}]),
        ("x", [{"text": "x"}]),
        ({"input_ids": MATRIX}, None),
        ([[5, 6], [7]], None),
        ([5, 6], None),
        (MATRIX, None),
    ],
)
def test_rows_of_a_batch(batch, expected):
    assert as_rows(batch, row, "Test") == expected


def test_columns_of_text_become_rows():
    assert columns_as_rows(FIELDS, (["a"], ["b"]), "Test") == [{"prompt": "a", "completion": "b"}]
    assert columns_as_rows(FIELDS, ("a", CHAT), "Test") == [{"prompt": "a", "completion": CHAT}]
    assert columns_as_rows(FIELDS, ([[5]], MATRIX), "Test") is None
    with pytest.raises(WhetValueError, match=mentions("Test", "prompt 1", "completion 2")):
        columns_as_rows(FIELDS, (["a"], ["b", "c"]), "Test")


def test_tuples_are_rows_with_the_fields_in_order():
    batches = arguments([([1], [2])] * 4)
    assert next(batches) == ([{"prompt": [1], "completion": [2]}] * 2,)
    with pytest.raises(WhetTypeError, match=mentions("Test:", "(1, 2, 3)", "(prompt, completion)")):
        as_row((1, 2, 3), FIELDS, "Test")


# --- every kind of data set -----------------------------------------------------------------------------


def test_a_sequence_can_start_anywhere():
    rows = [{"prompt": str(i)} for i in range(7)]
    whole = list(islice(stream(rows).batches, 12))
    assert stream(rows).per_epoch == 3
    for n, (_, place) in enumerate(whole, 1):
        assert list(islice(stream(rows, start=place).batches, 12 - n)) == whole[n:]
        assert stream(rows, start=place).n_left == 3 - n % 3
    assert all(len(batch) == 1 and len(batch[0]) == 2 for batch, _ in whole)


def test_ready_batches_are_unchanged():
    assert next(arguments([MATRIX])) == (MATRIX,)
    assert next(arguments([(MATRIX, MATRIX)])) == (MATRIX, MATRIX)
    assert next(arguments(iter([[MATRIX, MATRIX]]))) == (MATRIX, MATRIX)
    encoded = {"input_ids": MATRIX, "attention_mask": MATRIX}
    assert next(arguments([encoded])) == (encoded,)
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    assert next(arguments(iter([rows]))) == (rows,)
    assert next(arguments([rows])) == (rows,)  # in a sequence as in an iterator
    assert next(arguments(iter([{"prompt": ["a", "b"], "n": [1, 2]}]))) == (
        [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}],
    )


@pytest.mark.parametrize(
    "dataset",
    [ROWS, tuple(ROWS), Items(ROWS), torch.arange(32).reshape(8, 4), np.arange(32).reshape(8, 4)],
    ids=lambda dataset: type(dataset).__name__,
)
def test_sequences_of_rows_are_shuffled(dataset):
    seen = []
    as_seen = lambda item: seen.append(item) or {"prompt": item}  # noqa: E731
    batches, n_left, per_epoch = batch_stream(dataset, 3, 0, Place(), FIELDS, as_seen)
    assert n_left == per_epoch == 2 and [len(rows) for ((rows,), _) in islice(batches, 4)] == [3] * 4
    keys = [str(item["prompt"]) if isinstance(item, dict) else str(item) for item in seen]
    assert len(set(keys[:6])) == 6 and len(set(keys[6:])) == 6 and keys[:6] != keys[6:]


@pytest.mark.parametrize(
    ("dataset", "per_epoch"),
    [
        (Streamed(ROWS), None),
        (Sized(ROWS), 3),
        (dict(enumerate(ROWS)).values(), 3),
        (DataLoader(Items(ROWS), batch_size=3), 3),
        (DataLoader(Items(ROWS), batch_size=3, collate_fn=list), 3),
        (DataLoader(Items(ROWS), batch_size=None), 3),
        (DataLoader(Streamed(ROWS), batch_size=3), None),
        (DataLoader(Streamed(ROWS), batch_size=None), None),
        (DataLoader(Items(ROWS), batch_size=3, num_workers=1), 3),
    ],
    ids=["stream", "sized", "values", "default collate", "own collate", "unbatched", "of a stream", "items", "worker"],
)
def test_rows_of_iterables_are_batched_in_order(dataset, per_epoch):
    assert stream(dataset, batch_size=3).per_epoch == per_epoch
    batches = [rows for (rows,) in islice(arguments(dataset, batch_size=3), 4)]
    assert [[r["prompt"] for r in rows] for rows in batches] == [
        ["0+2=", "1+2=", "2+2="], ["3+2=", "4+2=", "5+2="], ["6+2=", "7+2="], ["0+2=", "1+2=", "2+2="],
    ]  # fmt: skip
    assert batches[0][0]["grid"].shape == (5, 5)


def test_an_iterator_of_rows_is_batched_and_ends():
    assert taken(iter(ROWS), batch_size=5) == [[r["prompt"] for r in part] for part in (ROWS[:5], ROWS[5:])]
    assert taken((r for r in ROWS), batch_size=8, start=Place(1, 7)) == [
        [r["prompt"] for r in ROWS]
    ]  # it left out nothing
    assert taken(zip("abc", "def", strict=True)) == [["a", "b"], ["c"]]


def test_iterables_restart_and_iterators_end():
    class Loader:
        def __iter__(self):
            return iter([[[1]], [[2]], [[3]]])

    assert stream(Loader()).per_epoch is stream(Loader()).n_left is None
    assert list(islice(arguments(Loader(), start=Place(1, 2)), 4)) == [([[3]],), ([[1]],), ([[2]],), ([[3]],)]
    assert list(arguments(iter([[[1]], [[2]]]), start=Place(0, 5))) == [([[1]],), ([[2]],)]


def test_default_collate_stacks_tensors_and_returns_rows_unchanged():
    """torch's default would transpose the lists of a row: messages, token ids, tuples of texts."""
    chats = [{"prompt": [{"role": "user", "content": str(i)}], "completion": [5, 6, i]} for i in range(4)]
    [first, _] = islice(arguments(DataLoader(Items(chats), batch_size=2)), 2)
    assert first == (chats[:2],)
    pairs = DataLoader([("a", "b"), ("c", "d")], batch_size=2)
    assert taken(pairs, 1) == [["a", "c"]]
    tensors = DataLoader(TensorDataset(torch.arange(8).reshape(4, 2), torch.arange(4).reshape(4, 1)), batch_size=2)
    prompts, completions = next(arguments(tensors))
    assert prompts.tolist() == [[0, 1], [2, 3]] and completions.tolist() == [[0], [1]]


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(Items(ROWS), batch_size=2, shuffle=True),
        lambda: DataLoader(Items(ROWS), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)),
        lambda: DataLoader(Items(ROWS), batch_sampler=BatchSampler(RandomSampler(ROWS), 2, drop_last=False)),
        lambda: DataLoader(Items(ROWS), batch_size=2, sampler=RandomSampler(ROWS, replacement=True, num_samples=8)),
    ],
    ids=["shuffle", "own generator", "batch sampler", "replacement"],
)
def test_shuffle_order_of_a_loader_is_independent_of_the_start(loader):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    whole = taken(loader(), 12)
    assert torch.equal(torch.get_rng_state(), before)  # dropout draws from that
    assert whole[:4] != whole[4:8]  # another order in every epoch
    given = loader()
    for n in range(9):
        torch.manual_seed(100 + n)  # a new process
        start = Place(*divmod(n, 4))
        assert taken(loader(), 3, start=start) == whole[n : n + 3]
        assert taken(given, 3, start=start) == whole[n : n + 3]  # nor does using it change anything
    assert taken(loader(), 12, seed=1) != whole


def test_the_seed_of_a_loader_changes_its_order():
    orders = [
        taken(DataLoader(Items(ROWS), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(s)), 4)
        for s in (1, 2, 1)
    ]
    assert orders[0] == orders[2] != orders[1]


def test_set_epoch_is_called_before_each_pass():
    class Ordered(Streamed):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return (self.items[(i + self.epoch) % 8] for i in range(8))

    for dataset, start in ((Ordered(ROWS), Place(1, 2)), (DataLoader(Ordered(ROWS), batch_size=2), Place(1, 1))):
        whole = taken(dataset, 8)
        assert whole[0][0] == "0+2=" and whole[4][0] == "1+2="
        assert taken(dataset, 3, start=start) == whole[5:]


@pytest.mark.parametrize(
    ("batch_size", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (3, [3, 2]), (5, [5])], ids=["1", "2", "3", "5"]
)
@pytest.mark.parametrize("dataset", [ROWS, Sized(ROWS), Streamed(ROWS)], ids=["sequence", "sized", "stream"])
def test_another_batch_size_resumes_at_the_same_row(dataset, batch_size, sizes):
    """Five of eight rows remain after a batch of three, and the last batch of a sequence is full."""
    if dataset is ROWS:
        sizes = [size for size in sizes if size == batch_size]
    ((rows,), place), *_ = islice(stream(dataset, batch_size=3).batches, 1)
    order = [prompt for [prompt] in taken(dataset, 8, batch_size=1)]
    assert place == (0, 3) and [r["prompt"] for r in rows] == order[:3]
    *rest, after = taken(dataset, len(sizes) + 1, batch_size=batch_size, start=place)
    assert [len(batch) for batch in rest] == sizes
    assert list(chain(*rest)) == order[3 : 3 + sum(sizes)]
    assert [after] == taken(dataset, 1, batch_size=batch_size, start=Place(1))
    n_left = stream(dataset, batch_size, place).n_left
    assert n_left == (None if type(dataset) is Streamed else len(sizes))


def test_a_remainder_smaller_than_a_batch_starts_the_next_epoch():
    assert stream(ROWS, 4, Place(0, 6)).n_left == stream(ROWS, 4).per_epoch == 2
    assert taken(ROWS, 2, batch_size=4, start=Place(0, 6)) == taken(ROWS, 2, batch_size=4, start=Place(1))
    assert stream(Sized(ROWS), 4, Place(0, 6)).n_left == 1
    assert taken(Sized(ROWS), 2, batch_size=4, start=Place(0, 6)) == [
        ["6+2=", "7+2="],
        ["0+2=", "1+2=", "2+2=", "3+2="],
    ]
    assert stream(ROWS, 2, Place(3, 11)).n_left == 4, "a shorter dataset than the last one begins with an epoch"


def test_one_pass_in_order():
    def prompts(dataset):
        batches = batches_in_order(dataset, 3, FIELDS, row, "Test")
        return [[r["prompt"] for r in rows] for (rows,) in batches]

    expected = [[r["prompt"] for r in ROWS[i : i + 3]] for i in (0, 3, 6)]
    for dataset in (ROWS, Items(ROWS), iter(ROWS), Streamed(ROWS), DataLoader(Items(ROWS), batch_size=3)):
        assert prompts(dataset) == expected
    assert prompts({"prompt": ["a", "b"], "n": [1, 2]}) == [["a", "b"]]
    assert prompts({"prompt": "a"}) == [["a"]]
    assert_raises(WhetValueError, "Test: the dataset is empty", prompts, iter([]))


# --- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        ([], WhetValueError, "train: the dataset is empty"),
        (torch.zeros(0, 3), WhetValueError, "the dataset is empty"),
        (
            ROWS[:1],
            WhetValueError,
            ("1 rows", "batch_size=2", "batch_size=1"),
        ),
        (
            "rows.jsonl",
            WhetTypeError,
            ("'rows.jsonl'", "sequence or iterable", "read_rows"),
        ),
        (5, WhetTypeError, ("dataset is 5",)),
        (None, WhetTypeError, ("dataset is None",)),
        (torch.tensor(5), WhetTypeError, ("dataset is tensor(5)",)),
        (
            {"prompt": ["a", "b"]},
            WhetTypeError,
            ("mapping", "'prompt'", "a list of dicts"),
        ),
        (Dataset(), WhetTypeError, ("sequence or iterable",)),
        (Items([]), WhetValueError, "the dataset is empty"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_error_names_a_value_that_is_not_a_dataset(dataset, error, message):
    assert_raises(error, message, stream, dataset)


def test_the_error_for_a_table_names_the_conversion():
    class Frame:
        def __len__(self):
            return 3

        def __getitem__(self, name):
            raise KeyError(name)

    assert_raises(WhetTypeError, r"Test: dataset\[0\] of the Frame", batches_in_order, Frame(), 2, FIELDS, row, "Test")
    with pytest.raises(WhetTypeError, match=mentions("dataset[0]", "Frame", "KeyError(0)")):
        stream(Frame())
    for table, fix in (
        (pyarrow.table({"prompt": ["a"]}), ("Table", "to_pylist()")),
        (type("DataFrame", (Frame,), {"iterrows": None})(), ("DataFrame", "to_dict('records')")),
        (type("DataFrame", (Frame,), {"to_dicts": None})(), ("DataFrame", "to_dicts()")),
    ):
        assert_raises(WhetTypeError, fix, stream, table)


def test_the_error_names_a_batch_among_rows():
    batches = arguments(iter([{"prompt": "a"}, {"prompt": "b"}, [{"prompt": "c"}]]))
    next(batches)
    with pytest.raises(WhetTypeError, match=mentions("batch", "row")):
        list(arguments(iter([{"prompt": "a"}, [{"prompt": "c"}]])))


def test_row_counts_must_agree():
    check_row_counts("Test", ("a", "b"), ([1], [2]))
    with pytest.raises(WhetValueError, match=mentions("Test:", "a 1", "b 2")):
        check_row_counts("Test", ("a", "b"), ([1], [2, 3]))
    assert_raises(WhetValueError, "a 0, b 0", check_row_counts, "Test", ("a", "b"), ([], []))
