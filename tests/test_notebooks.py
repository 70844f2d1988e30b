"""The notebooks of examples/ run from a clean clone, and are committed without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from tests.representatives import cases

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


@pytest.mark.parametrize("path", cases(NOTEBOOKS, lambda path: path.stem == "lora_on_gguf"), ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
    for name, value in {"OMP_NUM_THREADS": "1", "WHET_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook.cells)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
