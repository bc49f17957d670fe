from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torchcaps.analysis.robustness
from torchcaps.analysis import attack_curve, rotation_curve
from torchcaps.training import load_run

Cli = Callable[..., Any]
FEW, WEAK = ("--limit", "20"), ("--epsilons", "0,0.2")
QUICK = (*FEW, *WEAK, "--angles=-30,0", "--steps", "2")


def test_the_table_has_what_the_library_computes(cli: Cli, run_folder: Path) -> None:
    result = cli("robustness", run_folder, *QUICK)
    assert (result.code, result.err.splitlines()[0][:5]) == (0, "run: ")
    run = load_run(run_folder)
    images = run.dataset().test.take(20)
    curves = {
        "Rotation": rotation_curve(run.model, images, angles=(-30, 0)),
        "FGSM": attack_curve(run.model, images, "fgsm", epsilons=(0, 0.2)),
        "PGD": attack_curve(run.model, images, "pgd", epsilons=(0, 0.2), steps=2),
    }
    for part, (title, curve) in zip(result.out.split("\n\n"), curves.items(), strict=False):
        assert part.startswith(f"{title}. Accuracy on the first 20 test images of digits")
        rows = [line.split() for line in part.splitlines()[-2:]]
        assert rows == [
            [f"{strength:g}", f"{100 * accuracy:.2f}", "%"]
            for strength, accuracy in zip(curve.strengths, curve.accuracy, strict=True)
        ]


def test_networks_are_compared_side_by_side(cli: Cli, run_folder: Path, cnn_folder: Path) -> None:
    options = ("--data", "digits", "--kind", "fgsm", "--objective", "scores", "--figure", "both.png")
    result = cli("robustness", run_folder, cnn_folder, *FEW, *WEAK, *options)
    assert (result.code, result.err.splitlines()[0][:5]) == (0, "run: ")
    assert result.out.startswith("FGSM on the scores.")
    assert "Rotation" not in result.out
    heading = result.out.splitlines()[1].split()
    assert heading[-2:] == ["run", "cnn"]
    assert Path("both.png").stat().st_size > 1000


def test_each_network_s_images_are_named_where_they_differ(
    cli: Cli, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run_folder, "other")
    config = Path("other/config.json")
    config.write_text(config.read_text().replace('"limit_test": 100', '"limit_test": 15'))
    titles = []
    real = torchcaps.analysis.robustness.figure_robustness
    keep = lambda networks, title: titles.append(title) or real(networks, title=title)  # noqa: E731
    monkeypatch.setattr("torchcaps.analysis.robustness.figure_robustness", keep)
    options = (*FEW, *WEAK, "--kind", "fgsm", "--figure", "both.png")
    result = cli("robustness", run_folder, "other", *options)
    assert (result.code, result.err.splitlines()[0][:5]) == (0, "run: ")
    words = (
        "FGSM. Accuracy of run on the first 20 test images of digits, of other on the first 15 test images of digits"
    )
    assert words in " ".join(result.out.split())
    assert cli("robustness", run_folder, *options).code == 0
    assert titles == ["run: the first 20 test images of digits\nother: the first 15 test images of digits", None]


def test_json_for_other_programs(cli: Cli, run_folder: Path) -> None:
    options = ("--kind", "pgd", "--steps", "2", "--seed", "3", "--figure", "x.png")
    result = cli("robustness", run_folder, *FEW, *WEAK, "--json", *options)
    (found,) = json.loads(result.out)
    assert found["run"] == str(run_folder)
    assert (found["data"], found["split"], found["which"]) == ("digits", "test", "best")
    (curve,) = found["curves"]
    assert (curve["kind"], curve["strengths"], curve["num_images"]) == ("pgd", [0.0, 0.2], 20)
    assert result.err.splitlines() == ["run: pgd", "wrote x.png"]


def test_the_network_that_comes_along(cli: Cli) -> None:
    (found,) = json.loads(cli("robustness", *QUICK, "--json").out)
    assert (found["run"], found["data"]) == ("compact", "digits")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--angles", "ten"), ["--angles", "ten"]),
        (("--epsilons", "2"), ["epsilon", "2"]),
        (("--kind", "noise"), ["--kind", "noise"]),
        (("--steps", "0"), ["--steps", "0"]),
        (("--seed", "4294967296"), ["seed", "4294967295", "4294967296"]),
        (("--seed", "-1"), ["seed", "-1"]),
        # options that would do nothing
        (("--kind", "fgsm", "--angles", "10"), ["--angles is for rotations", "--kind", "leave it out"]),
        (("--kind", "rotation", "--epsilons", "0.1"), ["--epsilons is for attacks", "leave it out"]),
        (("--kind", "rotation", "--objective", "scores"), ["--objective is for attacks", "leave it out"]),
        (("--kind", "rotation", "--kind", "fgsm", "--steps", "2"), ["--steps is for PGD", "leave it out"]),
        (("--kind", "fgsm", "--seed", "2"), ["--seed is for PGD", "leave it out"]),
    ],
)
def test_bad_options(cli: Cli, run_folder: Path, options: tuple[str, ...], words: list[str]) -> None:
    result = cli("robustness", run_folder, *options)
    assert result.code == 2
    assert all(word in result.err for word in words)


def test_a_run_is_given_once(cli: Cli, run_folder: Path) -> None:
    assert "given once" in cli("robustness", run_folder, run_folder).err
