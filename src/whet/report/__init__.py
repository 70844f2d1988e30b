"""Reports as HTML pages without scripts, which load nothing from elsewhere."""

from __future__ import annotations

from whet.report.run import write_report

__all__ = ["write_report"]
