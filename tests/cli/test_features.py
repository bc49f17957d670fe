"""Every command on a network of features without images, from arrays and tables: it works, or one sentence."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from cli_support import Cli
from support import assert_raises
from torchcaps import create_model
from torchcaps.analysis import perturb_capsule, reconstruct
from torchcaps.errors import InputError

N, F = 90, 6
COMMANDS = {
    "evaluate RUN --json": 0,
    "evaluate RUN --out answers.csv": 0,
    "evaluate RUN --figure e.png": 0,
    "evaluate RUN --coverage 0.9": 0,
    "evaluate RUN --data csv:TABLE --group": 2,
    "predict RUN TABLE --out t.csv": 0,
    "predict RUN ARRAYS --out a.csv": 0,
    "predict RUN TABLE --poses p.npz": 0,
    "predict RUN TABLE --coverage 0.9 --json": 0,
    "predict RUN TABLE --invert": 2,
    "predict RUN TABLE --figure f.png": 2,
    "predict RUN TABLE --group P": 2,
    "predict RUN image.png": 2,
    "predict RUN no.csv": 2,
    "curves RUN --figure c.png": 0,
    "routing RUN --count 4 --figure r.png": 0,
    "routing RUN --image image.png": 2,
    "perturb RUN": 2,
    "reconstruct RUN": 2,
    "robustness RUN --limit 6 --steps 1 --epsilons 0.1 --angles 10": 2,
    "probe RUN --limit 6": 2,
    "detect RUN --limit 6 --steps 1": 2,
    "explore RUN --save site": 2,
    "datasets csv:TABLE --group patient --json": 0,
    "datasets csv:TABLE": 2,
    "datasets npz:ARRAYS --group patient --fold 1/3": 0,
    "datasets npz:ARRAYS --window 4": 2,
    "datasets npz:ARRAYS --scale 0,1": 2,
    "train --resume RUN --no-figures": 0,
    "train sequences --sequence-kernel 1 --data npz:ARRAYS --find-learning-rate": 0,
    "train compact --data npz:ARRAYS --out other": 2,
    "export RUN --format folder --out folder": 0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table, and the table and the same arrays."""
    folder, rng = tmp_path_factory.mktemp("features"), np.random.default_rng(0)
    labels = np.arange(N) % 3
    features = (rng.normal(size=(3, F)) * 2)[labels] + rng.normal(size=(N, F)) / 2
    np.savez(folder / "f.npz", features=features, y=labels, patient=np.arange(N) // 3)
    rows = [f"P{n // 3},class{labels[n]}," + ",".join(map(repr, map(float, features[n]))) for n in range(N)]
    (folder / "f.csv").write_text("\n".join([",".join(["patient", "label", *(f"e{j}" for j in range(F))]), *rows]))
    (folder / "image.png").write_bytes((Path(__file__).parents[2] / "examples/digit.png").read_bytes())
    words = "train sequences --sequence-kernel 1 --sequence-channels 8 --epochs 12 --no-figures --accelerator cpu"
    words += " --group patient --learning-rate 0.02"
    for run, data in (("run", "csv:f.csv"), ("arrays", "npz:f.npz")):
        kind, _, name = data.partition(":")
        result = Cli()(*words.split(), "--data", f"{kind}:{folder / name}", "--out", folder / run)
        assert result.code == 0, result.err
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("run", ["run", "arrays"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_works_or_says_why_not(command: str, run: str, folder: Path, cli: Cli) -> None:
    places = {"RUN": folder / run, "TABLE": folder / "f.csv", "ARRAYS": folder / "f.npz"}
    words = command.replace("image.png", str(folder / "image.png"))
    for name, place in places.items():
        words = words.replace(name, str(place))
    result = cli(*words.split())
    expected = COMMANDS[command]
    if run == "arrays" and command.startswith("predict RUN TABLE"):
        expected = 2  # the features of arrays have no names, and the table has other columns beside them
    assert result.code == expected, result.err
    if expected == 2:
        _, error, words = result.err.partition("Error: ")  # after a line about the progress
        assert error
        assert "\n" not in words.strip()
    elif command.endswith("--json"):
        json.loads(result.out)


@pytest.mark.parametrize("analyse", [reconstruct, perturb_capsule])
def test_a_decoder_of_features_draws_nothing(analyse: Callable[..., object]) -> None:
    network = create_model(
        "sequences", in_shape=(F, 1, 1), num_classes=3, decoder=True, backbone={"sequence_kernel": 1}
    )
    images = torch.zeros(1, F, 1, 1)
    assert_raises(InputError, analyse, network, images[0] if analyse is perturb_capsule else images, say="6 features")


def test_answers_are_those_of_the_rows(folder: Path, cli: Cli) -> None:
    answers = cli.json("predict", folder / "run", folder / "f.csv")
    right = [each["class"] == f"class{n % 3}" for n, each in enumerate(answers)]
    assert sum(right) > 0.9 * N
    assert answers[4]["image"] == f"{folder / 'f.csv'}, line 6"
    assert cli.json("evaluate", folder / "run")["accuracy"] > 0.8
    assert cli.json("predict", folder / "arrays", folder / "f.npz")[3]["image"] == f"{folder / 'f.npz'}[3]"


def test_columns_are_matched_by_name(folder: Path, cli: Cli, tmp_path: Path) -> None:
    header, *rows = (line.split(",") for line in (folder / "f.csv").read_text().splitlines())
    order = [5, 0, 7, 2, 1, 6, 4, 3]
    text = "\n".join(",".join(cells[n] for n in order) for cells in (header, *rows))
    (tmp_path / "other.csv").write_text(text)
    same = cli.json("predict", folder / "run", folder / "f.csv")
    other = cli.json("predict", folder / "run", tmp_path / "other.csv")
    for one, two in zip(same, other, strict=True):
        assert one["lengths"] == pytest.approx(two["lengths"], abs=1e-6)
    (tmp_path / "bare.csv").write_text(text.replace("patient", "e9").replace("P", ""))
    words = ("evaluate", folder / "run", "--split", "all", "--data")
    result = cli(*words, f"csv:{tmp_path / 'bare.csv'}")
    assert result.code == 2
    assert "has the channels e3, e9, e5, e0, e4, e2, e1; the network of" in result.err
    without = "\n".join(",".join(cells[n] for n in order if n) for cells in (header, *rows))
    (tmp_path / "bare.csv").write_text(without)
    found = cli.json(*words, f"csv:{tmp_path / 'bare.csv'}")
    arrays = cli.json(*words, f"npz:{folder / 'f.npz'}", "--by-number")
    assert found["accuracy"] == arrays["accuracy"] > 0.9
    assert found["loss"] == pytest.approx(arrays["loss"], rel=1e-4)


@pytest.mark.slow
def test_an_exported_network_answers_rows(folder: Path, cli: Cli) -> None:
    pytest.importorskip("onnxruntime")
    assert cli("export", folder / "run", "--format", "onnx", "--out", "m.onnx").code == 0
    exported, own = (cli.json("predict", each, folder / "f.csv") for each in ("m.onnx", folder / "run"))
    for one, two in zip(exported, own, strict=True):
        assert one["lengths"] == pytest.approx(two["lengths"], abs=1e-4)
    assert cli("export", folder / "run", "--format", "torch", "--out", "m.pt2").code == 0


def test_without_names_the_order_of_columns_decides_and_it_is_said(folder: Path, cli: Cli, tmp_path: Path) -> None:
    header, *rows = (line.split(",") for line in (folder / "f.csv").read_text().splitlines())
    plain, short = tmp_path / "plain.csv", tmp_path / "short.csv"
    plain.write_text("\n".join(",".join(cells[1:]) for cells in (header, *rows)))  # without patient
    short.write_text("\n".join(",".join(cells[2:]) for cells in (header, *rows)).replace("e5", "target"))
    words = "so their order decides: 1 is e0, 2 is e1, 3 is e2, 4 is e3, 5 is e4, 6 is e5"
    for run, data, kind in (("run", folder / "f.npz", "npz"), ("arrays", plain, "csv")):
        which = "the network" if run == "arrays" else str(data)
        for line in (f"predict {folder / run} {data}", f"evaluate {folder / run} --data {kind}:{data} --split all"):
            result = cli(*line.split())
            assert result.code == 0, result.err
            assert f"{which} has no names of features, {words}" in result.err
    same = cli.json("predict", folder / "arrays", folder / "f.npz")
    assert [each["class"] for each in cli.json("predict", folder / "arrays", plain)] == [each["class"] for each in same]
    result = cli("predict", folder / "arrays", short)  # a label is no feature, even if it is a number
    assert result.code == 2
    assert "has 5 features in a row, but the network takes 6" in result.err
    assert "has the column patient, which would be read" in cli("predict", folder / "arrays", folder / "f.csv").err
