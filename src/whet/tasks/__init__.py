"""Tasks: rows to answer, a system prompt and a verifier, opened by name (``choose``)."""

from __future__ import annotations

from whet.tasks.choose import open_task
from whet.tasks.mixture import Mixture, open_tasks
from whet.tasks.protocol import Split, Task, prompt_of

__all__ = ["Mixture", "Split", "Task", "open_task", "open_tasks", "prompt_of"]
