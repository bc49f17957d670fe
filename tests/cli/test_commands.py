"""Each command on a tiny run: what it prints is what the library computes, and its figures are pictures."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from own_parts import two_layers
from support import holds
from torchcaps.files import read_json
from torchcaps.models import create_model, get_preset, list_presets

Cli = Callable[..., Any]


def assert_figure(path: str | Path) -> None:
    """A picture of a sensible size that shows something."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.width >= 300
        assert image.height >= 200
        assert np.asarray(image.convert("L")).std() > 5, "an empty picture"


def test_the_assertion_can_fail(tmp_path: Path) -> None:
    Image.new("RGB", (400, 400), "white").save(tmp_path / "empty.png")
    Image.effect_noise((100, 100), 80).save(tmp_path / "small.png")
    assert not any(holds(assert_figure, tmp_path / name) for name in ("empty.png", "small.png"))


def read_rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


# ---- train


def test_train_says_first_what_it_does_and_last_what_to_do_next(cli: Cli, tiny: tuple[str, ...]) -> None:
    result = cli("train", *tiny, "--figures")
    assert (result.code, result.err) == (0, "")
    lines, folder = result.out.splitlines(), Path("runs/first-digits-1")
    assert re.fullmatch(r"Network: first, [\d,]+ parameters", lines[0])
    assert lines[1:4] == [
        "Data: digits",
        "Images: 200 to train on, 100 to validate, 100 to test; 1×28×28, 10 classes",
        "Device: cpu, float32",
    ]
    summary = read_json(folder / "summary.json", "summary")
    assert "Test (100 images)" in result.out
    assert f"{100 * summary['test']['best']['accuracy']:.2f} %" in result.out
    assert f"Run folder  {folder}" in result.out
    for command in ("evaluate", "reconstruct", "perturb"):
        assert f"  torchcaps {command} {folder}\n" in result.out
    assert "confusion.png" in result.out
    for figure in (folder / "figures").iterdir():
        assert_figure(figure)
    assert summary["command"] == " ".join(["torchcaps", "train", *tiny, "--figures"])


def test_a_network_without_decoder_has_nothing_to_perturb(cli: Cli, tiny: tuple[str, ...]) -> None:
    at = tiny.index("--decoder-hidden")
    cropped = ("--crop", "20", "--flip", "--max-rotation", "10")
    result = cli("train", "sabour2017-r3", *tiny[:at], *tiny[at + 2 :], *cropped, "--out", "a folder")
    assert result.code == 0, result.err
    assert "torchcaps evaluate 'a folder'" in result.out
    assert "torchcaps perturb" not in result.out
    assert "Figures" not in result.out
    assert cli("evaluate", "a folder").code == 0


def test_resume_and_a_configuration(cli: Cli, run_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    result = cli("train", "--resume", copy, "--epochs", "3", "--no-figures")
    assert (result.code, result.err) == (0, "")
    assert read_json(copy / "summary.json", "summary")["epochs"] == 3
    assert len((copy / "metrics.csv").read_text().splitlines()) == 4
    assert (copy / "metrics.csv").read_text().startswith((run_folder / "metrics.csv").read_text())
    assert cli("train", "--config", run_folder / "config.json", "--out", "again", "--no-figures").code == 0
    again, first = (read_json(folder / "summary.json", "summary") for folder in (Path("again"), run_folder))
    assert again["test"] == first["test"]


def test_long_paths_are_not_cut(cli: Cli, tiny: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    folder = Path("a-folder-with-a-name", "that-goes-on", "for-longer-than", "the-terminal-is-wide")
    out = cli("train", *tiny, "--out", folder).out
    assert f"Run folder  {folder}\n" in out
    assert f"torchcaps evaluate {folder}\n" in out
    assert cli("evaluate", folder).out.startswith(f"{folder} (best epoch) on the test images of digits\n")


# ---- evaluate


@pytest.mark.parametrize("which", ["best", "last"])
def test_evaluate_finds_what_training_found(cli: Cli, run_folder: Path, which: str) -> None:
    result = cli("evaluate", run_folder, "--which", which, "--json")
    found, summary = json.loads(result.out), read_json(run_folder / "summary.json", "summary")
    assert found["accuracy"] == summary["test"][which]["accuracy"]
    assert found["loss"] == pytest.approx(summary["test"][which]["loss"], rel=1e-5)
    assert (found["num_images"], found["which"], found["split"], found["data"]) == (100, which, "test", "digits")
    half = json.loads(cli("evaluate", run_folder, "--which", which, "--json", "--precision", "bf16").out)
    assert half["loss"] != found["loss"]
    assert half["loss"] == pytest.approx(found["loss"], rel=0.05)


@pytest.mark.parametrize(("split", "images"), [("test", 100), ("validation", 100), ("train", 200)])
def test_evaluate_any_part_of_the_data(cli: Cli, run_folder: Path, split: str, images: int) -> None:
    found = json.loads(cli("evaluate", run_folder, "--split", split, "--json").out)
    assert np.sum(found["confusion"]) == found["num_images"] == images
    if split == "validation":
        best = read_json(run_folder / "summary.json", "summary")["validation"]["best"]
        assert found["accuracy"] == best["accuracy"]


def test_evaluate_prints_every_class_and_the_confusion_matrix(cli: Cli, run_folder: Path) -> None:
    found = json.loads(cli("evaluate", run_folder, "--json").out)
    out = cli("evaluate", run_folder, "--figure", "confusion.png").out
    assert f"Accuracy  {100 * found['accuracy']:.2f} %  ({found['num_correct']} of 100 images right)" in out
    assert f"Loss      {found['loss']:.4f}" in out
    classes, matrix = map(read_rows, out.split("Confusion"))
    for j, row in enumerate(found["confusion"]):
        assert [str(j), str(found["per_class"][j]["images"])] in [each[:2] for each in classes]
        assert [str(j), *(str(number) if number else "·" for number in row)] in matrix
    assert_figure("confusion.png")


def test_evaluate_the_network_that_comes_along_and_a_saved_one(cli: Cli, cnn_folder: Path) -> None:
    judged = cli("evaluate")
    assert judged.out.startswith("compact (comes with torchcaps) on the test images of digits\n")
    assert "trained on the digits of MNIST, a download. These images are digits, which come" in judged.err
    found = json.loads(cli("evaluate", cnn_folder, "--data", "digits", "--json").out)
    assert (found["num_images"], found["data"]) == (360, "digits")


def test_many_classes_are_summed_up(cli: Cli, tmp_path: Path) -> None:
    classes = 25
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "x.npz", x=rng.integers(0, 256, (300, 28, 28), np.uint8), y=np.arange(300) % classes)
    model = create_model("baseline-cnn", num_classes=classes, channels=(2,), hidden=(4,))
    model.save_pretrained(tmp_path / "net")
    Image.fromarray(rng.integers(0, 256, (28, 28), np.uint8)).save(tmp_path / "image.png")
    out = cli("evaluate", "net", "--data", "npz:x.npz").out
    assert "The 10 worst of 25 classes" in out
    assert "Most frequent confusions" in out
    assert "true classes down" not in out
    shown = [line for line in cli("predict", "net", "image.png").out.splitlines() if "unsure" not in line]
    lengths = [float(line.split()[1]) for line in shown[1:11]]
    assert lengths == sorted(lengths, reverse=True)
    assert "and 15 lower ones" in shown[11]


# ---- figures


@pytest.mark.parametrize(
    ("command", "written"),
    [
        ("reconstruct", ["reconstructions"]),
        ("perturb", ["perturbation"]),
        ("routing", ["routing", "routing-statistics"]),
        ("curves", ["curves"]),
    ],
)
def test_figures_go_to_the_run_unless_told(
    cli: Cli, run_folder: Path, tmp_path: Path, command: str, written: list[str]
) -> None:
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    result = cli(command, copy)
    assert (result.code, result.err) == (0, "")
    files = [copy / "figures" / f"{name}.png" for name in written]
    assert [line for line in result.out.splitlines() if line.startswith("wrote")] == [f"wrote {f}" for f in files]
    for file in files:
        assert_figure(file)
    assert cli(command, run_folder, "--figure", "else/where.png").code == 0
    assert_figure("else/where.png")
    assert not (run_folder / "figures").exists()


def test_reconstruct_so_many(cli: Cli, run_folder: Path) -> None:
    few = cli("reconstruct", run_folder, "--count", "7", "--split", "train", "--figure", "a")
    assert "First 7 train images" in few.out
    assert "First 100 test images" in cli("reconstruct", run_folder, "--count", "1000", "--figure", "b.png").out
    heights = [Image.open(name).height for name in ("a.png", "b.png")]
    assert heights[1] > 3 * heights[0]


def test_perturb_options_reach_the_library(cli: Cli, run_folder: Path) -> None:
    from torchcaps.analysis import perturb_capsule, predict
    from torchcaps.training import load_run

    run = load_run(run_folder)
    data, figure = run.dataset(), ("--figure", "x.png")
    options = ["--capsule", "4", "--range", "0.5", "--steps", "3", "--index", "2", "--split", "validation"]
    result = cli("perturb", run_folder, *options, *figure, "--json")
    (found,) = json.loads(result.out)
    wanted = perturb_capsule(run.model, data.validation.images[2], target=4, amplitude=0.5, steps=3)
    assert (found["class"], found["offsets"], len(found["components"])) == ("4", [-0.5, 0, 0.5], 16)
    assert found["score"] == pytest.approx(float(wanted.scores[4]), rel=1e-5)

    classes, labels = predict(run.model, data.test.images).classes, data.test.labels.numpy()
    wrong = int((classes != labels).nonzero()[0][0])
    options = ["--component", "3", "--range", "-0.5,1", "--steps", "4", "--index", "5", "--index", str(wrong), *figure]
    for follow, followed in (("label", labels), ("longest", classes)):
        lines = cli("perturb", run_folder, *options, "--follow", follow).out.splitlines()
        whose = {"label": "the label's", "longest": "the longest"}[follow]
        for line, index in zip(lines, (5, wrong), strict=False):
            assert line.startswith(
                f"Image {index} of the test images of digits, class {labels[index]}: component 3 of capsule "
                f"{followed[index]} ({whose}), length "
            )
    found = json.loads(cli("perturb", run_folder, *options, "--json").out)
    np.testing.assert_allclose(found[0]["offsets"], [-0.5, 0, 0.5, 1], atol=1e-12)
    assert [each["components"] for each in found] == [[3], [3]]


def test_perturb_an_image_file(cli: Cli, run_folder: Path, digit_file: Path) -> None:
    of_file = ["--image", digit_file, "--figure", "x.png"]
    assert cli("perturb", run_folder, *of_file).out.startswith(f"{digit_file}: capsule ")
    result = cli("perturb", run_folder, *of_file, "--component", "0", "--capsule", "9")
    assert result.out.startswith(f"{digit_file}: component 0 of capsule 9, length ")
    assert_figure("x-2.png")


def test_routing_prints_entropy_and_change_of_each_iteration(cli: Cli, run_folder: Path) -> None:
    from torchcaps.analysis import routing_statistics, trace_routing
    from torchcaps.training import load_run

    run = load_run(run_folder)
    images = run.dataset().test.images
    out = cli("routing", run_folder, "--index", "3", "--num-iterations", "2", "--count", "10", "--figure", "x.png").out
    rows = [line.split() for line in out.splitlines() if line[:1].isdigit()]
    trace = trace_routing(run.model, images[3:4], num_iterations=2)
    statistics = routing_statistics(run.model, images[:10], num_iterations=2)
    assert [row[3:] for row in rows[:2]] == [
        [f"{trace.entropy[t, 0]:.3f}", f"{trace.mean_agreement[t, 0]:.4f}"] for t in range(2)
    ]
    assert [row[1:] for row in rows[2:]] == [
        [f"{statistics.entropy[t].mean():.3f}", f"{statistics.mean_agreement[t].mean():.4f}"] for t in range(2)
    ]
    assert "Mean of the first 10 test images of digits" in out
    assert_figure("x-statistics.png")


def test_routing_tells_every_round(cli: Cli, run_folder: Path) -> None:
    from torchcaps.analysis import trace_routing
    from torchcaps.training import load_run

    run = load_run(run_folder)
    trace = trace_routing(run.model, run.dataset().test.images[3:4])
    options = ["--index", "3", "--count", "2", "--figure", "x.png"]
    found = json.loads(cli("routing", run_folder, *options, "--json").out)
    assert found["image"].startswith("Image 3 of the test images of digits, class ")
    assert found["class_names"] == list(run.class_names)
    assert tuple(found["grid"]) == trace.grid
    assert [each["round"] for each in found["rounds"]] == [1, 2, 3]
    for t, each in enumerate(found["rounds"]):
        for name in ("logits", "coupling", "weighted_sum", "capsules", "lengths", "agreement"):
            np.testing.assert_array_equal(np.float32(each[name]), getattr(trace, name)[t, 0], err_msg=name)
    some = ["--input-capsule", "40", "--input-capsule", "2"]
    few = json.loads(cli("routing", run_folder, *options, *some, "--json").out)
    assert (found["input_capsules"], few["input_capsules"]) == (list(range(72)), [40, 2])
    for part, every in zip(few["rounds"], found["rounds"], strict=True):
        assert part["coupling"] == [every["coupling"][40], every["coupling"][2]]
    out = cli("routing", run_folder, *options, *some).out
    table = read_rows(out[out.index("Input capsule 40: type 1, row 0, column 4\n") :])
    first = [trace.logits[0, 0, 40, 0], trace.coupling[0, 0, 40, 0], trace.agreement[0, 0, 40, 0]]
    assert ["1", "0", *(f"{each:z.4f}" for each in first), f"{trace.lengths[0, 0, 0]:.4f}"] in table


def test_any_layer_is_followed(cli: Cli, digit_file: Path) -> None:
    fields = {"conv_channels": 4, "primary_types": 2, "decoder_hidden": (6,)}
    create_model("sabour2017", layers=two_layers(), **fields).save_pretrained("deep")
    options = ("--data", "digits", "--count", "3", "--figure", "x.png")
    result = cli("routing", "deep", *options, "--layer", "1", "--input-capsule", "8")
    assert (result.code, result.err) == (0, "")
    assert "Input capsule 8: type 0, row 1, column 2" in result.out
    inner, last = (json.loads(cli("routing", "deep", *options, *m, "--json").out) for m in (("--layer", "1"), ()))
    assert (inner["layer"], inner["class_names"]) == (1, ["type 0", "type 1", "type 2"])
    assert (inner["grid"], len(inner["input_capsules"]), inner["in_space"]) == ([2, 6, 6], 72, True)
    assert (last["layer"], len(last["class_names"]), last["grid"]) == (2, 10, [3, 4, 4])
    # an image file needs no data, and has no statistics
    result = cli("routing", "deep", "--image", digit_file, "--figure", "file.png")
    assert (result.code, result.err) == (0, "")
    assert_figure("file.png")
    assert not Path("file-statistics.png").exists()


def test_curves_of_several_runs(cli: Cli, run_folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(run_folder, tmp_path / "other" / run_folder.name)
    (young := tmp_path / "young").mkdir()
    result = cli("curves", run_folder, other, young)
    assert (result.code, result.out) == (0, "wrote curves.png\n")
    assert result.err == f"{young} is left out: it holds no metrics.csv, which is written after the first epoch\n"
    assert_figure("curves.png")
    assert cli("curves", run_folder, other).out == "wrote curves-2.png\n"


# ---- presets


def test_presets_are_all_there_with_their_parameters(cli: Cli) -> None:
    out, found = cli("presets").out, json.loads(cli("presets", "--json").out)
    assert [preset["name"] for preset in found] == list_presets()
    assert len(out.splitlines()) <= 45
    rows = {line.split()[0]: " ".join(line.split()) for line in out.splitlines() if line}
    assert set(list_presets()) <= set(rows)
    assert rows["sabour2017"] == "sabour2017 Sabour 2017 8,215,568 0.25 % (mnist)"
    assert rows["torch-notebook"] == "torch-notebook PyTorch notebook 8,215,568"
    assert rows["efficient-capsnet-mnist"] == "efficient-capsnet-mnist Mazzia 2021 1,573,168 0.26 % (mnist)"
    words = " ".join(cli("presets", "--diff").out.split())
    by_name = {preset["name"]: preset for preset in found}
    for name in ("sabour2017", "baseline-cnn", "torch-notebook"):
        real = sum(parameter.numel() for parameter in create_model(name).parameters())
        shown = by_name[name]["parameters"]
        assert real == (shown["with_decoder"] or shown["without_decoder"])
        assert f"{real:,}" in out
    assert by_name["sabour2017"]["parameters"] == {"with_decoder": 8_215_568, "without_decoder": 6_804_224}
    assert by_name["baseline-cnn-multimnist"]["parameters"]["with_decoder"] is None
    variants = [by_name[name]["variant_of"] for name in ("sabour2017-code", "sabour2017-r1", "sabour2017-cifar10")]
    assert variants == [None, "sabour2017", "sabour2017"]
    assert by_name["baseline-cnn"]["model"] == json.loads(json.dumps(get_preset("baseline-cnn").network))
    assert by_name["baseline-cnn"]["recipe"]["optimizer"] == {"name": "adam", "adam": "torch", "adam_eps": 1e-8}
    assert "sabour2017-r1 num_iterations 1; decoder none" in words
    assert "compact-deep layers conv,dense;" in words, "beside compact, which it is a variant of"
    assert "--routing dynamic, " in words
    alone = " ".join(cli("presets", "sabour2017-r1", "--diff").out.split())
    assert "sabour2017-r1 num_iterations 1; decoder none" in alone
    assert "compact-deep" not in alone


@pytest.mark.parametrize("width", [60, 200])
def test_tables_fit_the_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for command in ("presets", "datasets"):
        assert max(map(len, cli(command).out.splitlines())) <= max(width, 80)


@pytest.mark.parametrize("name", ["tf-notebook", "baseline-cnn"])
def test_one_preset_is_shown_and_drawn(cli: Cli, name: str) -> None:
    result = cli("presets", name, "--figure", "new/x.png")
    assert (result.code, result.err) == (0, "")
    assert_figure("new/x.png")
    assert get_preset(name).source in result.out
    if name == "tf-notebook":
        rows = [" ".join(line.split()) for line in result.out.splitlines()]
        assert "convolution 9×9, stride 2, ReLU 256×6×6 feature maps 5,308,672" in rows
        assert "dense, sigmoid 1×28×28 reconstruction 803,600" in rows
        assert "8,215,568, 6,804,224 without the decoder" in result.out
    found = json.loads(cli("presets", name, "--json").out)
    counts = found["parameters"]
    assert sum(layer["parameters"] for layer in found["layers"]) == counts["with_decoder"] or counts["without_decoder"]
    image = {"name": "image", "steps": [], "shape": [1, 28, 28], "parameters": 0, "in_decoder": False}
    assert found["layers"][0] == image


# ---- datasets


def test_datasets_are_listed(cli: Cli) -> None:
    from torchcaps.datasets import list_datasets

    rows, found = read_rows(cli("datasets").out), json.loads(cli("datasets", "--json").out)
    for info, described in zip(list_datasets(), found, strict=True):
        assert info.spec in [row[0] for row in rows if row]
        assert (described["name"], described["num_train"]) == (info.spec, info.num_train)
    assert next(row for row in rows if row[:1] == ["digits"])[-1] == "yes"


def test_a_data_set_is_counted_and_a_part_of_it_is_drawn(cli: Cli) -> None:
    from torchcaps.datasets import load_dataset

    digits = load_dataset("digits")
    parts = {"train": digits.train, "validation": digits.validation, "test": digits.test}
    for split, part in parts.items():
        result = cli("datasets", "digits", "--sample", "23", "--split", split)
        assert (result.code, result.err) == (0, "")
        labels = ", ".join(map(str, part.labels[:23].tolist()))
        words = "training" if split == "train" else split
        assert f"Sample  the first 23 {words} images of digits\nLabels  {labels}\n" in result.out
        assert "wrote digits-sample" in result.out
        assert ["0", "128", "14", "36"] in read_rows(result.out)
        assert ["all", "1,293", "144", "360"] in read_rows(result.out)
    assert_figure("digits-sample.png")
    found = json.loads(cli("datasets", "digits", "--sample", "5", "--validation", "first", "--json").out)
    assert found["sample"] == list(map(str, load_dataset("digits", validation="first").train.labels[:5].tolist()))
    assert found["loaded"]["test"]["images"] == sum(found["loaded"]["test"]["per_class"]) == 360
    assert (found["found"], found["here"]) == (None, True)
    most = json.loads(cli("datasets", "digits", "--sample", "1000", "--split", "validation", "--json").out)
    assert most["sample"] == list(map(str, digits.validation.labels.tolist())), "there are 144"


def test_a_data_set_that_is_not_here(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pooch.os_cache", lambda project: tmp_path / "cache" / project)
    assert "not on this machine" in cli("datasets", "mnist").out
    described = json.loads(cli("datasets", "mnist", "--json").out)
    assert (described["found"], described["here"]) == (None, False)


def test_own_images_are_counted(cli: Cli, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for n in range(20):
        (folder := tmp_path / "photos" / ("cat", "dog")[n % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 30, 3), np.uint8)).save(folder / f"{n}.png")
    (tmp_path / "photos" / "cat" / "no.png").write_text("no image")
    options = ("--image-size", "16", "--sample", "20", "--skip-damaged")
    result = cli("datasets", "folder:photos", *options)
    assert (result.code, result.err) == (0, "")
    for words in ("3×16×16", "Left out:", "no.png", "wrote photos-sample.png"):
        assert words in result.out
    assert [row[0] for row in read_rows(result.out) if row[:1] in (["cat"], ["dog"])] == ["cat", "dog"]


# ---- several objects in an image


def test_images_of_several_objects(cli: Cli, digit_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that sees two objects in an image, and a data set of such images called digits."""
    from torchcaps.datasets import Dataset, PairSet, load_dataset

    digits = load_dataset("digits")
    train = PairSet(digits.train.take(40))
    dataset = Dataset("pairs", train, train.preview(20), train.preview(30), digits.class_names)
    for place in ("training.run", "datasets"):
        monkeypatch.setattr(f"torchcaps.{place}.load_dataset", lambda *_, **__: dataset)
    small = {"conv_channels": 4, "primary_types": 1, "decoder_hidden": (8,)}
    create_model("sabour2017-multimnist", **small).save_pretrained("pairs")
    of_pairs = ("pairs", "--data", "digits")

    found = json.loads(cli("evaluate", *of_pairs, "--json").out)
    assert (found["num_images"], found["objects"], np.sum(found["confusion"])) == (30, 2, 60)
    out = cli("evaluate", *of_pairs).out
    objects = sum(found["confusion"][j][j] for j in range(10))
    assert f"Objects   {100 * found['object_accuracy']:.2f} %  ({objects} of 60 found, 2 an image)" in out
    assert json.loads(cli("evaluate", *of_pairs, "--split", "train", "--json").out)["num_images"] == 40

    result = cli("reconstruct", *of_pairs, "--count", "6", "--figure", "a.png")
    assert "First 6 test images of pairs: " in result.out
    assert "were given exactly their classes" in result.out
    for command in ("perturb", "routing"):
        result = cli(command, *of_pairs, "--index", "3", "--figure", "a.png")
        assert re.search(r"Image 3 of the test images of pairs, class \d \+ \d", result.out)
    for name in ("a.png", "a-2.png"):
        assert_figure(name)
    refused = cli("perturb", *of_pairs, "--follow", "label")
    assert "needs an image of one object, this one has 2" in refused.err

    (said,) = json.loads(cli("predict", "pairs", digit_file, "--json").out)
    longest = sorted(said["lengths"], key=lambda name: -said["lengths"][name])[:2]
    assert (said["classes"], "class" in said) == (longest, False)
    assert cli("predict", "pairs", digit_file).out.splitlines()[0] == f"{digit_file}  {' + '.join(longest)}"

    result = cli("datasets", "digits", "--sample", "20", "--figure", "sample.png")
    rows = read_rows(result.out)
    assert ["all", "40", "20", "30"] in rows
    counts = [[int(cell) for cell in row[1:]] for row in rows if row and row[0] in digits.class_names]
    assert np.sum(counts, 0).tolist() == [40, 40, 60]  # every image of the test has two objects
    assert "Each image holds 2 objects" in result.out
    assert f"Labels  {' + '.join(map(str, train.preview(1).labels[0].tolist()))}, " in result.out
