from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torchcaps.datasets import resize_images
from torchcaps.datasets.images import read_pixels, with_channels
from torchcaps.errors import InputError

GREY = np.arange(30, dtype=np.uint8).reshape(6, 5) * 8
COLOUR = np.stack([GREY, GREY[::-1], GREY[:, ::-1]], axis=-1)


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".gif"])
def test_grey_and_colour_files_keep_their_pixels(tmp_path: Path, save_image: Callable[..., Path], suffix: str) -> None:
    grey = read_pixels(save_image(tmp_path / f"grey{suffix}", GREY))
    assert torch.equal(grey, torch.from_numpy(GREY)[None])
    colour = read_pixels(save_image(tmp_path / f"colour{suffix}", COLOUR))
    assert torch.equal(colour, torch.from_numpy(COLOUR).permute(2, 0, 1))


@pytest.mark.parametrize("suffix", [".jpg", ".webp"])
def test_lossy_files_are_read(tmp_path: Path, save_image: Callable[..., Path], suffix: str) -> None:
    image = read_pixels(save_image(tmp_path / f"a{suffix}", np.full((8, 8), 128, np.uint8)))
    assert image.shape[1:] == (8, 8)
    assert (image.int() - 128).abs().max() <= 2


@pytest.mark.parametrize("mode", ["RGB", "P", "RGBA", "LA", "CMYK"])
def test_grey_pixels_make_one_channel_in_any_mode(tmp_path: Path, save_image: Callable[..., Path], mode: str) -> None:
    path = save_image(tmp_path / f"a{'.tif' if mode == 'CMYK' else '.png'}", GREY, mode)
    assert torch.equal(read_pixels(path), torch.from_numpy(GREY)[None])


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
    assert torch.equal(read_pixels(tmp_path / "a.png")[0], torch.from_numpy(np.rot90(GREY, -1).copy()))


def test_grey_is_repeated_and_colour_becomes_its_luma() -> None:
    grey, colour = torch.from_numpy(GREY)[None], torch.from_numpy(COLOUR).permute(2, 0, 1)
    assert torch.equal(with_channels(grey, 3), grey.expand(3, -1, -1))
    assert with_channels(grey, 1) is grey
    assert with_channels(colour, 3) is colour
    weights = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)
    luma = torch.from_numpy(COLOUR).double() @ weights
    assert (with_channels(colour, 1)[0] - luma).abs().max() <= 1
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


def test_resize_keeps_flat_images_flat_and_the_range() -> None:
    flat = torch.full((3, 2, 9, 7), 77, dtype=torch.uint8)
    assert torch.equal(resize_images(flat, (13, 5)), torch.full((3, 2, 13, 5), 77, dtype=torch.uint8))
    checker = ((torch.arange(8)[:, None] + torch.arange(8)) % 2 * 255).to(torch.uint8)[None, None]
    big = resize_images(checker, (31, 31))
    assert big.min() == 0  # bicubic overshoots: without the clamp dark would turn bright
    assert big.max() == 255
    assert resize_images(flat, (9, 7)) is flat


def test_shrinking_smooths_instead_of_skipping_pixels() -> None:
    lines = (torch.arange(64) % 8 == 0).to(torch.uint8).mul(255).expand(1, 1, 64, 64)
    small = resize_images(lines, (8, 8))  # taking the pixels in the middle would find no line at all
    assert (small[..., 2:-2].float() - 255 / 8).abs().max() < 20


def test_resizing_in_pieces_is_resizing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randint(0, 256, (10, 1, 6, 6), dtype=torch.uint8)
    whole = resize_images(images, (9, 9))
    monkeypatch.setattr("torchcaps.datasets.images._CHUNK", 3)
    assert torch.equal(resize_images(images, (9, 9)), whole)
