"""Run ``whet`` with arguments, and write its memory peak: ``python -m ...measured FILE.json ARGUMENTS``.

The peak of a child that the parent reads (``ru_maxrss``) would include the parent's memory before ``exec``.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path

from whet.cli import main
from whet.errors import WhetError
from whet.system import memory

if __name__ == "__main__":
    status, peak = main(sys.argv[2:]), None
    with suppress(OSError, WhetError):
        peak = memory.peak_bytes()
    Path(sys.argv[1]).write_text(json.dumps({"peak_bytes": peak}), encoding="utf-8")
    sys.exit(status)
