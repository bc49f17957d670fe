"""The homework of the course: what is missing is named, a solution passes, each flawed layer has exactly its fault."""

import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from torchcaps.plugins import import_file
from torchcaps.testing import diagnose

ROOT = Path(__file__).parents[1]
FAULTS = {"First": "mixes-images", "Second": "squash-over-other-axis", "Third": "no-routing"}
FLAWED = import_file(ROOT / "examples" / "flawed_layers.py")


@pytest.fixture
def homework() -> ModuleType:
    return import_file(ROOT / "examples" / "homework.py")


def test_the_unfilled_homework_says_what_to_do(homework: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"Not yet: fill in compete\(\)"):
        homework.main()


def test_a_solution_passes(
    homework: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(homework, "compete", lambda logits: logits.softmax(2))
    homework.main()
    assert "sums to one over the outputs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [lambda logits: logits.sigmoid(), lambda logits: logits.softmax(0), lambda logits: logits / logits.sum(2, True)],
    ids=["sigmoid", "over the batch", "no exponential"],
)
def test_wrong_solutions_do_not_pass(homework: ModuleType, wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homework, "compete", wrong)
    with pytest.raises(SystemExit, match="Not yet: "):
        homework.main()


@pytest.mark.parametrize(("name", "fault"), FAULTS.items())
@pytest.mark.parametrize("seed", range(3))
def test_a_flawed_layer_has_exactly_its_fault(name: str, fault: str, seed: int) -> None:
    torch.manual_seed(seed)
    layer: nn.Module = getattr(FLAWED, name)()
    assert [finding.name for finding in diagnose(layer, (4, 12, 8))] == [fault]


def test_the_mended_layers_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mended(FLAWED.Votes):  # type: ignore[misc, name-defined]
        def forward(self, poses: Tensor) -> Tensor:
            votes, logits = self.votes(poses), torch.zeros(len(poses), FLAWED.I, FLAWED.J)
            for _ in range(3):
                capsules = FLAWED.squash((logits.softmax(2).unsqueeze(3) * votes).sum(1), dim=2)
                logits = logits + (votes * capsules.unsqueeze(1)).sum(3)
            return capsules

    torch.manual_seed(0)
    assert diagnose(Mended(), (4, 12, 8)) == []


def test_the_answers_name_the_faults() -> None:
    text = (ROOT / "docs" / "lesson-answers.md").read_text(encoding="utf-8")
    for name, fault in FAULTS.items():
        assert re.search(rf"`{name}`.*`{fault}`", text), name


def test_the_exercises_are_stored_with_their_outputs_and_know_the_right_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    notebook = json.loads((ROOT / "docs" / "exercises.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    text = (ROOT / "docs" / "lesson-answers.md").read_text(encoding="utf-8")
    given = {1: 0.96, 2: 0.5, 3: 0.6, 4: 0.71, 5: 1474560, 6: 1 / 3}
    for answers, said in (({}, "no answer yet"), (given, "right"), (dict.fromkeys(given, 0.1), "not yet: try again")):
        names: dict[str, object] = {}
        for cell in cells:
            code = "".join(cell["source"])
            for number, answer in answers.items():
                code = code.replace(f"answer_{number} = None", f"answer_{number} = {answer}")
            exec(code, names)
        assert capsys.readouterr().out.splitlines() == [said] * len(given)
    stored = [output["text"] for cell in cells for output in cell["outputs"]]
    assert ["".join(each) for each in stored] == ["no answer yet\n"] * len(given)
    assert all(f"{each:,.2f}".removesuffix(".00").rstrip("0") in text for each in list(given.values())[:5])
