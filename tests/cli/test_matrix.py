"""Every command on a run of every task, with a decoder, without one, and without capsules: it works, or one sentence.

Words and units are those of the task; each cell ends with exit code 0 or 2, never with another.
"""

import functools
import itertools
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from cli_support import Cli, Result
from support import MASKS
from tiny_runs import NARROW, tiny_config
from torchcaps.files import read_json
from torchcaps.tasks import TASKS
from torchcaps.training import train
from torchcaps.training.progress import PlainProgress

pytestmark = pytest.mark.slow

SIZE = 18
OF_IMAGES = [task for task in TASKS if task not in MASKS]
"""Tasks with an answer for each image; test_pixels.py has commands for pixels."""
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "decoder": ("sabour2017", NARROW),
    "no decoder": ("sabour2017", {**NARROW, "decoder": False}),
    "no capsules": ("baseline-cnn", {"channels": (8, 8), "hidden": (16,), "pool": 2, "dropout": 0.0}),
}
NARROW_OPTIONS = "--conv-channels 8 --primary-types 2 --capsule-dim 4 --decoder-hidden 16 --max-shift 0 --batch-size 16"
COMMANDS: dict[str, str] = {
    "evaluate": "evaluate RUN",
    "evaluate --json": "evaluate RUN --json",
    "evaluate --figure": "evaluate RUN --figure e.png",
    "evaluate two --json": "evaluate RUN RUN/../run --figure two.png --json",
    "evaluate --coverage": "evaluate RUN --coverage 0.9 --coverage-over class",
    "evaluate --out": "evaluate RUN --out a.csv",
    "predict": "predict RUN IMAGE",
    "predict --coverage": "predict RUN IMAGE --coverage 0.9",
    "predict --out --figure": "predict RUN IMAGE --out q.csv --figure q.png",
    "predict --poses": "predict RUN IMAGE --poses p.npz",
    "predict --json": "predict RUN IMAGE --json",
    "predict --out": "predict RUN IMAGE --out p.csv",
    "predict --figure": "predict RUN IMAGE --figure p.png",
    "reconstruct": "reconstruct RUN --count 5 --figure r.png",
    "perturb": "perturb RUN --steps 3 --figure p.png",
    "perturb --image": "perturb RUN --image IMAGE --steps 3 --figure p.png",
    "perturb --follow": "perturb RUN --follow label --steps 3 --figure p.png",
    "routing": "routing RUN --count 4 --figure r.png",
    "routing --image": "routing RUN --image IMAGE --figure r.png",
    "curves": "curves RUN --figure c.png",
    "curves --json": "curves RUN --json",
    "datasets": "datasets npz:DATA",
    "datasets --json": "datasets npz:DATA --json",
    "datasets --sample": "datasets npz:DATA --sample 5 --figure s.png",
    "export folder": "export RUN --format folder --out folder",
    "export torch": "export RUN --format torch --out m.pt2",
    "export onnx": "export RUN --format onnx --out m.onnx",
    "robustness": "robustness RUN --limit 6 --steps 1 --epsilons 0.1 --angles 10",
    "probe": "probe RUN --limit 60",
    "detect": "detect RUN --limit 6 --steps 1",
    "explore --save": "explore RUN --save site",
    "resume": "train --resume RUN --no-figures",
    "init-from": "train sabour2017 --task TASK --data npz:DATA --init-from RUN --epochs 1 NARROW --out r --no-figures",
    "find-learning-rate": "train sabour2017 --task TASK --data npz:DATA NARROW --find-learning-rate",
}


EXPORTED = dict(zip(OF_IMAGES, itertools.cycle(NETWORKS)))
AS_CLASSES = ("classes", "ordinal")
"""Tasks with one of several classes for each image, which all commands take."""


class Trained(NamedTuple):
    task: str
    network: str
    folder: Path
    data: Path
    image: Path
    said: list[str]


class Lines(PlainProgress):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of each task: images with a bar at one of three heights; names that other programs take for markup."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("matrix")
    classes = np.arange(120) % 3
    images = rng.integers(0, 80, (120, SIZE, SIZE))
    for image, label in zip(images, classes, strict=True):
        image[3 + 5 * label : 6 + 5 * label, 2:16] += 150
    rows = rng.integers(0, 2, (120, 3))
    rows[:, 0] = classes == 0
    names = {"class_names": np.array(["a$\\frac$b", "middle", "[bold]low"])}
    targets: dict[str, dict[str, np.ndarray]] = {
        "classes": {"y": classes, **names},
        "ordinal": {"y": classes, **names},
        "labels": {"y": rows, **names},
        "regression": {"y": 10.0 * classes + 1000},
    }
    assert list(targets) == OF_IMAGES, "a new task: give it data"
    for task, arrays in targets.items():
        np.savez(folder / f"{task}.npz", x=images.astype(np.uint8), **arrays)  # type: ignore[arg-type]
    Image.fromarray(images[1].astype(np.uint8)).save(folder / "image.png")
    return folder


@pytest.fixture(scope="session")
def trainings(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Trained]:
    """Train each network once, when a test first asks for it."""

    @functools.cache
    def trained(task: str, network: str) -> Trained:
        out, lines = tmp_path_factory.mktemp("run") / "run", Lines()
        preset, options = NETWORKS[network]
        config = tiny_config(files / f"{task}.npz", preset, **{"task": task, "epochs": 1, "max_shift": 0, **options})
        train(config, out, progress=lines, figures=network == "decoder")
        return Trained(task, network, out, files / f"{task}.npz", files / "image.png", lines.said)

    return trained


@pytest.fixture(params=[(task, network) for task in OF_IMAGES for network in NETWORKS], ids="-".join)
def trained(request: pytest.FixtureRequest, trainings: Callable[[str, str], Trained]) -> Trained:
    return trainings(*request.param)


def call(cli: Cli, name: str, run: Trained) -> Result:
    """Call a command as it is typed."""
    text = COMMANDS[name].replace("NARROW", NARROW_OPTIONS)
    named = {"RUN": run.folder, "IMAGE": run.image, "DATA": run.data, "TASK": run.task}
    for word, value in named.items():
        text = text.replace(word, shlex.quote(str(value)))
    return cli(*shlex.split(text))


CELLS = [
    pytest.param((task, network), name, id=f"{task}-{network}-{name}")
    for task in OF_IMAGES
    for network in NETWORKS
    for name, words in COMMANDS.items()
    if "RUN" in words or network == "decoder"  # else the call is the same for every network
    # graphs of networks: tests/export; here each task and each network once
    if name not in ("export torch", "export onnx") or EXPORTED[task] == network
]


@pytest.mark.parametrize(("trained", "name"), CELLS, indirect=["trained"])
def test_a_command_works_or_says_in_a_sentence_that_it_does_not(name: str, trained: Trained, cli: Cli) -> None:
    result = call(cli, name, trained)
    assert result.code in (0, 2), result.err
    if result.code == 2:
        assert result.err.startswith("Error: ")
        assert len(result.err.splitlines()) == 1, result.err
    elif name.endswith("--json"):
        json.loads(result.out)
    command = name.split()[0]
    refused = name.endswith("--coverage") and trained.task not in AS_CLASSES
    refused |= name.endswith("--poses") and trained.network == "no capsules"
    if refused:
        assert result.code == 2, name
    elif command in ("evaluate", "predict", "curves", "datasets") or name in ("export folder", "resume"):
        assert result.code == 0, result.err
    if command in ("routing", "perturb", "robustness", "probe", "detect", "explore") and trained.task not in AS_CLASSES:
        able = "classes or ordinal or objects" if command == "explore" else "classes or ordinal"
        assert f"works for the task {able}; this network was trained for the " in result.err
        assert result.err.endswith(f"task {trained.task}\n")


def test_words_and_units_are_those_of_the_task(trained: Trained, cli: Cli) -> None:
    epoch = next(line for line in trained.said if line.startswith("epoch "))
    table = call(cli, "evaluate", trained).out
    first = next(line for line in trained.said if line.startswith("Images: "))
    summary = read_json(trained.folder / "summary.json", "summary")
    if trained.task == "regression":
        assert first.endswith(" 1 number")
        assert "%" not in epoch
        assert "train squared error 1." in epoch
        assert table.count("R²") == 1
        assert "%" not in table
        assert "(variances of the training targets)" in table
    else:
        assert first.endswith({"ordinal": " 3 grades"}.get(trained.task, f" 3 {trained.task}"))
        assert f"train {100 * read_metrics(trained)['train_accuracy']:.2f}%" in epoch
    if trained.task not in AS_CLASSES:
        assert not any("class" in line for line in trained.said)
        assert "class" not in str(summary["warning"])
    if trained.task == "ordinal":
        assert all(word in table for word in ("Kappa", "quadratic weights", "MAE", "grade", "true grades down"))
        assert "class" not in table


def read_metrics(run: Trained) -> dict[str, float]:
    header, line = (run.folder / "metrics.csv").read_text().splitlines()
    return dict(zip(header.split(","), (float(cell or "nan") for cell in line.split(",")), strict=True))


@pytest.mark.parametrize("trained", [(task, "decoder") for task in OF_IMAGES], ids="-".join, indirect=True)
def test_curves_have_the_unit_of_the_task(trained: Trained, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    from torchcaps.analysis import Curves

    figures = Curves.figures
    words: list[str] = []

    def read(curves: Curves) -> Any:
        found = figures(curves)
        words.extend(text.get_text() for axes in found[""].axes for text in (axes.yaxis.label, axes.title))
        words.extend(axes.get_title(loc="left") for axes in found[""].axes)
        return found

    monkeypatch.setattr(Curves, "figures", read)
    assert call(cli, "curves", trained).code == 0
    units = {
        "classes": "% of the images",
        "ordinal": "% of the images",
        "labels": "% of the labels",
        "regression": "variances of the training targets",
    }
    assert units[trained.task] in words
    assert ("Squared error" if trained.task == "regression" else "Error") in words


@pytest.mark.parametrize("trained", [(task, "no decoder") for task in OF_IMAGES], ids="-".join, indirect=True)
def test_the_model_card_has_the_words_of_the_task(trained: Trained, cli: Cli) -> None:
    assert call(cli, "export folder", trained).code == 0
    card = Path("folder/README.md").read_text()
    words = {
        "classes": (
            "with 3 classes;",
            "| test error | test accuracy |",
            "type: accuracy",
            "its 3 classes for any image",
        ),
        "ordinal": (
            "with 3 grades;",
            "| test error | test accuracy |",
            "type: accuracy",
            "its 3 grades for any image",
        ),
        "labels": (
            "with 3 labels;",
            "| test error | test labels right |",
            "type: accuracy",
            "its 3 labels for any image",
        ),
        "regression": (
            "with 1 number;",
            "| test squared error | epoch |",
            "type: mse",
            "predicts its 1 number for any image",
        ),
    }
    for each in words[trained.task]:
        assert each in card
    if trained.task != "classes":
        assert "classes" not in card.replace("--task", "")


def test_curves_of_several_tasks_are_refused(files: Path, cli: Cli, tmp_path: Path) -> None:
    for task in ("labels", "regression"):
        config = tiny_config(files / f"{task}.npz", task=task, epochs=1, max_shift=0)
        train(config, tmp_path / task, progress=Lines(), figures=False)
    result = cli("curves", tmp_path / "labels", tmp_path / "regression", "--figure", "c.png")
    assert result.code == 2
    assert "runs of different tasks have no common error to draw" in result.err


@pytest.mark.parametrize("trained", [(task, "decoder") for task in OF_IMAGES], ids="-".join, indirect=True)
def test_figures_of_a_run_are_those_of_its_task(trained: Trained) -> None:
    of_classes = {"confusion", "reconstructions", "perturbation"}
    own = {"classes": of_classes, "ordinal": of_classes, "labels": {"roc"}, "regression": {"numbers"}}
    drawn = {file.stem for file in (trained.folder / "figures").glob("*.png")}
    assert {"curves", "samples", *own[trained.task]} <= drawn
    assert not drawn & set().union(*(names for names in own.values() if names != own[trained.task]))


def test_a_perfect_network_has_learned_something(tmp_path: Path) -> None:
    """Validation images without one of the classes, and uneven training classes."""
    rng, labels = np.random.default_rng(0), np.repeat([0, 1, 2], [90, 30, 20])
    images = rng.integers(0, 60, (140, SIZE, SIZE))
    for image, label in zip(images, labels, strict=True):
        image[3 + 5 * label : 6 + 5 * label, 2:16] += 190
    images, chosen = images.astype(np.uint8), np.flatnonzero(labels != 1)[::5]
    arrays = {"x": images, "y": labels, "x_test": images, "y_test": labels}
    np.savez(tmp_path / "own.npz", x_val=images[chosen], y_val=labels[chosen], **arrays)
    options = {"epochs": 8, "learning_rate": 5e-3, "max_shift": 0, "select": "balanced-accuracy"}
    config = tiny_config(tmp_path / "own.npz", **options).replace({"validation_size": None})
    summary = train(config, tmp_path / "run", progress=Lines(), figures=False)
    assert summary["validation"]["best"]["balanced_accuracy"] > 0.9
    assert summary["warning"] is None
