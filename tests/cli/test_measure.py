"""``torchcaps robustness``, ``probe`` and ``detect``."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cli_support import Cli
from torchcaps.analysis import accuracy_curve, distance_ratios, fit_detector
from torchcaps.files import read_json, write_json
from torchcaps.models import create_model
from torchcaps.training import load_run

FEW, WEAK = ("--limit", "20"), ("--epsilons", "0,0.2")
QUICK = (*FEW, *WEAK, "--angles=-30,0", "--steps", "2")


def test_robustness_shows_what_the_library_computes(cli: Cli, run_folder: Path) -> None:
    result = cli("robustness", run_folder, *QUICK)
    assert (result.code, result.err.splitlines()) == (0, ["run: rotation", "run: fgsm", "run: pgd"])
    assert result.out.startswith("run: the first 20 test images of digits\n\nRotation: accuracy")
    (found,) = cli.json("robustness", run_folder, *QUICK)
    run = load_run(run_folder)
    images = run.dataset().test.take(20)
    for each, strengths in zip(found["curves"], ((-30, 0), (0, 0.2), (0, 0.2)), strict=True):
        wanted = accuracy_curve(run.model, images, each["kind"], strengths, steps=2)
        assert (each["strengths"], each["accuracy"]) == (list(wanted.strengths), list(wanted.accuracy))
    (found,) = cli.json("robustness", *QUICK)
    assert (found["run"], found["data"], len(found["curves"])) == ("compact", "digits", 3)


def test_rotated_images_are_filled_as_in_training(
    cli: Cli, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default as the recipe of the run says, with --fill as the user says."""
    trained = tmp_path / "edge"
    shutil.copytree(run_folder, trained)
    config = read_json(trained / "config.json", "configuration")
    config["recipe"]["fill"] = "edge"
    write_json(trained / "config.json", config)
    rotation, filled = (*FEW, "--kind", "rotation", "--angles=15"), []
    for words in ([run_folder], [trained], [trained, "--fill", "zeros"], [run_folder, "--fill", "edge"], []):
        (found,) = cli.json("robustness", *words, *rotation)
        filled.append(found["curves"][0]["fill"])
    assert filled == ["zeros", "edge", "zeros", "edge", "zeros"]
    assert "Rotation, filled with the edge: accuracy" in cli("robustness", trained, *rotation).out
    seen: list[str] = []
    monkeypatch.setattr("torchcaps.analysis.with_affine_factors", lambda images, fill, **_: seen.append(fill) or images)
    for words in ([run_folder], [trained], [trained, "--fill", "zeros"]):
        cli("probe", *words)
    assert seen == ["zeros", "zeros", "edge", "edge", "zeros", "zeros"]


def test_networks_are_compared_side_by_side(cli: Cli, run_folder: Path, cnn_folder: Path) -> None:
    options = (*FEW, *WEAK, "--kind", "fgsm", "--objective", "scores", "--data", "digits")
    result = cli("robustness", run_folder, cnn_folder, *options, "--figure", "both.png")
    assert result.code == 0, result.err
    assert result.out.startswith("the first 20 test images of digits\n\nFGSM on the scores: accuracy")
    assert result.out.splitlines()[3].split()[-2:] == ["run", "cnn"]


def test_networks_are_probed_side_by_side(cli: Cli, run_folder: Path, cnn_folder: Path) -> None:
    out = cli.out("probe", run_folder, cnn_folder, "--data", "digits", "--limit", "200")
    assert "run: fitted and evaluated on 200 training and 100 test images of digits" in out
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows if len(row) == 7] == ["pose", "pixels", "features", "pixels"]
    (found,) = cli.json("probe", run_folder, "--limit", "200", "--seed", "4")
    assert (found["data"], found["fitted"], found["held_out"]) == ("digits", 200, 100)
    assert set(found["probes"][0]["r2"]) == {"rotation", "scale", "shear", "shift right", "shift down"}


def test_what_is_detected(cli: Cli, run_folder: Path, cnn_folder: Path) -> None:
    options = ("--against", "digits", "--limit", "60", "--steps", "2", "--epsilons", "0.1,0.2")
    result = cli("detect", run_folder, *options)
    assert (result.code, result.err.splitlines()[0]) == (0, "FGSM, ε = 0.1")
    assert sum("ε" in line for line in result.out.splitlines()) == 2 * 3
    found = cli.json("detect", run_folder, *options)
    assert (found["detector"]["measure"], found["data"]) == ("reconstruction", "digits")
    run = load_run(run_folder)
    data = run.dataset()
    ratios, _ = distance_ratios(run.model, data.test.take(60).images, fit_detector(run.model, data.validation))
    assert found["found"][0]["detected"] == int((ratios > 1).sum())
    without_decoder = cli("detect", cnn_folder, "--data", "digits", "--limit", "20", "--steps", "1")
    assert "1 minus the highest score" in without_decoder.out


def test_a_folder_of_two_meanings_is_read_for_the_task_that_is_named(cli: Cli, run_folder: Path) -> None:
    random = np.random.default_rng(0)
    for name, most in (("scans", 256), ("seen", 2)):
        Path("odd", name).mkdir(parents=True)
        for n in range(20):
            pixels = random.integers(0, most, (28, 28)).astype(np.uint8)
            Image.fromarray(pixels).save(Path("odd", name, f"{n}.png"))
    words = ("detect", run_folder, "--limit", "20", "--steps", "1", "--against", "folder:odd")
    assert "set --task pixels if they are the masks of scans/" in cli(*words).err
    for task, images in (("pixels", 4), ("classes", 8)):  # a fifth
        found = cli.json(*words, "--task", task)["found"]
        assert [each["num_images"] for each in found if each["kind"] == "folder:odd"] == [images]
    refused = cli("detect", run_folder, "--task", "pixels")
    assert (refused.code, "--task is for the data sets of --against" in refused.err) == (2, True)


def test_detection_ends(cli: Cli, run_folder: Path) -> None:
    """Of images that are all alike, of which an attack cannot move one, and of a network with shared matrices."""
    np.savez("alike.npz", x=np.full((300, 28, 28), 90, np.uint8), y=np.arange(300) % 10)
    create_model("aff-capsnet", (1, 28, 28), 10, conv_channels=8, primary_types=2).save_pretrained("net")
    for words in ((run_folder, "--data", "npz:alike.npz"), ("net", "--data", "digits", "--steps", "5")):
        assert "adaptive PGD, ε = 0.1" in cli("detect", *words, "--limit", "10").out
