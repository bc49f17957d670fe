"""The tutorial notebook is stored with its outputs, and runs from top to bottom as a reader would run it."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorial.ipynb"


def check_outputs(notebook: nbformat.NotebookNode) -> str:
    """Every cell has run, in order, without warnings, and drew its figures; what was printed."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert all(output.output_type != "error" and output.get("name") != "stderr" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 6
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "lengths of the outputs: 0.851 and 0.054" in printed  # as the text says
    assert "softmax over the inputs: " in printed
    return printed


@pytest.mark.slow
def test_it_is_stored_with_its_outputs_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert not any(cell.metadata for cell in notebook.cells)
    stored = check_outputs(notebook)
    for cell in notebook.cells:  # two short trainings in place of two of eight epochs
        cell.source = cell.source.replace("epochs=8", "epochs=3").replace("train(other)", "train(other, epochs=1)")
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    before_training = slice(stored.index("epoch 1:"))
    assert check_outputs(notebook)[before_training] == stored[before_training]
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind
