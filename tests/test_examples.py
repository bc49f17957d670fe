"""The examples run, and print what their runs measured."""

from __future__ import annotations

import importlib.util
import json
import statistics
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchcaps.training import read_config

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = ("conv_channels=8", "primary_types=2", "capsule_dim=4", "decoder=false", "batch_size=16", "validation_size=12")
SMALL = [word for field in TINY for word in ("--set", field)]


def example(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bars(tmp_path: Path) -> str:
    """18×18 images of three classes: a bar on top, in the middle, or at the bottom, in noise."""
    rng = np.random.default_rng(0)
    labels = np.arange(90) % 3
    images = rng.integers(0, 80, (90, 18, 18))
    for image, label in zip(images, labels, strict=True):
        image[3 + 5 * label : 6 + 5 * label, 2:16] += 150
    np.savez(tmp_path / "bars.npz", x=images.astype(np.uint8), y=labels)
    return f"npz:{tmp_path / 'bars.npz'}"


def test_compare_routing(bars: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare = example("compare_routing")
    out = tmp_path / "runs"
    compare.main(["--data", bars, "--epochs", "2", "--seeds", "0", "1", "--out", str(out), *SMALL])
    printed = capsys.readouterr().out

    names = ["no routing", *(f"{n} over {axis}" for n in (1, 2, 3, 4) for axis in ("outputs", "inputs"))]
    runs = sorted(folder.name for folder in out.iterdir() if folder.is_dir())
    assert runs == sorted(f"{name.replace(' ', '-')}-seed{seed}" for name in names for seed in (0, 1))
    for name in names:
        percent = []
        for seed in (0, 1):
            folder = out / f"{name.replace(' ', '-')}-seed{seed}"
            config = read_config(folder / "config.json")
            iterations, _, axis = ("0 over outputs" if name == "no routing" else name).split()
            assert (config.model.num_iterations, config.model.softmax_over) == (int(iterations), axis)
            assert (config.seed, config.recipe.epochs, config.model.conv_channels) == (seed, 2, 8)
            percent.append(100 * json.loads((folder / "summary.json").read_text())["test"]["best"]["accuracy"])
        (line,) = [line for line in printed.splitlines() if line.startswith(name + " ")]
        assert f" {statistics.mean(percent):.2f} ± {statistics.stdev(percent):.2f} " in line
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_by_hand() -> None:
    compare = example("compare_routing")
    lines = compare.table(
        {compare.Setting(3, "inputs"): [0.9, 0.92, 0.94], compare.Setting(0, "outputs"): [0.5]}
    ).splitlines()
    assert lines[1].split() == ["3", "over", "inputs", "92.00", "±", "2.00", "3"]
    assert lines[2].split() == ["no", "routing", "50.00", "1"]


def test_every_number_of_iterations_has_both_axes() -> None:
    settings = example("compare_routing").settings([3, 0, 1, 3])
    assert [tuple(each) for each in settings] == [
        (0, "outputs"),
        (1, "outputs"),
        (1, "inputs"),
        (3, "outputs"),
        (3, "inputs"),
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--preset", "sabor2017"], 'did you mean "sabour2017"?'),
        (["--preset", "baseline-cnn"], 'there is no field of baseline-cnn "num_iterations"'),
        (["--iterations", "1", "-1"], "num_iterations must be at least 0, got -1"),
        (["--set", "conv_chanels=8"], 'did you mean "conv_channels"?'),
        (["--set", "conv_channels"], "write FIELD=VALUE instead of 'conv_channels'"),
        (["--data", "digit"], 'did you mean "digits"?'),
    ],
)
def test_compare_routing_refuses_in_a_sentence(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        example("compare_routing").main(["--out", str(tmp_path / "runs"), *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [("a=1", 1), ("a=0.5", 0.5), ("a=false", False), ("a=[4, 5]", [4, 5]), ("a=inputs", "inputs"), ("a=b=c", "b=c")],
)
def test_values_of_fields(text: str, value: Any) -> None:
    assert example("compare_routing").override(text) == ("a", value)
