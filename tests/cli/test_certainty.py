"""Sets of classes, probabilities, tables of answers and poses on the command line."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cli_support import Cli
from tiny_runs import NARROW, run, tiny_config
from torchcaps.analysis import Certainty, fit_certainty, predict
from torchcaps.files import read_json
from torchcaps.training import load_run

SIDE = 18


def write(path: Path, seed: int = 0, test_noise: int = 80) -> Path:
    """Write images with a bar at one of three heights, with groups of test images of their own."""
    rng, classes = np.random.default_rng(seed), np.arange(240) % 3
    images = rng.integers(0, 80, (240, SIDE, SIDE))
    for image, label in zip(images, classes, strict=True):
        image[3 + 5 * label : 6 + 5 * label, 2:16] += 150
    test = images[:60] + np.random.default_rng(99).integers(0, test_noise, (60, SIDE, SIDE)) - 40
    np.savez(path, x=images.astype(np.uint8), y=classes, x_test=test.clip(0, 255).astype(np.uint8), y_test=classes[:60])
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder, runs = tmp_path_factory.mktemp("certainty"), dict[str, Path]()

    def train(task: str) -> Path:
        if task not in runs:
            config = tiny_config(
                write(folder / "x.npz"), task=task, epochs=3, max_shift=0, learning_rate=5e-3, **NARROW
            )
            runs[task] = folder / task
            run(config, runs[task])
        return runs[task]

    return train


@pytest.mark.parametrize("task", ["classes", "ordinal"])
def test_evaluate_covers_and_writes_a_line_for_each_image(
    task: str, trained: Callable[[str], Path], cli: Cli, tmp_path: Path
) -> None:
    out = tmp_path / "answers.csv"
    result = cli("evaluate", trained(task), "--coverage", "0.9", "--out", out, "--json", "--figure", tmp_path / "f.png")
    assert result.code == 0, result.err
    assert (tmp_path / "f.png").exists()
    numbers, lines = json.loads(result.out), list(csv.DictReader(out.open(encoding="utf-8")))
    assert list(lines[0]) == ["file", "truth", "answer", "set", "group", "0", "1", "2"]
    assert len(lines) == numbers["num_images"] == 60
    assert np.mean([line["truth"] == line["answer"] for line in lines]) == pytest.approx(numbers["accuracy"])
    sets = [line["set"].split(" + ") if line["set"] else [] for line in lines]
    covered = np.mean([line["truth"] in held for line, held in zip(lines, sets, strict=True)])
    assert covered == pytest.approx(numbers["covered"])
    assert np.mean(list(map(len, sets))) == pytest.approx(numbers["mean_set_size"])
    assert numbers["calibration_map"] == "logistic"
    assert 0 <= numbers["calibration_error_after"] <= 1
    again = cli("evaluate", trained(task), "--out", out)
    assert (again.code, "exists already" in again.err) == (2, True)


def test_predict_prints_probability_and_set_and_writes_poses(
    trained: Callable[[str], Path], cli: Cli, tmp_path: Path
) -> None:
    data, folder = np.load(trained("classes").parent / "x.npz"), tmp_path / "images"
    folder.mkdir()
    for n in range(3):
        Image.fromarray(data["x"][n]).save(folder / f"{n}.png")
    result = cli("predict", trained("classes"), folder, "--coverage", "0.8", "--poses", tmp_path / "p.npz", "--json")
    assert result.code == 0, result.err
    opened = load_run(trained("classes"))
    assert opened.images.certainty is not None
    expected = predict(opened.model, torch.from_numpy(data["x"][:3, None]))
    sets = opened.images.certainty.sets(expected.scores, 0.8)
    for n, answer in enumerate(json.loads(result.out)):
        assert answer["set"] == [str(j) for j in np.flatnonzero(sets[n])]
        own = opened.images.certainty.probabilities(expected.scores, expected.classes)[n]
        assert answer["probability"] == pytest.approx(own)
    held = np.load(tmp_path / "p.npz", allow_pickle=False)
    assert held["poses"].shape == (3, 3, opened.model.capsule_dim)
    np.testing.assert_allclose(held["lengths"], expected.scores, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(held["poses"], axis=2), held["lengths"], atol=1e-3)
    assert held["names"].tolist() == [str(folder / f"{n}.png") for n in range(3)]
    table = cli(
        "predict", trained("classes"), folder, "--coverage", "0.8", "--out", tmp_path / "t.csv", "--figure", "g.png"
    )
    assert table.code == 0, table.err
    assert Path("g.png").exists()
    assert (tmp_path / "t.csv").read_text().splitlines()[0] == "image,class,unsure,set,0,1,2"


def test_the_last_epoch_has_no_certainty_of_the_best_one(
    trained: Callable[[str], Path], cli: Cli, tmp_path: Path
) -> None:
    """What was measured with other weights is not shown as that of the last ones."""
    folder = tmp_path / "run"
    shutil.copytree(trained("classes"), folder)
    assert load_run(folder, "best").images.certainty is not None
    checkpoint = torch.load(folder / "last.ckpt", weights_only=True)
    name = next(iter(checkpoint["model"]))
    checkpoint["model"][name] += 0.5
    torch.save(checkpoint, folder / "last.ckpt")
    images = load_run(folder, "last").images
    assert (images.certainty, images.calibration) == (None, None)
    refused = cli("evaluate", folder, "--which", "last", "--coverage", "0.9")
    assert (refused.code, "or leave --which last out" in refused.err) == (2, True)


def test_sets_are_measured_on_validation_images_and_never_on_test_images(
    trained: Callable[[str], Path], tmp_path: Path
) -> None:
    """Other test images change nothing of a run's certainty; it is that of the validation images."""
    stored = read_json(trained("classes") / "best" / "classes.json", "classes")["certainty"]
    opened = load_run(trained("classes"))
    data = opened.dataset()
    assert Certainty(**stored) == fit_certainty(opened.model, data.validation)
    assert Certainty(**stored) != fit_certainty(opened.model, data.test)
    config = tiny_config(
        write(tmp_path / "x.npz", test_noise=81), epochs=3, max_shift=0, learning_rate=5e-3, task="classes", **NARROW
    )
    run(config, tmp_path / "other")
    assert read_json(tmp_path / "other" / "best" / "classes.json", "classes")["certainty"] == stored


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("evaluate", "RUN", "--coverage", "1.5"), "--coverage must be above 0 and below 1, got 1.5"),
        (("evaluate", "RUN", "--coverage", "0.9", "--coverage-over", "group"), "have no groups"),
        (("evaluate", "RUN", "--coverage-over", "class"), "--coverage-over refines --coverage, but there is none"),
        (("evaluate", "--coverage", "0.9"), "which this network does not store"),
    ],
)
def test_what_cannot_be_covered_is_said_in_a_sentence(
    words: tuple[str, ...], error: str, trained: Callable[[str], Path], cli: Cli
) -> None:
    result = cli(*(trained("classes") if word == "RUN" else word for word in words))
    assert result.code == 2
    assert error in result.err
