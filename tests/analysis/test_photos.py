"""The figure of photos beside what a network sees of them."""

from __future__ import annotations

import numpy as np

from support import assert_raises
from torchcaps.analysis import SeenPhoto, figure_photos
from torchcaps.datasets import Photo, Prepared
from torchcaps.errors import InputError


def seen(reconstruction: bool = True, side: int = 900, channels: int = 3) -> SeenPhoto:
    prepared = Prepared(np.zeros((1, 28, 28), np.uint8), ("dark ink turned light",), (90, 180, 450, 540))
    photo = Photo(np.full((channels, side, 2 * side), 200, np.uint8), prepared)
    drawn = np.zeros((1, 28, 28)) if reconstruction else None
    return SeenPhoto("a $file$.jpg: 5", photo, drawn, ("its score 0.30 is below 0.50",))


def words(figure: object) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]  # type: ignore[attr-defined]


def test_a_row_shows_photo_image_and_reconstruction() -> None:
    figure = figure_photos([seen(), seen(channels=1, side=30)])
    (axes,) = figure.axes
    assert [image.get_array().shape[:2] for image in axes.images[:3]] == [(200, 400), (28, 28), (28, 28)]
    assert len(axes.images) == 6
    assert words(figure) == [
        *("photo", "what the network sees", "reconstruction"),
        *("a $file$.jpg: 5", "dark ink turned light", "unsure: its score 0.30 is below 0.50") * 2,
    ]


def test_the_ink_is_outlined() -> None:
    figure = figure_photos([seen()])
    (axes,) = figure.axes
    pixels = axes.images[0].get_array()
    red = np.argwhere((pixels[..., 0] > 0.7) & (pixels[..., 1] < 0.2))
    down, across = red.min(0) / pixels.shape[:2], red.max(0) / pixels.shape[:2]
    np.testing.assert_allclose([*down, *across], [0.1, 0.1, 0.5, 0.3], atol=0.03)


def test_networks_without_a_decoder_have_two_columns() -> None:
    figure = figure_photos([seen(reconstruction=False)])
    assert len(figure.axes[0].images) == 2
    assert "reconstruction" not in words(figure)


def test_how_many() -> None:
    assert_raises(InputError, figure_photos, [], say="a figure shows 1 to 100 photos, got 0")
    assert_raises(InputError, figure_photos, [seen()] * 101, say="a figure shows 1 to 100 photos, got 101")
