"""Every primitive of the wheel in an environment with only NumPy; run by `make wheel-test` and the release workflow."""

import importlib.metadata
import importlib.util
from pathlib import Path

import numpy as np

import whet
from whet.models.families import FAMILIES

assert "site-packages" in whet.__file__, whet.__file__
assert importlib.util.find_spec("torch") is None

cpuinfo = Path("/proc/cpuinfo")
if cpuinfo.exists() and " avx2 " in cpuinfo.read_text():
    assert whet.isa() != "scalar", whet.build_info()

p = np.log(np.full(8, 0.5))
r = np.arange(8.0)
assert whet.compute_token_kl(p, p) == whet.compute_token_kl_schulman(p, p) == 0.0
assert whet.compute_batch_token_kl_schulman_f32(p.astype(np.float32), p.astype(np.float32), 4).tolist() == [
    0.0,
    0.0,
]
assert whet.compute_group_advantages(r[:2]).tolist() == [-1.0, 1.0]
assert whet.compute_batch_group_advantages(r, 4).shape == (8,)
assert abs(whet.compute_token_logprobs(np.zeros((1, 4), np.float32), [0])[0] + np.log(4)) < 1e-6
assert whet.compute_gae(r, r, r > 9, 0.0, 1.0, 1.0)[0].shape == (8,)
assert whet.pack_sequences([3, 5, 4], 8) == [[1, 0], [2]]
assert FAMILIES["llama"].gguf_modules[0].names == ("token_embd",)  # read from a data file of the wheel
page = Path(whet.__file__).parent / "serve" / "page"
assert {file.name for file in page.iterdir()} == {"index.html", "page.js", "style.css"}, list(page.iterdir())

from whet.algorithms.grpo import GRPO  # noqa: E402

try:
    GRPO(object(), reward_fn=len)
except whet.WhetError as error:
    assert "pip install 'whet[train]'" in str(error), error
else:
    raise AssertionError("an algorithm took a module without torch")

folders = {file.parts[0] for file in importlib.metadata.files("whet") or ()}
assert importlib.util.find_spec("whet.bench.kernels") and "benchmarks" not in folders, folders

print(f"whet {importlib.metadata.version('whet')} on {whet.isa()}: 13 primitives work with only NumPy {np.__version__}")
