import re
import sys
from pathlib import Path

import numpy as np
import pytest

from whet.models.sources.mapped import map_file, release_pages


def resident_kib(path: Path) -> int:
    """Of a file's mappings, as the kernel counts them."""
    found = re.search(rf"{re.escape(str(path))}\n(?:\w.*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text())
    assert found is not None
    return int(found[1])


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts resident pages")
def test_all_of_a_tensor_is_let_go_though_its_views_have_strides(tmp_path):
    path = tmp_path / "rows"
    np.arange(1 << 20, dtype=np.uint8).tofile(path)
    rows = map_file(path, "test").reshape(256, -1)
    assert rows.sum() > 0 and resident_kib(path) == 1024
    release_pages([rows[begin : begin + 64 : 2] for begin in (0, 1)])
    assert resident_kib(path) == 768
    release_pages([rows[64:].T])
    assert resident_kib(path) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts resident pages")
def test_parts_of_a_weight_in_several_files_are_let_go(tmp_path):
    """As of q, k and v of a layer whose shards part it."""
    parts = []
    for name in ("first", "second"):
        np.ones(1 << 16, np.uint8).tofile(tmp_path / name)
        parts.append(map_file(tmp_path / name, "test"))
    for several in (parts, parts[::-1]):
        assert sum(int(part.sum()) for part in several) == 2 << 16
        release_pages([*several, np.ones(9)])
        assert resident_kib(tmp_path / "first") == resident_kib(tmp_path / "second") == 0
