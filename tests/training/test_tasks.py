"""Labels and numbers, from the file to the prediction; a learning rate is found; files are read as they are used."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from support import assert_close, assert_raises
from tiny_runs import NARROW, save_image, tiny_config
from torchcaps import create_model, fit
from torchcaps.analysis import TargetEvaluation, evaluate, predict, reconstruct
from torchcaps.cli import main
from torchcaps.datasets import ImageFiles, load_dataset
from torchcaps.errors import InputError
from torchcaps.export import describe_run, export_onnx
from torchcaps.models import load_pretrained
from torchcaps.training import Progress, Recipe, learning_rates, load_run, train

CNN: dict[str, Any] = {"channels": (8, 8), "hidden": (16,), "pool": 2, "dropout": 0.0}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """18×18 images with a bar at the top, at the bottom, both or neither (labels); or one at a height (regression)."""
    rng = np.random.default_rng(0)
    labels, heights = rng.integers(0, 2, (300, 2)), rng.integers(2, 15, 300)
    two, one = rng.integers(0, 60, (2, 300, 18, 18))
    for n in range(300):
        two[n, 3:6] += 150 * labels[n, 0]
        two[n, 12:15] += 150 * labels[n, 1]
        one[n, heights[n] - 1 : heights[n] + 2] += 150
    folder = tmp_path_factory.mktemp("tasks")
    np.savez(folder / "labels.npz", x=two.astype(np.uint8), y=labels, class_names=np.array(["top", "bottom"]))
    np.savez(folder / "regression.npz", x=one.astype(np.uint8), y=1000 + 10.0 * heights)
    return lambda task: folder / f"{task}.npz"


@pytest.fixture(scope="module", params=["sabour2017", "baseline-cnn"])
def runs(request: pytest.FixtureRequest, file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of each task."""
    out, sizes = tmp_path_factory.mktemp("runs"), NARROW if request.param == "sabour2017" else CNN
    for task in ("labels", "regression"):
        given: dict[str, Any] = {"epochs": 12, "learning_rate": 5e-3, "max_shift": 0, "validation_size": 40}
        config = tiny_config(file(task), request.param, task=task, **(given | sizes))
        train(config, out / task, progress=Progress(), figures=task == "labels")
    return out


@pytest.mark.slow
def test_labels_are_learned_judged_and_predicted(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = load_run(runs / "labels")
    assert (run.model.task, run.images.task, run.class_names) == ("labels", "labels", ("top", "bottom"))
    found = evaluate(run.model, run.dataset().test, class_names=run.class_names)
    assert isinstance(found, TargetEvaluation)
    assert found.accuracy > 0.9
    for row in found.rows:
        assert row["auroc"] > 0.95
        assert row["average_precision"] > 0.9
    assert found.accuracy == pytest.approx(((found.scores > 0.5) == found.targets).mean())
    assert set(found.figures()) == {""}
    assert found.to_dict()["mean_auroc"] == pytest.approx(np.mean([row["auroc"] for row in found.rows]))

    test = run.dataset().test
    image = runs / "both.png"
    Image.fromarray(test.images[test.labels.sum(1) == 2][0, 0].numpy()).save(image)
    assert main(["predict", str(runs / "labels"), str(image), "--json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)
    assert said["labels"] == ["top", "bottom"]
    assert main(["evaluate", str(runs / "labels")]) == 0
    assert "AUROC" in capsys.readouterr().out


@pytest.mark.slow
def test_numbers_are_learned_judged_and_predicted(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = load_run(runs / "regression")
    test = run.dataset().test
    found = evaluate(run.model, test)
    assert isinstance(found, TargetEvaluation)
    assert found.accuracy > 0.7
    (row,) = found.rows
    assert row["rmse"] == pytest.approx(np.sqrt(np.mean((found.scores - found.targets) ** 2)), rel=1e-4)
    assert row["mae"] < 20
    assert abs(run.model.target_mean.item() - 1085) < 20
    again = predict(load_pretrained(runs / "regression/best"), test.images)
    assert np.allclose(again.scores, found.scores, rtol=1e-4)

    image = runs / "bar.png"
    Image.fromarray(test.images[0, 0].numpy()).save(image)
    out = runs / "found.csv"
    assert main(["predict", str(runs / "regression"), str(image), "--out", str(out)]) == 0
    with out.open(newline="") as lines:
        (line,) = csv.DictReader(lines)
    assert float(line["0"]) == pytest.approx(float(found.scores[0, 0]), abs=0.01)
    summary = json.loads((runs / "regression/summary.json").read_text())
    assert (summary["task"], summary["calibration"], summary["warning"]) == ("regression", None, None)


def test_the_decoder_draws_what_there_is(file: Callable[[str], Path]) -> None:
    images = load_dataset(f"npz:{file('labels')}").test.images[:4].float() / 255
    network = create_model("sabour2017", (1, 18, 18), 2, task="labels", **NARROW).eval()
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    output = network(images, rows)
    assert_close(output.reconstruction, network.decode(output.capsules * rows.unsqueeze(2)))
    without = network(images)
    assert_close(without.reconstruction, network.decode(output.capsules * (output.scores > 0.5).unsqueeze(2)))
    network = create_model("sabour2017", (1, 18, 18), 1, task="regression", **NARROW).eval()
    assert_close(network(images).reconstruction, network.decode(network(images).capsules))


def test_tasks_that_do_not_fit(file: Callable[[str], Path], bars: Path, runs: Path, tmp_path: Path) -> None:
    for data, task, words in (
        (file("labels"), "classes", 'set task="labels" (--task labels)'),
        (bars, "labels", 'set task="classes" (--task classes)'),
        (file("regression"), "labels", 'set task="regression" (--task regression)'),
    ):
        config = tiny_config(data, task=task)
        assert_raises(InputError, train, config, tmp_path / "no", progress=Progress(), say=words)
    run = load_run(runs / "labels")
    if run.model.has_capsules:
        assert_raises(InputError, reconstruct, run.model, run.dataset().test.images, say="trained for the task labels")
    assert_raises(
        InputError, export_onnx, run.model, tmp_path / "x.onnx", describe_run(run), say="works for the task classes"
    )
    np.savez(tmp_path / "odd.npz", x=np.zeros((9, 18, 18), np.uint8), y=np.full((9, 2), 7))
    assert_raises(InputError, load_dataset, f"npz:{tmp_path / 'odd.npz'}", say="zeros and ones, (N, L)")


# ---- a learning rate, and data that are read as they are used


@pytest.mark.slow
def test_the_learning_rate_that_is_found_is_one_that_learns(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # elsewhere there may be runs of one's own
    config = tiny_config(bars)
    found = learning_rates(config)
    assert 1e-5 < found.suggestion < 0.3
    least = min(range(len(found.rates)), key=lambda n: abs(found.rates[n] - 10 * found.suggestion))
    assert found.losses[least] == min(found.losses)
    assert found.rates == learning_rates(config).rates
    words = [f"--{name}" for name in ("conv-channels", "primary-types", "capsule-dim", "decoder-hidden")]
    options = [text for pair in zip(words, ("8", "2", "4", "16"), strict=True) for text in pair]
    assert main(["train", "sabour2017", "--data", f"npz:{bars}", *options, "--find-learning-rate"]) == 0
    assert "--learning-rate" in capsys.readouterr().out
    assert not Path("runs").exists()


def test_image_files_are_read_as_they_are_used(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for n in range(40):
        pixels = rng.integers(0, 60, (20, 20)) + 150 * (n % 2)
        save_image(tmp_path / "photos" / "ab"[n % 2] / f"{n:02}.png", pixels.astype(np.uint8))
    files = ImageFiles(tmp_path / "photos", (1, 18, 18))
    assert (len(files), files.class_names, files[25][1]) == (40, ("a", "b"), 1)
    known = load_dataset(f"folder:{tmp_path / 'photos'}", image_size=18)
    images = {image.numpy().tobytes() for part in (known.train, known.validation, known.test) for image in part.images}
    assert {files[n][0].numpy().tobytes() for n in range(40)} == images
    found = []
    recipe = Recipe(epochs=2, batch_size=8, learning_rate=5e-3)
    for data in (files, DataLoader(files, batch_size=8, num_workers=1)):
        torch.manual_seed(0)
        network = create_model("sabour2017", (1, 18, 18), 2, **NARROW)
        rows = fit(network, data, recipe, accelerator="cpu", progress=Progress())
        found.append([row["train_loss"] for row in rows])
    assert found[0] == found[1]
    assert_raises(InputError, ImageFiles, tmp_path / "photos", (1, 18, 18), "test", say="no folder of test images")
