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

from torchcaps.analysis import Evaluation, figure_confusion, figure_curves, figure_samples, save_figure
from torchcaps.analysis.figures import displayable, save_figures, shorten, tile_size
from torchcaps.datasets import ImageSet
from torchcaps.errors import InputError

CURVES = ("epoch", "train_loss", "train_accuracy", "validation_loss", "validation_accuracy")
STARTS = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}


@pytest.fixture
def figure() -> Figure:
    figure = Figure(figsize=(2, 1))
    figure.text(0.5, 0.5, "seen")
    return figure


@pytest.mark.parametrize("suffix", STARTS)
def test_the_suffix_gives_the_format(tmp_path, figure, suffix):
    path = tmp_path / "new" / "folder" / f"a.{suffix}"
    assert save_figure(figure, path) == path
    assert path.read_bytes().startswith(STARTS[suffix])
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_png_is_what_a_path_without_suffix_becomes(tmp_path, figure):
    assert save_figure(figure, str(tmp_path / "a")) == tmp_path / "a.png"
    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (320, 160)


def test_an_unknown_suffix_is_refused_before_anything_is_made(tmp_path, figure):
    with pytest.raises(InputError, match=r"a\.docx' is no figure: it must end in \.png, \.pdf, \.svg"):
        save_figure(figure, tmp_path / "new" / "a.docx")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("path", ["", ".", "..", "/", "folder/..", "./folder/", "a\0.png", "a\ud800.png"])
def test_what_names_no_file_is_refused(tmp_path, figure, path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"is a folder; name a file|must hold no NUL and no half of a character"):
        save_figure(figure, path)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_to_is_named(tmp_path, figure):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InputError, match=r"file.a\.png cannot be written"):
        save_figure(figure, tmp_path / "file" / "a.png")
    (tmp_path / "a.png").mkdir()
    with pytest.raises(InputError, match=r"a\.png' is a folder; name a file in it for the figure"):
        save_figure(figure, tmp_path / "a.png")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.png", "file"]


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
def test_a_failed_save_is_one_sentence_and_leaves_the_old_figure(tmp_path, figure, suffix):
    figure.text(0, 0, string.printable[:94], parse_math=False)  # many glyphs: written in many pieces
    path = save_figure(figure, tmp_path / f"a.{suffix}")
    before = path.read_bytes()
    with pytest.raises(InputError, match=rf"a\.{suffix} cannot be written: ") as raised, full_disk():
        save_figure(figure, path)
    assert "\n" not in str(raised.value)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_figures_never_overwrite_another(tmp_path, figure):
    figures = {"": figure, "-statistics": figure}
    names = [[path.name for path in save_figures(figures, tmp_path / "a.png")] for _ in range(2)]
    assert names == [["a.png", "a-statistics.png"], ["a-2.png", "a-2-statistics.png"]]
    (tmp_path / "a-3-statistics.png").touch()
    assert save_figures(figures, tmp_path / "a")[0].name == "a-4.png"


def test_channels_become_colours():
    image = np.array([0.0, 0.5, 1.0]).reshape(3, 1, 1)
    np.testing.assert_array_equal(displayable(image)[0, 0], [0, 0.5, 1])
    np.testing.assert_array_equal(displayable(image[1:2])[0, 0], [0.5] * 3)
    np.testing.assert_array_equal(displayable(image[1:])[0, 0], [0.75] * 3)
    np.testing.assert_array_equal(displayable(np.array([[[-1.0, 2.0]]]))[0, :, 0], [0, 1])


def test_tiles_keep_the_aspect_ratio():
    for height, width in ((28, 28), (10, 40), (40, 10)):
        tile = tile_size(height, width)
        assert tile[0] / tile[1] == pytest.approx(width / height)
        assert max(tile) == max(tile_size(28, 28))


def test_words_are_cut_only_where_they_do_not_fit():
    assert shorten("ankle boot", 0.8) == "ankle boot"
    assert shorten("a very long name", 0.8) == "a very lon…"
    assert shorten("ab", 0.01) == "ab"


def test_names_are_no_formulas(tmp_path, make_images):
    name = r"$\unknown$"
    runs = {name: {key: np.ones(1) for key in CURVES}}
    save_figure(figure_curves(runs), tmp_path / "curves.png")
    save_figure(figure_confusion(Evaluation(np.eye(2, dtype=np.int64), 0.0, (name, "b"))), tmp_path / "confusion.png")
    images = ImageSet(make_images(1), torch.tensor([0]))
    save_figure(figure_samples(images, [name]), tmp_path / "samples.png")


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
