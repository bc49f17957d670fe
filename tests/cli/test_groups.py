"""Groups and folds on the command line: trained, evaluated together, resumed, counted."""

import csv
import re
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
    rows = rows_of("all.csv")
    expected = []
    for run in folds:
        assert cli("evaluate", run, "--out", f"{run.name}.csv").code == 0
        alone = rows_of(f"{run.name}.csv")
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


def test_a_group_has_a_set_of_its_mean_scores_and_poses_name_it(cli: Cli, folds: list[Path]) -> None:
    for n in range(6):
        Image.fromarray(np.full((SIDE, SIDE), 40 * n, np.uint8)).save(f"P{n // 2}-{n}.png")
    files = sorted(Path().glob("P*.png"))[::-1]
    options = ("--group", r"P\d", "--coverage", "0.6", "--coverage-over", "group")
    answers = cli.json("predict", folds[0], *files, *options, "--poses", "p.npz")
    certainty = load_run(folds[0]).images.certainty
    assert certainty is not None
    for answer in answers:
        held = certainty.of_groups().sets(np.array([[*answer["lengths"].values()]]), 0.6)[0]
        assert answer["set"] == [str(j) for j in np.flatnonzero(held)]
        assert "probability" not in answer, "it was measured for single images"
    poses = np.load("p.npz")
    assert list(zip(poses["names"], poses["groups"], strict=True)) == [(str(each), each.name[:2]) for each in files]
    assert len(poses["poses"]) == 6


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
    rows = rows_of("answers.csv")
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["records", "components"])
def test_numbers_that_are_no_pixels_get_no_answer_as_a_picture(
    cli: Cli, kind: str, records: Path, field: str, tmp_path: Path
) -> None:
    """An image file of the same shape would get an answer without a sense, and the explorer would show bytes of it."""
    run = tmp_path / "run"
    if kind == "records":
        shutil.copytree(records / "run", run)
    else:
        first = dict(np.load(field.removeprefix("scene:")))
        first["cube"] = first["cube"][..., :3]
        np.savez(tmp_path / "three.npz", **first)
        data = ("--data", f"scene:{tmp_path / 'three.npz'}", "--patch", "5", "--pca", "3")
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


@pytest.fixture(scope="module")
def scene_run(cli: Cli, field: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("scenes") / "run"
    options = ("--pca", "3", "--patch", "5", "--epochs", "3", "--no-figures", "--no-decoder", "--accelerator", "cpu")
    done = cli("train", "compact-shared", "--data", field, *options, "--out", run)
    assert done.code == 0, done.err
    return run


def networks(cli: Cli, run: Path) -> list[Path]:
    """Return a run, the folder that shares its network, and its ONNX file."""
    for form, file in (("folder", "saved"), ("onnx", "m.onnx")):
        done = cli("export", run, "--format", form, "--out", file)
        assert done.code == 0, done.err
    assert re.search(
        r"torchcaps predict \S+ (records.npz|scene:cube.npz)\n", Path("saved/README.md").read_text("utf-8")
    )
    return [run, Path("saved"), Path("m.onnx")]


def rows_of(path: str) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(path).read_text("utf-8").splitlines()))


@pytest.mark.slow
def test_records_without_labels_get_the_answers_of_evaluate(cli: Cli, records: Path) -> None:
    longer = dict(np.load(records / "longer.npz"))
    np.savez("new.npz", x=longer["x"], lengths=longer["lengths"])
    words = ("--data", f"npz:{records / 'longer.npz'}", "--split", "all", "--out", "windows.csv")
    assert cli("evaluate", records / "run", *words).code == 0
    scores = [(row["record"], [float(row[c]) for c in "012"]) for row in rows_of("windows.csv")]
    means = np.array([np.mean([each for record, each in scores if record == f"x[{n}]"], 0) for n in range(9)])
    for network in networks(cli, records / "run"):
        for name in ("new.npz", "npz:new.npz"):
            answers = cli.json("predict", network, name)
            assert [each["image"] for each in answers] == [f"new.npz[{n}]" for n in range(9)]
            assert np.array([[*each["lengths"].values()] for each in answers]) == pytest.approx(means, abs=2e-4)
            assert "probability" not in answers[0], "it was measured on windows"
    pairs = cli.json("predict", records / "run", "new.npz", "--group", r"\[(\d)\]")
    assert [each["group"] for each in pairs] == [str(n) for n in range(9)]
    for options in (("--poses", "p.npz"), ("--coverage", "0.9"), ("--invert",)):
        assert cli("predict", records / "run", "new.npz", *options).code == 2


@pytest.mark.slow
def test_a_scene_without_labels_gets_the_map_of_evaluate(cli: Cli, field: str, scene_run: Path) -> None:
    arrays = dict(np.load(field.removeprefix("scene:")))
    np.savez("new.npz", cube=arrays["cube"])
    data = ("--data", field.replace("/field", "/./field"), "--split", "all")
    assert cli("evaluate", scene_run, *data, "--out", "e.csv").code == 0
    expected, names = np.zeros((40, 40), np.uint8), arrays["class_names"].tolist()
    for row in rows_of("e.csv"):
        expected[int(row["row"]), int(row["column"])] = 1 + names.index(row["answer"])
    for number, network in enumerate(networks(cli, scene_run)):
        for name in (f"{number}.npy", f"{number}.png"):
            done = cli("predict", network, "scene:new.npz", "--out", name)
            assert done.code == 0, done.err
        assert (np.load(f"{number}.npy") != expected).mean() < 0.002, "numbers of the labels, up to ties"
        assert np.array_equal(np.asarray(Image.open(f"{number}.png")), np.load(f"{number}.npy"))
    shares = cli.json("predict", scene_run, "new.npz")[0]["shares"]
    assert list(shares.values()) == [(np.load("0.npy") == j).mean() for j in (1, 2, 3)]
    for options in (("--coverage", "0.9"), ("--poses", "p.npz"), ("--out", "x.tif")):
        assert cli("predict", scene_run, "new.npz", *options).code == 2
    Path("other").mkdir()
    shutil.copy("new.npz", "other")
    done = cli("predict", scene_run, "new.npz", "other/new.npz", "--out", "maps")
    assert (done.code, "would both be maps/new.npy" in done.err) == (2, True), done.err
    assert cli("predict", scene_run, "new.npz", "--figure", "m.png").code == 0


def test_scenes_are_counted(cli: Cli, field: str) -> None:
    loaded = cli("datasets", field, "--patch", "5", "--json")
    assert '"groups"' in loaded.out
    for words, said in ((("--patch", "4"), "--patch"), (("--pca", "9"), "--pca"), (("--window", "9"), "--window")):
        done = cli("datasets", field, *words)
        assert (done.code, said in done.err) == (2, True), done.err
