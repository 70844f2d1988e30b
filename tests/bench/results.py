"""Synthetic results.json from a seed: every status, a loss, parts, cold and threaded cases."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict

import numpy as np

from whet.bench import Case
from whet.bench.harness import CaseResult, Row


def a_row(provider, rng=None, median_s=None, spread=0.02, rounds=31, **fields):
    """Make a row, with samples around ``median_s`` if given."""
    samples = [] if median_s is None or rng is None else list(median_s * np.exp(spread * rng.standard_normal(rounds)))
    row = Row(provider, error=2.2e-16, tolerance=1e-12, samples_s=[float(s) for s in samples], loops=64, cpus=1.0)
    return asdict(row) | fields


def a_case(name, rows, **fields):
    """Make a warm case on two threads, without a size."""
    case = Case(name, lambda rng: None, lambda inputs: None, tolerance=1e-12, n_bytes=65536)
    return CaseResult(case, threads=2, rows=[]).as_dict() | {"rows": rows} | fields


def a_table(title, cases, **fields):
    """Make a table of cases."""
    return {"title": title, "allocation": "", "note": "", "item": "", "size_label": "", "cases": cases} | fields


_CEILINGS = {
    "read": {"L1": 4.1e11, "L2": 2.2e11, "L3": 1.5e11, "memory": 4.4e10},
    "copy": {"L1": 3.0e11, "L2": 1.2e11, "L3": 8.5e10, "memory": 3.0e10},
    "flops": {"float32": 4.6e11, "float64": 2.3e11, "bfloat16": 9.1e11, "int8": 1.8e12},
}


def make_results(tables, **fields):
    """Make the results of a run of ``tables``."""
    return copy.deepcopy(
        {
            "schema": 1,
            "suite": "llm-ops",
            "title": "The primitives of an RL step",
            "summary": "Group advantages and token KL compared with rlox, NumPy and torch.",
            "quick": False,
            "interrupted": False,
            "written": "2026-11-21T06:00:00+00:00",
            "command": "whet bench llm-ops --threads 2",
            "elapsed_s": 71.2,
            "machine": {
                "processor": "AMD EPYC 9R14",
                "device": "",
                "cpus": 2,
                "caches": {"L1": 32768, "L2": 1 << 20, "L3": 32 << 20},
                "memory_bytes": 25_000_000_000,
                "system": "Linux-6.1",
            },
            "versions": {"whet": "0.1.0", "python": "3.11.2", "numpy": "2.4.6", "torch": "2.13.0", "rlox": "1.2.0"},
            "commit": "b5d2eb3 (modified)",
            "build": {"compiler": "GCC 12", "isa": "avx512bf16"},
            "load": {"before": [0.1, 0.2, 0.3], "after": [1.9, 0.8, 0.4]},
            "threads": {"asked": 2, "cpus": [0, 1], "whet": 2, "torch": 2},
            "ceilings": {"2": _CEILINGS, "1": _CEILINGS},
            "tables": tables,
        }
        | fields
    )


def sized_table(rng, title="Group advantages, batched"):
    """Make a table of three sizes with a win, a loss and a tie, a cold case, and a case on one thread."""
    cases = []
    for n_groups, group in ((16, 4), (64, 8), (256, 16)):
        base = 2e-6 * n_groups / 16
        rows = [
            a_row("whet", rng, base, bandwidth=1.2e10, items_per_s=3.2e8, share=0.31, bound="L2 bandwidth"),
            a_row("whet float32", rng, 0.7 * base, error=3e-7, tolerance=1e-6, note="computes in float32"),
            a_row("rlox", rng, 5.3 * base, bandwidth=2.3e9, items_per_s=6e7, share=0.058, bound="L2 bandwidth"),
            a_row("NumPy", rng, 31.0 * base, error=0.0),
            a_row("torch", rng, (0.62 if n_groups == 256 else 1.0) * base, cpus=1.9),
        ]
        published = {"rlox": 6.6e-6 * n_groups / 16, "TRL": 9e-5}
        size = n_groups * group
        cases.append(a_case(f"{n_groups} x {group}", rows, size=size, n_items=size, published=published))
    cold = [a_row("whet", rng, 9e-5), a_row("rlox", rng, 1.4e-4), a_row("NumPy", rng, 6e-4), a_row("torch", rng, 8e-5)]
    cases.append(a_case("256 x 16 cold", cold, cache="cold", note="inputs come from memory"))
    one = [a_row("whet", rng, 6e-5), a_row("rlox", rng, 1.7e-4), a_row("torch", rng, 3.6e-5)]
    cases.append(a_case("256 x 16", one, threads=1, size=4096))
    return a_table(
        title,
        cases,
        allocation="inside: the result is a new array",
        note="One call for all groups.",
        item="completions",
        size_label="completions",
    )


def statuses_table(rng, title="Token KL"):
    """Make a table with a row of every status."""
    rows = [
        a_row("whet", rng, 1e-5, peak_bytes=3 << 20),
        a_row("rlox", status="absent", why="rlox is not installed: pip install 'whet[peers]'", error=None),
        a_row("NumPy", status="wrong", why="error 0.5, allowed 1e-12", error=0.5),
        a_row("TRL", status="failed", why="RuntimeError: planted failure", error=None),
        a_row("torch", rng, 1e-9, status="refused", why="impossible: 40 times the L1 bandwidth of this machine."),
    ]
    return a_table(title, [a_case("8192", rows)])


def parts_table(rng, title="One GRPO step"):
    """Make a table whose rows have more parts than there are colours."""
    shares = {"generation": 0.55, "logprobs": 0.08, "forward": 0.12, "loss": 0.01, "backward": 0.2, "optimizer": 0.03,
              "advantages": 2e-5, "kl": 1e-5, "sync": 0.001, "other": 0.00897}  # fmt: skip
    rows = []
    for provider, seconds in (("whet", 2.0), ("TRL", 3.1)):
        row = a_row(provider, rng, seconds, rounds=9)
        row["parts"] = {name: [share * s for s in row["samples_s"]] for name, share in shares.items()}
        rows.append(row)
    return a_table(title, [a_case("4 x 8, 64 + 64 tokens", rows)])


def full_results(seed=0, **fields):
    """Make the results of a run with all of these tables."""
    rng = np.random.default_rng(seed)
    return make_results([sized_table(rng), statuses_table(rng), parts_table(rng)], **fields)


def save(results, folder):
    """Write ``folder/results.json``, as a run does."""
    folder.mkdir(exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results))
    return folder
