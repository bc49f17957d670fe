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

from torchcaps.files import read_json, write_json
from torchcaps.models import create_model, get_preset, list_presets

Cli = Callable[..., Any]


def assert_figure(path: Path) -> None:
    """A picture of a sensible size that shows something."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.width >= 300
        assert image.height >= 200
        assert np.asarray(image.convert("L")).std() > 5, "an empty picture"


def test_the_assertion_can_fail(tmp_path: Path) -> None:
    Image.new("RGB", (400, 400), "white").save(tmp_path / "empty.png")
    Image.effect_noise((100, 100), 80).save(tmp_path / "small.png")
    for name in ("empty.png", "small.png"):
        with pytest.raises(AssertionError):
            assert_figure(tmp_path / name)


# train


def test_train_ends_with_results_places_and_what_to_do_next(cli: Cli, tiny: tuple[str, ...], tmp_path: Path) -> None:
    result = cli("train", *tiny, "--figures")
    assert (result.code, result.err) == (0, "")
    folder = Path("runs/sabour2017-digits-1")
    summary = read_json(folder / "summary.json", "summary")
    assert "Test (100 images)" in result.out
    assert f"{100 * summary['test']['best']['accuracy']:.2f} %" in result.out
    assert f"Run folder  {folder}" in result.out
    for command in ("evaluate", "reconstruct", "perturb"):
        assert f"  torchcaps {command} {folder}\n" in result.out
    assert "confusion.png" in result.out
    for figure in (tmp_path / folder / "figures").iterdir():
        assert_figure(figure)
    expected = ["torchcaps", "train", *tiny, "--figures"]
    assert summary["command"] == " ".join(expected)


def test_a_network_without_decoder_has_nothing_to_perturb(cli: Cli, tiny: tuple[str, ...]) -> None:
    at = tiny.index("--decoder-hidden")
    result = cli("train", "sabour2017-r3", *tiny[:at], *tiny[at + 2 :], "--out", "a folder")
    assert result.code == 0
    assert "torchcaps evaluate 'a folder'" in result.out
    assert "torchcaps perturb" not in result.out
    assert "Figures" not in result.out


def test_resume_goes_on_in_the_same_folder(cli: Cli, run_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    result = cli("train", "--resume", copy, "--epochs", "3", "--no-figures")
    assert (result.code, result.err) == (0, "")
    assert read_json(copy / "summary.json", "summary")["epochs"] == 3
    assert len((copy / "metrics.csv").read_text().splitlines()) == 4
    assert (copy / "metrics.csv").read_text().startswith((run_folder / "metrics.csv").read_text())


def test_a_configuration_gives_the_same_run_again(cli: Cli, run_folder: Path) -> None:
    assert cli("train", "--config", run_folder / "config.json", "--out", "again", "--no-figures").code == 0
    again, first = (read_json(folder / "summary.json", "summary") for folder in (Path("again"), run_folder))
    assert again["test"] == first["test"]


def test_only_the_first_process_prints_results(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchcaps.training.train", lambda *_, **__: {})
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert cli("train").out == ""


# evaluate


@pytest.mark.parametrize("which", ["best", "last"])
def test_evaluate_finds_what_training_found(cli: Cli, run_folder: Path, which: str) -> None:
    result = cli("evaluate", run_folder, "--which", which, "--json")
    found, summary = json.loads(result.out), read_json(run_folder / "summary.json", "summary")
    assert found["accuracy"] == summary["test"][which]["accuracy"]
    assert found["loss"] == pytest.approx(summary["test"][which]["loss"], rel=1e-5)
    assert (found["num_images"], found["which"], found["split"], found["data"]) == (100, which, "test", "digits")


def test_evaluate_in_half_precision(cli: Cli, run_folder: Path) -> None:
    full, half = (
        json.loads(cli("evaluate", run_folder, "--json", *more).out) for more in ((), ("--precision", "bf16"))
    )
    assert half["num_images"] == full["num_images"]
    assert half["loss"] != full["loss"]
    assert half["loss"] == pytest.approx(full["loss"], rel=0.05)
    refused = cli("evaluate", run_folder, "--precision", "auto")
    assert refused.code == 2
    assert "'auto' is not one of '32', 'bf16'" in refused.err


def test_a_run_says_first_what_it_trains_on_what_and_where(cli: Cli, tiny: tuple[str, ...]) -> None:
    lines = cli("train", "sabour2017-r1-recon", *tiny, "--out", "run").out.splitlines()
    assert re.fullmatch(r"Network: sabour2017-r1-recon, [\d,]+ parameters", lines[0])
    assert lines[1:4] == [
        "Data: digits",
        "Images: 200 to train on, 100 to validate, 100 to test; 1×28×28, 10 classes",
        "Device: cpu, float32",
    ]


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
    assert f"Error     {100 * found['error']:.2f} %" in out
    assert f"Loss      {found['loss']:.4f}" in out
    classes, matrix = out.split("Confusion")
    for j, row in enumerate(found["confusion"]):
        score = found["per_class"][j]
        assert any(line.split()[:2] == [str(j), str(score["images"])] for line in classes.splitlines())
        shown = [str(number) if number else "·" for number in row]
        assert any(line.split() == [str(j), *shown] for line in matrix.splitlines())
    assert_figure(Path("confusion.png"))
    assert out.endswith("wrote confusion.png\n")


def test_evaluate_judges_the_network_that_comes_along(cli: Cli) -> None:
    judged = cli("evaluate")
    assert judged.out.startswith("compact (comes with torchcaps) on the test images of digits\n")
    assert "was trained on MNIST; digits is another data set" in judged.err
    assert "--data mnist" in judged.err
    assert json.loads(cli("evaluate", "--json").out)["run"] == "compact"


def test_evaluate_keeps_json_clean_beside_a_figure(cli: Cli, run_folder: Path) -> None:
    result = cli("evaluate", run_folder, "--json", "--figure", "confusion.png")
    json.loads(result.out)
    assert result.err == "wrote confusion.png\n"


def test_evaluate_a_saved_network_on_named_data(cli: Cli, cnn_folder: Path) -> None:
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


def test_long_paths_are_not_cut(cli: Cli, tiny: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    folder = Path("a-folder-with-a-name", "that-goes-on", "for-longer-than", "the-terminal-is-wide")
    out = cli("train", *tiny, "--out", folder).out
    assert f"Run folder  {folder}\n" in out
    assert f"torchcaps evaluate {folder}\n" in out
    assert cli("evaluate", folder).out.startswith(f"{folder} (best epoch) on the test images of digits\n")


# predict


def test_predict_gives_class_and_lengths(cli: Cli, run_folder: Path, digit_file: Path) -> None:
    import torch

    from torchcaps.analysis import load_image, predict
    from torchcaps.training import load_run

    run = load_run(run_folder)
    expected = predict(run.model, torch.stack([load_image(digit_file, run.model.in_shape)]))
    (found,) = json.loads(cli("predict", run_folder, digit_file, "--json").out)
    assert found["image"] == str(digit_file)
    assert list(found["lengths"]) == list(run.class_names)
    np.testing.assert_allclose(list(found["lengths"].values()), expected.lengths[0], rtol=1e-6)
    assert found["class"] == run.class_names[expected.classes[0]]
    out = cli("predict", run_folder, digit_file).out
    first, *lines = [line for line in out.splitlines() if not line.startswith("  unsure: ")]
    assert first.split() == [str(digit_file), found["class"]]
    for line, (name, length) in zip(lines, found["lengths"].items(), strict=False):
        assert line.split()[:2] == [name, f"{length:.3f}"]


def test_predict_ink_on_paper(cli: Cli, run_folder: Path, digit_file: Path, tmp_path: Path) -> None:
    with Image.open(digit_file) as image:
        Image.fromarray(255 - np.asarray(image)).save(tmp_path / "ink.png")
    light, found, said, ink, inverted = (
        json.loads(cli("predict", run_folder, *arguments, "--json").out)[0]["lengths"]
        for arguments in (
            [digit_file],
            ["ink.png"],
            ["ink.png", "--invert"],
            ["ink.png", "--prepare", "none"],
            ["ink.png", "--prepare", "none", "--invert"],
        )
    )
    assert light == found == said == inverted != ink


def test_predict_several_images_of_any_size(cli: Cli, run_folder: Path, digit_file: Path, tmp_path: Path) -> None:
    with Image.open(digit_file) as image:
        image.convert("RGB").resize((90, 45)).save(tmp_path / "wide.jpg")
    padded, stretched = (
        json.loads(cli("predict", run_folder, digit_file, "wide.jpg", "--prepare", "none", "--fit", fit, "--json").out)
        for fit in ("pad", "stretch")
    )
    assert [found["image"] for found in padded] == [str(digit_file), "wide.jpg"]
    assert padded[0] == stretched[0]
    assert padded[1]["lengths"] != stretched[1]["lengths"]


@pytest.mark.parametrize("fit", ["stretch", "pad"])
def test_image_files_are_brought_to_size_as_the_runs_images_were(
    cli: Cli, run_folder: Path, digit_file: Path, tmp_path: Path, fit: str
) -> None:
    with Image.open(digit_file) as image:
        image.resize((90, 45)).save(tmp_path / "wide.png")
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    about = read_json(copy / "best/classes.json", "list of classes")
    write_json(copy / "best/classes.json", about | {"fit": fit})

    as_it_is = ("--prepare", "none")

    def lengths(*options: str) -> list[dict[str, float]]:
        said = cli("predict", copy, "wide.png", "--json", *as_it_is, *options).out
        return [found["lengths"] for found in json.loads(said)]

    assert lengths() == lengths("--fit", fit)
    assert lengths("--fit", "pad") != lengths("--fit", "stretch")
    for command in ("perturb", "routing"):
        pictures = []
        for options in ([], ["--fit", "pad"], ["--fit", "stretch"]):
            assert cli(command, copy, "--image", "wide.png", *as_it_is, *options, "--figure", "x.png").code == 0
            pictures.append(Path("x.png").read_bytes())
            Path("x.png").unlink()
        assert pictures[0] == pictures[1 if fit == "pad" else 2] != pictures[2 if fit == "pad" else 1]


# figures


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        (["reconstruct"], ["reconstructions"]),
        (["perturb"], ["perturbation"]),
        (["routing"], ["routing", "routing-statistics"]),
        (["curves"], ["curves"]),
    ],
)
def test_figures_go_to_the_run_unless_told(
    cli: Cli, run_folder: Path, tmp_path: Path, arguments: list[str], written: list[str]
) -> None:
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    result = cli(*arguments, copy)
    assert (result.code, result.err) == (0, "")
    files = [copy / "figures" / f"{name}.png" for name in written]
    assert [line for line in result.out.splitlines() if line.startswith("wrote")] == [f"wrote {f}" for f in files]
    for file in files:
        assert_figure(file)
    assert cli(*arguments, run_folder, "--figure", "else/where.png").code == 0
    assert_figure(Path("else/where.png"))
    assert not (run_folder / "figures").exists()


def test_reconstruct_so_many(cli: Cli, run_folder: Path) -> None:
    assert (
        "First 7 train images"
        in cli("reconstruct", run_folder, "--count", "7", "--split", "train", "--figure", "a").out
    )
    assert "First 100 test images" in cli("reconstruct", run_folder, "--count", "1000", "--figure", "b.png").out
    heights = [Image.open(name).height for name in ("a.png", "b.png")]
    assert heights[1] > 3 * heights[0]


def test_a_figure_holds_so_many_and_no_more(cli: Cli, run_folder: Path) -> None:
    result = cli("reconstruct", run_folder, "--count", "1001")
    assert (result.code, result.out) == (2, "")
    assert result.err == "Error: --count must be at most 1,000, more do not fit one figure, got 1,001\n"


def test_perturb_options_reach_the_library(cli: Cli, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchcaps.analysis

    asked = []
    real = torchcaps.analysis.perturb_capsule
    monkeypatch.setattr("torchcaps.analysis.perturb_capsule", lambda *a, **k: asked.append((a, k)) or real(*a, **k))
    options = ["--capsule", "4", "--range", "0.5", "--steps", "3", "--index", "2", "--split", "validation"]
    result = cli("perturb", run_folder, *options, "--figure", "x.png")
    ((_, image), keywords) = asked[0]
    assert keywords == {"target": 4, "components": None, "amplitude": 0.5, "steps": 3}
    from torchcaps.training import load_run

    assert (image == load_run(run_folder).dataset().validation.images[2]).all()
    assert "Image 2 of the validation images of digits" in result.out
    assert "capsule 4" in result.out


def test_perturb_one_component_of_several_images(cli: Cli, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchcaps.analysis
    from torchcaps.training import load_run

    drawn: list[Any] = []
    real = torchcaps.analysis.figure_component
    monkeypatch.setattr(
        "torchcaps.analysis.perturbations.figure_component", lambda *a, **k: drawn.append((a, k)) or real(*a, **k)
    )
    indices = ["--index", "5", "--index", "0", "--index", "5"]
    options = ["--component", "3", "--range", "-0.5,1", "--steps", "4", *indices]
    test = load_run(run_folder).dataset().test
    for follow in ("label", "longest"):
        drawn.clear()
        result = cli("perturb", run_folder, *options, "--follow", follow, "--figure", "x.png")
        assert (result.code, result.err) == (0, "")
        (((results, names), keywords),) = drawn
        whose = {"label": "the label's", "longest": "the longest"}[follow]
        assert keywords == {"title": f"Component 3 of {whose} capsule"}
        assert [each.components for each in results] == [(3,)] * 3
        np.testing.assert_allclose(results[0].offsets, [-0.5, 0, 0.5, 1], atol=1e-12)
        for line, each, index in zip(result.out.splitlines(), results, (5, 0, 5), strict=False):
            np.testing.assert_allclose(each.image, test.images[index] / 255)
            label = int(test.labels[index])
            assert each.target == (label if follow == "label" else each.lengths.argmax())
            length = each.lengths[each.target]
            assert line == (
                f"Image {index} of the test images of digits, class {label}: component 3 of capsule "
                f"{names[each.target]} ({whose}), length {length:.3f}"
            )
        assert_figure(Path("x.png"))


def test_perturb_follows_the_label(cli: Cli, run_folder: Path) -> None:
    from torchcaps.analysis import predict
    from torchcaps.training import load_run

    run = load_run(run_folder)
    test = run.dataset().test
    classes = predict(run.model, test.images).classes
    wrong = int((classes != test.labels.numpy()).nonzero()[0][0])
    options = ["--index", str(wrong), "--figure", "x.png"]
    longest, label = (cli("perturb", run_folder, *options, *more).out for more in ([], ["--follow", "label"]))
    assert f": capsule {classes[wrong]} (the longest), length " in longest
    assert f": capsule {int(test.labels[wrong])} (the label's), length " in label


def test_perturb_one_component_of_an_image_file(cli: Cli, run_folder: Path, digit_file: Path) -> None:
    options = ["--image", digit_file, "--component", "0", "--capsule", "9", "--figure", "x.png"]
    result = cli("perturb", run_folder, *options)
    assert result.out.startswith(f"{digit_file}: component 0 of capsule 9, length ")
    assert_figure(Path("x.png"))


def test_perturb_an_image_file(cli: Cli, run_folder: Path, digit_file: Path) -> None:
    result = cli("perturb", run_folder, "--image", digit_file, "--figure", "x.png")
    assert result.out.startswith(f"{digit_file}: capsule ")
    assert_figure(Path("x.png"))


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
        [f"{trace.entropy[t, 0]:.4f}", f"{trace.mean_agreement[t, 0]:.2e}"] for t in range(2)
    ]
    assert [row[1:] for row in rows[2:]] == [
        [f"{statistics.entropy[t].mean():.4f}", f"{statistics.mean_agreement[t].mean():.2e}"] for t in range(2)
    ]
    assert "Mean of the first 10 test images of digits" in out
    assert_figure(Path("x.png"))
    assert_figure(Path("x-statistics.png"))


def test_routing_prints_every_round_as_json(cli: Cli, run_folder: Path) -> None:
    from torchcaps.analysis import trace_routing
    from torchcaps.training import load_run

    run = load_run(run_folder)
    trace = trace_routing(run.model, run.dataset().test.images[3:4])
    options = ["--index", "3", "--count", "2", "--json", "--figure", "x.png"]
    result = cli("routing", run_folder, *options)
    found = json.loads(result.out)
    assert result.err == "wrote x.png\nwrote x-statistics.png\n"
    assert found["image"].startswith("Image 3 of the test images of digits, class ")
    assert found["class_names"] == list(run.class_names)
    assert (found["softmax_over"], found["leaky"], found["in_space"]) == ("outputs", False, True)
    assert tuple(found["grid"]) == trace.grid
    assert [each["round"] for each in found["rounds"]] == [1, 2, 3]
    for t, each in enumerate(found["rounds"]):
        for name in ("logits", "coupling", "weighted_sum", "capsules", "lengths", "agreement"):
            wanted = getattr(trace, name)[t, 0]
            np.testing.assert_array_equal(np.float32(each[name]), wanted, err_msg=name)
    few = json.loads(cli("routing", run_folder, *options, "--input-capsule", "40", "--input-capsule", "2").out)
    assert (found["input_capsules"], few["input_capsules"]) == (list(range(72)), [40, 2])
    for some, every in zip(few["rounds"], found["rounds"], strict=True):
        assert some["capsules"] == every["capsules"]
        for name in ("logits", "coupling", "agreement"):
            assert some[name] == [every[name][40], every[name][2]]


def test_routing_prints_the_rounds_of_an_input_capsule(cli: Cli, run_folder: Path) -> None:
    from torchcaps.analysis import trace_routing
    from torchcaps.training import load_run

    run = load_run(run_folder)
    trace = trace_routing(run.model, run.dataset().test.images[:1], num_iterations=2)
    options = ["--num-iterations", "2", "--count", "2", "--input-capsule", "40", "--figure", "x.png"]
    out = cli("routing", run_folder, *options).out
    table = out[out.index("Input capsule 40: type 1, row 0, column 4\n") :].splitlines()[3:]
    by_pair = (trace.logits, trace.coupling, trace.agreement)
    expected = [
        [name, *(f"{part[t, 0, 40, j]:z.4f}" for part in by_pair), f"{trace.lengths[t, 0, j]:.4f}"]
        for t in range(2)
        for j, name in enumerate(run.class_names)
    ]
    expected[0].insert(0, "1")
    expected[10].insert(0, "2")
    assert [line.split() for line in table[:21] if line.strip()] == expected


def test_rounds_of_an_input_capsule_among_many_classes(cli: Cli, digit_file: Path, tmp_path: Path) -> None:
    model = create_model("torch-tutorial", num_classes=30, conv_channels=4, primary_types=2, decoder=False)
    model.save_pretrained(tmp_path / "net")
    options = ["--image", digit_file, "--input-capsule", "7", "--figure", "x.png"]
    out = cli("routing", "net", *options).out
    table = out[out.index("Input capsule 7 (the 10 longest of 30 classes)\n") :]  # raster capsules have no place
    assert sum(line[:4].strip() in ("", "1", "2", "3") and len(line.split()) >= 5 for line in table.splitlines()) == 30


def test_routing_of_an_image_file_needs_no_data(cli: Cli, run_folder: Path, digit_file: Path, tmp_path: Path) -> None:
    shutil.copytree(run_folder / "best", tmp_path / "net")
    result = cli("routing", "net", "--image", digit_file, "--figure", "x.png")
    assert (result.code, result.err) == (0, "")
    assert_figure(Path("x.png"))
    assert not Path("x-statistics.png").exists()


def test_curves_of_several_runs(cli: Cli, run_folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(run_folder, tmp_path / "other" / run_folder.name)
    assert cli("curves", run_folder, other, "--figure", "x.png").out == "wrote x.png\n"
    assert_figure(Path("x.png"))


def test_a_run_without_an_epoch_is_left_out_of_curves(cli: Cli, run_folder: Path, tmp_path: Path) -> None:
    young = tmp_path / "young"
    young.mkdir()
    result = cli("curves", run_folder, young, "--figure", "x.png")
    assert (result.code, result.out) == (0, "wrote x.png\n")
    assert result.err == f"{young} is left out: it holds no metrics.csv, which is written after the first epoch\n"
    missing = cli("curves", run_folder, tmp_path / "missing")
    assert (missing.code, "missing" in missing.err) == (2, True)


def test_curves_of_several_runs_write_over_no_figure(cli: Cli, run_folder: Path, tmp_path: Path) -> None:
    runs = [shutil.copytree(run_folder, tmp_path / name) for name in ("a", "b")]
    own = runs[0] / "figures" / "curves.png"
    before = own.read_bytes() if own.exists() else None
    assert [cli("curves", *runs).out for _ in range(3)] == [
        f"wrote {name}\n" for name in ("curves.png", "curves-2.png", "curves-3.png")
    ]
    assert (own.read_bytes() if own.exists() else None) == before
    assert cli("curves", runs[0]).out == f"wrote {own}\n"


# presets


def test_presets_are_all_there_with_their_parameters(cli: Cli) -> None:
    out = cli("presets").out
    for name in list_presets():
        assert any(line.startswith(f"{name} ") for line in out.splitlines()), name
    assert "8,215,568" in out
    assert "6,804,224" in out
    assert "35,445,522" in out
    assert "arXiv:1710.09829" in out


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_presets_fit_the_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for command in ("presets", "datasets"):
        assert max(map(len, cli(command).out.splitlines())) <= max(width, 80)


def test_presets_of_several_kinds_of_data(cli: Cli) -> None:
    found = {preset["name"]: preset for preset in json.loads(cli("presets", "--json").out)}
    cifar, pairs = found["sabour2017-cifar10"], found["baseline-cnn-multimnist"]
    assert (cifar["data"], cifar["in_shape"], cifar["num_classes"]) == ("cifar10", [3, 24, 24], 10)
    assert cifar["variant_of"] == "sabour2017"
    assert pairs["parameters"] == {"with_decoder": None, "without_decoder": 24_563_978}
    out = cli("presets", "sabour2017-smallnorb").out
    assert "smallnorb, 2×32×32 in 5 classes" in out
    assert "9,327,104, 6,661,120 without the decoder" in out


def test_one_preset_in_full(cli: Cli) -> None:
    out = cli("presets", "tf-notebook").out
    preset = get_preset("tf-notebook")
    assert "8,215,568, 6,804,224 without the decoder" in out
    assert preset.source in out


def test_one_preset_shows_its_layers(cli: Cli) -> None:
    rows = [" ".join(line.split()) for line in cli("presets", "tf-notebook").out.splitlines()]
    for row in (
        "convolution 9×9, ReLU 256×20×20 feature maps 20,992",
        "convolution 9×9, stride 2, ReLU 256×6×6 feature maps 5,308,672",
        "cut in 8s, squash 32×6×6×8 primary capsules –",
        "length 10 lengths –",
        "dense, sigmoid 1×28×28 reconstruction 803,600",
    ):
        assert row in rows
    assert any(row.endswith("10×16 class capsules 1,474,560") for row in rows)


@pytest.mark.parametrize("name", ["sabour2017", "baseline-cnn"])
def test_a_preset_is_drawn(cli: Cli, name: str) -> None:
    result = cli("presets", name, "--figure", "new/x.png")
    assert (result.code, result.err) == (0, "")
    assert result.out.endswith("wrote new/x.png\n")
    assert_figure(Path("new/x.png"))
    result = cli("presets", name, "--json", "--figure", "y.svg")
    assert result.err == "wrote y.svg\n"
    layers = json.loads(result.out)["layers"]
    counts = json.loads(result.out)["parameters"]
    assert sum(layer["parameters"] for layer in layers) == (counts["with_decoder"] or counts["without_decoder"])
    assert layers[0] == {"name": "image", "steps": [], "shape": [1, 28, 28], "parameters": 0, "in_decoder": False}


def test_presets_as_json(cli: Cli) -> None:
    found = json.loads(cli("presets", "--json").out)
    assert [preset["name"] for preset in found] == list_presets()
    by_name = {preset["name"]: preset for preset in found}
    assert by_name["sabour2017"]["parameters"] == {"with_decoder": 8_215_568, "without_decoder": 6_804_224}
    assert by_name["sabour2017-code"]["variant_of"] is None
    assert by_name["sabour2017-r1"]["variant_of"] == "sabour2017"
    for name in ("sabour2017", "baseline-cnn", "torch-notebook"):
        real = sum(parameter.numel() for parameter in create_model(name).parameters())
        shown = by_name[name]["parameters"]
        assert real == (shown["with_decoder"] or shown["without_decoder"])
    one = json.loads(cli("presets", "baseline-cnn", "--json").out)
    assert one == by_name["baseline-cnn"]
    assert one["model"] == json.loads(json.dumps(get_preset("baseline-cnn").network))
    assert one["recipe"]["optimizer"] == {"name": "adam", "adam": "torch", "adam_eps": 1e-8}


# datasets


def test_datasets_are_listed(cli: Cli) -> None:
    from torchcaps.datasets import list_datasets

    out = cli("datasets").out
    found = json.loads(cli("datasets", "--json").out)
    for info, described in zip(list_datasets(), found, strict=True):
        assert any(line.split()[0] == info.spec for line in out.splitlines())
        assert (described["name"], described["num_train"]) == (info.spec, info.num_train)
    assert next(line for line in out.splitlines() if line.startswith("digits")).split()[-1] == "yes"


def test_one_data_set_is_counted(cli: Cli) -> None:
    result = cli("datasets", "digits", "--sample", "20", "--figure", "sample.png")
    rows = [line.split() for line in result.out.splitlines()]
    assert ["all", "1,293", "144", "360"] in rows
    assert ["0", "128", "14", "36"] in rows
    assert_figure(Path("sample.png"))
    loaded = json.loads(cli("datasets", "digits", "--json").out)["loaded"]
    assert loaded["test"]["images"] == sum(loaded["test"]["per_class"]) == 360


def test_the_first_images_of_a_part_are_drawn_with_their_labels(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from torchcaps import analysis
    from torchcaps.datasets import load_dataset

    drawn: list[Any] = []
    figure_samples = analysis.figure_samples
    monkeypatch.setattr(analysis, "figure_samples", lambda *a, **k: drawn.append(a[0]) or figure_samples(*a, **k))
    digits = load_dataset("digits")
    for split, part, words in (
        ("train", digits.train, "training"),
        ("validation", digits.validation, "validation"),
        ("test", digits.test, "test"),
    ):
        result = cli("datasets", "digits", "--sample", "23", *(() if split == "train" else ("--split", split)))
        assert (result.code, result.err) == (0, "")
        labels = ", ".join(map(str, part.labels[:23].tolist()))
        assert f"Sample  the first 23 {words} images of digits\nLabels  {labels}\n" in result.out
        assert "wrote digits-sample" in result.out
        assert drawn[-1].images.equal(part.preview(23).images)
    with Image.open("digits-sample.png") as three_rows:
        height = three_rows.height
    assert cli("datasets", "digits", "--sample", "10", "--figure", "sheets/one.png").out.endswith(
        "wrote sheets/one.png\n"
    )
    with Image.open("sheets/one.png") as one_row:
        assert height > 2 * one_row.height
    result = cli("datasets", "digits", "--sample", "5", "--validation", "first", "--json")
    first = load_dataset("digits", validation="first")
    assert json.loads(result.out)["sample"] == list(map(str, first.train.labels[:5].tolist()))
    assert not torch.equal(first.train.labels[:5], digits.train.labels[:5])
    result = cli("datasets", "digits", "--sample", "1000", "--split", "validation", "--json")  # there are 144
    assert json.loads(result.out)["sample"] == list(map(str, digits.validation.labels.tolist()))
    assert result.err.startswith("wrote digits-sample")


@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data set was downloaded yet."""
    monkeypatch.setattr("pooch.os_cache", lambda project: tmp_path / "cache" / project)


@pytest.mark.usefixtures("no_cache")
def test_a_data_set_that_is_not_here(cli: Cli) -> None:
    result = cli("datasets", "mnist")
    assert result.code == 0
    assert "not on this machine" in result.out
    described = json.loads(cli("datasets", "mnist", "--json").out)
    assert (described["found"], described["here"]) == (None, False)


def test_a_data_set_without_files_is_here(cli: Cli) -> None:
    assert "not on this machine" not in cli("datasets", "digits").out
    described = json.loads(cli("datasets", "digits", "--json").out)
    assert (described["found"], described["here"]) == (None, True)


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_folder_without_the_data_set_is_an_error(cli: Cli, tmp_path: Path, more: tuple[str, ...]) -> None:
    result = cli("datasets", "mnist", "--data-dir", "nowhere", *more)
    assert (result.code, result.out) == (2, "")
    assert "data_dir is nowhere, which is no folder" in result.err
    (tmp_path / "empty").mkdir()
    result = cli("datasets", "mnist", "--data-dir", "empty", *more)
    assert (result.code, result.out) == (2, "")
    assert "empty has no train-images-idx3-ubyte" in result.err


def test_own_images_are_counted(cli: Cli, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for n in range(10):
            image = Image.fromarray(rng.integers(0, 256, (20, 30, 3), np.uint8))
            image.save(tmp_path / "photos" / name / f"{n}.png")
    result = cli("datasets", "folder:photos", "--image-size", "16", "--sample", "20", "--figure", "sample.png")
    assert (result.code, result.err) == (0, "")
    assert "3×16×16" in result.out
    assert "cat" in result.out
    assert_figure(Path("sample.png"))


# several objects in an image


@pytest.fixture
def pair_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A network that sees two objects in an image, and a data set of such images called digits."""
    from torchcaps.datasets import Dataset, PairSet, load_dataset

    digits = load_dataset("digits")
    train = PairSet(digits.train.take(40))
    dataset = Dataset("pairs", train, train.preview(20), train.preview(30), digits.class_names)
    monkeypatch.setattr("torchcaps.training.run.load_dataset", lambda *_, **__: dataset)
    small = {"conv_channels": 4, "primary_types": 1, "decoder_hidden": (8,)}
    create_model("sabour2017-multimnist", **small).save_pretrained(tmp_path / "pairs")
    return tmp_path / "pairs"


def test_evaluate_pairs(cli: Cli, pair_folder: Path) -> None:
    found = json.loads(cli("evaluate", pair_folder, "--data", "digits", "--json").out)
    assert (found["num_images"], found["objects"], np.sum(found["confusion"])) == (30, 2, 60)
    out = cli("evaluate", pair_folder, "--data", "digits", "--figure", "confusion.png").out
    assert f"({found['num_correct']} of 30 images right)" in out
    objects = sum(found["confusion"][j][j] for j in range(10))
    assert f"Objects   {100 * found['object_accuracy']:.2f} %  ({objects} of 60 found, 2 an image)" in out
    assert "Confusion (objects): true classes down" in out
    assert_figure(Path("confusion.png"))
    trained = json.loads(cli("evaluate", pair_folder, "--data", "digits", "--split", "train", "--json").out)
    assert trained["num_images"] == 40  # made for it, always the same


def test_pictures_of_pairs(cli: Cli, pair_folder: Path) -> None:
    for split in ("test", "train"):
        result = cli(
            "reconstruct", pair_folder, "--data", "digits", "--split", split, "--count", "6", "--figure", "a.png"
        )
        assert (result.code, result.err) == (0, "")
        assert f"First 6 {split} images of pairs: " in result.out
        assert "were given exactly their classes" in result.out
        assert_figure(Path("a.png"))
    for command in ("perturb", "routing"):
        result = cli(command, pair_folder, "--data", "digits", "--index", "3", "--figure", f"{command}.png")
        assert (result.code, result.err) == (0, "")
        assert re.search(r"Image 3 of the test images of pairs, class \d \+ \d", result.out)
        assert_figure(Path(f"{command}.png"))


def test_predict_pairs(cli: Cli, pair_folder: Path, digit_file: Path) -> None:
    (found,) = json.loads(cli("predict", pair_folder, digit_file, "--json").out)
    longest = sorted(found["lengths"], key=lambda name: -found["lengths"][name])[:2]
    assert found["classes"] == longest
    assert cli("predict", pair_folder, digit_file).out.splitlines()[0] == f"{digit_file}  {' + '.join(longest)}"


def test_a_data_set_of_pairs_is_counted(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchcaps.datasets import Dataset, PairSet, load_dataset

    digits = load_dataset("digits")
    train = PairSet(digits.train.take(40))
    pairs = Dataset("pairs", train, train.preview(20), train.preview(30), digits.class_names)
    monkeypatch.setattr("torchcaps.datasets.load_dataset", lambda *_, **__: pairs)
    result = cli("datasets", "digits", "--sample", "20", "--figure", "sample.png")
    assert (result.code, result.err) == (0, "")
    rows = [line.split() for line in result.out.splitlines()]
    assert ["all", "40", "20", "30"] in rows
    counts = [[int(cell) for cell in row[1:]] for row in rows if row and row[0] in digits.class_names]
    assert np.sum(counts, 0).tolist() == [40, 40, 60]  # every image of the test has two objects
    assert "Each image holds 2 objects" in result.out
    assert f"Labels  {' + '.join(map(str, train.preview(1).labels[0].tolist()))}, " in result.out
    assert_figure(Path("sample.png"))
