"""The rows of rlox's "LLM Post-Training Operations" benchmark: group advantages, and the exact token KL.

In the form of rlox's benchmark page, which calls once per group or sequence, and in one call for all of them. All
providers work in float64 on the same values. The page's medians are given beside the rows; its machine is another one,
and not named. Speed in float32, k3, and what a training step needs beyond these two are in the suite "trl".
"""

# The peers are an extra; where one is not installed it is not measured.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import whet
from whet.bench.case import BenchOptions, Call, Case, Provider, Suite, Table, relative_error
from whet.ops.advantages import naive_group_advantages
from whet.ops.divergence import naive_token_kl

F64_TOLERANCE = 1e-12
"""Of a float64 answer: some thousand roundings, for sums added up one by one."""


def flat_error(answer: Any, reference: Any) -> float:
    """``relative_error``, whether the answer is one array, or a list of one per group or sequence."""
    return relative_error(np.asarray(answer, np.float64).ravel(), np.ravel(reference))


def cold(case: Case) -> Case:
    """The same work on inputs that are in no cache."""
    return replace(case, name=f"{case.name}, cold", cache="cold", size=None, thread_scaling=False, published={})


# --- group advantages -----------------------------------------------------------------------------------


class Groups(NamedTuple):
    """Rewards of every group one after the other, (n_prompts * G,), and G."""

    rewards: np.ndarray
    group_size: int

    def rows(self) -> list[np.ndarray]:
        """One array (G,) per group, as the loops take them."""
        return list(self.rewards.reshape(-1, self.group_size).copy())


def random_groups(rng: np.random.Generator, n_prompts: int, group_size: int) -> Groups:
    """Normal rewards that float32 represents exactly, so that every dtype gets the same values."""
    rewards = rng.standard_normal(n_prompts * group_size, np.float32).astype(np.float64)
    return Groups(rewards, group_size)


def population(groups: Groups) -> np.ndarray:
    """(r - mean) / population deviation of the group, (n_prompts, G), in extended precision."""
    return naive_group_advantages(groups.rewards.astype(np.longdouble).reshape(-1, groups.group_size))


def sample(groups: Groups) -> np.ndarray:
    """(r - mean) / sample deviation of the group, (n_prompts, G), in extended precision."""
    wide = groups.rewards.astype(np.longdouble).reshape(-1, groups.group_size)
    return naive_group_advantages(wide, ddof=1, eps=0.0)


def whet_groups(groups: Groups) -> Call:
    return lambda: whet.compute_batch_group_advantages(groups.rewards, groups.group_size)


def whet_groups_loop(groups: Groups) -> Call:
    rows = groups.rows()
    return lambda: [whet.compute_group_advantages(row) for row in rows]


def rlox_groups(groups: Groups) -> Call:
    import rlox

    return lambda: rlox.compute_batch_group_advantages(groups.rewards, groups.group_size)


def rlox_groups_loop(groups: Groups) -> Call:
    import rlox

    rows = groups.rows()
    return lambda: [rlox.compute_group_advantages(row) for row in rows]


def numpy_groups(groups: Groups) -> Call:
    def call() -> np.ndarray:
        grouped = groups.rewards.reshape(-1, groups.group_size)
        return (grouped - grouped.mean(1, keepdims=True)) / grouped.std(1, keepdims=True)

    return call


def numpy_groups_loop(groups: Groups) -> Call:
    rows = groups.rows()
    return lambda: [(row - row.mean()) / row.std() for row in rows]


def torch_groups(groups: Groups) -> Call:
    import torch

    grouped = torch.from_numpy(groups.rewards).view(-1, groups.group_size)
    return lambda: (grouped - grouped.mean(1, keepdim=True)) / grouped.std(1, keepdim=True)


def torch_groups_loop(groups: Groups) -> Call:
    import torch

    rows = [torch.from_numpy(row) for row in groups.rows()]
    return lambda: [(row - row.mean()) / row.std() for row in rows]


def group_case(n_prompts: int, group_size: int, published: Mapping[str, float], itemsize: int = 8) -> Case:
    """Advantages of ``n_prompts`` groups; ``itemsize`` is that of a reward."""
    n = n_prompts * group_size
    return Case(
        f"{n_prompts} x {group_size}",
        inputs=lambda rng: random_groups(rng, n_prompts, group_size),
        reference=population,
        tolerance=F64_TOLERANCE,
        n_bytes=2 * itemsize * n,
        n_items=n,
        size=n,
        published=published,
    )


GROUP_SHAPES = ((16, 4), (64, 8), (256, 16))
PUBLISHED_GROUPS = {
    (16, 4): {"rlox": 2.2e-6, "NumPy": 79.0e-6, "torch": 76.2e-6},
    (64, 8): {"rlox": 8.6e-6, "NumPy": 309.9e-6, "torch": 320.3e-6},
    (256, 16): {"rlox": 36.1e-6, "NumPy": 1243.3e-6, "torch": 1261.6e-6},
}
SAMPLE_DEVIATION = "torch's std() is the sample deviation, and its answers are compared with that definition."


def group_table(form: str, providers: Sequence[Provider], published: Mapping[Any, Any], note: str) -> Table:
    cases = [group_case(*shape, published.get(shape, {})) for shape in GROUP_SHAPES]
    cases[-1] = replace(cases[-1], thread_scaling=True)
    return Table(
        f"Group advantages, {form}",
        [*cases, cold(cases[-1])],
        providers,
        allocation="inside: results are new arrays",
        note=f"{note} {SAMPLE_DEVIATION}",
        item="completions",
        size_label="completions",
        error=flat_error,
    )


# --- token KL -------------------------------------------------------------------------------------------


class Logprobs(NamedTuple):
    """Log-probs of the policy and of the reference, (B, T) each."""

    policy: np.ndarray
    ref: np.ndarray


def random_logprobs(rng: np.random.Generator, batch: int, length: int) -> Logprobs:
    """p = -Exp(1), q = p + N(0, 1/4), rounded so that float32 represents both exactly."""
    policy = -rng.standard_exponential((batch, length), np.float32)
    ref = policy + rng.standard_normal((batch, length), np.float32) / 2
    return Logprobs(policy.astype(np.float64), ref.astype(np.float64))


def exact_kl(logprobs: Logprobs) -> np.ndarray:
    """sum exp(p) (p - q) of every sequence, (B,), in extended precision."""
    return naive_token_kl(logprobs.policy.astype(np.longdouble), logprobs.ref.astype(np.longdouble))


def whet_kl(logprobs: Logprobs) -> Call:
    return lambda: whet.compute_batch_token_kl(logprobs.policy, logprobs.ref)


def whet_kl_loop(logprobs: Logprobs) -> Call:
    pairs = list(zip(*logprobs, strict=True))
    return lambda: [whet.compute_token_kl(p, q) for p, q in pairs]


def rlox_kl(logprobs: Logprobs) -> Call:
    import rlox

    (p, q), length = (x.ravel() for x in logprobs), logprobs.policy.shape[1]
    return lambda: rlox.compute_batch_token_kl(p, q, length)


def rlox_kl_loop(logprobs: Logprobs) -> Call:
    import rlox

    pairs = list(zip(*logprobs, strict=True))
    return lambda: [rlox.compute_token_kl(p, q) for p, q in pairs]


def numpy_kl(logprobs: Logprobs) -> Call:
    p, q = logprobs
    return lambda: np.sum(np.exp(p) * (p - q), axis=-1)


def torch_kl(logprobs: Logprobs) -> Call:
    import torch

    p, q = map(torch.from_numpy, logprobs)
    return lambda: torch.sum(torch.exp(p) * (p - q), dim=-1)


def whet_kl_single(logprobs: Logprobs) -> Call:
    (p,), (q,) = logprobs
    return lambda: whet.compute_token_kl(p, q)


def rlox_kl_single(logprobs: Logprobs) -> Call:
    import rlox

    (p,), (q,) = logprobs
    return lambda: rlox.compute_token_kl(p, q)


def numpy_kl_single(logprobs: Logprobs) -> Call:
    (p,), (q,) = logprobs
    return lambda: np.sum(np.exp(p) * (p - q))


def torch_kl_single(logprobs: Logprobs) -> Call:
    import torch

    (p,), (q,) = map(torch.from_numpy, logprobs)
    return lambda: torch.sum(torch.exp(p) * (p - q)).item()


LENGTHS = (128, 512, 2048, 8192)
PUBLISHED_KL = {
    128: {"rlox": 0.4e-6, "NumPy": 1.8e-6, "torch": 2.0e-6},
    512: {"rlox": 1.2e-6, "NumPy": 2.8e-6, "torch": 3.2e-6},
    2048: {"rlox": 3.9e-6, "NumPy": 6.6e-6, "torch": 5.8e-6},
    8192: {"rlox": 17.0e-6, "NumPy": 26.8e-6, "torch": 50.3e-6},
}


def kl_table(title: str, batch: int, providers: Sequence[Provider], published: Mapping[int, Any], note: str) -> Table:
    def case(length: int) -> Case:
        return Case(
            f"{batch} x {length}",
            inputs=lambda rng: random_logprobs(rng, batch, length),
            reference=exact_kl,
            tolerance=F64_TOLERANCE,
            n_bytes=8 * batch * (2 * length + 1),
            n_items=batch * length,
            size=length,
            thread_scaling=length == LENGTHS[-1],
            published=published.get(length, {}),
        )

    cases = [case(length) for length in LENGTHS]
    return Table(
        title,
        [*cases, cold(cases[-1])],
        providers,
        allocation="inside: results, and temporaries where a provider makes them",
        note=note,
        item="tokens",
        size_label="tokens per sequence",
        error=flat_error,
    )


# --- the suite ------------------------------------------------------------------------------------------


def tables(options: BenchOptions) -> list[Table]:
    """All four; none is slow enough to be left out of a quick run."""
    loop = [
        Provider("whet", whet_groups_loop),
        Provider("rlox", rlox_groups_loop),
        Provider("NumPy", numpy_groups_loop),
        Provider("torch", torch_groups_loop, reference=sample),
    ]
    batch = [
        Provider("whet", whet_groups),
        Provider("rlox", rlox_groups),
        Provider("NumPy", numpy_groups),
        Provider("torch", torch_groups, reference=sample),
    ]
    single_kl = [
        Provider("whet", whet_kl_single),
        Provider("rlox", rlox_kl_single),
        Provider("NumPy", numpy_kl_single),
        Provider("torch", torch_kl_single),
    ]
    batch_kl = [
        Provider("whet", whet_kl),
        Provider("whet (loop)", whet_kl_loop),
        Provider("rlox", rlox_kl),
        Provider("rlox (loop)", rlox_kl_loop),
        Provider("NumPy", numpy_kl),
        Provider("torch", torch_kl),
    ]
    return [
        group_table(
            "one call per group",
            loop,
            PUBLISHED_GROUPS,
            "The form of rlox's page: a Python loop over groups.",
        ),
        group_table("one call", batch, {}, "All groups at once, which rlox's page does not measure."),
        kl_table(
            "Token KL, one sequence",
            1,
            single_kl,
            PUBLISHED_KL,
            "The form of rlox's page: a number comes back.",
        ),
        kl_table("Token KL, 32 sequences", 32, batch_kl, {}, "One call for all; (loop) calls once per sequence."),
    ]


SUITE = Suite(
    name="llm-ops",
    title="LLM post-training operations",
    summary="Group advantages and the exact token KL in float64, in the forms and sizes of rlox's benchmark.",
    tables=tables,
)
