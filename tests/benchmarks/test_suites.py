"""Suites: tables are well formed, installed providers are right, and errors are found."""

import importlib.util
import sys

import numpy as np
import pytest

from benchmarks.contenders.packing import (
    MAX_LENGTH,
    best_fit_decreasing,
    first_fit_decreasing,
    packing_error,
    random_lengths,
)
from benchmarks.suites.llm_ops import Groups, Logprobs, exact_advantages, exact_kl, sample
from benchmarks.suites.trl import Trajectories, gae, k3, trl_definition
from whet.bench import BenchOptions, NotMeasured
from whet.bench.suites import load_suite, suite_names
from whet.ops.packing import naive_pack_sequences

PEERS = ("rlox", "trl", "torch", "pyarrow", "datasets")
PRIMITIVES = [
    (name, table) for name in ("llm-ops", "trl") for table in load_suite(name).tables(BenchOptions(quick=True))
]
TABLES = [pytest.param(table, id=f"{name}: {table.title}") for name, table in PRIMITIVES]


def calls(table, case, x):
    """Yield (provider, call, tolerance, reference) of the installed providers."""
    references = {}
    for provider in table.providers:
        define = provider.reference or case.reference
        if define not in references:
            references[define] = define(x)
        tolerance = case.tolerance if provider.tolerance is None else provider.tolerance
        try:
            yield provider, provider.prepare(x), tolerance, references[define]
        except NotMeasured:
            continue
        except ImportError as error:
            name = (error.name or "").partition(".")[0]
            assert name in PEERS, error
            assert importlib.util.find_spec(name) is None, error


@pytest.mark.parametrize("name", suite_names())
@pytest.mark.parametrize("quick", [True, False])
def test_tables_are_well_formed(name, quick):
    suite = load_suite(name)
    assert suite.name == name
    tables = suite.tables(suite.options(quick=quick))
    assert len({table.title for table in tables}) == len(tables) > 0
    for table in tables:
        cases, providers = ([one.name for one in many] for many in (table.cases, table.providers))
        assert len(set(cases)) == len(cases) > 0, table.title
        assert len(set(providers)) == len(providers), table.title
        assert providers[0] == "whet"
        for case in table.cases:
            assert case.n_bytes + case.n_flops + case.n_items > 0, case.name
            installable = {name for name in case.published if not name.startswith("RuvLLM")}
            assert installable <= set(providers), (table.title, case.name)
            assert case.n_items == 0 or table.item, table.title


@pytest.mark.parametrize("table", TABLES)
def test_every_provider_is_right_and_errors_are_found(table):
    for case in table.cases:
        assert case.n_bytes > 0
        x = case.inputs(np.random.default_rng(0))
        for provider, call, tolerance, right in calls(table, case, x):
            answer = call()
            assert table.error(answer, right) <= tolerance, (case.name, provider.name)
            if table.error is not packing_error:
                wrong = np.asarray(answer, np.float64).flatten()
                at = np.argmax(np.abs(wrong))
                wrong[at] += 2.5 * tolerance * max(1.0, abs(wrong[at]))
                assert table.error(wrong, right) > tolerance, (case.name, provider.name)


@pytest.mark.parametrize("table", TABLES)
def test_missing_peer_is_an_import_error(table, monkeypatch):
    for name in [*PEERS, *(name for name in sys.modules if name.partition(".")[0] in PEERS)]:
        monkeypatch.setitem(sys.modules, name, None)
    case = table.cases[0]
    inputs = case.inputs(np.random.default_rng(0))
    for provider in table.providers:
        if provider.name.lower().startswith(("rlox", "trl", "torch")):
            with pytest.raises(ImportError) as caught:
                provider.prepare(inputs)
            assert (caught.value.name or "").partition(".")[0] in PEERS


# --- the references, by hand ----------------------------------------------------------------------------


def test_advantages_by_hand():
    groups = Groups(np.array([1.0, 3.0, 2.0, 6.0]), 2)
    np.testing.assert_allclose(exact_advantages(groups).astype(float), [[-1, 1], [-1, 1]], rtol=1e-15)
    half = np.sqrt(0.5)  # the sample deviation of two is |a - b| / sqrt(2)
    np.testing.assert_allclose(sample(groups).astype(float), [[-half, half], [-half, half]], rtol=1e-15)
    first, second = 1 / (np.sqrt(2) + 1e-4), 2 / (np.sqrt(8) + 1e-4)
    expected = [[-first, first], [-second, second]]
    np.testing.assert_allclose(trl_definition(groups).astype(float), expected, rtol=1e-15)


def test_kl_by_hand():
    p, q = np.log([[0.5, 0.25]]), np.log([[0.25, 0.5]])
    ln2 = np.log(2)
    np.testing.assert_allclose(exact_kl(Logprobs(p, q)).astype(float), [0.5 * ln2 - 0.25 * ln2], rtol=1e-14)
    # k3 = q/p - log(q/p) - 1, from the policy to the reference and not the other way round
    np.testing.assert_allclose(k3(Logprobs(p, q)).astype(float), [(0.5 + ln2 - 1) + (2 - ln2 - 1)], rtol=1e-14)
    lopsided = Logprobs(p[:, :1], q[:, :1])
    np.testing.assert_allclose(k3(lopsided).astype(float), [0.5 + ln2 - 1], rtol=1e-14)


def test_gae_by_hand():
    x = Trajectories(np.array([[1.0, 2.0]]), np.array([[0.5, 1.0]]), np.array([[True, False]]), np.array([4.0]))
    last = 2 + 0.99 * 4 - 1
    expected = [[[1 - 0.5, last]], [[1.0, last + 1]]]
    np.testing.assert_allclose(gae(x).astype(float), expected, rtol=1e-15)


# --- packings -------------------------------------------------------------------------------------------


def naive_best_fit(lengths):
    room = []
    for length in sorted(lengths, reverse=True):
        fitting = [b for b, free in enumerate(room) if free >= length]
        if fitting:
            room[min(fitting, key=lambda b: room[b])] -= length
        else:
            room.append(MAX_LENGTH - length)
    return len(room)


@pytest.mark.parametrize("seed", range(20))
def test_fast_packings_equal_the_naive_definitions(seed):
    rng = np.random.default_rng(seed)
    lengths = random_lengths(rng, int(rng.integers(1, 300)))
    if seed % 2:
        lengths = rng.choice([1, 300, 683, 1024, 1365, 2048], len(lengths))  # many equal ones, and exact fits
    right = first_fit_decreasing(lengths)
    assert packing_error(naive_pack_sequences(lengths.tolist(), MAX_LENGTH), right) == 0
    assert best_fit_decreasing(lengths).n_bins == naive_best_fit(lengths.tolist())


def test_packings_by_hand():
    lengths = np.array([1000, 1500, 500, 1048])
    right = first_fit_decreasing(lengths)
    assert right.n_bins == 2
    assert right.bin_of is not None
    assert right.bin_of.tolist() == [1, 0, 0, 1]
    assert packing_error([[1, 2], [3, 0]], right) == 0
    assert packing_error([[3, 0], [1, 2]], right) == 1
    assert packing_error([[1], [3, 0], [2]], right) == 0.5
    assert packing_error([[1, 2], [3]], right) == np.inf
    assert packing_error([[1, 2], [3, 0, 0]], right) == np.inf
    assert packing_error([[1, 0], [3, 2]], right) == np.inf  # 2500 tokens in a bin
    counted = best_fit_decreasing(lengths)
    assert packing_error([[3, 0], [1, 2]], counted) == 0
    assert packing_error([[1], [3, 0], [2]], counted) == 0.5
