"""Operations of an RL step in TRL 1.16, rlox and Whet: advantages, k3, token log-probs, packing, GAE.

All rows of rlox's "rlox vs TRL-style Operations" and of its guide's table, in float32 and float64, and operations that
they omit. Log-probs and packing are functions of TRL. Its advantages and KL are inline in GRPOTrainer, and written out
here from their formulas; TRL 1.16 has no PPO and no GAE. No model runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

import whet
from benchmarks.contenders.packing import packing_table
from benchmarks.suites.llm_ops import (
    RLOX_GROUPS,
    RLOX_GROUPS_LOOP,
    TOLERANCE,
    WHET_GROUPS,
    Groups,
    Logprobs,
    exact_advantages,
    flat_error,
    group_case,
    group_table,
    kl_case,
    kl_table,
    numpy_groups,
    rlox_batch,
)
from whet.bench.case import BenchOptions, Call, Case, Provider, Suite, Table
from whet.bench.prepare import ITEM_BYTES, in_loop, normal, on_arrays, on_tensors, resolve, tensor
from whet.ops.advantages import naive_gae
from whet.ops.divergence import naive_token_kl_schulman
from whet.ops.logprobs import naive_token_logprobs

F32_SUM_TOLERANCE = 2e-5
"""Tolerance of sums of thousands of terms in float32."""

Float = Literal["float32", "float64"]


def published(dtype: Float, medians: Mapping[str, float]) -> dict[str, float]:
    """Return the medians of rlox's page in this dtype: TRL in float32, all others in float64."""
    return {name: median_s for name, median_s in medians.items() if (name == "TRL") == (dtype == "float32")}


# --- group advantages -----------------------------------------------------------------------------------

AS_TRL: dict[str, Any] = {"ddof": 1, "eps": 1e-4}
trl_definition = partial(exact_advantages, **AS_TRL)
"""(r - mean) / (sample deviation of the group + 1e-4)."""


def trl_form(rewards: Any, size: int, mean: Callable[..., Any], std: Callable[..., Any]) -> Any:
    grouped = rewards.view(-1, size)
    means = mean(grouped, dim=1).repeat_interleave(size)
    return (rewards - means) / (std(grouped, dim=1).repeat_interleave(size) + 1e-4)


def trl_groups(mean: str, std: str) -> Callable[[Groups], Call]:
    return lambda groups: partial(trl_form, *map(tensor, groups), resolve(mean), resolve(std))


PUBLISHED_GROUPS = {
    (16, 4): {"rlox": 0.5e-6, "rlox (loop)": 2.0e-6, "TRL": 6.5e-6, "NumPy": 5.9e-6},
    (64, 8): {"rlox": 1.6e-6, "rlox (loop)": 8.0e-6, "TRL": 11.6e-6, "NumPy": 8.1e-6},
    (256, 16): {"rlox": 6.6e-6, "rlox (loop)": 36.6e-6, "TRL": 44.3e-6, "NumPy": 15.9e-6},
    (1024, 32): {"rlox": 53.5e-6, "rlox (loop)": 153.4e-6, "TRL": 212.5e-6, "NumPy": 67.9e-6},
}
GUIDE_GROUPS = {
    (16, 4): "rlox's guide gives 1.3 µs for rlox and 34.1 µs for TRL.",
    (1024, 32): "rlox's guide gives 115 µs for rlox and 243 µs for TRL.",
}


def groups_table(dtype: Float) -> Table:
    def case(shape: tuple[int, int]) -> Case:
        note = GUIDE_GROUPS.get(shape, "") if dtype == "float64" else ""
        times = published(dtype, PUBLISHED_GROUPS[shape])
        return group_case(*shape, times, dtype, thread_scaling=shape == (1024, 32), note=note)

    form, nan_form = trl_groups("torch:mean", "torch:std"), trl_groups("torch:nanmean", "trl.trainer.utils:nanstd")
    trl = Provider("TRL", form, trl_definition, note="the formula in torch, as on rlox's benchmark page")
    trl_now = Provider("TRL 1.16", nan_form, trl_definition, note="with nanmean and TRL's nanstd, as in 1.16")
    peers = {
        "float64": [Provider("rlox", RLOX_GROUPS), Provider("rlox (loop)", RLOX_GROUPS_LOOP), trl],
        "float32": [trl, trl_now],  # nanstd computes its correction in float32 for any dtype
    }
    compute = whet.compute_batch_group_advantages
    as_trl = on_arrays(compute, **AS_TRL)
    return group_table(
        f"Group advantages, {dtype}",
        [case(shape) for shape in PUBLISHED_GROUPS],
        [
            Provider("whet", WHET_GROUPS),
            Provider("whet (as TRL)", as_trl, trl_definition, note="ddof=1, eps=1e-4: TRL's definition"),
            Provider("whet torch", on_tensors(compute), note="torch tensors as input and output"),
            *peers[dtype],
            Provider("NumPy", numpy_groups),
        ],
        note="TRL divides by the sample deviation + 1e-4, the others by the population deviation; each is compared "
        "with its own definition. rlox's page runs rlox in float64 and TRL in float32; rlox has no float32 form.",
    )


# --- token KL, k3 ---------------------------------------------------------------------------------------


def k3(logprobs: Logprobs) -> np.ndarray:
    """Compute sum exp(q - p) - (q - p) - 1 per sequence, (B,), in extended precision."""
    return naive_token_kl_schulman(*(x.astype(np.longdouble) for x in logprobs))


def whet_k3_torch(logprobs: Logprobs) -> Call:
    return partial(whet.compute_batch_token_kl_schulman, *(tensor(np.atleast_2d(x)) for x in logprobs))


def trl_k3(p: Any, q: Any) -> Any:
    return ((q - p).exp() - (q - p) - 1).sum(-1)


def numpy_k3(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    r = q - p
    return (np.exp(r) - r - 1).sum(-1)


PUBLISHED_K3 = {
    (1, 128): {"rlox": 0.5e-6, "TRL": 2.5e-6, "NumPy": 1.2e-6},
    (1, 512): {"rlox": 1.1e-6, "TRL": 3.0e-6, "NumPy": 2.2e-6},
    (1, 2048): {"rlox": 4.0e-6, "TRL": 4.0e-6, "NumPy": 6.0e-6},
    (1, 8192): {"rlox": 17.0e-6, "TRL": 46.1e-6, "NumPy": 26.1e-6},
    (32, 128): {"rlox (loop)": 12.4e-6, "TRL": 41.6e-6, "NumPy": 11.1e-6},
    (32, 512): {"rlox (loop)": 39.2e-6, "TRL": 52.3e-6, "NumPy": 49.2e-6},
    (32, 2048): {"rlox (loop)": 247.4e-6, "TRL": 156.7e-6, "NumPy": 284.8e-6},
}
GUIDE_K3 = {
    (1, 128): "rlox's guide gives 0.3 µs for rlox and 3.1 µs for TRL.",
    (32, 2048): "rlox's guide gives 72 µs for rlox and 194 µs for TRL.",
}


def k3_providers(dtype: Float, batch: int) -> list[Provider]:
    """Create the providers; rlox takes r = policy - ref, so its arguments are swapped."""
    rough, suffix = (F32_SUM_TOLERANCE, "_f32") if dtype == "float32" else (None, "")
    single = f"rlox:compute_token_kl_schulman{suffix}"
    if batch == 1:
        compute, peers = whet.compute_token_kl_schulman, {"rlox": lambda x: on_arrays(single)(x[::-1])}
    else:
        compute = whet.compute_batch_token_kl_schulman
        batched = f"rlox:compute_batch_token_kl_schulman{suffix}"
        peers = {"rlox": rlox_batch(batched, swap=True), "rlox (loop)": lambda x: in_loop(single)(Logprobs(*x[::-1]))}
    swapped = "with swapped arguments, since it takes r = policy - ref"
    return [
        Provider("whet", on_arrays(compute)),
        Provider("whet torch", whet_k3_torch, note="torch tensors as input and output"),
        *(Provider(name, peer, None, rough, swapped if name == "rlox" else "") for name, peer in peers.items()),
        Provider("TRL", on_tensors(trl_k3), note="the formula in torch"),
        Provider("NumPy", on_arrays(numpy_k3)),
    ]


def k3_table(dtype: Float, batch: int) -> Table:
    def case(shape: tuple[int, int]) -> Case:
        note = GUIDE_K3.get(shape, "") if dtype == "float32" else ""
        times = published(dtype, PUBLISHED_K3[shape])
        is_longest = shape in ((1, 8192), (32, 2048))
        return kl_case(*shape, dtype, k3, thread_scaling=is_longest, published=times, note=note)

    return kl_table(
        f"Token KL (Schulman), {'one sequence' if batch == 1 else f'{batch} sequences'}, {dtype}",
        [case(shape) for shape in PUBLISHED_K3 if shape[0] == batch],
        k3_providers(dtype, batch),
        note="rlox's page runs rlox in float64, once per sequence, and TRL in float32; its guide both in float32.",
    )


# --- token log-probabilities ----------------------------------------------------------------------------


class Logits(NamedTuple):
    """Logits (N, V) that the dtype represents exactly, and token ids (N,)."""

    logits: np.ndarray
    ids: np.ndarray


def exact_logprobs(x: Logits, entropy: bool) -> np.ndarray:
    """Compute log-probs (N,), or log-probs and entropies (2, N), in float64, row by row."""
    rows = [naive_token_logprobs(x.logits[i : i + 1].astype(np.float64), x.ids[i : i + 1]) for i in range(len(x.ids))]
    both = np.stack([np.concatenate(part) for part in zip(*rows, strict=True)])
    return both if entropy else both[0]


def trl_logprobs(entropy: bool, dtype: str) -> Callable[[Logits], Call]:
    def prepare(x: Logits) -> Call:
        from trl.trainer.utils import entropy_from_logits, selective_log_softmax

        logits, ids = (t.view(8, -1, *t.shape[1:]) for t in (tensor(x.logits, dtype), tensor(x.ids)))
        if not entropy:
            return lambda: selective_log_softmax(logits, ids).float()
        return lambda: (selective_log_softmax(logits, ids).float(), entropy_from_logits(logits).float())

    return prepare


def torch_logprobs(logits: Any, ids: Any, return_entropy: bool) -> Any:
    import torch

    every = logits.log_softmax(-1, dtype=torch.float32)
    picked = every.gather(1, ids[:, None])[:, 0]
    return (picked, -(every.exp() * every).sum(-1)) if return_entropy else picked


VOCABULARIES = (32_000, 49_152, 128_256, 151_936)


def logprobs_table(dtype: Literal["float32", "bfloat16"], entropy: bool, quick: bool) -> Table:
    n_rows = 16 if quick else 256

    def case(vocab_size: int) -> Case:
        def inputs(rng: np.random.Generator) -> Logits:
            return Logits(2 * normal(rng, (n_rows, vocab_size), dtype), rng.integers(vocab_size, size=n_rows))

        return Case(
            f"{n_rows} x {vocab_size:,}",
            inputs,
            partial(exact_logprobs, entropy=entropy),
            TOLERANCE["float32"],
            n_bytes=n_rows * (vocab_size * ITEM_BYTES[dtype] + 8 + (8 if entropy else 4)),
            n_items=n_rows,
            size=vocab_size,
            thread_scaling=vocab_size == VOCABULARIES[-1],
        )

    # In bfloat16 the rounding error of a log-prob near -12, and of an entropy, is up to 2^-5.
    half = dtype == "bfloat16"
    rough = F32_SUM_TOLERANCE if entropy else None
    trl_rough = (2**-5 if entropy else 2**-7) if half else rough
    trl_note = "computes and returns bfloat16, 8 bits" if half else ""
    with_entropy: dict[str, Any] = {"dtype": dtype, "return_entropy": entropy}
    in_float32 = on_tensors(torch_logprobs, **with_entropy)
    return Table(
        f"Token log-probs{' and entropy' if entropy else ''}, {dtype}",
        [case(vocab_size) for vocab_size in VOCABULARIES],
        [
            Provider("whet", on_tensors(whet.compute_token_logprobs, **with_entropy)),
            Provider("TRL", trl_logprobs(entropy, dtype), None, trl_rough, trl_note),
            Provider("torch", in_float32, None, rough, "log_softmax in float32, and gather"),
        ],
        allocation="inside: results and temporaries; outside: the logits",
        note="TRL: selective_log_softmax and entropy_from_logits on a batch of 8 completions.",
        item="tokens",
        size_label="vocabulary",
        peak_memory=True,
        error=flat_error,
    )


# --- GAE ------------------------------------------------------------------------------------------------

GAMMA, LAM = 0.99, 0.95


class Trajectories(NamedTuple):
    """Rewards, values and dones (bool), (B, T) each, and the value after the last step, (B,)."""

    rewards: np.ndarray
    values: np.ndarray
    dones: np.ndarray
    last_values: np.ndarray


def random_trajectories(rng: np.random.Generator, batch: int, steps: int) -> Trajectories:
    """Draw normal rewards and values; one step in a hundred ends an episode."""
    rewards, values = rng.normal(size=(2, batch, steps))
    return Trajectories(rewards, values, rng.random((batch, steps)) < 0.01, rng.normal(size=batch))


def gae(x: Trajectories) -> np.ndarray:
    """Compute advantages and returns, (2, B, T), in extended precision."""
    rewards, values = x.rewards.astype(np.longdouble), x.values.astype(np.longdouble)
    rows = zip(rewards, values, x.dones, x.last_values, strict=True)
    return np.stack([naive_gae(*row, GAMMA, LAM) for row in rows], axis=1)


def rlox_gae(x: Trajectories) -> Call:
    rewards, values, dones = x.rewards.ravel(), x.values.ravel(), x.dones.astype(np.float64).ravel()
    batch, steps = x.rewards.shape
    if batch == 1:
        return partial(resolve("rlox:compute_gae"), rewards, values, dones, float(x.last_values[0]), GAMMA, LAM)
    return partial(resolve("rlox:compute_gae_batched"), rewards, values, dones, x.last_values, steps, GAMMA, LAM)


def loop_over_time(rewards: Any, values: Any, alive: Any, last_values: Any) -> list[Any]:
    """Compute advantages, last step first, of (T, B) arrays or tensors, or of T numbers."""
    advantages, advantage, next_values = [], 0.0, last_values
    for t in range(len(rewards) - 1, -1, -1):
        delta = rewards[t] + GAMMA * alive[t] * next_values - values[t]
        advantage = delta + GAMMA * LAM * alive[t] * advantage
        advantages.append(advantage)
        next_values = values[t]
    return advantages


def numpy_gae(x: Trajectories) -> Call:
    rewards, values, alive, last_values = x.rewards, x.values, 1.0 - x.dones, x.last_values

    def single() -> tuple[np.ndarray, np.ndarray]:
        floats = loop_over_time(rewards[0].tolist(), values[0].tolist(), alive[0].tolist(), float(last_values[0]))
        advantages = np.array(floats[::-1])
        return advantages, advantages + values[0]

    def batch() -> tuple[np.ndarray, np.ndarray]:
        advantages = np.stack(loop_over_time(rewards.T, values.T, alive.T, last_values)[::-1], axis=1)
        return advantages, advantages + values

    return single if len(rewards) == 1 else batch


def torch_gae(x: Trajectories) -> Call:
    import torch

    rewards, values, alive, last_values = map(tensor, (x.rewards, x.values, 1.0 - x.dones, x.last_values))

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        advantages = torch.stack(loop_over_time(rewards.T, values.T, alive.T, last_values)[::-1], dim=1)
        return advantages, advantages + values

    return call


def gae_table(quick: bool) -> Table:
    def case(batch: int, steps: int = 2048) -> Case:
        return Case(
            f"{batch} x {steps}",
            inputs=lambda rng: random_trajectories(rng, batch, steps),
            reference=gae,
            tolerance=TOLERANCE["float64"],
            n_bytes=batch * (steps * (5 * 8 + 1) + 8),
            n_items=batch * steps,
            size=batch,
            thread_scaling=batch == 64,
        )

    return Table(
        "GAE, float64",
        [case(batch) for batch in ((1, 4) if quick else (1, 8, 64))],
        [
            Provider("whet", on_arrays(whet.compute_gae, gamma=GAMMA, lam=LAM)),
            Provider("rlox", rlox_gae),
            Provider("NumPy", numpy_gae, note="one trajectory: a loop over Python floats, which is faster"),
            Provider("torch", torch_gae),
        ],
        allocation="inside: results are new arrays",
        note="NumPy and torch loop backwards over time for all trajectories at once, as PPO of earlier TRL versions.",
        item="steps",
        size_label="trajectories",
        error=flat_error,
    )


# --- the suite ------------------------------------------------------------------------------------------


def tables(options: BenchOptions) -> list[Table]:
    quick = options.quick
    return [
        groups_table("float64"),
        groups_table("float32"),
        *(k3_table(dtype, batch) for batch in (1, 32) for dtype in ("float64", "float32")),
        *(logprobs_table(dtype, entropy, quick) for entropy in (False, True) for dtype in ("float32", "bfloat16")),
        packing_table(quick),
        gae_table(quick),
    ]


SUITE = Suite(
    name="trl",
    title="Operations of an RL step, and TRL",
    summary="The mathematics of an RL step: Whet, TRL 1.16, rlox and plain array code on the same inputs.",
    tables=tables,
)
