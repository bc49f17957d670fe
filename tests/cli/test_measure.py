"""``torchcaps probe`` and ``detect``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchcaps.analysis import fit_detector, judge
from torchcaps.models import create_model
from torchcaps.training import load_run

Cli = Callable[..., Any]


def test_networks_are_probed_side_by_side(cli: Cli, run_folder: Path, cnn_folder: Path) -> None:
    result = cli("probe", run_folder, cnn_folder, "--data", "digits", "--limit", "200", "--figure", "both.png")
    assert (result.code, result.err) == (0, "")
    assert "run: fitted and judged on 200 training and 100 test images of digits" in result.out
    rows = [line.split() for line in result.out.splitlines()]
    assert ["R²", "numbers", "rotation", "scale", "shear", "shift", "right", "shift", "down"] in rows
    assert [row[0] for row in rows if len(row) == 7] == ["pose", "pixels", "features", "pixels"]
    assert sum(row[:1] == ["shuffled"] for row in rows) == 5
    assert Path("both.png").stat().st_size > 1000


def test_probes_for_other_programs(cli: Cli, run_folder: Path) -> None:
    result = cli("probe", run_folder, "--limit", "200", "--json", "--seed", "4")
    (found,) = json.loads(result.out)
    assert (found["run"], found["data"], found["fitted"], found["held_out"]) == (str(run_folder), "digits", 200, 100)
    pose, pixels = found["probes"]
    assert (pose["numbers"], pose["width"], pixels["width"]) == ("pose", 16, 784)
    assert set(pose["r2"]) == set(pose["shuffled"]) == {"rotation", "scale", "shear", "shift right", "shift down"}


def test_the_network_that_comes_along_is_probed(cli: Cli) -> None:
    result = cli("probe", "--limit", "300")
    assert result.code == 0, result.err
    assert result.out.startswith("compact: fitted and judged on 300 training")


def test_what_is_detected(cli: Cli, run_folder: Path) -> None:
    options = ("--against", "digits", "--limit", "60", "--steps", "2", "--epsilons", "0.1,0.2")
    result = cli("detect", run_folder, *options)
    assert (result.code, result.err.splitlines()[0]) == (0, "FGSM, ε = 0.1")
    assert "of 100 validation images" in result.out
    rows = [line.split("  ")[0] for line in result.out.splitlines()]
    assert [row for row in rows if "ε" in row] == [
        f"{name}, ε = {epsilon}" for epsilon in (0.1, 0.2) for name in ("FGSM", "PGD", "PGD that knows")
    ]
    found = json.loads(cli("detect", run_folder, *options, "--json").out)
    assert (found["detector"]["measure"], found["data"]) == ("reconstruction", "digits")
    run = load_run(run_folder)
    data = run.dataset()
    ratios, _ = judge(run.model, data.test.take(60).images, fit_detector(run.model, data.validation))
    assert found["found"][0]["detected"] == int((ratios > 1).sum())
    by_score = json.loads(cli("detect", run_folder, *options, "--measure", "score", "--json").out)
    assert by_score["detector"]["measure"] == "score"


def test_images_that_are_all_alike(cli: Cli, run_folder: Path) -> None:
    """Nothing about them differs, and an attack that cannot move ends at once."""
    np.savez("alike.npz", x=np.full((300, 28, 28), 90, np.uint8), y=np.arange(300) % 10)
    result = cli("detect", run_folder, "--data", "npz:alike.npz", "--limit", "20")
    assert result.code == 0, result.err
    assert "PGD that knows, ε = 0.1" in result.out


def test_a_network_with_shared_matrices(cli: Cli) -> None:
    torch.manual_seed(0)
    options = {"conv_channels": 8, "primary_types": 2}
    create_model("aff-capsnet", (1, 28, 28), 10, **options).save_pretrained("net")
    result = cli("detect", "net", "--data", "digits", "--limit", "10", "--steps", "5")
    assert result.code == 0, result.err
    assert "PGD that knows, ε = 0.1" in result.out


def test_a_network_without_decoder_is_judged_by_its_scores(cli: Cli, cnn_folder: Path) -> None:
    options = ("--data", "digits", "--limit", "20", "--steps", "1")
    result = cli("detect", cnn_folder, *options)
    assert result.code == 0, result.err
    assert "1 less the highest score" in result.out
    assert "needs a decoder" in cli("detect", cnn_folder, *options, "--measure", "reconstruction").err


def test_images_of_other_channels(cli: Cli, run_folder: Path) -> None:
    colours = np.zeros((30, 9, 9, 3), np.uint8)
    np.savez("colours.npz", x=colours, y=np.arange(30) % 3)
    result = cli("detect", run_folder, "--against", "npz:colours.npz")
    assert result.code == 2
    assert "npz:colours.npz has images of 3 channels, but the network takes 1" in result.err


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("detect", ("--epsilons", "2"), "epsilon must be 0 to 1"),
        ("detect", ("--steps", "0"), "--steps"),
        ("detect", ("--against", "no-such-data"), 'no data set "no-such-data"'),
        ("probe", ("--limit", "50"), "at least 10 images of each class"),
        ("probe", ("--figure", "x.txt"), "it must end in .png"),
    ],
)
def test_bad_options(cli: Cli, run_folder: Path, command: str, options: tuple[str, ...], words: str) -> None:
    result = cli(command, run_folder, *options)
    assert result.code == 2
    assert words in result.err
