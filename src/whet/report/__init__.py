"""Reports as self-contained HTML pages without scripts."""

from __future__ import annotations

from whet.report.run import write_report

__all__ = ["write_report"]
