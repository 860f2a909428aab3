"""The notebook runs from top to bottom, and is kept without outputs."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert len(code) >= 6
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


@pytest.mark.slow
def test_the_notebook_trains_and_shows_loss_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbclient import NotebookClient

    monkeypatch.setenv("SAFELIGHT_HOME", str(tmp_path / "workspace"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    here = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources=here).execute()

    outputs = [cell.get("outputs", []) for cell in notebook.cells]
    pictures = [found for found in outputs if any("image/png" in output.get("data", {}) for output in found)]
    assert len(pictures) == 3, "the data set, the loss, before and after"
    printed = "".join(o.get("text", "") for o in notebook.cells[-2].outputs)
    assert "base unchanged: True" in printed
    files = list((tmp_path / "workspace").glob("projects/quickstart/runs/*/exports/*.safetensors"))
    assert files and all(str(path) in printed for path in files)
