"""Groups and folds on the command line: trained, evaluated together, resumed, counted."""

import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cli_support import Cli
from torchcaps.files import read_json
from torchcaps.training import load_run

PATIENTS, EACH, SIDE = 9, 8, 18
PATIENT = np.arange(PATIENTS * EACH) % PATIENTS
NARROW = "--conv-channels 8 --primary-types 2 --capsule-dim 4 --no-decoder --max-shift 0 --batch-size 16 --no-figures"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("cells") / "cells.npz"
    images = rng.integers(0, 255, (len(PATIENT), SIDE, SIDE)).astype(np.uint8)
    np.savez(path, x=images, y=PATIENT % 3, patient=PATIENT)
    return f"npz:{path}"


@pytest.fixture(scope="module")
def folds(cli: Cli, data: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The runs of three folds."""
    folder, runs = tmp_path_factory.mktemp("folds"), []
    for k in range(1, 4):
        runs.append(folder / f"fold-{k}")
        options = ("--data", data, "--group", "patient", "--fold", f"{k}/3", "--epochs", "1", "--out", runs[-1])
        done = cli("train", "sabour2017", *NARROW.split(), *options)
        assert done.code == 0, done.err
        assert "Groups: 5 training, 1 validation, 3 test" in done.out
    return runs


def test_runs_of_folds_are_evaluated_together(cli: Cli, folds: list[Path]) -> None:
    alone = [cli.json("evaluate", run) for run in folds]
    together = cli.json("evaluate", *folds)
    assert together["runs"] == alone
    assert set(alone[0]) >= {"run", "which", "data", "split", "accuracy", "confusion"}  # one run: as ever
    assert together["pooled"]["num_images"] == len(PATIENT)  # each image is tested once
    assert together["pooled"]["confusion"] == np.sum([each["confusion"] for each in alone], 0).tolist()
    assert "calibration_error_after" not in together["pooled"]  # each run has probabilities of its own
    for name in ("accuracy", "balanced_accuracy", "error", "loss", "calibration_error_after"):
        values = [each[name] for each in alone]
        assert together["mean"][name] == pytest.approx(np.mean(values))
        assert together["sd"][name] == pytest.approx(np.std(values, ddof=1))
    shown = cli("evaluate", *folds, "--figure", "all.png")
    assert shown.code == 0, shown.err
    assert "\nerror: mean ± standard deviation" in shown.out
    assert "All images of the 3 runs" in shown.out
    assert Path("all.png").exists()


def test_answers_of_several_runs_are_one_table(cli: Cli, folds: list[Path]) -> None:
    done = cli("evaluate", *folds, "--out", "all.csv")
    assert done.code == 0, done.err
    rows = list(csv.DictReader(Path("all.csv").read_text("utf-8").splitlines()))
    expected = []
    for run in folds:
        assert cli("evaluate", run, "--out", f"{run.name}.csv").code == 0
        alone = list(csv.DictReader(Path(f"{run.name}.csv").read_text("utf-8").splitlines()))
        expected += [{"run": run.name, **row} for row in alone]
    assert rows == expected


def test_sets_of_the_runs_of_folds_are_counted_together(cli: Cli, folds: list[Path]) -> None:
    """Each run has sets by its own validation images."""
    options = ("--coverage", "0.6", "--coverage-over", "group")
    alone = [cli.json("evaluate", run, *options) for run in folds]
    together = cli.json("evaluate", *folds, *options)
    assert together["runs"] == alone
    images = [each["num_images"] for each in alone]
    for name in ("covered", "mean_set_size"):
        values = [each[name] for each in alone]
        assert together["pooled"][name] == pytest.approx(np.average(values, weights=images))
        assert together["mean"][name] == pytest.approx(np.mean(values))
    shown = cli.out("evaluate", *folds, *options)
    assert "Covered" in shown
    assert "set size" in shown
    assert "Covered" not in cli.out("evaluate", *folds)


def test_a_run_keeps_its_group_and_fold(cli: Cli, folds: list[Path]) -> None:
    config = read_json(folds[1] / "config.json", "configuration")
    assert (config["group"], config["fold"]) == ("patient", "2/3")
    for option, value in (("--fold", "1/3"), ("--group", "none")):
        done = cli("train", "--resume", folds[1], option, value)
        assert (done.code, option[2:] in done.err) == (2, True)
    assert cli("train", "--resume", folds[1]).code == 0


def test_answers_for_other_data_name_its_groups(cli: Cli, data: str, folds: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other.npz"
    shutil.copy(data.removeprefix("npz:"), other)
    options = ("--data", f"npz:{other}", "--split", "all", "--group", "patient", "--out", tmp_path / "answers.csv")
    assert cli("evaluate", folds[0], *options).code == 0
    rows = list(csv.DictReader((tmp_path / "answers.csv").open(encoding="utf-8")))
    assert [row["group"] for row in rows] == [str(each) for each in PATIENT]
    for data_options in ((), ("--data", data)):
        done = cli("evaluate", folds[0], *data_options, "--group", "patient")
        assert (done.code, "images of the run's own" in done.err) == (2, True), done.err


def test_groups_are_counted(cli: Cli, data: str) -> None:
    counts: Any = cli.json("datasets", data, "--group", "patient", "--fold", "1/3")["loaded"]
    assert counts["groups"] == {"train": 5, "validation": 1, "test": 3}
    assert "groups" in cli("datasets", data, "--group", "patient").out
    assert "\ngroups" not in cli("datasets", data).out
    for words, said in ((("--fold", "7"), "--fold must be K/N"), (("--group", "who"), "no array 'who'")):
        done = cli("datasets", data, *words)
        assert (done.code, said in done.err) == (2, True), done.err
    done = cli("datasets", "--fold", "1/2")
    assert (done.code, "--fold is for one data set" in done.err) == (2, True)


# ---- records and scenes


@pytest.fixture(scope="module")
def records(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on windows of records."""
    folder, rng = tmp_path_factory.mktemp("records"), np.random.default_rng(0)
    for name, count, steps in (("own", 30, 60), ("longer", 9, 100)):
        values = rng.normal(size=(count, 2, steps)).astype(np.float32)
        np.savez(folder / f"{name}.npz", x=values, y=np.arange(count) % 3, lengths=np.full(count, steps))
    options = ("--window", "16", "--stride", "8", "--epochs", "1", "--batch-size", "16", "--no-figures")
    done = cli("train", "sequences", "--data", f"npz:{folder / 'own.npz'}", *options, "--out", folder / "run")
    assert done.code == 0, done.err
    assert "Groups: 21 training, 3 validation, 6 test" in done.out
    return folder


def test_records_are_answered_by_their_windows(cli: Cli, records: Path) -> None:
    own = cli.json("evaluate", records / "run")
    assert (own["num_images"], own["records"]["num_images"]) == (6 * 7, 6)
    assert "One answer for each of 6 records" in cli("evaluate", records / "run").out
    longer = ("--data", f"npz:{records / 'longer.npz'}", "--split", "all")
    assert cli("evaluate", records / "run", *longer, "--out", "answers.csv").code == 0
    rows = list(csv.DictReader(Path("answers.csv").read_text("utf-8").splitlines()))
    places = [(f"x[{n}]", str(start)) for n in range(9) for start in [*range(0, 84, 8), 84]]
    assert [(row["record"], row["start"]) for row in rows] == places
    other = cli.json("evaluate", records / "run", *longer)  # cut like the run's own records
    assert (other["num_images"], other["records"]["num_images"]) == (9 * 12, 9)
    cli.out("export", records / "run", "--format", "folder", "--out", "saved")
    assert cli.json("evaluate", "saved", *longer)["records"] == other["records"]


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("scene") / "field.npz"
    labels = np.indices((40, 40)).sum(0) // 6 % 3 + 1
    cube = rng.normal(size=(40, 40, 6)) + labels[..., None] * np.arange(6)
    np.savez(path, cube=cube.astype(np.float32), labels=labels, class_names=np.array(["oats", "corn", "soy"]))
    return f"scene:{path}"


@pytest.mark.parametrize("options", [(), ("--pca", "3")], ids=["bands", "components"])
def test_a_scene_is_trained_evaluated_and_drawn(cli: Cli, field: str, options: tuple[str, ...]) -> None:
    small = ("--epochs", "1", "--patch", "5", "--batch-size", "64")
    done = cli("train", "compact-shared", "--data", field, *small, *options, "--out", "run")
    assert done.code == 0, done.err
    assert "labelled pixels of" in done.err
    assert Path("run/figures/confusion-map.png").exists()
    values = cli("evaluate", "run", "--json", "--figure", "f.png")
    assert '"kappa"' in values.out
    assert Path("f.png").exists()
    assert Path("f-map.png").exists()
    done = cli("evaluate", "run", "--data", field.replace("field.npz", "./field.npz"), "--split", "all")
    assert done.code == 0, done.err


@pytest.mark.parametrize("kind", ["records", "bands", "components"])
def test_numbers_that_are_no_pixels_get_no_answer_as_a_picture(
    cli: Cli, kind: str, records: Path, field: str, tmp_path: Path
) -> None:
    """An image file of the same shape would get an answer without a sense, and the explorer would show bytes of it."""
    run = tmp_path / "run"
    if kind == "records":
        shutil.copytree(records / "run", run)
    else:
        options = ("--pca", "3") if kind == "components" else ()
        first = dict(np.load(field.removeprefix("scene:")))
        first["cube"] = first["cube"][..., :3]
        np.savez(tmp_path / "three.npz", **first)
        data = ("--data", f"scene:{tmp_path / 'three.npz'}", "--patch", "5", *options)
        done = cli("train", "compact-shared", *data, "--epochs", "1", "--no-figures", "--out", run)
        assert done.code == 0, done.err
    Image.new("RGB", (5, 5)).save(tmp_path / "a.png")
    for form, file in (("folder", "saved"), ("onnx", "m.onnx")):
        assert cli("export", run, "--format", form, "--out", tmp_path / file).code == 0
    for words in (
        ("predict", run, tmp_path / "a.png"),
        ("predict", tmp_path / "saved", tmp_path / "a.png"),
        ("predict", tmp_path / "m.onnx", tmp_path / "a.png"),
        ("routing", run, "--image", tmp_path / "a.png"),
        ("explore", run, "--save", tmp_path / "site"),
    ):
        done = cli(*words)
        assert (done.code, "is for pixels of pictures, but this network" in done.err) == (2, True), done.err
    pca = load_run(run).images.pca
    assert pca is None or [len(row) for row in pca] == [3] * 4  # a mean, and three components
    assert (pca is None) == (kind != "components")


def test_the_components_of_a_run_travel_with_it(cli: Cli, field: str, tmp_path: Path) -> None:
    """Another scene is seen in the components of the run's training pixels, also by a saved network."""
    options = ("--pca", "2", "--patch", "5", "--epochs", "1", "--no-figures", "--no-decoder")
    assert cli("train", "compact-shared", "--data", field, *options, "--out", "run").code == 0
    own = load_run("run").dataset().test
    arrays = dict(np.load(field.removeprefix("scene:")))
    row, column = (own.factors[name].numpy() for name in ("row", "column"))
    labels = np.zeros_like(arrays["labels"])
    labels[row, column] = arrays["labels"][row, column]
    np.savez("other.npz", **arrays | {"labels": labels})
    assert cli("export", "run", "--format", "folder", "--out", "saved").code == 0
    for network in ("run", "saved"):
        other = load_run(network).part("all", "scene:other.npz").images
        assert torch.equal(other.images, own.images[np.lexsort((column, row))])
    np.savez("fewer.npz", **arrays | {"cube": arrays["cube"][..., :3]})
    done = cli("evaluate", "saved", "--data", "scene:fewer.npz", "--split", "all")
    assert (done.code, "has 3 bands, but the components were fitted to 6" in done.err) == (2, True)


def test_warnings_of_several_runs_name_them(cli: Cli, field: str) -> None:
    options = ("--data", field, "--patch", "5", "--epochs", "1", "--batch-size", "64", "--no-figures", "--no-decoder")
    for name, fold in (("one", "1/2"), ("two", "2/2"), ("again", "1/2")):
        assert cli("train", "compact-shared", *options, "--fold", fold, "--out", name).code == 0
    lines = cli("evaluate", "one", "two", "again").err.splitlines()
    names = [line.removeprefix("Warning: ").partition(": ")[0].split(", ") for line in lines]
    assert {n for each in names for n in each} == {"one", "two", "again"}
    assert all(("one" in each) == ("again" in each) for each in names)  # one line for both
    assert len({line.rpartition(": ")[2] for line in lines}) == len(lines)


def test_scenes_are_counted(cli: Cli, field: str) -> None:
    loaded = cli("datasets", field, "--patch", "5", "--json")
    assert '"groups"' in loaded.out
    for words, said in ((("--patch", "4"), "--patch"), (("--pca", "9"), "--pca"), (("--window", "9"), "--window")):
        done = cli("datasets", field, *words)
        assert (done.code, said in done.err) == (2, True), done.err
