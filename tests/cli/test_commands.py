"""Each command on a tiny run: what it prints is what the library computes, and its figures are pictures."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cli_support import Cli
from own_parts import two_layers
from support import registered_for_now
from torchcaps.analysis import perturb_capsule, predict, routing_statistics, trace_routing
from torchcaps.datasets import PairSet, Splits, list_datasets, load_dataset, register_dataset
from torchcaps.files import read_json
from torchcaps.models import create_model, get_preset, list_presets
from torchcaps.training import load_run


def assert_figure(path: str | Path) -> None:
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert min(image.width, image.height) >= 200
        assert np.asarray(image.convert("L")).std() > 5, "an empty picture"


def read_rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_train_says_first_what_it_does_and_last_what_to_do_next(cli: Cli, tiny: tuple[str, ...]) -> None:
    out = cli.out("train", *tiny, "--figures")
    folder = Path("runs/first-digits-1")
    assert [line.split(":")[0] for line in out.splitlines()[:4]] == ["Network", "Data", "Images", "Device"]
    summary = read_json(folder / "summary.json", "summary")
    assert f"{100 * summary['test']['best']['accuracy']:.2f} %" in out
    assert f"Run folder  {folder}" in out
    for command in ("evaluate", "reconstruct", "perturb"):
        assert f"  torchcaps {command} {folder}\n" in out
    for figure in (folder / "figures").iterdir():
        assert figure.name in out
        assert_figure(figure)
    assert summary["command"] == " ".join(["torchcaps", "train", *tiny, "--figures"])


def test_without_a_decoder_nothing_is_perturbed(
    cli: Cli, tiny: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    at = tiny.index("--decoder-hidden")
    folder = Path("a folder with a name", "that-goes-on", "for-longer-than", "the-terminal-is-wide")
    options = ("--crop", "20", "--flip", "--max-rotation", "10", "--out", folder)
    result = cli("train", "sabour2017-r3", *tiny[:at], *tiny[at + 2 :], *options)
    assert result.code == 0, result.err
    assert f"torchcaps evaluate '{folder}'\n" in result.out, "paths are not cut"
    assert "torchcaps perturb" not in result.out
    assert "Figures" not in result.out
    assert cli("evaluate", folder).out.startswith(f"{folder} (best epoch) on the test images of digits\n")


def test_resume_and_a_configuration(cli: Cli, run_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    cli.out("train", "--resume", copy, "--epochs", "3", "--no-figures")
    assert read_json(copy / "summary.json", "summary")["epochs"] == 3
    assert len((copy / "metrics.csv").read_text().splitlines()) == 4
    assert (copy / "metrics.csv").read_text().startswith((run_folder / "metrics.csv").read_text())
    assert cli("train", "--config", run_folder / "config.json", "--out", "again", "--no-figures").code == 0
    again, first = (read_json(folder / "summary.json", "summary") for folder in (Path("again"), run_folder))
    assert again["test"] == first["test"]


def test_evaluate_finds_what_training_found(cli: Cli, run_folder: Path) -> None:
    summary = read_json(run_folder / "summary.json", "summary")
    for which in ("best", "last"):
        for split in ("test", "validation"):
            words = ("evaluate", run_folder, "--which", which, "--split", split)
            found, wanted = cli.json(*words), summary[split][which]
            assert (found["which"], found["split"], found["data"]) == (which, split, "digits")
            assert (found["accuracy"], found["num_images"]) == (wanted["accuracy"], 100)
            assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        half = cli.json(*words, "--precision", "bf16")
        assert half["loss"] == pytest.approx(found["loss"], rel=0.05)
        assert half["loss"] != found["loss"]
    assert cli.json("evaluate", run_folder, "--split", "train")["num_images"] == 200


def test_evaluate_the_network_that_comes_along(cli: Cli) -> None:
    judged = cli("evaluate")
    assert judged.out.startswith("compact (comes with torchcaps) on the test images of digits\n")
    assert "trained on MNIST. These images are digits, which come" in judged.err


def test_figures_go_to_the_run(cli: Cli, run_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    shutil.rmtree(copy / "figures", ignore_errors=True)  # of another test
    for command, written in (
        ("reconstruct", ["reconstructions"]),
        ("perturb", ["perturbation"]),
        ("routing", ["routing", "routing-statistics"]),
        ("curves", ["curves"]),
    ):
        out = cli.out(command, copy)
        files = [copy / "figures" / f"{name}.png" for name in written]
        assert [line for line in out.splitlines() if line.startswith("wrote")] == [f"wrote {f}" for f in files]
        for file in files:
            assert_figure(file)


def test_perturb_options_reach_the_library(cli: Cli, run_folder: Path, digit_file: Path) -> None:
    run = load_run(run_folder)
    data, figure = run.dataset(), ("--figure", "x.png")
    options = ["--capsule", "4", "--range", "0.5", "--steps", "3", "--index", "2", "--split", "validation"]
    (found,) = cli.json("perturb", run_folder, *options, *figure)
    wanted = perturb_capsule(run.model, data.validation.images[2], target=4, amplitude=0.5, steps=3)
    assert (found["class"], found["offsets"], len(found["components"])) == ("4", [-0.5, 0, 0.5], 16)
    assert found["score"] == pytest.approx(float(wanted.scores[4]), rel=1e-5)

    classes, labels = predict(run.model, data.test.images).classes, data.test.labels.numpy()
    wrong = int((classes != labels).nonzero()[0][0])
    options = ["--component", "3", "--range", "-0.5,1", "--steps", "4", "--index", "5", "--index", str(wrong), *figure]
    for follow, followed, whose in (("label", labels, "the label's"), ("longest", classes, "the longest")):
        lines = cli("perturb", run_folder, *options, "--follow", follow).out.splitlines()
        for line, index in zip(lines, (5, wrong), strict=False):
            where = f"Image {index} of the test images of digits, class {labels[index]}"
            assert line.startswith(f"{where}: component 3 of capsule {followed[index]} ({whose}), length ")
    result = cli("perturb", run_folder, "--image", digit_file, "--component", "0", "--capsule", "9", *figure)
    assert result.out.startswith(f"{digit_file}: component 0 of capsule 9, length ")


def test_routing_tells_every_round(cli: Cli, run_folder: Path) -> None:
    run = load_run(run_folder)
    images = run.dataset().test.images
    trace, statistics = trace_routing(run.model, images[3:4]), routing_statistics(run.model, images[:10])
    options = ["--index", "3", "--count", "10", "--figure", "x.png"]
    found = cli.json("routing", run_folder, *options)
    assert found["image"].startswith("Image 3 of the test images of digits, class ")
    assert found["class_names"] == list(run.class_names)
    assert tuple(found["grid"]) == trace.grid
    assert [each["round"] for each in found["rounds"]] == [1, 2, 3]
    for t, each in enumerate(found["rounds"]):
        for name in ("logits", "coupling", "weighted_sum", "capsules", "lengths", "agreement"):
            np.testing.assert_array_equal(np.float32(each[name]), getattr(trace, name)[t, 0], err_msg=name)
    some = ["--input-capsule", "40", "--input-capsule", "2"]
    few = cli.json("routing", run_folder, *options, *some)
    assert (found["input_capsules"], few["input_capsules"]) == (list(range(72)), [40, 2])
    for part, every in zip(few["rounds"], found["rounds"], strict=True):
        assert part["coupling"] == [every["coupling"][40], every["coupling"][2]]
    out = cli("routing", run_folder, *options, *some).out
    assert "Input capsule 40: type 1, row 0, column 4\n" in out
    of_all = read_rows(out[out.index("Mean of the first 10 test images of digits") :])
    for t in range(3):
        entropy, agreement = statistics.entropy[t].mean(), statistics.mean_agreement[t].mean()
        assert [str(t + 1), f"{entropy:.3f}", f"{agreement:.4f}"] in of_all
    assert len(cli.json("routing", run_folder, "--num-iterations", "2")["rounds"]) == 2


def test_any_layer_is_followed(cli: Cli, digit_file: Path) -> None:
    fields = {"conv_channels": 4, "primary_types": 2, "decoder_hidden": (6,)}
    create_model("sabour2017", layers=two_layers(), **fields).save_pretrained("deep")
    options = ("--data", "digits", "--count", "3", "--figure", "x.png")
    inner, last = (cli.json("routing", "deep", *options, *m) for m in (("--layer", "1"), ()))
    assert (inner["layer"], inner["class_names"]) == (1, ["type 0", "type 1", "type 2"])
    assert (inner["grid"], len(inner["input_capsules"]), inner["in_space"]) == ([2, 6, 6], 72, True)
    assert (last["layer"], len(last["class_names"]), last["grid"]) == (2, 10, [3, 4, 4])
    # an image file needs no data, and has no statistics
    cli.out("routing", "deep", "--image", digit_file, "--figure", "file.png")
    assert Path("file.png").exists()
    assert not Path("file-statistics.png").exists()


def test_curves_of_several_runs(cli: Cli, run_folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(run_folder, tmp_path / "other" / run_folder.name)
    (young := tmp_path / "young").mkdir()
    result = cli("curves", run_folder, other, young)
    assert (result.code, result.out) == (0, "wrote curves.png\n")
    assert result.err == f"{young} is left out: it has no metrics.csv, which is written after the first epoch\n"
    assert_figure("curves.png")
    assert cli("curves", run_folder, other).out == "wrote curves-2.png\n"


@pytest.mark.slow
def test_presets_are_all_there_with_their_parameters(cli: Cli) -> None:
    out, found = cli("presets").out, cli.json("presets")
    by_name, words = {preset["name"]: preset for preset in found}, " ".join(cli("presets", "--diff").out.split())
    assert list(by_name) == list_presets()
    rows = {line.split()[0]: " ".join(line.split()) for line in out.splitlines() if line}
    assert len(out.splitlines()) <= len(found) + 6, "a line each"
    assert set(by_name) <= set(rows)
    assert rows["sabour2017"] == "sabour2017 Sabour 2017 8,215,568 0.25 % (mnist)"
    assert by_name["sabour2017"]["parameters"] == {"with_decoder": 8_215_568, "without_decoder": 6_804_224}
    assert [by_name[name]["variant_of"] for name in ("sabour2017-code", "sabour2017-r1")] == [None, "sabour2017"]
    assert "sabour2017-r1 num_iterations 1; decoder none" in words
    assert "compact-deep layers conv,dense;" in words, "beside compact, which it is a variant of"
    assert "compact-deep" not in cli("presets", "sabour2017-r1", "--diff").out


def test_one_preset_is_shown_and_drawn(cli: Cli) -> None:
    result = cli("presets", "tf-notebook", "--figure", "x.png")
    assert_figure("x.png")
    assert get_preset("tf-notebook").source in result.out
    rows = [" ".join(line.split()) for line in result.out.splitlines()]
    assert "convolution 9×9, stride 2, squash 32×6×6×8 primary capsules 5,308,672" in rows
    assert "8,215,568, 6,804,224 without the decoder" in result.out
    found = cli.json("presets", "tf-notebook")
    assert sum(layer["parameters"] for layer in found["layers"]) == found["parameters"]["with_decoder"]


def test_datasets_are_listed_and_described(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pooch.os_cache", lambda project: Path("cache", project))
    out, found = cli("datasets").out, cli.json("datasets")
    assert [each["name"] for each in found] == [info.spec for info in list_datasets()]
    assert all(info.spec in out for info in list_datasets())
    assert "not on this machine" in cli("datasets", "mnist").out
    assert cli.json("datasets", "mnist")["here"] is False


def test_a_data_set_is_counted_and_a_part_of_it_is_drawn(cli: Cli) -> None:
    digits = load_dataset("digits")
    for split, part in (("train", digits.train), ("validation", digits.validation), ("test", digits.test)):
        out = cli.out("datasets", "digits", "--sample", "23", "--split", split)
        labels = ", ".join(map(str, part.labels[:23].tolist()))
        words = "training" if split == "train" else split
        assert f"Sample  the first 23 {words} images of digits\nLabels  {labels}\n" in out
        assert ["0", "128", "14", "36"] in read_rows(out)
        assert ["images", "1,293", "144", "360"] in read_rows(out)
    found = cli.json("datasets", "digits", "--sample", "1000", "--validation", "first")
    assert found["sample"] == list(map(str, load_dataset("digits", validation="first").train.labels[:1000].tolist()))
    assert found["loaded"]["test"]["images"] == sum(found["loaded"]["test"]["per_class"]) == 360
    assert found["here"] is True


def test_own_images_are_counted(cli: Cli, tmp_path: Path) -> None:
    for n in range(20):
        (folder := tmp_path / "photos" / ("cat", "dog")[n % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 30), (n, 2 * n, 0)).save(folder / f"{n}.png")
    (tmp_path / "photos" / "cat" / "no.png").write_text("no image")
    out = cli.out("datasets", "folder:photos", "--image-size", "16", "--sample", "20", "--skip-damaged")
    for words in ("3×16×16", "Left out:", "no.png", "wrote photos-sample.png"):
        assert words in out
    assert [row[0] for row in read_rows(out) if row[:1] in (["cat"], ["dog"])] == ["cat", "dog"]


def test_images_of_several_objects(cli: Cli, digit_file: Path) -> None:
    """A network that sees two objects in an image, and a data set of such images."""
    digits = load_dataset("digits")
    train = PairSet(digits.train.take(40))
    splits = Splits(train.objects, train.preview(30), digits.class_names, train.preview(20), as_train=PairSet)
    with registered_for_now():
        register_dataset("pairs", title="Pairs", source="here", licence="none")(lambda _: splits)
        small = {"conv_channels": 4, "primary_types": 1, "decoder_hidden": (8,)}
        create_model("sabour2017-multimnist", **small).save_pretrained("pairs")
        of_pairs = ("pairs", "--data", "pairs")
        found = cli.json("evaluate", *of_pairs)
        assert (found["num_images"], found["objects"], np.sum(found["confusion"])) == (30, 2, 60)
        assert cli.json("evaluate", *of_pairs, "--split", "train")["num_images"] == 40
        assert "with the right classes" in cli("reconstruct", *of_pairs, "--count", "6", "--figure", "a.png").out
        for command in ("perturb", "routing"):
            result = cli(command, *of_pairs, "--index", "3", "--figure", "a.png")
            assert re.search(r"Image 3 of the test images of pairs, class \d \+ \d", result.out)
        refused = cli("perturb", *of_pairs, "--follow", "label")
        assert "needs an image of one object" in refused.err
        (said,) = cli.json("predict", "pairs", digit_file)
        longest = sorted(said["lengths"], key=lambda name: -said["lengths"][name])[:2]
        assert (said["classes"], "class" in said) == (longest, False)
        assert cli("predict", "pairs", digit_file).out.splitlines()[0] == f"{digit_file}  {' + '.join(longest)}"
        result = cli("datasets", "pairs", "--sample", "20", "--figure", "sample.png")
        assert ["images", "40", "20", "30"] in read_rows(result.out)
        assert "Each image shows 2 objects" in result.out
        assert f"Labels  {' + '.join(map(str, train.preview(1).labels[0].tolist()))}, " in result.out
