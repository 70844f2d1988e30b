"""Token rows of every shape, tokenisation with real tokenizers, and the order of batches."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from tests.raising import assert_raises, mentions
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BatchEncoding, PreTrainedTokenizerFast

from whet.data.rows import shuffled_batches, tokenize_completion, tokenize_preference, tokenize_prompt, tokenize_turns
from whet.data.token_ids import token_rows
from whet.errors import WhetTypeError, WhetValueError

BOS, EOS, UNK, A, B, C, USER, ASSISTANT = range(8)
WORDS = ["<s>", "</s>", "<unk>", "a", "b", "c", "user:", "assistant:"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %} </s>{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def words(template: str | None = "<s> $A", **special: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word; ``template`` is its post-processor."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template is not None:
        core.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | special
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **special)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def letters() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the letters a, b, c, with ab merged into one token, and no BOS."""
    core = Tokenizer(models.BPE({"</s>": 0, "a": 1, "b": 2, "c": 3, "ab": 4}, [("a", "b")]))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


def chat(*turns: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in (turn.split("=") for turn in turns)]


# --- token_rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor([5, 6], dtype=torch.int32), [[5, 6]]),
        (np.array([[1, 2]], dtype=np.uint8), [[1, 2]]),
        ([torch.tensor([1]), np.array([2, 3]), [4], ()], [[1], [2, 3], [4], []]),
        ((7, 8), [[7, 8]]),
        ([torch.tensor(7), np.int64(8)], [[7, 8]]),
        ([], [[]]),
        (torch.zeros(2, 0, dtype=torch.int64), [[], []]),
        ({"input_ids": [[1, 2], [3]]}, [[1, 2], [3]]),
        (BatchEncoding({"input_ids": [[0, 2]], "attention_mask": [[0, 1]]}), [[2]]),
    ],
)
def test_rows_of_every_shape(x: Any, expected: list[list[int]]) -> None:
    rows = token_rows(x)
    assert rows == expected and all(type(token) is int for row in rows for token in row)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_padding_on_either_side_is_stripped(dtype: torch.dtype) -> None:
    x = torch.tensor([[-100, 0, 5], [6, 0, -1], [7, 8, 9], [0, 0, 0]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 0], [1, 1, 1], [0, 0, 0]]).to(dtype)
    expected = [[0, 5], [6, 0], [7, 8, 9], []]
    assert token_rows(x, mask) == expected
    assert token_rows({"input_ids": x, "attention_mask": mask}) == expected
    assert token_rows(x[0], mask[0]) == [[0, 5]]
    assert token_rows([[1, 2], [3]], [[0, 1], [1]]) == [[2], [3]]


@pytest.mark.parametrize(
    ("x", "mask", "error", "message"),
    [
        (torch.ones(1, 4).long(), torch.tensor([[1, 0, 0, 1]]), WhetValueError, "row 0 has a hole at position 1"),
        ([[1, 2], [3]], [[1, 1]], WhetValueError, "attention_mask has 1 rows and x has 2"),
        ([[1, 2], [3]], [[1, 1], [1, 1]], WhetValueError, "row 1 has 1 tokens and its attention_mask 2"),
        ([[1], [-100, 2]], None, WhetValueError, r"row 1 holds -100.*attention_mask"),
        ([[1.0, 2.0]], None, WhetTypeError, "row 0 holds float64 values"),
        (torch.ones(2, 2), None, WhetTypeError, "row 0 holds float64 values"),
        (torch.ones(2, dtype=torch.bool), None, WhetTypeError, "row 0 holds bool values"),
        (["a", "b"], None, WhetTypeError, "expected integer token ids"),
        ("ab", None, WhetTypeError, "x is 'ab', expected token ids"),
        (None, None, WhetTypeError, "x is None"),
        (3, None, WhetTypeError, "x is 3"),
        (torch.ones(1, 2, 3).long(), None, WhetValueError, "row 0 has 3 axes"),
        (torch.tensor(3), None, WhetValueError, "row 0 has 0 axes"),
        ([[[1]]], None, WhetValueError, "row 0 has 2 axes"),
        ({"ids": [1]}, None, WhetValueError, r"keys \['ids'\], expected input_ids"),
    ],
)
def test_bad_token_rows(x: Any, mask: Any, error: type[Exception], message: str) -> None:
    assert_raises(error, message, token_rows, x, mask)


# --- tokenize_prompt ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "expected"),
    [(None, [A, B]), ("<s> $A", [BOS, A, B]), ("<s> $A </s>", [BOS, A, B]), ("$A </s>", [A, B])],
)
def test_prompt_text_gets_bos_as_the_tokenizer_adds_it_and_no_eos(template: str | None, expected: list[int]) -> None:
    tokenizer = words(template)
    assert tokenize_prompt({"prompt": "a b"}, tokenizer) == expected
    with_bos = [BOS, *expected[-2:]]  # written out in the text: still once
    assert tokenize_prompt({"prompt": "<s> a b"}, tokenizer) == with_bos


def test_prompt_messages_open_the_assistants_turn() -> None:
    assert tokenize_prompt({"prompt": chat("user=a")}, words()) == [USER, A, ASSISTANT]
    opened = tokenize_prompt({"prompt": chat("user=a", "assistant=b")}, words())
    assert opened == [USER, A, ASSISTANT, B]  # its turn is left open: no EOS, no second opening


@pytest.mark.parametrize("prompt", [[4, 5], (4, 5), np.array([4, 5]), torch.tensor([[4, 5]])])
def test_prompt_ids_pass_through_without_a_tokenizer(prompt: Any) -> None:
    assert tokenize_prompt({"prompt": prompt}, None) == [4, 5]


def test_an_empty_prompt_is_bos_or_an_error() -> None:
    assert tokenize_prompt({"prompt": ""}, words("<s> $A </s>")) == [BOS]
    assert_raises(WhetValueError, "the prompt is empty", tokenize_prompt, {"prompt": ""}, words("$A </s>"))


@pytest.mark.parametrize(
    ("row", "tokenizer", "error", "message"),
    [
        ({"question": "a", "x": 1}, words(), WhetValueError, "no 'prompt'; it has 'question', 'x'"),
        ({"prompt": None}, words(), WhetValueError, "no 'prompt'"),
        ({"prompt": "a"}, None, WhetTypeError, "holds text, and there is no tokenizer"),
        ({"prompt": "a"}, "gpt2", WhetTypeError, r"tokenizer is 'gpt2', expected .*AutoTokenizer"),
        ({"prompt": chat("user=a")}, letters(), WhetValueError, "has no chat_template"),
        ({"prompt": chat("tool=a")}, words(), WhetValueError, "chat template rejects .*no tools"),
        ({"prompt": 3.5}, words(), WhetTypeError, r"a field is 3\.5, expected one text, chat messages"),
        ({"prompt": ["a", "b"]}, words(), WhetTypeError, r"a field is \['a', 'b'\], expected one text"),
        ({"prompt": [{"from": "human"}]}, words(), WhetTypeError, r"expected .* chat messages \(dicts with role and"),
        ("a b", words(), WhetTypeError, "tokenize_prompt: the row is 'a b', expected a dict"),
        ({"prompt": [[1], [2]]}, words(), WhetTypeError, "holds 2 rows"),
    ],
)
def test_bad_prompts(row: dict[str, Any], tokenizer: Any, error: type[Exception], message: str) -> None:
    assert_raises(error, message, tokenize_prompt, row, tokenizer)


# --- tokenize_completion --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a b", "completion": " c"}, ([BOS, A, B], [C, EOS])),
        ({"prompt": "a b", "completion": " c </s>"}, ([BOS, A, B], [C, EOS])),
        ({"prompt": "a", "completion": ""}, ([BOS, A], [EOS])),
        ({"prompt": "", "completion": "a"}, ([BOS], [A, EOS])),
        ({"text": "a b c"}, ([BOS], [A, B, C, EOS])),
        ({"text": [A, B, C]}, ([A], [B, C])),
        ({"prompt": [A, B], "completion": torch.tensor([C])}, ([A, B], [C])),
        ({"prompt": [A], "completion": []}, ([A], [])),
        ({"prompt": [], "completion": [A, B]}, ([A], [B])),
        ({"prompt": chat("user=a"), "completion": chat("assistant=b")}, ([USER, A, ASSISTANT], [B, EOS])),
        ({"prompt": chat("user=a"), "completion": "b"}, ([USER, A, ASSISTANT], [B, EOS])),
        ({"messages": chat("user=a", "assistant=b c")}, ([USER, A, ASSISTANT], [B, C, EOS])),
    ],
)
@pytest.mark.parametrize("template", ["<s> $A", "<s> $A </s>"])
def test_completions(row: dict[str, Any], expected: Any, template: str) -> None:
    assert tokenize_completion(row, words(template)) == expected


def test_text_without_bos_has_its_first_token_as_context() -> None:
    assert tokenize_completion({"text": "abc"}, letters()) == ([4], [3, 0])


def test_a_token_across_the_boundary_belongs_to_the_completion() -> None:
    assert tokenize_completion({"prompt": "ca", "completion": "bc"}, letters()) == ([3], [4, 3, 0])
    assert tokenize_completion({"prompt": "ca", "completion": "c"}, letters()) == ([3, 1], [3, 0])


@pytest.mark.parametrize(
    ("row", "tokenizer", "error", "message"),
    [
        ({"a": 1}, words(), WhetValueError, "has 'a', expected 'prompt' and 'completion', or 'messages', or"),
        ({"completion": "a"}, words(), WhetValueError, "no 'prompt'"),
        ({"messages": chat("user=a")}, words(), WhetValueError, "expected two chat messages or more"),
        ({"prompt": "a", "completion": chat("assistant=b")}, words(), WhetTypeError, "both as text"),
        ({"prompt": "a", "completion": [B]}, words(), WhetTypeError, "the prompt is 'a'.*Give both"),
        ({"prompt": [], "completion": []}, words(), WhetValueError, "both empty"),
        ({"text": "a"}, words(eos_token=None), WhetValueError, "no EOS token"),
        ({"text": "a"}, None, WhetTypeError, "no tokenizer"),
    ],
)
def test_bad_completions(row: dict[str, Any], tokenizer: Any, error: type[Exception], message: str) -> None:
    assert_raises(error, message, tokenize_completion, row, tokenizer)


# --- tokenize_preference --------------------------------------------------------------------------

CHAT = ([USER, A, ASSISTANT], [B, EOS], [C, EOS])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a", "chosen": " b", "rejected": " c c"}, ([BOS, A], [B, EOS], [C, C, EOS])),
        ({"prompt": "a", "chosen": " b", "rejected": " b c"}, ([BOS, A], [B, EOS], [B, C, EOS])),
        ({"prompt": None, "chosen": "a b", "rejected": "a c"}, ([BOS, A], [B, EOS], [C, EOS])),
        ({"chosen": "a", "rejected": "b"}, ([BOS], [A, EOS], [B, EOS])),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, ([BOS], [A, EOS], [B, EOS])),
        ({"prompt": chat("user=a"), "chosen": chat("assistant=b"), "rejected": chat("assistant=c")}, CHAT),
        ({"prompt": chat("user=a"), "chosen": "b", "rejected": "c"}, CHAT),
        ({"chosen": chat("user=a", "assistant=b"), "rejected": chat("user=a", "assistant=c")}, CHAT),
        ({"prompt": [A], "chosen": [B, B], "rejected": [B]}, ([A], [B, B], [B])),
        ({"chosen": [A, B, B], "rejected": [A, C]}, ([A], [B, B], [C])),
        ({"prompt": [], "chosen": [A, B], "rejected": [A, C]}, ([A], [B], [C])),
        # A prompt that both sides repeat, and a text that both conversations contain.
        ({"prompt": "a", "chosen": "a b", "rejected": "a c"}, ([BOS, A], [B, EOS], [C, EOS])),
        ({"prompt": "a", "chosen": "a b", "rejected": "c"}, ([BOS], [UNK, B, EOS], [UNK, EOS])),
        (
            {
                "prompt": chat("user=a"),
                "chosen": chat("user=a", "assistant=b"),
                "rejected": chat("user=a", "assistant=c"),
            },
            CHAT,
        ),
        ({"prompt": " a\n", "chosen": chat("user=a", "assistant=b"), "rejected": chat("user=a", "assistant=c")}, CHAT),
    ],
)
def test_preferences(row: dict[str, Any], expected: Any) -> None:
    assert tokenize_preference(row, words()) == expected


def test_the_prompt_is_the_shortest_common_prefix() -> None:
    # "ca" + "b" makes c ab, "ca" + "c" makes c a c: both sides share only the first token.
    row = {"prompt": "ca", "chosen": "b", "rejected": "c"}
    assert tokenize_preference(row, letters()) == ([3], [4, 0], [1, 3, 0])


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, WhetValueError, "no 'rejected'; it has 'prompt', 'chosen'"),
        ({"chosen": "a", "rejected": "c"}, WhetValueError, "no common first token.*prompt"),
        ({"prompt": "a", "chosen": [1], "rejected": [2]}, WhetTypeError, "both as token ids"),
        (
            {"prompt": "a", "chosen": chat("assistant=b"), "rejected": chat("assistant=c")},
            WhetTypeError,
            "both as messages",
        ),
        (
            {"prompt": "c", "chosen": chat("user=a", "assistant=b"), "rejected": chat("user=a", "assistant=c")},
            WhetValueError,
            ("the prompt 'c'", "conversations", "'prompt'"),
        ),
        (
            {
                "prompt": chat("user=b"),
                "chosen": chat("user=a", "assistant=b"),
                "rejected": chat("user=a", "assistant=c"),
            },
            WhetValueError,
            ("the role 'user'", "prompt"),
        ),
    ],
)
def test_bad_preferences(row: dict[str, Any], error: type[Exception], message: str) -> None:
    assert_raises(error, message, tokenize_preference, row, letters())


def test_a_completion_of_messages_begins_with_the_assistant() -> None:
    row = {"prompt": chat("user=a"), "completion": chat("user=a", "assistant=b")}
    for read in (tokenize_completion, tokenize_turns):
        assert_raises(WhetValueError, ("continuation", "'user'", "assistant"), read, row, words())


def test_a_pair_without_a_difference() -> None:
    assert tokenize_preference({"prompt": "a", "chosen": " b", "rejected": " b"}, words()) == (
        [BOS, A],
        [B, EOS],
        [B, EOS],
    )
    assert tokenize_preference({"chosen": "a b", "rejected": "a b"}, words()) == ([BOS, A, B, EOS], [], [])


# --- tools and options of the chat template -----------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "b"}}]
WITH_TOOLS = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{{ (mood or '') + ' ' }}" + TEMPLATE
ASKED, ANSWERED = chat("user=a"), chat("assistant=c")
READERS = [
    (tokenize_prompt, {"prompt": ASKED}),
    (tokenize_completion, {"prompt": ASKED, "completion": ANSWERED}),
    (tokenize_completion, {"messages": ASKED + ANSWERED}),
    (tokenize_turns, {"messages": ASKED + ANSWERED + ASKED + ANSWERED}),
    (tokenize_preference, {"prompt": ASKED, "chosen": ANSWERED, "rejected": chat("assistant=a")}),
    (tokenize_preference, {"chosen": ASKED + ANSWERED, "rejected": ASKED + chat("assistant=a")}),
]


def chatty(template: str = WITH_TOOLS) -> PreTrainedTokenizerFast:
    tokenizer = words()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(("read", "row"), READERS)
@pytest.mark.parametrize("as_json", [False, True])
def test_tools_and_options_reach_the_chat_template(read: Any, row: dict[str, Any], as_json: bool) -> None:
    plain = read(row, chatty())
    more = {"tools": TOOLS, "chat_template_kwargs": {"mood": "c"}}
    given = {name: json.dumps(value) if as_json else value for name, value in more.items()}
    ids, *completions = [plain] if read is tokenize_prompt else plain
    got = read({**row, **given}, chatty())
    assert (got if read is tokenize_prompt else got[0]) == [B, C, *ids]
    assert read is tokenize_prompt or list(got[1:]) == completions
    for nothing in (None, [], "", "null"):
        assert read({**row, "tools": nothing}, chatty()) == plain
    assert read({**row, "tools": TOOLS}, chatty())[-1] == plain[-1]
    assert read({**row, "chat_template_kwargs": None}, words()) == read(row, words())


def test_tools_of_a_row_of_text_are_an_unused_column() -> None:
    assert tokenize_prompt({"prompt": "a", "tools": 3}, words()) == [BOS, A]


@pytest.mark.parametrize(
    ("more", "tokenizer", "error", "message"),
    [
        ({"tools": TOOLS}, words(), WhetValueError, "chat template drops them"),
        (
            {"tools": "{"},
            chatty(),
            WhetValueError,
            r"tools is '\{', expected a list of tools, perhaps as JSON: Expecting",
        ),
        ({"tools": "{}"}, chatty(), WhetTypeError, r"tools is \{\}, expected a list of tools"),
        ({"tools": 5}, chatty(), WhetTypeError, "tools is 5, expected a list of tools"),
        ({"chat_template_kwargs": [1]}, chatty(), WhetTypeError, r"chat_template_kwargs is \[1\], expected a dict"),
        ({"chat_template_kwargs": {"tokenize": False}}, chatty(), WhetValueError, "sets tokenize, which the task sets"),
    ],
)
@pytest.mark.parametrize(("read", "row"), READERS[:2])
def test_bad_options_of_the_chat_template(
    read: Any, row: dict[str, Any], more: dict[str, Any], tokenizer: Any, error: type[Exception], message: str
) -> None:
    assert_raises(error, message, read, {**row, **more}, tokenizer)


@pytest.mark.parametrize(
    ("read", "row"),
    [
        (tokenize_completion, {"messages": [*ASKED, *ANSWERED, *ASKED]}),
        (tokenize_completion, {"prompt": ASKED, "completion": [*ANSWERED, *ASKED]}),
        (tokenize_turns, {"messages": [*ASKED, *ANSWERED, *ASKED]}),
        (tokenize_preference, {"prompt": ASKED, "chosen": ANSWERED, "rejected": ASKED}),
        (tokenize_preference, {"chosen": ASKED, "rejected": ASKED + ANSWERED}),
        (tokenize_completion, {"text": ASKED}),
    ],
)
def test_only_assistant_turns_are_learnt(read: Any, row: dict[str, Any]) -> None:
    with pytest.raises(WhetValueError, match=mentions("last message", "'user'", "'assistant'")):
        read(row, words())


def test_the_error_names_messages_that_a_loader_collated() -> None:
    collated = [{"role": ["user", "user"], "content": ["a", "b"]}]
    with pytest.raises(WhetTypeError, match=mentions("['user', 'user']", "collate_fn=list")):
        tokenize_prompt({"prompt": collated}, words())


def test_rows_of_tokenizer_output() -> None:
    row = {"input_ids": [0, A, B], "attention_mask": [0, 1, 1], "answer": 3}
    assert tokenize_prompt(row, None) == [A, B]
    assert tokenize_completion(row, None) == ([A], [B])
    assert tokenize_prompt({**row, "prompt": [C]}, None) == [C]
    assert tokenize_prompt({"input_ids": torch.tensor([A, B])}, None) == [A, B]


# --- shuffled_batches -----------------------------------------------------------------------------


def take(n: int, *args: int) -> list[list[int]]:
    return list(itertools.islice(shuffled_batches(*args), n))


def test_an_epoch_has_each_row_at_most_once_and_drops_the_remainder() -> None:
    batches = take(9, 10, 3, 0)
    epochs = [list(itertools.chain(*batches[start : start + 3])) for start in (0, 3, 6)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == 9 and set(epoch) <= set(range(10))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert set().union(*epochs) == set(range(10))
    assert all(type(index) is int for index in epochs[0])


@pytest.mark.parametrize("start", [0, 1, 2, 3, 5, 6, 100, 3 * 10**12 + 1])
def test_batches_resume_at_any_position(start: int) -> None:
    assert take(5, 10, 3, 7, start)[1:] == take(4, 10, 3, 7, start + 1)
    if start <= 100:
        assert take(start + 4, 10, 3, 7)[start:] == take(4, 10, 3, 7, start)


def test_the_seed_determines_the_order() -> None:
    assert take(3, 100, 10, 1) == take(3, 100, 10, 1) != take(3, 100, 10, 2)
    assert take(1, 100, 10, -1) != take(1, 100, 10, 1)


def test_all_orders_are_equally_likely() -> None:
    counts = np.zeros((5, 5))
    for seed in range(2000):
        [order] = take(1, 5, 5, seed)
        counts[np.arange(5), order] += 1
    # Pearson's statistic with 16 degrees of freedom; the 0.999 quantile is 39.3.
    assert ((counts - 400) ** 2 / 400).sum() < 39.3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((3, 4, 0), r"n_rows is 3, fewer than batch_size 4\. Use a smaller batch or more rows"),
        ((0, 1, 0), "n_rows is 0, fewer than batch_size 1"),
        ((3, 0, 0), "batch_size is 0, expected an integer >= 1"),
        ((3, 1, 0, -1), "start_batch is -1, expected an integer >= 0"),
        ((3.5, 1, 0), r"n_rows is 3\.5, expected an integer"),
        ((3, "1", 0), "batch_size is '1', expected an integer"),
        ((3, 1, None), "seed is None, expected an integer"),
    ],
)
def test_bad_batch_arguments_are_rejected_at_the_call(args: tuple[Any, ...], message: str) -> None:
    assert_raises(WhetValueError, f"shuffled_batches: {message}", shuffled_batches, *args)


def test_numpy_integers_are_accepted() -> None:
    assert take(2, np.int64(10), np.int32(3), np.int64(-1)) == take(2, 10, 3, -1)
