"""Tasks: rows, a system prompt and a verifier, opened by name (``choose``)."""

from __future__ import annotations

from whet.tasks.choose import open_task
from whet.tasks.mixture import Mixture, open_tasks
from whet.tasks.protocol import Split, Task, make_prompt

__all__ = ["Mixture", "Split", "Task", "make_prompt", "open_task", "open_tasks"]
