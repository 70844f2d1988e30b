"""Rows of rlox's "LLM Post-Training Operations" benchmark: group advantages and the exact token KL.

In the form of rlox's benchmark page, which calls once per group or sequence, and in one call for all of them. All
providers compute in float64 on the same values. The page's medians, from another, unnamed machine, are shown with the
rows. The suite "trl" has float32, k3, and the other operations of a training step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import whet
from whet.bench.case import BenchOptions, Case, Provider, Suite, Table, relative_error, to_array
from whet.bench.prepare import ITEM_BYTES, Function, Prepare, in_loop, on_arrays, on_tensors, resolve, tensor
from whet.ops.advantages import naive_group_advantages
from whet.ops.divergence import naive_token_kl

TOLERANCE = {"float32": 2e-6, "float64": 1e-12}
"""About thirty roundings in float32; about a thousand in float64, for sequential sums."""


def flat_error(answer: Any, reference: Any) -> float:
    """Return ``relative_error`` of an answer that is one array or a list of arrays per group or sequence."""
    return relative_error(to_array(answer).ravel(), np.ravel(reference))


def cold(case: Case) -> Case:
    """Copy a case with a cold cache."""
    return replace(case, name=f"{case.name}, cold", cache="cold", size=None, thread_scaling=False, published={})


# --- group advantages -----------------------------------------------------------------------------------


class Groups(NamedTuple):
    """Concatenated rewards of all groups, (n_prompts * G,), and G."""

    rewards: np.ndarray
    group_size: int

    @property
    def grouped(self) -> np.ndarray:
        """Rewards, (n_prompts, G)."""
        return self.rewards.reshape(-1, self.group_size)

    def rows(self) -> list[tuple[np.ndarray]]:
        """Return one array (G,) per group, for loops."""
        return [(row,) for row in self.grouped.copy()]


def exact_advantages(groups: Groups, **definition: Any) -> np.ndarray:
    """Compute ``naive_group_advantages`` (n_prompts, G) in extended precision."""
    return naive_group_advantages(groups.grouped.astype(np.longdouble), **definition)


sample = partial(exact_advantages, ddof=1, eps=0.0)
"""(r - mean) / sample deviation of the group."""


def normalize(rewards: Any) -> Any:
    """Normalise rewards by NumPy or torch, each with its default deviation."""
    return (rewards - rewards.mean()) / rewards.std()


def normalize_rows(grouped: Any) -> Any:
    """Normalise all rows at once."""
    return (grouped - grouped.mean(1, keepdims=True)) / grouped.std(1, keepdims=True)


WHET_GROUPS = on_arrays(whet.compute_batch_group_advantages)
RLOX_GROUPS = on_arrays("rlox:compute_batch_group_advantages")
RLOX_GROUPS_LOOP = in_loop("rlox:compute_group_advantages")


def numpy_groups(groups: Groups) -> Any:
    return partial(normalize_rows, groups.grouped)


def torch_groups(groups: Groups) -> Any:
    return partial(normalize_rows, tensor(groups.grouped))


def group_case(
    n_prompts: int, group_size: int, published: Mapping[str, float], dtype: str = "float64", **fields: Any
) -> Case:
    """Create a case of groups of normal rewards that float32 represents exactly, so that all dtypes get the same."""
    n = n_prompts * group_size
    return Case(
        f"{n_prompts} x {group_size}",
        inputs=lambda rng: Groups(rng.standard_normal(n, np.float32).astype(dtype), group_size),
        reference=exact_advantages,
        tolerance=TOLERANCE[dtype],
        n_bytes=2 * ITEM_BYTES[dtype] * n,
        n_items=n,
        size=n,
        published=published,
        **fields,
    )


group_table = partial(
    Table,
    allocation="inside: results are new arrays",
    item="completions",
    size_label="completions",
    error=flat_error,
)
PUBLISHED_GROUPS = {
    (16, 4): {"rlox": 2.2e-6, "NumPy": 79.0e-6, "torch": 76.2e-6},
    (64, 8): {"rlox": 8.6e-6, "NumPy": 309.9e-6, "torch": 320.3e-6},
    (256, 16): {"rlox": 36.1e-6, "NumPy": 1243.3e-6, "torch": 1261.6e-6},
}
SAMPLE_DEVIATION = "torch's std() is the sample deviation; its answers are compared with that definition."


def group_cases(is_published: bool) -> list[Case]:
    """Create cases by ascending size; the largest also on fewer threads and with a cold cache."""
    published = [(shape, times if is_published else {}) for shape, times in PUBLISHED_GROUPS.items()]
    cases = [group_case(*shape, times, thread_scaling=shape == (256, 16)) for shape, times in published]
    return [*cases, cold(cases[-1])]


# --- token KL -------------------------------------------------------------------------------------------


class Logprobs(NamedTuple):
    """Log-probs of the policy and of the reference, (B, T) each; (T,) for one sequence."""

    policy: np.ndarray
    ref: np.ndarray

    def rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return a pair of (T,) arrays per sequence."""
        return list(zip(*self, strict=True))


def exact_kl(logprobs: Logprobs) -> np.ndarray:
    """Compute sum exp(p) (p - q) per sequence, (B,), in extended precision."""
    return naive_token_kl(*(x.astype(np.longdouble) for x in logprobs))


def rlox_batch(function: Function, swap: bool = False) -> Prepare:
    """Prepare a call of rlox with a batch as flat arrays and the sequence length."""

    def prepare(logprobs: Logprobs) -> Any:
        p, q = (x.ravel() for x in logprobs)
        return partial(resolve(function), *((q, p) if swap else (p, q)), logprobs.policy.shape[1])

    return prepare


def numpy_kl(p: Any, q: Any) -> Any:
    return np.sum(np.exp(p) * (p - q), axis=-1)


def torch_kl(p: Any, q: Any) -> Any:
    return (p.exp() * (p - q)).sum(-1)


def torch_kl_number(p: Any, q: Any) -> float:
    return (p.exp() * (p - q)).sum(-1).item()


LENGTHS = (128, 512, 2048, 8192)
PUBLISHED_KL = {
    128: {"rlox": 0.4e-6, "NumPy": 1.8e-6, "torch": 2.0e-6},
    512: {"rlox": 1.2e-6, "NumPy": 2.8e-6, "torch": 3.2e-6},
    2048: {"rlox": 3.9e-6, "NumPy": 6.6e-6, "torch": 5.8e-6},
    8192: {"rlox": 17.0e-6, "NumPy": 26.8e-6, "torch": 50.3e-6},
}


def kl_case(batch: int, length: int, dtype: str = "float64", reference: Any = exact_kl, **fields: Any) -> Case:
    """Create a case of p = -Exp(1), q = p + N(0, 1/4), exact in float32; (T,) for one sequence."""

    def inputs(rng: np.random.Generator) -> Logprobs:
        shape = (length,) if batch == 1 else (batch, length)
        policy = -rng.standard_exponential(shape, np.float32)
        ref = policy + rng.standard_normal(shape, np.float32) / 2
        return Logprobs(policy.astype(dtype), ref.astype(dtype))

    return Case(
        f"{batch} x {length}",
        inputs,
        reference,
        TOLERANCE[dtype],
        n_bytes=ITEM_BYTES[dtype] * batch * (2 * length + 1),
        n_items=batch * length,
        size=length,
        **fields,
    )


kl_table = partial(
    Table,
    allocation="inside: results, and temporaries if any",
    item="tokens",
    size_label="tokens per sequence",
    error=flat_error,
)


def kl_cases(batch: int, published: Mapping[int, Mapping[str, float]]) -> list[Case]:
    """Create cases by ascending length; the longest also on fewer threads and with a cold cache."""
    cases = [kl_case(batch, n, thread_scaling=n == LENGTHS[-1], published=published.get(n, {})) for n in LENGTHS]
    return [*cases, cold(cases[-1])]


# --- the suite ------------------------------------------------------------------------------------------


def tables(options: BenchOptions) -> list[Table]:
    """Create all four tables, also if quick."""
    loop = [
        Provider("whet", in_loop(whet.compute_group_advantages)),
        Provider("rlox", RLOX_GROUPS_LOOP),
        Provider("NumPy", in_loop(normalize)),
        Provider("torch", in_loop(normalize, tensors=True), reference=sample),
    ]
    batch = [
        Provider("whet", WHET_GROUPS),
        Provider("rlox", RLOX_GROUPS),
        Provider("NumPy", numpy_groups),
        Provider("torch", torch_groups, reference=sample),
    ]
    single_kl = [
        Provider("whet", on_arrays(whet.compute_token_kl)),
        Provider("rlox", on_arrays("rlox:compute_token_kl")),
        Provider("NumPy", on_arrays(numpy_kl)),
        Provider("torch", on_tensors(torch_kl_number)),
    ]
    batch_kl = [
        Provider("whet", on_arrays(whet.compute_batch_token_kl)),
        Provider("whet (loop)", in_loop(whet.compute_token_kl)),
        Provider("rlox", rlox_batch("rlox:compute_batch_token_kl")),
        Provider("rlox (loop)", in_loop("rlox:compute_token_kl")),
        Provider("NumPy", on_arrays(numpy_kl)),
        Provider("torch", on_tensors(torch_kl)),
    ]
    in_page = f"The form of rlox's page: a Python loop over groups. {SAMPLE_DEVIATION}"
    not_in_page = f"All groups at once, which rlox's page does not measure. {SAMPLE_DEVIATION}"
    one, many = "The form of rlox's page: the result is a number.", "One call for all; (loop): a call per sequence."
    return [
        group_table("Group advantages, one call per group", group_cases(True), loop, note=in_page),
        group_table("Group advantages, one call", group_cases(False), batch, note=not_in_page),
        kl_table("Token KL, one sequence", kl_cases(1, PUBLISHED_KL), single_kl, note=one),
        kl_table("Token KL, 32 sequences", kl_cases(32, {}), batch_kl, note=many),
    ]


SUITE = Suite(
    name="llm-ops",
    title="LLM post-training operations",
    summary="Group advantages and the exact token KL in float64, in the forms and sizes of rlox's benchmark.",
    tables=tables,
)
