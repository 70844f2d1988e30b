"""dpo_loss: by hand, against formulas in float64, gradients, and invalid arguments."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from tests.raising import assert_raises, mentions

from whet.config import SORTED_LOSSES, DPOLossType, FDivergence
from whet.errors import WhetTypeError, WhetValueError
from whet.losses import dpo_loss

LOSS_TYPES = get_args(DPOLossType)
SMOOTHED = {"sigmoid": (0.0, 0.1), "sigmoid_norm": (0.0, 0.1), "robust": (0.0, 0.2), "exo_pair": (1e-3, 0.1)}
SMOOTHED |= {"aot": (0.0, 0.1), "aot_unpaired": (0.0, 0.1)}
CASES = [(name, s) for name in LOSS_TYPES for s in SMOOTHED.get(name, (0.0,))]


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def literal(name, c, r, chosen, n_c, n_r, beta, s, rejected):
    """Reference implementation of the table, with logarithms of sigmoids."""
    d, per_token = c - r, c / n_c - r / n_r
    log = torch.log
    policy, reference = chosen - rejected, (chosen - c) - (rejected - r)
    by_rank = policy.sort().values - reference.detach().sort().values

    def cross_entropy(x):
        return -(1 - s) * log(sigmoid(beta * x)) - s * log(sigmoid(-beta * x))

    return {
        "sigmoid": lambda: cross_entropy(d),
        "sigmoid_norm": lambda: cross_entropy(per_token),
        "robust": lambda: (-(1 - s) * log(sigmoid(beta * d)) + s * log(sigmoid(-beta * d))) / (1 - 2 * s),
        "hinge": lambda: torch.where(beta * d < 1, 1 - beta * d, 0.0),
        "ipo": lambda: (per_token - 1 / (2 * beta)) ** 2,
        "exo_pair": lambda: (
            sigmoid(beta * d) * log(sigmoid(beta * d) / (1 - s)) + sigmoid(-beta * d) * log(sigmoid(-beta * d) / s)
        ),
        "nca_pair": lambda: -log(sigmoid(beta * c)) - log(sigmoid(-beta * c) * sigmoid(-beta * r)) / 2,
        "bco_pair": lambda: -log(sigmoid(beta * c)) - log(sigmoid(-beta * r)),
        "sppo_hard": lambda: (c - 1 / (2 * beta)) ** 2 + (r + 1 / (2 * beta)) ** 2,
        "apo_zero": lambda: 1 - sigmoid(beta * c) + sigmoid(beta * r),
        "apo_down": lambda: sigmoid(beta * c) + 1 - sigmoid(beta * d),
        "aot": lambda: cross_entropy(by_rank),
        "aot_unpaired": lambda: cross_entropy(c.sort().values - r.sort().values),
        "sft": lambda: -chosen * len(chosen) / n_c.sum(),  # its mean over pairs is the sum over the number of tokens
    }[name]()


def score(x, divergence, alpha):
    return {
        "reverse_kl": lambda: x,
        "forward_kl": lambda: 1 - torch.exp(-x),
        "js_divergence": lambda: torch.log(2 * torch.exp(x) / (1 + torch.exp(x))),
        "alpha_divergence": lambda: (torch.exp((alpha - 1) * x) - 1) / (alpha - 1),
    }[divergence]()


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = ("chosen_logprobs", "rejected_logprobs", "ref_chosen_logprobs", "ref_rejected_logprobs")
    tensors = {name: -torch.rand(7, generator=generator, dtype=torch.float64) * 9 for name in names}
    return {**tensors, "chosen_lengths": torch.arange(1, 8), "rejected_lengths": torch.tensor([3] * 7)}


def test_values_by_hand():
    # c = -1 - (-3) = 2, r = -4 - (-3) = -1, d = 3; lengths 2 and 1: per token 1 + 1 = 2. beta = 1/2.
    one = torch.ones(1, dtype=torch.float64)

    def value(name, s=0.0):
        return dpo_loss(
            -one, -4 * one, -3 * one, -3 * one, loss_type=name, beta=0.5, label_smoothing=s,
            chosen_lengths=2 * one, rejected_lengths=one,
        )[0].item()  # fmt: skip

    log_one_plus = [math.log(1 + math.exp(x)) for x in (-1.5, 1.5, -1.0, 1.0, -0.5)]
    assert value("sigmoid") == pytest.approx(log_one_plus[0])
    assert value("sigmoid", 0.1) == pytest.approx(0.9 * log_one_plus[0] + 0.1 * log_one_plus[1])
    assert value("robust", 0.1) == pytest.approx((0.9 * log_one_plus[0] - 0.1 * log_one_plus[1]) / 0.8)
    assert value("hinge") == 0.0  # 1 - 1.5 < 0
    assert value("ipo") == pytest.approx(1.0)  # (2 - 1)^2
    assert value("sigmoid_norm") == pytest.approx(log_one_plus[2])
    assert value("nca_pair") == pytest.approx(log_one_plus[2] + log_one_plus[3] / 2 + log_one_plus[4] / 2)
    assert value("bco_pair") == pytest.approx(log_one_plus[2] + log_one_plus[4])
    assert value("sppo_hard") == pytest.approx(1.0)  # (2 - 1)^2 + (-1 + 1)^2
    assert value("apo_zero") == pytest.approx(1 - 0.7310585786300049 + 0.3775406687981454)
    assert value("apo_down") == pytest.approx(0.7310585786300049 + 1 - 0.8175744761936437)
    assert value("aot") == value("aot_unpaired") == value("sigmoid")  # of one pair
    two = torch.tensor([[-1.0, -6.0], [-4.0, -5.0], [-3.0, -4.0], [-3.0, -2.0]], dtype=torch.float64)
    # Differences 3 and -1, the reference's 0 and -2: sorted -1 - -2 = 1 and 3 - 0 = 3.
    expected = [math.log(1 + math.exp(-x / 2)) for x in (1, 3)]
    assert dpo_loss(*two, loss_type="aot", beta=0.5)[0].item() == pytest.approx(sum(expected) / 2)
    # c = 2 and -2, r = -1 and -3: sorted -2 - -3 = 1 and 2 - -1 = 3.
    assert dpo_loss(*two, loss_type="aot_unpaired", beta=0.5)[0].item() == pytest.approx(sum(expected) / 2)
    assert value("sft") == 0.5  # of two tokens
    q = 0.8175744761936437
    assert value("exo_pair", 0.1) == pytest.approx(q * math.log(q / 0.9) + (1 - q) * math.log((1 - q) / 0.1))


@pytest.mark.parametrize(("name", "smoothing"), CASES)
@pytest.mark.parametrize("beta", [0.1, 1.3])
def test_value_and_gradient_match_the_formula(name, smoothing, beta):
    b = batch()
    chosen, rejected = b["chosen_logprobs"].requires_grad_(), b["rejected_logprobs"].requires_grad_()
    loss, _ = dpo_loss(**b, loss_type=name, beta=beta, label_smoothing=smoothing)
    c, r = chosen - b["ref_chosen_logprobs"], rejected - b["ref_rejected_logprobs"]
    expected = literal(name, c, r, chosen, b["chosen_lengths"], b["rejected_lengths"], beta, smoothing, rejected)
    expected = expected.mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for at in (chosen, rejected):
        options = {"retain_graph": True, "allow_unused": True}
        got, wanted = (torch.autograd.grad(x, at, **options)[0] for x in (loss, expected))
        assert (got is None) == (wanted is None)
        if got is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("divergence", get_args(FDivergence))
@pytest.mark.parametrize("name", ["sigmoid", "ipo", "hinge"])
def test_divergences_match_the_formula(name, divergence):
    b, alpha = batch(), 0.3
    at = chosen, rejected = b["chosen_logprobs"].requires_grad_(), b["rejected_logprobs"].requires_grad_()
    options = {"f_alpha_divergence_coef": alpha} if divergence == "alpha_divergence" else {}
    loss, _ = dpo_loss(**b, loss_type=name, f_divergence_type=divergence, beta=0.2, **options)
    pairs = zip(at, ("chosen", "rejected"), strict=True)
    c, r = (score(x - b[f"ref_{side}_logprobs"], divergence, alpha) for x, side in pairs)
    expected = literal(name, c, r, chosen, b["chosen_lengths"], b["rejected_lengths"], 0.2, 0.0, rejected).mean()
    for got, wanted in zip(*(torch.autograd.grad(x, at) for x in (loss, expected)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-14)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


def test_several_losses_add_up_with_their_factors():
    b, factors = batch(), {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.5, "aot": 0.3}
    at = b["chosen_logprobs"].requires_grad_(), b["rejected_logprobs"].requires_grad_()
    whole = dpo_loss(**b, loss_type=factors)[0]
    summed = sum(factor * dpo_loss(**b, loss_type=name)[0] for name, factor in factors.items())
    assert whole.item() == pytest.approx(summed.item(), rel=1e-12)
    for got, wanted in zip(*(torch.autograd.grad(x, at) for x in (whole, summed)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("name", "smoothing"), CASES)
def test_gradcheck(name, smoothing):
    b = batch()
    inputs = (b.pop("chosen_logprobs").requires_grad_(), b.pop("rejected_logprobs").requires_grad_())
    assert torch.autograd.gradcheck(
        lambda c, r: dpo_loss(c, r, **b, loss_type=name, beta=0.3, label_smoothing=smoothing)[0], inputs
    )


@pytest.mark.parametrize(("name", "smoothing"), [case for case in CASES if case[0] not in SORTED_LOSSES])
def test_micro_batches_add_up_to_the_whole(name, smoothing):
    b, options = batch(), {"loss_type": name, "label_smoothing": smoothing}
    whole, whole_metrics = dpo_loss(**b, **options)
    slices = [{name: values[i : i + 2] for name, values in b.items()} for i in range(0, 7, 2)]
    parts = [dpo_loss(**part, **options, n_pairs=7, n_tokens=28) for part in slices]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item(), rel=1e-12)
    summed = {name: sum(metrics[name] for _, metrics in parts) for name in whole_metrics}
    assert summed == pytest.approx(whole_metrics, rel=1e-12)


def test_sft_averages_over_the_chosen_tokens_of_the_batch():
    chosen, rest = torch.tensor([-3.0, -1.0]), torch.tensor([-9.0, -9.0])
    by_lengths, _ = dpo_loss(chosen, rest, None, None, loss_type="sft", chosen_lengths=torch.tensor([6, 2]))
    assert by_lengths.item() == 0.5  # (3 + 1) / 8; the mean over pairs of means would be (1/2 + 1/2) / 2
    assert dpo_loss(chosen, rest, None, None, loss_type="sft", n_tokens=16)[0].item() == 0.25
    nothing = dpo_loss(torch.zeros(1), rest[:1], None, None, loss_type="sft", chosen_lengths=torch.tensor([0]))
    assert nothing[0].item() == 0.0
    with pytest.raises(WhetValueError, match=mentions("dpo_loss", "'sft'", "chosen_lengths", "n_tokens")):
        dpo_loss(chosen, rest, None, None, loss_type="sft")


@pytest.mark.parametrize("count", [-1, math.nan, "3", [3]])
def test_invalid_counts_are_rejected(count):
    x = torch.tensor([-3.0, -1.0])
    with pytest.raises(WhetValueError, match=mentions("dpo_loss", "n_pairs", ">= 0")):
        dpo_loss(x, x, None, None, n_pairs=count)
    with pytest.raises(WhetValueError, match=mentions("dpo_loss", "n_tokens", ">= 0")):
        dpo_loss(x, x, None, None, loss_type="sft", n_tokens=count)


def test_metrics_by_hand():
    _, metrics = dpo_loss(
        torch.tensor([-1.0, -4.0]), torch.tensor([-4.0, -1.0]), torch.tensor([-3.0, -3.0]),
        torch.tensor([-3.0, -3.0]), beta=0.5,
    )  # fmt: skip
    # c = 2, -1; r = -1, 2; d = 3, -3.
    expected = {"rewards/chosen": 0.25, "rewards/rejected": 0.25, "rewards/margins": 0.0}
    expected |= {"rewards/accuracies": 0.5, "logps/chosen": -2.5, "logps/rejected": -2.5}
    assert metrics == pytest.approx(expected)


def test_reference_free_equals_a_uniform_reference():
    b = batch()
    constant = torch.full((7,), -5.0, dtype=torch.float64)
    free = dpo_loss(b["chosen_logprobs"], b["rejected_logprobs"], None, None)[0]
    indifferent = dpo_loss(b["chosen_logprobs"], b["rejected_logprobs"], constant, constant)[0]
    assert free.item() == pytest.approx(indifferent.item(), rel=1e-12)


def test_no_gradient_reaches_the_reference():
    b = batch()
    b["ref_chosen_logprobs"].requires_grad_()
    assert not dpo_loss(**b)[0].requires_grad


def test_large_margins_stay_finite():
    far = torch.tensor([1e4, -1e4], requires_grad=True)
    zero = torch.zeros(2)
    for name, smoothing in CASES:
        loss, _ = dpo_loss(
            far, zero, zero, zero, loss_type=name, label_smoothing=smoothing, chosen_lengths=zero + 1,
            rejected_lengths=zero + 1,
        )  # fmt: skip
        assert loss.isfinite()
        assert torch.autograd.grad(loss, far)[0].isfinite().all()


@pytest.mark.parametrize(
    ("change", "error", "facts"),
    [
        ({"loss_type": "kto"}, WhetValueError, ("loss_type", "'kto'", "sigmoid", "robust")),
        ({"beta": 0.0}, WhetValueError, ("beta", "0.0", "> 0")),
        ({"label_smoothing": 0.5}, WhetValueError, ("label_smoothing", "0.5", "[0, 0.5)")),
        ({"label_smoothing": 0.1, "loss_type": "hinge"}, WhetValueError, ("label_smoothing", "'hinge'", "Pass 0")),
        ({"loss_type": "aot", "n_pairs": 9}, WhetValueError, ("7", "n_pairs=9", "whole batch")),
        ({"loss_type": "sft", "weights": torch.ones(7)}, WhetValueError, ("sft", "weights")),
        ({"loss_type": {"sigmoid": 1.0, "kto": 1.0}}, WhetValueError, ("loss_type", "'kto'")),
        ({"loss_type": "bco_pair", "f_divergence_type": "forward_kl"}, WhetValueError, ("'bco_pair'", "'forward_kl'")),
        ({"f_divergence_type": "kl"}, WhetValueError, ("f_divergence_type", "'kl'", "js_divergence")),
        ({"f_alpha_divergence_coef": 1.0}, WhetValueError, ("f_alpha_divergence_coef", "1.0", "reverse_kl")),
        ({"loss_type": "exo_pair"}, WhetValueError, ("'exo_pair'", "label_smoothing > 0")),
        ({"loss_type": "ipo", "chosen_lengths": None}, WhetValueError, ("'ipo'", "chosen_lengths", "rejected_lengths")),
        ({"ref_rejected_logprobs": None}, WhetValueError, ("ref_*_logprobs", "None")),
        ({"rejected_logprobs": torch.zeros(3)}, WhetValueError, ("rejected_logprobs", "(3,)")),
        ({"chosen_logprobs": torch.zeros(7, 2)}, WhetTypeError, ("chosen_logprobs", "(B,)", "floating-point")),
        ({"rejected_logprobs": 1.0}, WhetTypeError, ("rejected_logprobs", "float", "tensor")),
    ],
)
def test_invalid_arguments_are_rejected(change, error, facts):
    assert_raises(error, facts, dpo_loss, **{**batch(), **change})


def test_an_empty_batch_is_rejected():
    empty = torch.zeros(0)
    assert_raises(WhetValueError, ("chosen_logprobs", "empty"), dpo_loss, empty, empty, empty, empty)
