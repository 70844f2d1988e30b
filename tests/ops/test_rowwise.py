"""Properties of all row-wise functions: any view, any ``out``, and bits that do not depend on threads."""

import numpy as np
import pytest
from tests.ops.arrays import normal, views
from tests.threads import same_on_any_threads

import whet


def weight_of(x):
    return normal(x.shape[-1], mean=1.0)


FUNCTIONS = {
    "rms_norm": lambda x, **more: whet.rms_norm(x, weight_of(x), **more),
    "layer_norm": lambda x, **more: whet.layer_norm(x, weight_of(x), **more),
    "softmax": whet.softmax,
    "log_softmax": whet.log_softmax,
    "silu": whet.silu,
    "gelu": whet.gelu,
    "gelu tanh": lambda x, **more: whet.gelu(x, "tanh", **more),
    "relu2": whet.relu2,
    "softcap": lambda x, **more: whet.softcap(x, 2.0, **more),
    "swiglu": lambda x, **more: whet.swiglu(x, x, **more),
}
every_function = pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)


@every_function
def test_views_and_out(f):
    for x in views():
        expected = f(np.array(x, np.float32))
        got = f(x)
        assert got.shape == x.shape and got.dtype == np.float32
        np.testing.assert_array_equal(got, expected)
        memory = np.empty((*x.shape[:-1], 2 * x.shape[-1]), np.float32)
        for out in (memory[..., : x.shape[-1]], memory[..., 1::2]):
            assert f(x, out=out) is out
            np.testing.assert_array_equal(out, expected)


@every_function
def test_out_may_overlap_the_input(f):
    base = normal((9, 33))
    expected = f(base)
    x = base.copy()
    assert f(x, out=x) is x
    np.testing.assert_array_equal(x, expected)
    for source, target in (np.s_[:-1], np.s_[1:]), (np.s_[1:], np.s_[:-1]):
        x = base.copy()
        f(x[source], out=x[target])
        np.testing.assert_array_equal(x[target], expected[source])


@every_function
def test_bits_do_not_depend_on_threads_or_other_rows(f):
    x = normal((200, 700), spread=3.0)
    whole = same_on_any_threads(lambda: f(x))
    np.testing.assert_array_equal(f(x[77]), whole[77])
