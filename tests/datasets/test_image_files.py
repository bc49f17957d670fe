"""Image files to pixels; tests/analysis/test_predictions.py tests how they are brought to a network's shape."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torchcaps.datasets import read_image, resize_images
from torchcaps.datasets.image_files import read_pixels, with_channels
from torchcaps.errors import InputError

GREY = np.arange(30, dtype=np.uint8).reshape(6, 5) * 8
COLOUR = np.stack([GREY, GREY[::-1], GREY[:, ::-1]], axis=-1)


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".gif"])
def test_grey_and_colour_files_keep_their_pixels(tmp_path: Path, save_image: Callable[..., Path], suffix: str) -> None:
    grey = read_pixels(save_image(tmp_path / f"grey{suffix}", GREY))
    np.testing.assert_array_equal(grey, GREY[None])
    colour = read_pixels(save_image(tmp_path / f"colour{suffix}", COLOUR))
    np.testing.assert_array_equal(colour, COLOUR.transpose(2, 0, 1))


@pytest.mark.parametrize("suffix", [".jpg", ".webp"])
def test_lossy_files_are_read(tmp_path: Path, save_image: Callable[..., Path], suffix: str) -> None:
    image = read_pixels(save_image(tmp_path / f"a{suffix}", np.full((8, 8), 128, np.uint8)))
    assert image.shape[1:] == (8, 8)
    assert np.abs(image.astype(int) - 128).max() <= 2


@pytest.mark.parametrize("mode", ["RGB", "P", "RGBA", "LA", "CMYK"])
def test_grey_pixels_make_one_channel_in_any_mode(tmp_path: Path, save_image: Callable[..., Path], mode: str) -> None:
    path = save_image(tmp_path / f"a{'.tif' if mode == 'CMYK' else '.png'}", GREY, mode)
    np.testing.assert_array_equal(read_pixels(path), GREY[None])


def test_bilevel_images_are_black_and_white(tmp_path: Path, save_image: Callable[..., Path]) -> None:
    path = save_image(tmp_path / "a.png", np.array([[0, 255], [255, 0]], np.uint8), "1")
    assert read_pixels(path).tolist() == [[[0, 255], [255, 0]]]


def test_sixteen_bit_greys_are_scaled_not_clipped(tmp_path: Path, save_image: Callable[..., Path]) -> None:
    path = save_image(tmp_path / "a.png", np.array([[0, 257, 32896, 65535]], np.uint16))
    assert read_pixels(path).tolist() == [[[0, 1, 128, 255]]]


def test_float_images_run_from_0_to_1(tmp_path: Path, save_image: Callable[..., Path]) -> None:
    path = save_image(tmp_path / "a.tif", np.array([[0, 0.5, 1]], np.float32))
    assert read_pixels(path).tolist() == [[[0, 128, 255]]]
    with pytest.raises(InputError, match=r"from 0 to 7 instead of 0\.\.1"):
        read_pixels(save_image(tmp_path / "b.tif", np.array([[0, 7]], np.float32)))


def test_transparent_parts_show_white(tmp_path: Path, save_image: Callable[..., Path]) -> None:
    pixels = np.array([[[0, 0, 0, 255], [0, 0, 0, 0]]], np.uint8)  # black ink, and nothing
    assert read_pixels(save_image(tmp_path / "a.png", pixels)).tolist() == [[[0, 255]]]


def test_photos_are_turned_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera on its side
    Image.fromarray(GREY).save(tmp_path / "a.png", exif=exif)
    np.testing.assert_array_equal(read_pixels(tmp_path / "a.png")[0], np.rot90(GREY, -1))


def test_grey_is_repeated_and_colour_becomes_its_luma() -> None:
    grey, colour = GREY[None], COLOUR.transpose(2, 0, 1)
    np.testing.assert_array_equal(with_channels(grey, 3), np.stack([GREY] * 3))
    assert with_channels(grey, 1) is grey
    assert with_channels(colour, 3) is colour
    assert np.abs(with_channels(colour, 1)[0] - COLOUR @ [0.299, 0.587, 0.114]).max() <= 1
    with pytest.raises(InputError, match="1 channel or 3, not 2"):
        with_channels(grey, 2)


def test_files_that_are_no_images(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no image file .*gone\.png"):
        read_pixels(tmp_path / "gone.png")
    text = tmp_path / "text.png"
    text.write_text("not an image")
    with pytest.raises(InputError, match=r"text\.png cannot be read as an image"):
        read_pixels(text)
    (tmp_path / "empty.png").touch()
    with pytest.raises(InputError, match=r"empty\.png cannot be read"):
        read_pixels(tmp_path / "empty.png")


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".gif", ".bmp", ".tif", ".webp"])
def test_half_an_image_and_a_garbled_one(tmp_path: Path, save_image: Callable[..., Path], suffix: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 40), dtype=np.uint8)
    path = save_image(tmp_path / f"a{suffix}", noise)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cannot be read as an image"):
        read_pixels(path)
    for begin in (4, 12, 30):  # whatever the decoder makes of it, nothing but an InputError may come out
        path.write_bytes(whole[:begin] + b"\xff\x00\x7f" * 8 + whole[begin + 24 :])
        try:
            read_pixels(path)
        except InputError as error:
            assert str(path) in str(error)  # noqa: PT017


@pytest.mark.parametrize("size", [(9, 40), (28, 28), (64, 50), (100, 7)])
def test_files_are_resized_as_data_sets_are(
    tmp_path: Path, save_image: Callable[..., Path], size: tuple[int, int]
) -> None:
    """Pillow and torch round apart only where a value lies between two pixels' levels."""
    noise = np.random.default_rng(0).integers(0, 256, (50, 41, 3), np.uint8)
    image = read_image(save_image(tmp_path / "a.png", noise), (3, *size), fit="stretch")
    stacked = resize_images(torch.from_numpy(noise).permute(2, 0, 1)[None], size)[0].numpy()
    difference = np.abs(image.astype(int) - stacked)
    assert difference.max() <= 1
    assert difference.mean() < 0.001


def test_reading_loads_no_torch(tmp_path: Path) -> None:
    Image.fromarray(GREY).save(tmp_path / "a.png")
    code = (
        "import sys\nfrom torchcaps.datasets import read_image\n"
        f"print(read_image({str(tmp_path / 'a.png')!r}, (1, 28, 28)).shape, 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "(1, 28, 28) False\n"
