"""Optimizers by name: against their definitions, in both policies, resumed, and by their memory."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from tests.raising import assert_raises
from tests.tiny import assert_resumes, assert_same_weights, make_trainer, tiny_llama, weights, with_lora

from whet import Learner, _core
from whet.algorithms.grpo import GRPO
from whet.algorithms.sft import SFT
from whet.errors import CheckpointError, WhetValueError
from whet.learner.moments import make_moments, moment_bytes, moment_seed
from whet.models.lora import LoraSettings, choose_adapted
from whet.models.packed_base import pack_base
from whet.models.sources.live import open_module
from whet.nn import frozen_model
from whet.nn.optimizers import AdamW8bit
from whet.training.sizes import Lengths, run_memory

ROWS = [([5, 6], [4, 8, 2]), ([7], [9, 3, 2])]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
NUMBERS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "grad_scale": 1.0}


def learner_of(rank: int = 64, **settings):
    base = pack_base(open_module(tiny_llama(**SIZES)), weights="float32")
    return Learner(base, lora_rank=rank, compute="float32", **settings)


def run_of(model, **settings):
    return make_trainer(SFT, model, **{"learning_rate": 1e-2, "batch_size": 2, **settings})


def step(p, grad, moments, t, seed=0, **changes):
    m, v, m_scales, v_scales = moments
    _core.adamw_8bit(
        p=p, grad=grad, m=m, v=v, m_scales=m_scales[0], v_scales=v_scales[0], t=t, seed=moment_seed(0, t, seed),
        **NUMBERS | changes,
    )  # fmt: skip


# --- moments in 8 bits ------------------------------------------------------------------------------------


def decode(codes: np.ndarray, scales: np.ndarray, top: int) -> np.ndarray:
    """The definition: 0, or an eighth of an octave by linear steps below the largest magnitude of the block."""

    def magnitude(code):
        octave, eighth = divmod(code - 1, 8)
        return np.where(code > 0, np.exp2(octave) * (1 + eighth / 8), 0)

    code = codes.astype(int) & top
    sign = np.where(codes > top, -1.0, 1.0)
    return sign * magnitude(code) * np.repeat(scales, 256)[: len(codes)] / magnitude(np.array(top))


def test_codes_of_the_moments_are_their_definition_without_bias():
    """The mean over seeds of the decoded moments is the moments, and no element is off by more than a step."""
    rng = np.random.default_rng(0)
    grad = (rng.standard_normal(5000) * 10.0 ** rng.uniform(-3, 1, 5000)).astype(np.float32)
    m, v = 0.1 * grad.astype(np.float64), 0.001 * grad.astype(np.float64) ** 2
    found = []
    for seed in range(200):
        moments = make_moments(grad, 1, True)
        step(np.zeros_like(grad), grad, moments, 1, seed)
        found.append([decode(moments[0], moments[2][0], 127), decode(moments[1], moments[3][0], 255)])
    of_m, of_v = np.array(found).transpose(1, 0, 2)
    large = np.abs(m) > 1e-4 * np.repeat([np.abs(b).max() for b in np.split(m, range(256, 5000, 256))], 256)[:5000]
    for exact, each in ((m, of_m), (v, of_v)):
        relative = each[:, large] / exact[large] - 1
        assert np.abs(relative).max() < 0.126 and np.abs(relative.mean(0)).max() < 0.02
        assert abs(relative.mean()) < 2e-4
    assert (of_v[:, v > 0] > 0).all()


def test_a_first_step_in_8_bits_is_adamws_and_moments_follow_their_gradients():
    """By hand: with gradients of 1 and 4 each later step moves by the rate, and v tends to 1 and 16."""
    grad = np.repeat(np.float32([1, -4]), 2560)
    moments, p, own = make_moments(grad, 1, True), np.zeros_like(grad), np.zeros_like(grad)
    step(p, grad, moments, 1)
    _core.adamw(p=own, grad=grad, m=np.zeros_like(grad), v=np.zeros_like(grad), t=1, **NUMBERS)
    assert p.tobytes() == own.tobytes() and p[0] == pytest.approx(-0.1) and p[-1] == pytest.approx(0.1)
    for t in range(2, 2001):
        step(p, grad, moments, t, beta2=0.99)
    v = decode(moments[1], moments[3][0], 255)
    assert v[:2560].mean() == pytest.approx(1, rel=0.02) and v[2560:].mean() == pytest.approx(16, rel=0.02)
    assert p[:2560].mean() == pytest.approx(-200, rel=0.02) and p[:2560].std() < 2
    for t in range(2001, 3001):  # v falls again, by e^10: with codes to nearest it would stay
        step(p, 1e-4 * grad, moments, t, beta2=0.99)
    assert decode(moments[1], moments[3][0], 255)[:2560].mean() < 1e-3


@pytest.mark.parametrize("kind", ["learner", "modules", "bfloat16"])
def test_8_bit_moments_train_as_float32_ones_in_a_quarter_of_the_memory(kind):
    def make(seed, optimizer):
        if kind == "learner":
            model = learner_of(seed=seed)
        else:
            model = tiny_llama(seed, **SIZES)
            model = model.bfloat16() if kind == "bfloat16" else model
        compute = "torch" if kind == "bfloat16" else "float32"
        return run_of(model, optimizer=optimizer, learning_rate=2e-3, compute=compute)

    finals, runs = {}, {}
    for optimizer in ("adamw", "adamw_8bit"):
        runs[optimizer] = [make(seed, optimizer) for seed in range(4)]
        finals[optimizer] = [run.train(ROWS, 12)["loss"] for run in runs[optimizer]]
    spread = np.ptp(finals["adamw"])
    assert abs(np.mean(finals["adamw"]) - np.mean(finals["adamw_8bit"])) < spread
    own, plain = (
        sum(n for part, _, n in runs[name][0].memory_blocks() if part == "moments") for name in ("adamw_8bit", "adamw")
    )
    policy = runs["adamw"][0].policy
    sizes = (
        [p.size for p in policy.model.parameters]
        if kind == "learner"
        else [p.numel() for p in policy.trainable.values()]
    )
    masters = 4 * sum(sizes) if kind == "bfloat16" else 0
    scalars = 0 if kind == "learner" else 4 * len(sizes)  # torch's counts of steps
    assert own == sum(map(moment_bytes, sizes)) + masters + scalars and plain == 8 * sum(sizes) + masters + scalars
    assert moment_bytes(1 << 20) == 0.25390625 * 8 * (1 << 20)  # 2 bytes, and 8 per block of 256


def test_estimates_know_the_optimizers_state():
    learner, model = learner_of(), tiny_llama(**SIZES)
    source = open_module(model)
    adapters = choose_adapted(source, LoraSettings(64))
    for name, each in (("learner", learner), ("modules", model)):
        for optimizer in ("adamw", "adamw_8bit", "muon"):
            if (name, optimizer) == ("learner", "muon"):
                continue
            run = run_of(copy.deepcopy(each) if name == "modules" else each, optimizer=optimizer)
            if name == "learner":
                each.moments = []
            run.train(ROWS, 1)
            found = sum(n for part, _, n in run.memory_blocks() if part == "moments")
            given = {"adapters": adapters, "base": "float32", "learner": True} if name == "learner" else {}
            predicted = run_memory(source, run.config, Lengths(2, 3), interpreter=0, **given).parts["moments"]
            assert found == pytest.approx(predicted, abs=64 if name == "modules" else 0), (name, optimizer)


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "muon"])
@pytest.mark.parametrize("kind", ["modules", "adapters", "learner", "bfloat16"])
def test_runs_resume(kind, optimizer, tmp_path):
    models = {
        "modules": lambda: tiny_llama(**SIZES),
        "adapters": lambda: with_lora(tiny_llama(**SIZES), r=64, target_modules=["q_proj", "down_proj"]),
        "learner": learner_of,
        "bfloat16": lambda: tiny_llama(**SIZES).bfloat16(),
    }
    settings = {"compute": "torch"} if kind == "bfloat16" else {}
    if (kind, optimizer) == ("learner", "muon"):
        assert_raises(
            WhetValueError, ("optimizer is 'muon'", "Learner", "adamw_8bit"), run_of, learner_of(), optimizer="muon"
        )
        return
    assert_resumes(lambda: run_of(models[kind](), optimizer=optimizer, weight_decay=0.1, **settings), ROWS, tmp_path)
    facts = ("optimizer is 'adamw'", repr(optimizer))
    with pytest.raises(CheckpointError) as error:
        SFT.from_checkpoint(tmp_path / "checkpoint", model=models[kind](), optimizer="adamw")
    assert all(fact in str(error.value) for fact in facts)


def test_8_bit_moments_belong_to_their_policy(tmp_path):
    run = run_of(learner_of(), optimizer="adamw_8bit")
    run.train(ROWS, 1)
    run.save(tmp_path / "learner")
    run.save_pretrained(tmp_path / "adapter")
    from peft import PeftModel

    base = frozen_model(tiny_llama(**SIZES), run.model.base)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    with pytest.raises(CheckpointError, match="Learner"):
        SFT.from_checkpoint(tmp_path / "learner", model=model)


def test_adapters_of_experts_and_fixed_halves_keep_their_blocks():
    learner = learner_of(32, lora_init="pissa")
    run = run_of(learner, optimizer="adamw_8bit", weight_decay=0.1)
    halves = [(each.a[each.rank // 2 :].copy(), each) for each in learner.adapters]
    run.train(ROWS, 2)
    assert all(np.array_equal(each.a[each.rank // 2 :], half) for half, each in halves)
    moments = make_moments(np.zeros((8 * 16, 64), np.float32), 8, True)
    assert [x.shape for x in moments] == [(128, 64)] * 2 + [(8, 4)] * 2


def test_what_8_bit_moments_do_not_support_is_named():
    wide = torch.nn.Parameter(torch.zeros(64, 128).t())
    wide.grad = torch.ones_like(wide)
    optimizer = AdamW8bit([{"params": [wide]}])
    assert_raises(WhetValueError, ("adamw_8bit", "(128, 64)", "contiguous"), optimizer.step)


# --- Muon -------------------------------------------------------------------------------------------------


def test_muon_is_torchs_for_matrices_and_adamw_for_the_rest():
    model, own = tiny_llama(**SIZES), tiny_llama(**SIZES)
    run = run_of(model, optimizer="muon", weight_decay=0.1, max_grad_norm=0.0)
    hidden = [p for name, p in own.named_parameters() if p.ndim == 2 and "layers" in name]
    ends = [p for name, p in own.named_parameters() if p.ndim == 2 and "layers" not in name]
    norms = [p for p in own.parameters() if p.ndim == 1]
    others = [{"params": ends, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizers = [
        torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1e-2),
    ]
    gradients = []
    run.policy.optimizer.register_step_pre_hook(
        lambda *_: gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    )
    for _ in range(3):
        run.train_step(ROWS)
        for name, p in own.named_parameters():
            p.grad = gradients[-1][name]
        for optimizer in optimizers:
            optimizer.step()
    for name, value in weights(model).items():
        torch.testing.assert_close(value, weights(own)[name], rtol=1e-5, atol=1e-7)
    assert len(hidden) == 7 and {len(group["params"]) for group in run.policy.optimizer.param_groups} == {7, 2, 3}
    # By hand: six tokens predict: the first update has six singular values of about 0.2 sqrt(128) times the rate.
    first = run_of(tiny_llama(**SIZES), optimizer="muon")
    name = "model.layers.0.mlp.up_proj.weight"
    before = weights(first.model)[name]
    first.train_step(ROWS)
    change = (weights(first.model)[name] - before).square().mean().sqrt().item()
    assert change == pytest.approx(1e-2 * 0.2 * math.sqrt(128 * 6 / (128 * 64)), rel=0.2)


def test_muon_of_clipped_gradients_of_adapters_and_without_matrices():
    model = with_lora(tiny_llama(**SIZES), r=4, target_modules=["q_proj", "lm_head"])
    run = run_of(model, optimizer="muon", max_grad_norm=1e-3)
    first = run.train_step(ROWS)["loss"]
    assert [run.train_step(ROWS)["loss"] for _ in range(5)][-1] < first
    states = [set(run.policy.optimizer.state[p]) for name, p in run.policy.trainable.items() if "q_proj" in name]
    assert states == [{"momentum_buffer"}] * 2
    norms = tiny_llama(**SIZES).requires_grad_(False)
    norms.model.norm.weight.requires_grad_(True)
    assert_raises(WhetValueError, ("muon", "no matrix"), run_of, norms, optimizer="muon")


# --- schedule-free ----------------------------------------------------------------------------------------


@pytest.mark.needs("schedulefree")
def test_schedule_free_steps_are_the_packages(tmp_path):
    import schedulefree

    model, own = tiny_llama(**SIZES), tiny_llama(**SIZES)
    given = {"optimizer": "schedule_free_adamw", "weight_decay": 0.1, "warmup_steps": 2, "max_grad_norm": 0.0}
    run = run_of(model, **given)
    groups = [
        {"params": [p for p in own.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in own.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = schedulefree.AdamWScheduleFree(groups, lr=1e-2)
    for i in range(4):
        optimizer.train()
        theirs = make_trainer(SFT, own, learning_rate=0.0, batch_size=2)
        loss = theirs.train_step(ROWS)["loss"]  # at the same weights
        found = {}
        theirs.policy.optimizer.register_step_pre_hook(
            lambda *_, found=found: found.update({n: p.grad.clone() for n, p in own.named_parameters()})
        )
        theirs.train_step(ROWS)
        for name, p in own.named_parameters():
            p.grad = found[name]
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1, (i + 1) / 2)
        optimizer.step()
        optimizer.eval()
        assert run.train_step(ROWS)["loss"] == pytest.approx(loss, rel=1e-5)
    for name, value in weights(model).items():
        torch.testing.assert_close(value, weights(own)[name], rtol=1e-4, atol=1e-6)
    assert_resumes(lambda: run_of(tiny_llama(**SIZES), **given), ROWS, tmp_path)
    facts = ("schedule_free_adamw", "bfloat16", "float32")
    narrow = tiny_llama().bfloat16()
    assert_raises(WhetValueError, facts, run_of, narrow, optimizer="schedule_free_adamw", compute="torch")


def test_settings_that_do_not_fit_an_optimizer_are_named():
    facts = ("optimizer is 'schedule_free_adamw'", "average", "adamw")
    assert_raises(WhetValueError, facts, GRPO.config_class, optimizer="schedule_free_adamw")
    facts = ("lr_schedule", "'cosine'", "schedule_free_adamw")
    assert_raises(WhetValueError, facts, SFT.config_class, optimizer="schedule_free_adamw", lr_schedule="cosine")
    assert_raises(WhetValueError, ("muon_momentum", "0.9", "'adamw'"), SFT.config_class, muon_momentum=0.9)
    assert_raises(WhetValueError, ("optimizer", "'lion'", "'muon'"), SFT.config_class, optimizer="lion")
    same = [run_of(tiny_llama(), optimizer=name) for name in ("adamw", "adamw_8bit")]  # all are small
    for run in same:
        run.train(ROWS, 2)
    assert_same_weights(same[0].model, same[1].model)
