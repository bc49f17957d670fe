"""The notebooks are stored with their outputs, and run from top to bottom as a reader would run them."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

DOCS = Path(__file__).parents[1] / "docs"
NOTEBOOKS = {
    "tutorial": (6, ("lengths of the outputs: 0.851 and 0.054", "softmax over the inputs: "), "epoch 1:"),
    "segment": (4, ("73,760 parameters", "a one: Dice "), "epoch 1:"),
}
"""Number of figures, printed words, and the words from which on the numbers depend on the machine."""
SHORTER = {"epochs=8": "epochs=3", "train(other)": "train(other, epochs=1)", "EPOCHS = 3": "EPOCHS = 1"}


def check_outputs(notebook: nbformat.NotebookNode, figures: int, words: tuple[str, ...]) -> str:
    """Every cell has run, in order, without warnings, and drew its figures; what was printed."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert all(output.output_type != "error" and output.get("name") != "stderr" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == figures
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert all(each in printed for each in words)  # as the text says
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_is_stored_with_its_outputs_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    figures, words, training = NOTEBOOKS[name]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(DOCS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert not any(cell.metadata for cell in notebook.cells)
    stored = check_outputs(notebook, figures, words)
    for cell in notebook.cells:  # shorter trainings
        for longer, shorter in SHORTER.items():
            cell.source = cell.source.replace(longer, shorter)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    before_training = slice(stored.index(training))
    assert check_outputs(notebook, figures, words)[before_training] == stored[before_training]
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind
