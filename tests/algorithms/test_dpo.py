"""DPO: against an update in plain torch, references of every kind, inputs, accumulated micro-batches."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import get_args

import pytest
import torch
from tests.raising import assert_raises, mentions
from tests.tiny import (
    EOS,
    TinyModel,
    assert_close_weights,
    assert_same_steps,
    assert_same_weights,
    letters_tokenizer,
    make_trainer,
    padded,
    timeless,
    tiny_llama,
    token_logprobs,
    weights,
    with_lora,
)

from whet.algorithms.dpo import DPO
from whet.algorithms.sft import SFT
from whet.config import DPOLossType
from whet.errors import WhetTypeError, WhetValueError
from whet.nn import frozen_model
from whet.training.reference import model_digest

PROMPTS = [[5, 6], [7], [8, 9, 10]]
CHOSEN = [[4, 8, EOS], [9], [6, EOS]]
REJECTED = [[9, EOS], [10, 10, 10, EOS], [5]]
ROWS = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in zip(PROMPTS, CHOSEN, REJECTED, strict=True)]
make = partial(make_trainer, DPO)


def sums(model, completions):
    return torch.stack([token_logprobs(model, p, c).sum() for p, c in zip(PROMPTS, completions, strict=True)])


def sigmoid_loss(model, ref_model, beta):
    with torch.no_grad():
        ref = sums(ref_model, CHOSEN) - sums(ref_model, REJECTED)
    d = sums(model, CHOSEN) - sums(model, REJECTED) - ref
    return -(1 / (1 + torch.exp(-beta * d))).log().mean()


@pytest.mark.parametrize("micro_batch_size", [0, 1, 2])
def test_updates_match_plain_torch(micro_batch_size):
    ref_model, own = TinyModel(seed=1), TinyModel()
    dpo = make(ref_model=ref_model, beta=0.5, micro_batch_size=micro_batch_size)
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.02, weight_decay=0.0)
    for _ in range(3):
        loss = sigmoid_loss(own, ref_model, 0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics = dpo.train_step(PROMPTS, CHOSEN, REJECTED)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-9)
    assert_close_weights(dpo.model, own, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("loss_type", get_args(DPOLossType))
def test_accumulated_micro_batches_trace_the_same_curve(loss_type):
    smoothing = 0.01 if loss_type in ("exo_pair", "robust") else 0.0
    runs = []
    for micro_batch_size in (0, 1):
        dpo = make(
            loss_type=loss_type, label_smoothing=smoothing, micro_batch_size=micro_batch_size,
            **({} if loss_type == "sft" else {"ref_model": TinyModel(seed=1), "beta": 0.3}),
        )  # fmt: skip
        history = [dpo.train_step(ROWS) for _ in range(3)]
        runs.append((history, dpo.model))
    assert_close_weights(runs[1][1], runs[0][1], rtol=1e-7, atol=1e-10)
    for got, expected in zip(runs[1][0], runs[0][0], strict=True):
        assert timeless(got) == pytest.approx(timeless(expected), rel=1e-6, abs=1e-9)


def test_metrics_by_hand():
    ref_model = TinyModel(seed=1)
    metrics = make(ref_model=ref_model, beta=0.5).train_step(PROMPTS, CHOSEN, REJECTED)
    with torch.no_grad():
        chosen, rejected = sums(TinyModel(), CHOSEN), sums(TinyModel(), REJECTED)
        c, r = chosen - sums(ref_model, CHOSEN), rejected - sums(ref_model, REJECTED)
    expected = {
        "rewards/chosen": 0.5 * c.mean().item(),
        "rewards/margins": 0.5 * (c - r).mean().item(),
        "rewards/accuracies": (c > r).double().mean().item(),
        "logps/rejected": rejected.mean().item(),
        "num_tokens": 2 * 6 + 6 + 7,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    assert 0 < metrics["entropy"] < math.log(12)


def test_the_reference_is_a_frozen_copy():
    dpo = make()
    reference = weights(dpo.ref_model)
    for _ in range(3):
        dpo.train_step(ROWS)
    assert_same_weights(dpo.ref_model, TinyModel())
    assert not any(p.requires_grad for p in dpo.ref_model.parameters())
    assert not torch.equal(weights(dpo.model)["head.weight"], reference["head.weight"])


def test_the_reference_is_the_model_without_adapters():
    model = with_lora(tiny_llama())
    dpo, copied = make(model), make(with_lora(tiny_llama()), ref_model=tiny_llama())
    assert dpo.ref_model is None
    for _ in range(3):
        metrics, expected = dpo.train_step(ROWS), copied.train_step(ROWS)
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert metrics["loss"] < math.log(2)
    base = {n.replace(".base_layer", ""): p for n, p in model.get_base_model().named_parameters() if "lora" not in n}
    for name, value in weights(tiny_llama()).items():
        assert torch.equal(base[name], value)


def test_reference_free():
    dpo = make(reference_free=True, beta=0.5)
    assert dpo.ref_model is None
    d = sums(TinyModel(), CHOSEN) - sums(TinyModel(), REJECTED)
    expected = -(1 / (1 + torch.exp(-0.5 * d))).log().mean()
    assert dpo.train_step(ROWS)["loss"] == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.parametrize("make_model", [TinyModel, tiny_llama])
def test_precomputed_log_probs_equal_the_reference(make_model):
    live, precomputed = make(make_model()), make(make_model(), precompute_reference=True)
    assert precomputed.ref_model is None
    rows = precomputed.add_reference_logprobs(ROWS)
    assert "ref_chosen_logprobs" not in ROWS[0]
    assert rows[1]["ref_chosen_logprobs"] == pytest.approx(
        token_logprobs(make_model(), PROMPTS[1], CHOSEN[1]).sum().item(), rel=1e-5
    )
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    columns |= {name: torch.tensor(columns[name], dtype=torch.float64) for name in rows[0] if name.startswith("ref_")}
    assert precomputed.evaluate(columns) == precomputed.evaluate(rows)
    for _ in range(3):
        assert precomputed.train_step(rows)["loss"] == pytest.approx(live.train_step(ROWS)["loss"], rel=1e-5)
    again = make(make_model(), precompute_reference=True, batch_size=2)
    columns = make(make_model(), batch_size=2)
    again.train(ROWS, steps=3)
    columns.train(rows, steps=3)
    assert_close_weights(again.model, columns.model, rtol=1e-3, atol=1e-5)


def test_the_reference_cache_is_reused_by_the_next_run(tmp_path, monkeypatch):
    settings = {"precompute_reference": True, "reference_cache": str(tmp_path / "cache"), "batch_size": 2}
    first = make(**settings).add_reference_logprobs(ROWS)
    (file,) = (tmp_path / "cache").iterdir()
    file.write_text(file.read_text() + '["torn')  # a torn line, as after a kill

    def never(*arguments):
        raise AssertionError("computed again")

    with monkeypatch.context() as context:
        context.setattr(DPO, "_reference_sums", never)
        assert make(**settings).add_reference_logprobs(ROWS[::-1]) == first[::-1]
        for other in ({**ROWS[0], "chosen": [*ROWS[0]["chosen"], 1]}, {**ROWS[0], "prompt": [3]}):
            assert_raises(AssertionError, ("computed", "again"), make(**settings).add_reference_logprobs, [other])
    changed = TinyModel()
    with torch.no_grad():
        next(changed.parameters()).add_(0.1)
    assert make(changed, **settings).add_reference_logprobs(ROWS) != first
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_reference_cache_key_of_adapters_is_their_base(tmp_path):
    base = tiny_llama()
    frozen = model_digest(base)
    for parameter in list(base.parameters())[:2]:
        parameter.requires_grad_(False)
    assert model_digest(base) == frozen  # the frozen part does not identify a partly frozen policy
    before = model_digest(base, adapters_off=True)
    assert before != frozen
    with torch.no_grad():
        list(base.parameters())[-1].add_(1.0)
    assert model_digest(base, adapters_off=True) == before and model_digest(base) != frozen


def test_reference_cache_key_includes_the_packed_base():
    """The matrices of a packed base are not in any state_dict."""
    digests = {model_digest(frozen_model(tiny_llama(seed), base)) for seed in (0, 1) for base in ("bf16", "float32")}
    assert len(digests) == 4
    assert model_digest(frozen_model(tiny_llama(), "bf16")) in digests


def test_reference_cache_key_includes_the_config(tmp_path):
    settings = {"precompute_reference": True, "reference_cache": str(tmp_path), "compute": "float32"}

    def precomputed(**change):
        model = tiny_llama()
        for name, value in change.items():
            setattr(model.config, name, value)
        model = type(model)(model.config)
        model.load_state_dict({name: 8 * tensor for name, tensor in tiny_llama().state_dict().items()})
        fresh = make(model, precompute_reference=True, compute="float32").add_reference_logprobs(ROWS)
        assert make(model, **settings).add_reference_logprobs(ROWS) == fresh
        return [row["ref_chosen_logprobs"] for row in fresh]

    plain = precomputed()
    changes = [{"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, {"rms_norm_eps": 0.5}]
    for n_models, change in enumerate(changes, start=2):
        assert precomputed(**change) != plain
        assert len(list(tmp_path.iterdir())) == n_models
    elsewhere = tiny_llama()
    elsewhere.config._name_or_path = "elsewhere"
    assert model_digest(elsewhere) == model_digest(tiny_llama())
    norms = [torch.nn.Sequential(torch.nn.LayerNorm(4, eps=eps)) for eps in (1e-5, 1e-3)]
    assert model_digest(norms[0]) != model_digest(norms[1])


def test_reference_cache_must_be_a_folder(tmp_path):
    (tmp_path / "cache").write_text("mine")
    with pytest.raises(WhetValueError, match=mentions("reference_cache", "file", "folder")):
        make(precompute_reference=True, reference_cache=str(tmp_path / "cache")).add_reference_logprobs(ROWS)
    assert (tmp_path / "cache").read_text() == "mine"


def test_a_damaged_line_of_a_reference_cache_is_reported(tmp_path):
    settings = {"precompute_reference": True, "reference_cache": str(tmp_path / "cache")}
    make(**settings).add_reference_logprobs(ROWS)
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_text()
    for damage in ('["half", 1.0', '["name", 1.0, "much"]', "17", "\ufffd"):
        lines = whole.splitlines()
        lines[1] = damage
        file.write_text("\n".join(lines) + "\n")
        with pytest.raises(WhetValueError, match=mentions("reference_cache", "line 2", "two numbers", "Delete")):
            make(**settings).add_reference_logprobs(ROWS)


def test_precomputing_requires_a_reference():
    dpo = make(precompute_reference=True)
    assert_raises(WhetValueError, ("precompute_reference", "pairs", "log-probs"), dpo.train_step, ROWS)
    dpo.train_step(dpo.add_reference_logprobs(ROWS))
    with pytest.raises(
        WhetValueError, match=mentions("precompute_reference", "already been trained", "ref_model", "new")
    ):
        dpo.add_reference_logprobs([{**ROWS[0], "chosen": [3]}])
    with pytest.raises(WhetTypeError, match=mentions("precompute_reference", "list_iterator", "list(dataset)")):
        dpo.train(iter(ROWS), steps=1)
    assert_raises(WhetTypeError, ("precompute_reference", "sequence", "batches"), dpo.train, [ROWS], steps=1)


def test_precomputed_log_probs_are_kept_for_later_epochs_and_runs(tmp_path):
    settings = {"precompute_reference": True, "batch_size": 2}
    whole, epochs, live = make(**settings), make(**settings), make(batch_size=2)
    whole.train(ROWS, steps=3)
    live.train(ROWS, steps=3)
    epochs.train(ROWS)
    epochs.train(ROWS)  # one step per epoch
    assert epochs.step == 2 and "ref_chosen_logprobs" not in ROWS[0]
    epochs.save(tmp_path / "c")
    resumed = DPO.from_checkpoint(tmp_path / "c", model=TinyModel(seed=9))  # unchanged, no reference
    resumed.train(ROWS)
    assert_same_weights(resumed.model, whole.model)
    assert_close_weights(whole.model, live.model, rtol=1e-5, atol=1e-8)
    assert resumed.train_step(ROWS)["loss"] == whole.train_step(PROMPTS, CHOSEN, REJECTED)["loss"]
    with pytest.raises(WhetValueError, match=mentions("precompute_reference", "ref_model", "new")):
        resumed.train([*ROWS, {"prompt": [5], "chosen": [4], "rejected": [6]}])


def test_reference_log_probs_are_computed_once(monkeypatch):
    dpo = make(precompute_reference=True, ref_model=TinyModel(seed=1), batch_size=2)
    asked = []
    compute = DPO._reference_sums
    monkeypatch.setattr(DPO, "_reference_sums", lambda self, rows: asked.extend(rows) or compute(self, rows))
    dpo.train([*ROWS, ROWS[0]], n_epochs=2)
    dpo.train(ROWS)
    assert sorted(prompt for prompt, _, _ in asked) == sorted(PROMPTS)


@pytest.mark.parametrize("value", ["x", math.nan, [1.0]])
def test_invalid_reference_log_probs_are_rejected(value):
    row = {**ROWS[0], "ref_chosen_logprobs": -1.0, "ref_rejected_logprobs": value}
    with pytest.raises(WhetValueError, match=mentions("DPO", "ref_rejected_logprobs", "finite number")):
        make(precompute_reference=True).train_step([row])


def test_ties_are_excluded_counted_and_warned_about_once():
    same = [{"prompt": [5], "chosen": [4, EOS], "rejected": [4, EOS]}, {"chosen": [5, 4], "rejected": [5, 4]}]
    for settings in ({}, {"precompute_reference": True}, {"ref_model": TinyModel(seed=1)}):
        dpo, without = make(**settings), make(**settings)
        rows = [same[0], *ROWS[:2], same[1], ROWS[2]]
        if dpo.config.precompute_reference:
            rows = dpo.add_reference_logprobs(rows)
        with pytest.warns(UserWarning, match=mentions("DPO", "2 of the 5", "frac_ties")):
            metrics = dpo.train_step(rows)
        expected = without.train_step(
            without.add_reference_logprobs(ROWS) if settings.get("precompute_reference") else ROWS
        )
        assert metrics["frac_ties"] == 0.4 and expected["frac_ties"] == 0.0
        assert metrics["loss"] == expected["loss"] and metrics["num_tokens"] == expected["num_tokens"]
        assert_same_weights(dpo.model, without.model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            metrics = dpo.train_step([5], [4], [4])  # only a tie, already warned about
        assert (metrics["loss"], metrics["grad_norm"], metrics["frac_ties"]) == (0.0, 0.0, 1.0)
        assert dpo.n_updates == 1 and dpo.step == 2
        assert_same_weights(dpo.model, without.model)


def test_the_sft_loss_trains_on_ties():
    dpo = make(loss_type="sft")
    metrics = dpo.train_step([{"prompt": [5], "chosen": [4, EOS], "rejected": [4, EOS]}])
    expected = -token_logprobs(TinyModel(), [5], [4, EOS]).mean().item()
    assert metrics["loss"] == pytest.approx(expected) and metrics["frac_ties"] == 0.0 and dpo.n_updates == 1


@pytest.mark.parametrize("micro_batch_size", [0, 1])
def test_the_sft_loss_equals_sft_on_chosen_completions(micro_batch_size):
    dpo = make(loss_type="sft", micro_batch_size=micro_batch_size)
    sft = SFT(TinyModel(), learning_rate=0.02, max_grad_norm=0.0)
    for _ in range(2):
        metrics, expected = dpo.train_step(ROWS), sft.train_step(PROMPTS, CHOSEN)
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-9)
    assert_close_weights(dpo.model, sft.model, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "sft"])
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_evaluation_is_the_loss_of_all_pairs_and_changes_nothing(loss_type, batch_size):
    reference = {} if loss_type == "sft" else {"ref_model": TinyModel(seed=1), "beta": 0.5}
    dpo = make(loss_type=loss_type, batch_size=batch_size, **reference)
    state = torch.get_rng_state()
    same = {"prompt": [5], "chosen": [4], "rejected": [4]}
    found = dpo.evaluation_metrics([*ROWS, same] if loss_type != "sft" else ROWS)
    assert dpo.evaluate(iter(ROWS)) == pytest.approx(found["loss"], rel=1e-12)
    assert torch.equal(torch.get_rng_state(), state) and dpo.step == dpo.position == dpo.num_tokens == 0
    assert_same_weights(dpo.model, TinyModel())
    stepped = dpo.train_step(ROWS)  # a step computes its metrics before its update
    assert found == pytest.approx({name: stepped[name] for name in found}, rel=1e-6)
    assert_raises(WhetValueError, ("DPO", "chosen", "rejected", "every pair"), make().evaluate, [same])


def test_evaluation_with_precomputed_references():
    dpo = make(precompute_reference=True)
    rows = dpo.add_reference_logprobs(ROWS)
    assert dpo.evaluate(rows) == dpo.evaluate(ROWS) == pytest.approx(math.log(2), rel=1e-6)
    with pytest.raises(WhetValueError, match=mentions("precompute_reference", "pairs", "log-probs")):
        make(precompute_reference=True).evaluate(ROWS)


def test_all_forms_of_a_batch_are_equivalent():
    batches = [
        (PROMPTS, CHOSEN, REJECTED),
        (ROWS,),
        (tuple(ROWS),),
        (list(zip(PROMPTS, CHOSEN, REJECTED, strict=True)),),
        ({"prompt": PROMPTS, "chosen": CHOSEN, "rejected": REJECTED},),
        tuple(padded(rows, left=True) for rows in (PROMPTS, CHOSEN, REJECTED)),
        tuple(padded(rows, left=False) for rows in (PROMPTS, CHOSEN, REJECTED)),
    ]
    assert_same_steps(make, batches)


def test_rows_of_text_are_tokenised():
    dpo, by_ids = make(tokenizer=letters_tokenizer()), make()
    dpo.train_step([{"prompt": "bc", "chosen": "ae", "rejected": "f"}])
    by_ids.train_step([[5, 6]], [[4, 8, EOS]], [[9, EOS]])
    assert_same_weights(dpo.model, by_ids.model)
    columns = make(tokenizer=letters_tokenizer())
    columns.train_step(["bc"], ["ae"], ["f"])
    assert_same_weights(columns.model, by_ids.model)


def test_invalid_batches_are_rejected():
    with pytest.raises(WhetValueError, match=mentions("prompt 3", "chosen 4", "rejected 2")):
        make().train_step(PROMPTS, [*CHOSEN, [4]], REJECTED[:2])
    for batch in ((PROMPTS, CHOSEN), (PROMPTS,), (torch.tensor([[5, 6]]),)):
        with pytest.raises(WhetTypeError, match=mentions("DPO", "prompt, chosen and rejected", "list of rows")):
            make().train_step(*batch)
    assert_raises(WhetTypeError, ("DPO", "None", "list of rows"), make().train_step, None)
    assert_raises(WhetValueError, ("DPO", "batch", "empty"), make().train_step, [])
    assert_raises(WhetValueError, ("DPOConfig", "'exo_pair'", "label_smoothing"), make, loss_type="exo_pair")
    with pytest.raises(WhetValueError, match=mentions("ref_model", "itself")):
        model = TinyModel()
        make(model, ref_model=model)


# --- long rows ----------------------------------------------------------------------------------------


def test_long_pairs_are_rejected_cut_or_dropped():
    long = {"prompt": [5, 6], "chosen": [4, 8, 9, EOS], "rejected": [9]}
    cut = {"prompt": [5, 6], "chosen": [4, 8], "rejected": [9]}
    assert_raises(WhetValueError, ("DPO", "row 1", "6 tokens"), make(max_length=4).train_step, [cut, long])
    too_long = {"prompt": [5], "chosen": [5] * 64, "rejected": [6]}
    assert_raises(WhetValueError, ("65 tokens", "last position", 64), make(tiny_llama()).train_step, [too_long])
    tie = {"prompt": [7] * 4, "chosen": [9], "rejected": [9]}
    with pytest.warns(UserWarning, match=mentions("2 of 3", "4 tokens")):
        metrics = make(max_length=4, truncation="truncate").train_step([long, cut, tie])
    assert (metrics["frac_truncated"], metrics["frac_dropped"], metrics["frac_ties"]) == (1 / 3, 1 / 3, 0)
    assert metrics["loss"] == make().train_step([cut, cut])["loss"]
    with pytest.warns(UserWarning, match=mentions("1 of 1", "4 tokens")):
        metrics = make(max_length=4, truncation="drop").train_step([long])
    assert (metrics["loss"], metrics["frac_dropped"], metrics["frac_ties"]) == (0, 1, 0)


def test_precomputed_log_probs_belong_to_cut_pairs():
    rows = [
        {"prompt": [5, 6], "chosen": [4, 8, 9], "rejected": [9]},
        {"prompt": [5] * 5, "chosen": [6], "rejected": [7]},
    ]
    with pytest.warns(UserWarning, match=mentions("2 of 2", "rows")):
        dpo = make(max_length=4, truncation="truncate", precompute_reference=True, batch_size=2)
        done = dpo.add_reference_logprobs(rows)
    cut = make().add_reference_logprobs([{**rows[0], "chosen": [4, 8]}])
    assert done == [{**cut[0], "chosen": [4, 8, 9]}, rows[1]]
    assert dpo.train(done, steps=1)["loss"] == pytest.approx(math.log(2))
