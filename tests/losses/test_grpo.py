"""grpo_loss: by hand, against formulas written token by token in float64, and its invariants."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tests import trls
from tests.raising import mentions

from whet.config import GRPOLossType, RatioLevel, SamplerCorrection
from whet.errors import WhetTypeError, WhetValueError
from whet.losses import grpo_loss
from whet.losses.terms import count_rows, importance_weights, top_entropy_masks

LOSS_TYPES, LEVELS = get_args(GRPOLossType), get_args(RatioLevel)
PAIRS = [(t, level) for t in LOSS_TYPES for level in LEVELS if level == "token" or t not in ("gmpo", "dppo_tv")]
N_ROWS, N_TOKENS = 5, 6
LENGTHS = [6, 3, 1, 4, 0]


def batch(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logprobs = -normal(N_ROWS, N_TOKENS).abs() - 0.1
    return {
        "logprobs": logprobs.to(dtype),
        "old_logprobs": (logprobs + 0.3 * normal(N_ROWS, N_TOKENS)).to(dtype),
        "ref_logprobs": (logprobs + 0.4 * normal(N_ROWS, N_TOKENS)).to(dtype),
        "sampler_logprobs": (logprobs + 0.4 * normal(N_ROWS, N_TOKENS)).to(dtype),
        "advantages": normal(N_ROWS).to(dtype),
        "completion_mask": torch.arange(N_TOKENS)[None] < torch.tensor(LENGTHS)[:, None],
    }


def literal(b, loss_type, level="token", eps=0.2, eps_high=0.2, delta=None, beta=0.0, estimator="k3",
            bias=True, tau=(1.0, 1.05), length=N_TOKENS):  # fmt: skip
    """Reference implementation of the formulas, token by token, differentiable."""
    row_sums, row_counts = [], []
    for i in range(N_ROWS):
        tokens = [t for t in range(N_TOKENS) if b["completion_mask"][i, t]]
        gaps = [b["logprobs"][i, t] - b["old_logprobs"][i, t] for t in tokens]
        advantage = b["advantages"][i].item()
        row = torch.zeros((), dtype=torch.float64)
        for t, gap in zip(tokens, gaps, strict=True):
            rho = torch.exp({"token": gap, "sequence": sum(gaps) / len(gaps), "sequence_product": sum(gaps)}[level])
            if loss_type == "cispo":
                loss = -min(rho.item(), eps_high) * advantage * b["logprobs"][i, t]
            elif loss_type == "sapo":
                sharpness = tau[0] if advantage > 0 else tau[1]
                loss = -advantage * 4 / (1 + torch.exp(-sharpness * (rho - 1))) / sharpness
            elif loss_type == "gmpo":
                logs = [gap.clamp(max=eps_high) if advantage > 0 else gap.clamp(min=-eps) for gap in gaps]
                rho = torch.exp(sum(logs) / len(logs))
                loss = -rho * advantage
            elif loss_type == "dppo_tv":
                change = b["logprobs"][i, t].exp().item() - b["old_logprobs"][i, t].exp().item()
                is_beyond = change > eps_high if advantage > 0 else change < -eps
                loss = -min(rho.item(), 20.0) * advantage * b["logprobs"][i, t] * (not is_beyond)
            else:
                capped = rho if delta is None or rho < delta else torch.tensor(delta, dtype=torch.float64)
                clipped = rho if 1 - eps < rho < 1 + eps_high else torch.tensor(
                    1 - eps if rho < 1 else 1 + eps_high, dtype=torch.float64)  # fmt: skip
                first, second = capped * advantage, clipped * advantage
                loss = -(first if first < second else second)
            if beta:
                d = b["ref_logprobs"][i, t] - b["logprobs"][i, t]
                kl = {"k1": -d, "k2": d**2 / 2, "k3": torch.exp(d) - d - 1}[estimator]
                loss = loss + beta * (kl * rho if bias and estimator == "k3" else kl)
            row = row + loss
        row_sums.append(row)
        row_counts.append(len(tokens))
    if loss_type in ("grpo", "sapo", "gmpo"):
        return sum(s / max(n, 1) for s, n in zip(row_sums, row_counts, strict=True)) / N_ROWS
    if loss_type == "luspo":
        return sum(row_sums) / N_ROWS
    if loss_type == "dr_grpo":
        return sum(row_sums) / (N_ROWS * length)
    return sum(row_sums) / sum(row_counts)


TRLS = [
    *({"loss_type": name} for name in LOSS_TYPES if name not in ("dppo_tv", "dr_grpo")),
    *({"loss_type": name, "beta": 0.3} for name in ("dapo", "gmpo")),
    *({"loss_type": name, "off_policy_mask_threshold": 0.05} for name in ("dapo", "grpo", "cispo")),
    {"level": "sequence", "off_policy_mask_threshold": 0.05, "beta": 0.3},
    *({"loss_type": name, "top_entropy_quantile": 0.4, "beta": 0.3} for name in ("dapo", "grpo", "cispo", "sapo")),
    *({"loss_type": name, "entropy_coef": 0.2} for name in ("dapo", "luspo")),
    {"entropy_coef": 0.2, "top_entropy_quantile": 0.4},
]


@pytest.mark.parametrize("options", TRLS, ids=str)
def test_value_and_gradient_are_trls(options):
    pytest.importorskip("trl", reason="pip install 'whet[peers]'")
    from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer

    b = {name: value for name, value in batch(seed=4).items() if name != "sampler_logprobs"}
    b = {name: value[:4] for name, value in b.items()}  # TRL's metrics of an empty row are NaN
    b["logprobs"].requires_grad_()
    is_gmpo = options.get("loss_type") == "gmpo"
    bounds = {"epsilon": 0.15, "epsilon_high": 0.25}
    used = {**options, **(bounds if options.get("loss_type") != "sapo" else {})}
    entropies = torch.rand(
        4, N_TOKENS, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    ).requires_grad_()
    of_entropies = {}
    if "top_entropy_quantile" in used:
        quantile, mask = used.pop("top_entropy_quantile"), b["completion_mask"].numpy()
        [entropy_mask] = top_entropy_masks([entropies.detach().numpy()], [mask], quantile)
        assert entropy_mask.sum() == 6  # of 14
        of_entropies["entropy_mask"] = torch.from_numpy(entropy_mask)
    if "entropy_coef" in used:
        of_entropies["entropies"] = entropies
    loss, metrics = grpo_loss(**b, **of_entropies, **used, kl_bias_correction=not is_gmpo)
    names = {"level": "importance_sampling_level"}
    settings: dict[str, Any] = {names.get(name, name): value for name, value in options.items()}
    expected, trls_metrics = trls.grpo_loss(
        b, entropies, GMPOTrainer if is_gmpo else None, epsilon_low=0.15, epsilon_high=0.25,
        **settings,
    )  # fmt: skip
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient(loss, b["logprobs"]), gradient(expected, b["logprobs"]), rtol=1e-10, atol=1e-15)
    if "entropy_coef" in options:
        found, wanted = gradient(loss, entropies), gradient(expected, entropies)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
        assert found.count_nonzero() == (6 if "entropy_mask" in of_entropies else 14)
    if "off_policy_mask_threshold" in options:
        assert 0 < metrics["clip_ratio/off_policy"] < 1
    elif "clip_ratio/low_mean" in trls_metrics:
        found = [metrics["clip_ratio/low"], metrics["clip_ratio/high"]]
        assert found == pytest.approx([trls_metrics["clip_ratio/low_mean"], trls_metrics["clip_ratio/high_mean"]])


def test_entropy_by_hand():
    """Rows of 2 and 1 tokens with the advantages 1 and -1, on-policy; entropies 0.5, 2.0 and 1.0."""
    mask, logprobs = np.array([[True, True], [True, False]]), np.full((2, 2), -1.0)
    entropies = np.array([[0.5, 2.0], [1.0, np.nan]])
    advantages = np.array([1.0, -1.0])
    loss = grpo_loss(logprobs, None, advantages, mask, entropies=entropies, entropy_coef=0.3)
    assert loss.value == pytest.approx((-1 - 1 + 1) / 3 - 0.3 * (0.5 + 2 + 1) / 3)
    np.testing.assert_allclose(loss.gradients["entropies"], [[-0.1, -0.1], [-0.1, 0]])
    np.testing.assert_allclose(loss.gradients["logprobs"], [[-1 / 3, -1 / 3], [1 / 3, 0]])

    # The top half: the median is 1.0. The loss is still divided by all 3 tokens, the bonus by 2.
    [top] = top_entropy_masks([entropies], [mask], 0.5)
    assert top.tolist() == [[False, True], [True, False]]
    loss = grpo_loss(logprobs, None, advantages, mask, entropies=entropies, entropy_mask=top, entropy_coef=0.3)
    assert loss.value == pytest.approx((-1 + 1) / 3 - 0.3 * (2 + 1) / 2)
    np.testing.assert_allclose(loss.gradients["entropies"], [[0, -0.15], [-0.15, 0]])
    np.testing.assert_allclose(loss.gradients["logprobs"], [[0, -1 / 3], [1 / 3, 0]])
    # The KL term is of all tokens.
    ref = {"ref_logprobs": logprobs - 0.5, "beta": 1.0, "kl_estimator": "k1"}
    assert grpo_loss(logprobs, None, advantages, mask, entropy_mask=top, **ref).value == pytest.approx(0.5)

    assert top_entropy_masks([entropies], [mask], 0.0)[0].tolist() == [[False, True], [False, False]]
    assert (top_entropy_masks([entropies], [mask], 1.0)[0] == mask).all()
    parts = top_entropy_masks([entropies[:1], entropies[1:]], [mask[:1], mask[1:]], 0.5)  # of the whole batch
    assert np.concatenate(parts).tolist() == top.tolist() and top_entropy_masks([], [], 0.5) == []
    with pytest.raises(WhetValueError, match=mentions("entropy_coef", "0.3", "entropies", "None")):
        grpo_loss(logprobs, None, advantages, mask, entropy_coef=0.3)


def test_masks_by_hand():
    """Rows of 2, 1 and 1 tokens."""
    mask = np.array([[True, True], [True, False], [True, False]])
    old = np.log([[0.5, 0.1], [0.4, 1.0], [0.5, 1.0]])
    now = np.log([[0.8, 0.2], [0.1, 1.0], [0.45, 1.0]])
    advantages = np.array([1.0, -1.0, -1.0])

    # off-policy: row 1 lost ln 4 > 0.5 nats, row 2 only ln (1 / 0.9). Left: clipped at 1.2 twice, 0, and 0.9.
    loss = grpo_loss(now, old, advantages, mask, off_policy_mask_threshold=0.5)
    assert loss.value == pytest.approx((-1.2 - 1.2 + 0 + 0.9) / 4)
    np.testing.assert_allclose(loss.gradients["logprobs"], [[0, 0], [0, 0], [0.9 / 4, 0]])
    assert loss.metrics["clip_ratio/off_policy"] == 1 / 4
    kept = grpo_loss(now, old, -advantages, mask, off_policy_mask_threshold=0.5)
    assert kept.metrics["clip_ratio/off_policy"] == 0

    # dppo_tv: 0.8 - 0.5 > 0.15 and 0.1 - 0.4 < -0.15 are beyond the bounds; a ratio of 2 is not, as 0.2 - 0.1 is small.
    loss = grpo_loss(now, old, advantages, mask, loss_type="dppo_tv", epsilon=0.15)
    assert loss.value == pytest.approx((-2 * math.log(0.2) + 0.9 * math.log(0.45)) / 4)
    np.testing.assert_allclose(loss.gradients["logprobs"], [[0, -2 / 4], [0, 0], [0.9 / 4, 0]])
    assert loss.metrics["clip_ratio/high"] == loss.metrics["clip_ratio/low"] == 1 / 4
    # The bounds are around the sampler's probabilities: these are as they are now.
    same = {"sampler_logprobs": now, "sampler_correction": "token_truncate"}
    loss = grpo_loss(now, old, advantages, mask, loss_type="dppo_tv", epsilon=0.15, **same)
    assert loss.metrics["clip_ratio/region"] == 0

    # gmpo: of row 0 the logarithms ln 1.6 > 0.4 and ln 2 > 0.4 are clipped: rho = e^0.4; of row 1 ln 0.25 < -0.4:
    # e^-0.4; of row 2 rho = 0.9.
    loss = grpo_loss(now, old, advantages, mask, loss_type="gmpo", epsilon=0.4)
    assert loss.value == pytest.approx((-math.exp(0.4) + math.exp(-0.4) + 0.9) / 3)
    np.testing.assert_allclose(loss.gradients["logprobs"], [[0, 0], [0, 0], [0.9 / 3, 0]])
    # With 0.5 only ln 2 is clipped, and the other token has half of the gradient.
    loss = grpo_loss(now[:1], old[:1], advantages[:1], mask[:1], loss_type="gmpo", epsilon=0.5)
    rho = math.exp((math.log(1.6) + 0.5) / 2)
    assert loss.value == pytest.approx(-rho)
    np.testing.assert_allclose(loss.gradients["logprobs"], [[-rho / 2, 0]])
    assert loss.metrics["clip_ratio/high"] == 1 / 2


def gradient(loss: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, at)[0]


def test_values_by_hand():
    # Two rows: ratio 2 on both tokens of row 0 (A = 1, clipped to 1.2), ratio 1/2 on the one token of
    # row 1 (A = -2, clipped up to 0.8): l = -1.2, -1.2 | 1.6.
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]], dtype=torch.float64)
    gaps = torch.tensor([[math.log(2), math.log(2)], [-math.log(2), 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    advantages = torch.tensor([1.0, -2.0])

    def value(loss_type: str, **options):
        options["loss_type"] = loss_type
        return grpo_loss(logprobs, logprobs - gaps, advantages, mask, **options)[0].item()

    assert value("dapo") == pytest.approx((-1.2 - 1.2 + 1.6) / 3)
    assert value("bnpo") == pytest.approx((-1.2 - 1.2 + 1.6) / 3)
    assert value("grpo") == pytest.approx((-1.2 + 1.6) / 2)
    assert value("luspo") == pytest.approx((-2.4 + 1.6) / 2)
    assert value("dr_grpo", max_completion_length=10) == pytest.approx((-2.4 + 1.6) / 20)
    assert value("dr_grpo") == pytest.approx((-2.4 + 1.6) / 4)
    # cispo: -min(rho, 1.5) A logp = 1.5, 3 | -min(0.5, 1.5) * -2 * -3 = -3.
    assert value("cispo", epsilon_high=1.5) == pytest.approx((1.5 + 3 - 3) / 3)
    # sapo: row 0: -4 sigmoid(1) = -2.92423; row 1: 2 * 4 sigmoid(-0.525) / 1.05 = 2.83206.
    sigmoid = 1 / (1 + math.exp(0.525))
    assert value("sapo") == pytest.approx((-4 / (1 + math.exp(-1)) + 8 * sigmoid / 1.05) / 2)


def test_metrics_by_hand():
    logprobs = torch.tensor([[-1.0, -2.0, -1.0], [-3.0, 0.0, 0.0]], dtype=torch.float64)
    ratios = torch.tensor([[2.0, 1.0, 1.0], [0.5, 9.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    ref = logprobs + math.log(2)
    _, metrics = grpo_loss(
        logprobs, logprobs - ratios.log(), torch.tensor([1.0, -2.0]), mask, ref_logprobs=ref,
        sampler_logprobs=logprobs - ratios.log() - 0.25, sampler_correction="token_truncate",
    )  # fmt: skip
    k3 = 2 - math.log(2) - 1
    expected = {"clip_ratio/low": 1 / 4, "clip_ratio/high": 1 / 4, "clip_ratio/region": 1 / 2}
    expected |= {
        "kl": k3,
        "mean_kl": 4 * k3 / 2,
        "sampler/logprob_difference": 0.25,
        "sampler/importance_weight": math.exp(0.25),
    }
    assert metrics == pytest.approx(expected)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "options",
    [{}, {"eps": 0.1, "eps_high": 0.28}, {"delta": 1.25}, {"beta": 0.3}, {"beta": 0.3, "bias": False},
     {"beta": 0.3, "estimator": "k1"}, {"beta": 0.3, "estimator": "k2"}],
)  # fmt: skip
def test_value_and_gradient_match_the_formula(loss_type, level, options):
    b = batch()
    b["logprobs"].requires_grad_()
    names = {"eps": "epsilon", "eps_high": "epsilon_high", "delta": "delta", "beta": "beta"}
    names |= {"estimator": "kl_estimator", "bias": "kl_bias_correction"}
    settings = {names[name]: value for name, value in options.items()}
    no_delta = dict.fromkeys(("cispo", "gmpo", "dppo_tv"), ("delta",))
    bounds = {"sapo": ("epsilon_high", "delta"), **no_delta}.get(loss_type, ())
    if unused := [name for name in bounds if name in settings]:
        with pytest.raises(WhetValueError, match=mentions(unused[0], "no effect", loss_type)):
            grpo_loss(**b, loss_type=loss_type, level=level, **settings)
        settings = {name: value for name, value in settings.items() if name not in bounds}
    tensors = {name: value for name, value in b.items() if name != "sampler_logprobs"}
    if loss_type in ("gmpo", "dppo_tv") and level != "token":
        with pytest.raises(WhetValueError, match=mentions("level", level, loss_type)):
            grpo_loss(**tensors, loss_type=loss_type, level=level, **settings)
        return
    loss, _ = grpo_loss(**tensors, loss_type=loss_type, level=level, **settings)
    expected = literal(b, loss_type, level, **options)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    got, wanted = (gradient(x, b["logprobs"]) for x in (loss, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=0)


@pytest.mark.parametrize(("loss_type", "level"), [pair for pair in PAIRS if pair[0] not in ("cispo", "dppo_tv")])
def test_gradcheck(loss_type, level):
    b = batch(seed=3)
    b["logprobs"].requires_grad_()

    def loss(logprobs):
        return grpo_loss(**{**b, "logprobs": logprobs}, loss_type=loss_type, level=level, beta=0.2)[0]

    assert torch.autograd.gradcheck(loss, (b["logprobs"],))


@pytest.mark.parametrize(("loss_type", "level"), PAIRS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_positions_contribute_nothing(loss_type, level, poison):
    clean, poisoned = batch(), batch()
    mask = clean["completion_mask"]
    clean["advantages"] = clean["advantages"][:, None].expand_as(mask)
    for name in ("logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs"):
        poisoned[name] = torch.where(mask, poisoned[name], poison)
    poisoned["advantages"] = torch.where(mask, clean["advantages"], poison)
    results = []
    for b in (clean, poisoned):
        b["logprobs"].requires_grad_()
        loss, metrics = grpo_loss(**b, loss_type=loss_type, level=level, beta=0.1)
        results.append((loss.item(), metrics, gradient(loss, b["logprobs"])))
    assert results[0][:2] == results[1][:2]
    assert torch.equal(results[0][2], results[1][2])
    assert not results[1][2][~mask].any()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("correction", get_args(SamplerCorrection))
def test_micro_batches_add_up_to_the_whole(loss_type, correction):
    b = batch(seed=1)
    settings = {"loss_type": loss_type, "beta": 0.1, "max_completion_length": 9}
    settings |= {"sampler_correction": correction, "sampler_cap": 1.2}
    old, sampler, mask = (b[name].numpy() for name in ("old_logprobs", "sampler_logprobs", "completion_mask"))
    _, kept = importance_weights(old, sampler, mask, correction=correction, cap=1.2)
    b["logprobs"].requires_grad_()
    whole, whole_metrics = grpo_loss(**b, **settings)
    whole_gradient = gradient(whole, b["logprobs"])
    whole_batch = {"n_tokens": kept.sum().item(), "n_rows": count_rows(mask, kept)}
    total, metrics = 0.0, dict.fromkeys(whole_metrics, 0.0)
    for rows in (slice(0, 2), slice(2, 3), slice(3, 5)):
        part, part_metrics = grpo_loss(**{k: v[rows] for k, v in b.items()}, **settings, **whole_batch)
        total = total + part
        metrics = {name: value + part_metrics[name] for name, value in metrics.items()}
    assert total.item() == pytest.approx(whole.item(), rel=1e-12)
    assert metrics == pytest.approx(whole_metrics, rel=1e-12)
    torch.testing.assert_close(gradient(total, b["logprobs"]), whole_gradient, rtol=1e-12, atol=0)


@pytest.mark.parametrize("loss_type", [t for t in LOSS_TYPES if t != "dr_grpo"])
def test_results_do_not_depend_on_padding(loss_type):
    b = batch()
    wide = {name: torch.nn.functional.pad(value, (0, 7)) for name, value in b.items() if value.ndim == 2}
    wide["advantages"] = b["advantages"]
    # torch.sum adds pairwise, in an order that depends on the width.
    loss, metrics = grpo_loss(**wide, loss_type=loss_type)
    expected_loss, expected_metrics = grpo_loss(**b, loss_type=loss_type)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-14)
    assert metrics == pytest.approx(expected_metrics, rel=1e-14)


def test_without_old_logprobs_the_ratio_is_one_with_a_gradient():
    b = batch()
    logprobs = b["logprobs"].requires_grad_()
    explicit = grpo_loss(logprobs, logprobs.detach(), b["advantages"], b["completion_mask"])[0]
    implicit = grpo_loss(logprobs, None, b["advantages"], b["completion_mask"])[0]
    assert implicit.item() == explicit.item()
    expected = -torch.where(b["completion_mask"], b["advantages"][:, None], 0.0) / sum(LENGTHS)
    torch.testing.assert_close(gradient(implicit, logprobs), expected)


def test_bias_corrected_k3_has_the_gradient_of_the_kl():
    # On-policy, d(rho k3)/d logp = logp - ref per sampled token: the score-function gradient of the KL.
    b = batch()
    logprobs = b["logprobs"].requires_grad_()
    loss, _ = grpo_loss(
        logprobs, None, torch.zeros(N_ROWS), b["completion_mask"], ref_logprobs=b["ref_logprobs"], beta=1.0
    )
    expected = torch.where(b["completion_mask"], (logprobs - b["ref_logprobs"]).detach(), 0.0) / sum(LENGTHS)
    torch.testing.assert_close(gradient(loss, logprobs), expected)


def test_importance_weights_by_hand():
    old, sampler = np.log([[2.0, 3.0, 99.0]]), np.zeros((1, 3))
    mask = np.array([[True, True, False]])

    def weigh(correction, cap):
        weights, kept = importance_weights(old, sampler, mask, correction=correction, cap=cap)
        return weights[mask].tolist(), kept[0].tolist()

    assert weigh("token_truncate", 2.5) == (pytest.approx([2.0, 2.5]), [True, True, False])
    assert weigh("token_mask", 2.5) == (pytest.approx([2.0, 0.0]), [True, False, False])
    assert weigh("sequence_truncate", 5.0) == (pytest.approx([5.0, 5.0]), [True, True, False])
    assert weigh("sequence_truncate", 7.0) == (pytest.approx([6.0, 6.0]), [True, True, False])
    assert weigh("sequence_mask", 5.0) == (pytest.approx([0.0, 0.0]), [False, False, False])
    assert weigh("sequence_mask", 7.0) == (pytest.approx([6.0, 6.0]), [True, True, False])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_rejected_tokens_are_excluded_from_numerator_and_denominator(loss_type):
    b = batch()
    b["sampler_logprobs"] = b["old_logprobs"].clone()  # weight 1 ...
    b["sampler_logprobs"][1] -= 1.0  # ... except row 1, whose weight is exp(3)
    without_row = {name: value[[0, 2, 3, 4]] for name, value in b.items() if name != "sampler_logprobs"}
    loss, metrics = grpo_loss(**b, loss_type=loss_type, beta=0.1)
    expected, expected_metrics = grpo_loss(**without_row, loss_type=loss_type, beta=0.1)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert metrics["kl"] == pytest.approx(expected_metrics["kl"], rel=1e-12)
    assert metrics["sampler/importance_weight"] == pytest.approx(1.0)


def test_importance_weights_multiply_the_policy_term_and_not_the_kl():
    b = batch()
    b["sampler_logprobs"] = b["old_logprobs"] - math.log(2)
    zero = torch.zeros(N_ROWS)
    cap = {"sampler_correction": "token_truncate"}
    with_weight = grpo_loss(**b, **cap, beta=0.1)[0]
    kl_only = grpo_loss(**{**b, "advantages": zero}, **cap, beta=0.1)[0]
    policy_only = grpo_loss(**{**b, "sampler_logprobs": None})[0]
    assert with_weight.item() == pytest.approx(2 * policy_only.item() + kl_only.item(), rel=1e-12)


def test_a_batch_without_tokens_is_zero():
    b = batch()
    b["completion_mask"] = torch.zeros_like(b["completion_mask"])
    b["logprobs"].requires_grad_()
    for loss_type in LOSS_TYPES:
        loss, _ = grpo_loss(**b, loss_type=loss_type)
        assert loss.item() == 0 and not gradient(loss, b["logprobs"]).any()
    empty = torch.zeros(2, 0)
    assert grpo_loss(empty, None, torch.ones(2), torch.zeros(2, 0, dtype=torch.bool))[0].item() == 0


def test_float32_agrees_with_float64():
    for loss_type in LOSS_TYPES:
        single = grpo_loss(**batch(dtype=torch.float32), loss_type=loss_type, beta=0.1)[0]
        double = grpo_loss(**batch(), loss_type=loss_type, beta=0.1)[0]
        assert single.dtype == torch.float32
        assert single.item() == pytest.approx(double.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "facts"),
    [
        ({"loss_type": "ppo"}, WhetValueError, ("loss_type", "'ppo'", "grpo", "bnpo")),
        ({"level": "word"}, WhetValueError, ("level", "'word'", "token", "sequence")),
        ({"kl_estimator": "k4"}, WhetValueError, ("kl_estimator", "'k4'")),
        ({"sampler_correction": "clip"}, WhetValueError, ("correction", "'clip'")),
        ({"sampler_cap": 0.0}, WhetValueError, ("cap", "0.0", "> 0")),
        ({"epsilon": -0.1}, WhetValueError, ("epsilon", "-0.1", ">= 0")),
        ({"delta": 0.5}, WhetValueError, ("delta", "0.5", ">= 1")),
        ({"beta": 0.1, "ref_logprobs": None}, WhetValueError, ("ref_logprobs", "None", "beta=0")),
        ({"logprobs": [[0.0]]}, WhetTypeError, ("logprobs", "list", "(B, T)", "floating-point")),
        (
            {"completion_mask": torch.ones(5, 6)},
            WhetTypeError,
            ("completion_mask", "float32", "astype(bool)", ".bool()"),
        ),
        ({"advantages": torch.ones(3)}, WhetValueError, ("advantages", "(3,)")),
        ({"advantages": None}, WhetTypeError, ("advantages", "NoneType", "tensor")),
        ({"completion_mask": None}, WhetTypeError, ("completion_mask", "NoneType", "tensor")),
        ({"old_logprobs": torch.zeros(5, 5)}, WhetValueError, ("old_logprobs", "(5, 5)", "(5, 6)")),
    ],
)
def test_invalid_arguments_are_rejected(change, error, facts):
    with pytest.raises(error, match=mentions(*facts)):
        grpo_loss(**{**batch(), **change})
