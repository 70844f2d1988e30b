import re
import sys
from pathlib import Path

import numpy as np
import pytest

from whet.models.sources.mapped import map_file, release_pages


def resident_kib(path: Path) -> int:
    """Return the resident bytes of a file's mappings, from the kernel."""
    found = re.search(rf"{re.escape(str(path))}\n(?:\w.*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text())
    assert found is not None
    return int(found[1])


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts resident pages")
def test_pages_of_strided_views_are_released(tmp_path):
    path = tmp_path / "rows"
    np.arange(1 << 20, dtype=np.uint8).tofile(path)
    rows = map_file(path, "test").reshape(256, -1)
    assert rows.sum() > 0 and resident_kib(path) == 1024
    release_pages([rows[begin : begin + 64 : 2] for begin in (0, 1)])
    assert resident_kib(path) == 768
    release_pages([rows[64:].T])
    assert resident_kib(path) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts resident pages")
def test_releases_multi_file_weights(tmp_path):
    """Slices of one slot may come from several shards."""
    parts = []
    for name in ("first", "second"):
        np.ones(1 << 16, np.uint8).tofile(tmp_path / name)
        parts.append(map_file(tmp_path / name, "test"))
    for several in (parts, parts[::-1]):
        assert sum(int(part.sum()) for part in several) == 2 << 16
        release_pages([*several, np.ones(9)])
        assert resident_kib(tmp_path / "first") == resident_kib(tmp_path / "second") == 0
