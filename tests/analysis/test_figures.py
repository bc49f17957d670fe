"""Saving of figures, and images with their labels."""

import string
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from torchcaps.analysis import figure_samples, save_figure
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


def test_what_names_no_figure_is_refused_before_anything_is_made(tmp_path, figure):
    for path in ("..", "folder/..", "folder/", "a\0.png", "new/a.docx"):
        with pytest.raises(InputError, match=r"is a folder; name a|hold a NUL or half|must end in \.png, \.pdf, \.svg"):
            save_figure(figure, f"{tmp_path}/{path}")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def image_set(make_images) -> ImageSet:
    return ImageSet(make_images(7, (3, 6, 9)), torch.tensor([0, 1, 2, 0, 1, 2, 0]))


def test_the_first_images_are_shown_in_order_with_their_names(image_set, words):
    figure = figure_samples(image_set, ["ant", "bee\x1b", "$cow$"], count=6, title="Insects?")
    shown = figure.axes[0].images
    assert len(shown) == 6
    np.testing.assert_allclose(shown[1].get_array(), image_set.images[1].permute(1, 2, 0) / 255)
    assert words(figure) == ["Insects?", *["ant", r"bee\x1b", "$cow$"] * 2]
    every = figure_samples(image_set.select(torch.arange(14) % 7))
    places = [image.get_extent() for image in every.axes[0].images]
    assert (len(places), words(every)[:4]) == (14, ["0", "1", "2", "0"])
    assert places[0][0] < places[1][0]  # side by side
    assert places[0][2] < places[10][3]  # then below


def test_several_objects_in_an_image_are_all_named_and_what_cannot_be_shown(image_set, words):
    made = PairSet(image_set, max_shift=1)
    figure = figure_samples(made, ["ant", "bee", "cow"], count=4)
    assert [word.split(" + ")[0] for word in words(figure)] == ["ant", "bee", "cow", "ant"]
    np.testing.assert_allclose(figure.axes[0].images[3].get_array(), made.preview(4).images[3].permute(1, 2, 0) / 255)
    with pytest.raises(InputError, match="at most 5,000 images on 65,535 pixels a side, got 5,001 images"):
        figure_samples(image_set.select(torch.arange(5001) % 7), count=5001)
    with pytest.raises(InputError, match=r"a label must be in 0\.\.1, got 0\.\.2"):
        figure_samples(image_set, ["ant", "bee"])
