"""Trainers of a learner against trainers of PEFT's modules on the same base, checkpoints in both directions, and a run
without torch.
"""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.processes import run_python
from tests.raising import assert_raises
from tests.tiny import first_is_four, fours, timeless, tiny_llama, with_lora

from whet import Learner, WhetTypeError, WhetValueError
from whet.algorithms import DPO, GRPO, RLOO, SFT, BestOfN, OnlineDPO
from whet.checkpoint.folder import load_checkpoint
from whet.errors import CheckpointError, NonFiniteError
from whet.nn.frozen import base_of, frozen_model

ROWS = [
    {"prompt": [5, 6, 7], "completion": [4, 4, 2], "chosen": [4, 4, 2], "rejected": [8, 9, 2]},
    {"prompt": [5, 6, 7], "completion": [8, 2], "chosen": [4, 2], "rejected": [7, 7, 7, 2]},
    {"prompt": [9, 3], "completion": [4, 4, 4, 4, 2], "chosen": [4, 4, 4, 2], "rejected": [3, 2]},
    {"prompt": [11], "completion": [10, 2], "chosen": [4, 10, 2], "rejected": [10, 2]},
]
SETTINGS: dict[str, Any] = {"learning_rate": 0.02, "batch_size": 4, "weight_decay": 0.01, "seed": 3,
                            "adam_epsilon": 1e-4, "stop_token_ids": [2]}  # fmt: skip
"""Epsilon above the noise of gradients near zero, which AdamW would scale up; a base in memory has no EOS."""
TRAINERS = {
    "sft": (SFT, {}),
    "dpo": (DPO, {"beta": 0.2}),
    "grpo": (GRPO, {"reward_fn": fours, "group_size": 4, "max_new_tokens": 6, "beta": 0.05}),
    "grpo-filtered": (GRPO, {"reward_fn": fours, "group_size": 4, "max_new_tokens": 6, "beta": 0.05, "top_k": 9}),
    "grpo-entropy": (
        GRPO,
        {
            "reward_fn": fours,
            "group_size": 4,
            "max_new_tokens": 6,
            "entropy_coef": 0.1,
            "top_entropy_quantile": 0.4,
            "num_iterations": 2,
            "steps_per_generation": 2,
        },
    ),
    "rloo": (RLOO, {"reward_fn": fours, "group_size": 4, "max_new_tokens": 6}),
    "online-dpo": (OnlineDPO, {"reward_fn": first_is_four, "max_new_tokens": 6}),
}


NORMS = ["model.norm", "input_layernorm"]


def modules(base: str = "float32", b_std: float = 0.0, norms: Sequence[str] = ()) -> Any:
    """Adapters of all linear layers of a packed model, and norms, as PEFT's modules."""
    return with_lora(
        frozen_model(tiny_llama(initializer_range=0.3), base),
        r=2,
        lora_alpha=6,
        target_modules="all-linear",
        modules_to_save=list(norms) or None,
        b_std=b_std,
    )


def learner(model: Any) -> Learner:
    """Make the learner with the base, the adapters and the norms of PEFT's modules."""
    base = base_of(model)
    assert base is not None
    norms = model.peft_config["default"].modules_to_save or ()
    made = Learner(base, lora_rank=2, lora_alpha=6, compute="float32", modules_to_save=norms)
    for adapter in made.adapters:
        layer = model.base_model.model.get_submodule(adapter.name)
        factors = (getattr(layer, name)["default"].weight.detach().numpy() for name in ("lora_A", "lora_B"))
        adapter.a[:], adapter.b[:] = adapter.from_module(*factors)
    for norm in made.norms:
        layer = model.base_model.model.get_submodule(norm.name)
        norm.parameters[0][:] = layer.modules_to_save["default"].weight.detach()
    made.update()
    return made


def pair(method: str, b_std: float = 0.0, norms: Sequence[str] = (), **settings: Any) -> tuple[Any, Any]:
    """Return the trainer of PEFT's modules, and the trainer of a learner that begins with the same weights."""
    algorithm, own = TRAINERS[method]
    model = modules(b_std=b_std, norms=norms)
    given = {**SETTINGS, **own, **settings}
    return algorithm(model, compute="float32", **given), algorithm(learner(model), **given)


def assert_same_policies(torch_trainer: Any, native: Any, tolerance: float = 1e-5) -> None:
    """Check the parameters after a few steps of AdamW, which amplify rounding, more so if norms change too."""
    if native.model.norms:
        tolerance *= 10
    right = torch_trainer.policy.state()[0]["model"]
    for name, value in native.policy.state()[0]["model"].items():
        expected = right[name].detach().numpy()
        assert np.linalg.norm(value - expected) <= tolerance * np.linalg.norm(expected), name


@pytest.mark.parametrize("method", TRAINERS)
@pytest.mark.parametrize(
    ("b_std", "norms"), [(0.0, ()), (0.3, ()), (0.0, NORMS), (0.3, NORMS)],
    ids=["new", "trained", "new-norms", "trained-norms"],
)  # fmt: skip
def test_every_algorithm_makes_the_steps_of_the_torch_path(method: str, b_std: float, norms: Sequence[str]) -> None:
    trainers = pair(method, b_std, norms)
    for _ in range(3):
        of_torch, native = (timeless(trainer.train(ROWS, steps=1)) for trainer in trainers)
        assert native.keys() == of_torch.keys()
        for name, value in of_torch.items():
            np.testing.assert_allclose(native[name], value, rtol=2e-4, atol=5e-6, err_msg=name)
    assert_same_policies(*trainers)
    np.testing.assert_allclose(trainers[1].evaluate(ROWS), trainers[0].evaluate(ROWS), rtol=1e-4)


@pytest.mark.parametrize("method", ["sft", "dpo"])
@pytest.mark.parametrize("begin", ["torch", "native"])
def test_a_checkpoint_of_either_continues_in_the_other(method: str, begin: str, tmp_path: Path) -> None:
    trainers = pair(method, b_std=0.3, norms=NORMS)
    for trainer in trainers:
        trainer.train(ROWS, steps=3)
    trainers[begin == "native"].save(tmp_path / "c")
    algorithm, own = TRAINERS[method]
    fresh = modules(b_std=0.3, norms=NORMS)
    models = (fresh, learner(fresh))
    loaded = [algorithm.from_checkpoint(tmp_path / "c", model, compute="float32", **own) for model in models]
    assert_same_policies(*loaded, tolerance=0.0)
    for trainer in (*trainers, *loaded):
        trainer.train(ROWS, steps=3)
    assert_same_policies(trainers[0], loaded[1])
    assert_same_policies(loaded[0], trainers[1])
    assert loaded[0].step == loaded[1].step == 6


def test_a_checkpoint_continues_to_the_bit_and_keeps_the_reference(tmp_path: Path) -> None:
    def make() -> Any:
        trainer = pair("dpo", b_std=0.3, norms=NORMS, training_mode=True)[1]
        trainer.model.lora_dropout = 0.2
        return trainer

    whole, first = make(), make()
    whole.train(ROWS, steps=5)
    first.train(ROWS, steps=2)
    first.save(tmp_path / "c")
    other = learner(modules(b_std=0.5, norms=NORMS))  # the checkpoint replaces its values, and the reference
    other.lora_dropout = 0.2
    second = DPO.from_checkpoint(tmp_path / "c", other)
    second.train(ROWS, steps=3)
    for a, b in zip(whole.model.parameters, second.model.parameters, strict=True):
        assert a.tobytes() == b.tobytes()
    rows = [row["prompt"] for row in ROWS], [row["chosen"] for row in ROWS]
    assert whole.logprobs(*rows, reference=True).tobytes() == second.logprobs(*rows, reference=True).tobytes()


def test_the_reference_is_the_base_or_the_initial_adapters() -> None:
    rows = [row["prompt"] for row in ROWS], [row["chosen"] for row in ROWS]
    for b_std, change in ((0.0, 0.0), (0.3, 0.0), (0.0, 0.1)):
        trainer = pair("dpo", b_std, NORMS)[1]
        if change:  # of a norm, so that the base is not the reference
            trainer.model.norms[0].parameters[0][:] += change
            trainer = DPO(trainer.model, **SETTINGS)
            trainer.model.update()
        assert trainer.policy.reference.adapters_off == (not b_std and not change)
        before = trainer.logprobs(*rows)
        trainer.train(ROWS, steps=2)
        assert trainer.logprobs(*rows, reference=True).tobytes() == before.tobytes()
        assert trainer.logprobs(*rows).tobytes() != before.tobytes()


def test_a_checkpoint_has_the_tensors_of_the_torch_path(tmp_path: Path) -> None:
    shapes, settings = [], []
    for name, trainer in zip(("torch", "native"), pair("dpo", b_std=0.3, norms=NORMS), strict=True):
        trainer.train(ROWS, steps=1)
        trainer.save(tmp_path / name)
        tensors, state = load_checkpoint(tmp_path / name)
        shapes.append({g: {n: (t.shape, t.dtype) for n, t in sorted(part.items())} for g, part in tensors.items()})
        names = "r", "lora_alpha", "peft_type", "lora_dropout"
        settings.append({name: state["adapter"]["config"][name] for name in names})
    assert shapes[0] == shapes[1] and settings[0] == settings[1]


def test_saved_adapters_are_read_by_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    trainer = pair("sft", norms=NORMS)[1]
    trainer.train(ROWS, steps=2)
    trainer.save_pretrained(tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(tiny_llama(initializer_range=0.3), tmp_path / "adapter")
    logits = model(torch.tensor([[5, 6, 7, 4]])).logits[0, 2].log_softmax(-1)
    [[logprob]] = trainer.logprobs([[5, 6, 7]], [[4]])
    assert abs(logits[4].item() - logprob) < 1e-5
    again = Learner(base_of(modules()), adapter=tmp_path / "adapter")  # pyright: ignore[reportArgumentType]
    assert [a.scaling for a in trainer.model.adapters] == [a.scaling for a in again.adapters]
    for a, b in zip(trainer.model.parameters, again.parameters, strict=True):
        assert a.tobytes() == b.tobytes()


def test_adapters_of_another_base_are_refused(tmp_path: Path) -> None:
    base = base_of(modules("q8_0"))
    assert base is not None
    Learner(base, lora_rank=2).save_pretrained(tmp_path / "adapter")
    assert_raises(CheckpointError, "Learner: .* was trained on .*q8_0", Learner, base_of(modules()),
                  adapter=tmp_path / "adapter")  # fmt: skip
    assert_raises(WhetValueError, "lora_rank is 3, but the adapter's folder determines it", Learner, base,
                  adapter=tmp_path / "adapter", lora_rank=3)  # fmt: skip


def test_micro_batches_and_exact_sums_do_not_change_the_step() -> None:
    whole = pair("sft", norms=NORMS)[1]
    whole.train(ROWS, steps=2)
    changes: list[dict[str, Any]] = [{"micro_batch_size": 1}, {"max_tokens_per_step": 8}]
    for settings in (*changes, {"deterministic_reduction": True}, {"activation_bytes": 0}):
        trainer = pair("sft", norms=NORMS, **settings)[1]
        trainer.train(ROWS, steps=2)
        for a, b in zip(whole.model.parameters, trainer.model.parameters, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert trainer.model.activation_bytes == trainer.model.n_kept_layers == 0 < whole.model.n_kept_layers


def test_dropout_is_of_updates_in_training_mode_and_not_of_micro_batches() -> None:
    def train(dropout: float, **settings: Any) -> Any:
        trainer = pair("sft", b_std=0.3, norms=NORMS, **settings)[1]
        trainer.model.lora_dropout = dropout
        trainer.train(ROWS, steps=2)
        return trainer

    with_dropout, without = train(0.5), train(0.0)
    assert train(0.5, training_mode=False).policy.checksum() == without.policy.checksum()
    assert train(0.5).policy.checksum() == with_dropout.policy.checksum() != without.policy.checksum()
    assert train(0.5, seed=4).policy.checksum() != with_dropout.policy.checksum()
    in_parts = train(0.5, micro_batch_size=1)
    for a, b in zip(with_dropout.model.parameters, in_parts.model.parameters, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    rows = [row["prompt"] for row in ROWS], [row["completion"] for row in ROWS]
    scores = with_dropout.logprobs(*rows)
    with_dropout.model.lora_dropout = 0.0
    assert scores.tobytes() == with_dropout.logprobs(*rows).tobytes()


def test_updates_that_are_not_finite_are_skipped_and_counted() -> None:
    trainer = pair("sft", max_skipped_steps=3)[1]
    before = [factor.copy() for adapter in trainer.model.adapters for factor in adapter.parameters]
    spoilt = trainer.model.adapters[3]
    spoilt.b[0, 0] = np.nan
    trainer.model.update()
    metrics = trainer.train(ROWS, steps=1)
    assert metrics["skipped_steps"] == 1 and np.isnan(metrics["loss"]) and np.isnan(metrics["grad_norm"])
    assert trainer.n_updates == 0 and not any(m.any() or v.any() for m, v in trainer.model.moments)
    assert_raises(NonFiniteError, "SFT: 3 updates in a row", trainer.train, ROWS, 4)
    spoilt.b[0, 0] = 0
    trainer.model.update()
    for factor, value in zip(
        (f for adapter in trainer.model.adapters for f in adapter.parameters), before, strict=True
    ):
        assert factor.tobytes() == value.tobytes()
    assert np.isfinite(trainer.train(ROWS, steps=1)["loss"]) and trainer.n_updates == 1


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("logprobs", KeyboardInterrupt),
        ("backward", KeyboardInterrupt),
        ("apply_gradients", KeyboardInterrupt),
        ("zero_grad", KeyboardInterrupt),
        ("logprobs", MemoryError),
        ("backward", MemoryError),
    ],
)
def test_a_step_that_is_interrupted_is_made_again_to_the_bit(method: str, error: type, monkeypatch: Any) -> None:
    def make() -> Any:
        return pair("dpo", b_std=0.3, micro_batch_size=2)[1]

    whole, trainer = make(), make()
    whole.train(ROWS, steps=3)
    trainer.train(ROWS, steps=1)
    own, calls = getattr(trainer.model, method), []

    def fail(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == (1 if method == "apply_gradients" else 2):
            if error is MemoryError:
                raise error
            signal.raise_signal(signal.SIGINT)  # which an update that has begun to change the weights defers
        return own(*arguments, **options)

    monkeypatch.setattr(trainer.model, method, fail)
    with pytest.raises(error):
        trainer.train(ROWS, steps=2)
    monkeypatch.undo()
    trainer.train(ROWS, steps=3 - trainer.step)
    for a, b in zip(whole.model.adapters, trainer.model.adapters, strict=True):
        assert a.a.tobytes() == b.a.tobytes() and a.b.tobytes() == b.b.tobytes()


def test_settings_without_effect_are_refused() -> None:
    model = learner(modules())
    for settings, message in (
        ({"compute": "torch"}, "compute is 'torch', and a Learner computes natively"),
        ({"compute": "bfloat16"}, "compute is 'bfloat16', and the learner computes in float32"),
    ):
        assert_raises(WhetValueError, f"SFT: {message}", SFT, model, **settings)
    assert_raises(WhetTypeError, "DPO: ref_model is .*, but the reference of a Learner", DPO, model, tiny_llama())
    assert_raises(WhetValueError, "GRPO: engine is 'torch', and a Learner is sampled by the native engine", GRPO, model,
                  reward_fn=fours, engine="torch")  # fmt: skip
    assert_raises(WhetTypeError, "SFT: model is str, expected an nn.Module or a whet.Learner", SFT, "model.gguf")


def test_best_of_n_samples_a_learner(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    model = Learner(tmp_path / "model", lora_rank=2)
    best = BestOfN(model, fours, n=4, max_new_tokens=6).generate([[5, 6, 7], [9]], return_all=True)
    assert len(best.sequences) == 2 and BestOfN(model, fours)._stop_token_ids() == [2]  # the folder's EOS
    assert all(2 not in completion.token_ids[:-1] for group in best.candidates for completion in group)


def test_precomputed_references_are_cached(tmp_path: Path) -> None:
    settings = {"precompute_reference": True, "reference_cache": str(tmp_path / "cache")}
    live = pair("dpo", b_std=0.3)[1]
    expected = timeless(live.train(ROWS, steps=1))
    for _ in range(2):  # computed, and read
        trainer = pair("dpo", b_std=0.3, **settings)[1]
        metrics = timeless(trainer.train(ROWS, steps=1))
        assert metrics == {name: pytest.approx(value, rel=1e-6) for name, value in expected.items()}
    [file] = (tmp_path / "cache").iterdir()
    assert file.name.endswith("-native-float32.jsonl") and len(file.read_text().splitlines()) == len(ROWS)


def test_a_checkpoint_of_whole_models_is_refused(tmp_path: Path) -> None:
    SFT(tiny_llama()).save(tmp_path / "c")
    message = "holds every weight of a model, and a Learner trains adapters"
    assert_raises(CheckpointError, f"SFT.from_checkpoint: .*{message}", SFT.from_checkpoint, tmp_path / "c",
                  learner(modules()))  # fmt: skip


def test_it_trains_samples_saves_and_resumes_without_torch(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    done = run_python(
        textwrap.dedent(f"""
        import sys
        sys.modules["torch"] = sys.modules["transformers"] = None
        import whet
        from whet.algorithms import GRPO

        def reward(completions, **columns):
            return [float((ids == 4).sum()) for ids in completions]

        def make():
            return whet.Learner({str(tmp_path / "model")!r}, lora_rank=2, lora_alpha=8, weights="float32")

        trainer = GRPO(make(), reward_fn=reward, group_size=4, max_new_tokens=6, learning_rate=0.03, beta=0.01,
                       batch_size=2)
        trainer.train([{{"prompt": [5, 6, 7]}}, {{"prompt": [9]}}], steps=4)
        trainer.save({str(tmp_path / "c")!r})
        again = GRPO.from_checkpoint({str(tmp_path / "c")!r}, make(), reward_fn=reward)
        trainer.train([{{"prompt": [5, 6, 7]}}, {{"prompt": [9]}}], steps=2)
        again.train([{{"prompt": [5, 6, 7]}}, {{"prompt": [9]}}], steps=2)
        assert all((a.b == b.b).all() for a, b in zip(trainer.model.adapters, again.model.adapters))
        trainer.save_pretrained({str(tmp_path / "adapter")!r})
        assert sys.modules["torch"] is None
        print(trainer.step, trainer.stop_token_ids())
    """)
    )
    assert done.stdout == "6 [2]\n", done.stderr
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
