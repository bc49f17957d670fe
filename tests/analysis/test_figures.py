"""How figures are saved and look; images with their labels; learning curves."""

from __future__ import annotations

import string
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from torchcaps.analysis import figure_curves, figure_samples, read_metrics, save_figure
from torchcaps.analysis.figures import displayable, save_figures, shorten
from torchcaps.datasets import ImageSet, PairSet
from torchcaps.errors import InputError

STARTS = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}


@pytest.fixture
def figure() -> Figure:
    figure = Figure(figsize=(2, 1))
    figure.text(0.5, 0.5, string.printable[:94], parse_math=False)  # many glyphs: written in many pieces
    return figure


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond 100 bytes meanwhile: a write fails in the middle, as on a full disk."""
    resource = pytest.importorskip("resource", reason="file sizes can be limited on Unix only")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("suffix", STARTS)
def test_the_suffix_gives_the_format_and_a_failed_save_leaves_the_old_figure(tmp_path, figure, suffix):
    path = tmp_path / "new" / "folder" / f"a.{suffix}"
    assert save_figure(figure, path) == path
    before = path.read_bytes()
    assert before.startswith(STARTS[suffix])
    with pytest.raises(InputError, match=rf"a\.{suffix} cannot be written: ") as raised, full_disk():
        save_figure(figure, path)
    assert "\n" not in str(raised.value)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_png_is_what_a_path_without_suffix_becomes(tmp_path, figure):
    assert save_figure(figure, str(tmp_path / "a")) == tmp_path / "a.png"
    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (320, 160)


def test_what_names_no_figure_is_refused_before_anything_is_made(tmp_path, figure, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("", ".", "..", "/", "folder/..", "./folder/", "a\0.png", "a\ud800.png", "new/a.docx"):
        with pytest.raises(
            InputError, match=r"is a folder; name a|no NUL and no half|must end in \.png, \.pdf, \.svg|empty"
        ):
            save_figure(figure, path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InputError, match=r"file.a\.png cannot be written"):
        save_figure(figure, tmp_path / "file" / "a.png")


def test_figures_never_overwrite_another(tmp_path, figure):
    figures = {"": figure, "-statistics": figure}
    names = [[path.name for path in save_figures(figures, tmp_path / "a.png")] for _ in range(2)]
    assert names == [["a.png", "a-statistics.png"], ["a-2.png", "a-2-statistics.png"]]
    (tmp_path / "a-3-statistics.png").touch()
    assert save_figures(figures, tmp_path / "a")[0].name == "a-4.png"


def test_channels_become_colours_and_words_are_cut_only_where_they_do_not_fit():
    image = np.array([0.0, 0.5, 1.0]).reshape(3, 1, 1)
    np.testing.assert_array_equal(displayable(image)[0, 0], [0, 0.5, 1])
    np.testing.assert_array_equal(displayable(image[1:])[0, 0], [0.75] * 3)
    np.testing.assert_array_equal(displayable(np.array([[[-1.0, 2.0]]]))[0, :, 0], [0, 1])
    assert shorten("ankle boot", 0.8) == "ankle boot"
    assert shorten("a very long name", 0.8) == "a very lon…"
    assert shorten("ab", 0.01) == "ab"


def test_nothing_global_is_touched_and_nothing_heavy_loaded_early():
    code = """
import sys
import torchcaps.analysis as analysis
assert not {"torch", "matplotlib"} & set(sys.modules), "heavy imports"
import numpy as np
analysis.figure_confusion
import torchcaps.analysis.routing_maps
assert "matplotlib" not in sys.modules, "matplotlib before a drawing"
import matplotlib
before = matplotlib.rcParams.copy()  # a look at its "backend" would load pyplot
analysis.figure_confusion(analysis.Evaluation(np.eye(2, dtype=int), 0.0, ("a", "b")))
analysis.figure_routing_statistics(analysis.RoutingStatistics(np.ones((2, 2)), np.ones((2, 2)), np.ones(3)))
assert "matplotlib.pyplot" not in sys.modules, "pyplot"
assert dict.__eq__(matplotlib.rcParams, before), "rcParams"
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


# ---- images with their labels


@pytest.fixture
def image_set(make_images) -> ImageSet:
    return ImageSet(make_images(7, (3, 6, 9)), torch.tensor([0, 1, 2, 0, 1, 2, 0]))


def test_the_first_images_are_shown_in_order_with_their_names(image_set, words):
    figure = figure_samples(image_set, ["ant", "bee", "cow"], rows=2, columns=3, title="Insects?")
    shown = figure.axes[0].images
    assert len(shown) == 6
    np.testing.assert_allclose(shown[1].get_array(), image_set.images[1].permute(1, 2, 0) / 255)
    assert words(figure) == ["Insects?", *["ant", "bee", "cow"] * 2]
    places = [image.get_extent() for image in shown]
    assert places[0][0] < places[1][0]  # side by side
    assert places[0][2] < places[3][3]  # then below
    width, height = places[0][1] - places[0][0], places[0][2] - places[0][3]
    assert width / height == pytest.approx(9 / 6)
    every = figure_samples(image_set)
    assert (len(every.axes[0].images), words(every)) == (7, ["0", "1", "2", "0", "1", "2", "0"])


def test_names_are_drawn_as_they_are_but_cut_and_without_control_characters(tmp_path, make_images, words):
    images = ImageSet(make_images(3), torch.tensor([0, 1, 2]))
    figure = figure_samples(images, [r"US$ $\unknown$", "a\x1b[31m", "n" * 200])
    assert words(figure)[:2] == [r"US$ $\unknown$", r"a\x1b[31m"]
    assert words(figure)[2].endswith("…")
    assert figure.get_figwidth() < 5
    save_figure(figure, tmp_path / "a.png")


def test_several_objects_in_an_image_are_all_named(image_set, make_images, words):
    pairs = ImageSet(make_images(2), torch.tensor([[0, 2], [1, 0]]))
    assert words(figure_samples(pairs, ["ant", "bee", "cow"])) == ["ant + cow", "bee + ant"]
    made = PairSet(image_set, max_shift=1)
    figure = figure_samples(made, ["ant", "bee", "cow"], rows=1, columns=4)
    assert [word.split(" + ")[0] for word in words(figure)] == ["ant", "bee", "cow", "ant"]
    np.testing.assert_allclose(figure.axes[0].images[3].get_array(), made.preview(4).images[3].permute(1, 2, 0) / 255)


def test_bad_sheets(image_set):
    for options, message in (({"rows": 0}, "rows must be"), ({"columns": 0}, "columns must be")):
        with pytest.raises(InputError, match=message):
            figure_samples(image_set, **options)
    with pytest.raises(InputError, match="label is 2, but there are only 2"):
        figure_samples(image_set, ["ant", "bee"])


# ---- learning curves

HEADER = "epoch,step,train_loss,train_reconstruction_loss,train_accuracy,validation_loss,validation_accuracy"
ROWS = ["1,20,0.4,20,0.5,0.2,0.75", "2,40,0.1,,0.9,0.05,0.98"]


def write(path, *lines, end="\n"):
    path.write_text("\n".join(lines) + end)
    return path


def test_columns_come_by_name_and_empty_cells_are_nan(tmp_path):
    path = write(tmp_path / "metrics.csv", HEADER, *ROWS)
    for place in (path, tmp_path, str(path)):
        metrics = read_metrics(place)
        assert list(metrics) == HEADER.split(",")
        np.testing.assert_array_equal(metrics["epoch"], [1, 2])
        np.testing.assert_array_equal(metrics["train_reconstruction_loss"], [20, np.nan])
        np.testing.assert_array_equal(metrics["validation_accuracy"], [0.75, 0.98])
    for unfinished in ("3,60,4.", ROWS[1][:-1]):  # the second is whole, but 0.9 was to be 0.98
        path = write(tmp_path / "metrics.csv", HEADER, *ROWS, unfinished, end="")
        np.testing.assert_array_equal(read_metrics(path)["epoch"], [1, 2])


def test_files_that_are_no_metrics(tmp_path):
    with pytest.raises(InputError, match=r"metrics\.csv does not exist; give a run folder"):
        read_metrics(tmp_path)
    for text, message in (
        (f"{HEADER}\n", "no rows yet"),
        ("\n", "no rows yet"),
        ("a,b\n1,2\n", "it has no 'epoch'"),
        (f"{HEADER}\n1,2\n", "is damaged or no metrics"),
        (f"{HEADER}\n{ROWS[1].replace('0.1', 'much')}\n", "much"),
        (f"{HEADER}\n{ROWS[0].replace('0.75', '7' * 200_000)}\n", "field larger than field limit"),
        ("x" * 100_000 + "\n1\n", "it has no 'epoch'"),
        ("\ud800", "is damaged or no metrics"),
    ):
        (tmp_path / "metrics.csv").write_text(text, errors="surrogatepass")
        with pytest.raises(InputError, match=message) as caught:
            read_metrics(tmp_path)
        assert len(str(caught.value)) < 500


def run(errors, losses):
    accuracy, loss = 1 - np.array(errors), np.array(losses)
    validation = {"validation_loss": loss, "validation_accuracy": accuracy}
    return {
        "epoch": np.arange(1.0, len(loss) + 1),
        "train_loss": 2 * loss,
        "train_accuracy": accuracy - 0.01,
    } | validation


def test_validation_and_training_of_each_run_are_drawn(words):
    runs = {"$one$": run([0.5, 0.4], [1, 0.8]), "two": run([0.3, 0.2], [0.7, 0.6])}
    figure = figure_curves(runs, title="Both")
    loss, error = figure.axes
    np.testing.assert_allclose(loss.lines[0].get_ydata(), [1, 0.8])
    np.testing.assert_allclose(loss.lines[1].get_ydata(), [2, 1.6])
    np.testing.assert_allclose(error.lines[2].get_ydata(), [30, 20])  # percent
    assert len({line.get_color() for line in error.lines}) == 2
    assert {"Both", "$one$", "two", "train", "validation", "epoch", "Loss", "Error"} <= set(words(figure))
    assert loss.get_yscale() == error.get_yscale() == "linear"


def test_wide_ranges_are_logarithmic_and_zeros_and_single_points_still_shown(tmp_path):
    figure = figure_curves({"a": run([0.5, 0.01], [1, 0.01])})
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "log"]
    figure = figure_curves({"a": run([0.5, 0.01, 0], [1, 0.9, 0.8])})
    assert [axes.get_yscale() for axes in figure.axes] == ["linear", "symlog"]
    assert figure.axes[1].get_ylim()[0] == 0
    without = run([0.5, 0.2], [1, 0.5])
    without["validation_loss"] = without["validation_accuracy"] = np.full(2, np.nan)
    figure = figure_curves({"one": run([0.5], [1]), "without": without})
    save_figure(figure, tmp_path / "a.png")
    assert all(line.get_marker() not in ("", "None") for line in figure.axes[0].lines)  # one point is seen


def test_bad_curves():
    with pytest.raises(InputError, match="at least one run"):
        figure_curves({})
    with pytest.raises(InputError, match='bad have no column "train_loss"'):
        figure_curves({"bad": {"epoch": np.ones(1)}})
