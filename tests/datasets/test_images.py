"""Image files to pixels; tests/analysis/test_predictions.py tests how they are brought to a network's shape."""

import itertools
import os
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from support import assert_raises
from tiny_runs import save_image
from torchcaps.datasets import get_max_megapixels, load_dataset, read_image, resize_images, set_max_megapixels
from torchcaps.datasets.images import read_pixels, with_channels
from torchcaps.datasets.scaling import UnknownRange, as_bytes
from torchcaps.errors import InputError

GREY = np.arange(30, dtype=np.uint8).reshape(6, 5) * 8
COLOUR = np.stack([GREY, GREY, GREY[:, ::-1]], axis=-1)


def test_files_keep_their_pixels_in_any_format_and_mode(tmp_path: Path) -> None:
    for suffix in (".png", ".bmp", ".tif", ".gif"):
        np.testing.assert_array_equal(read_pixels(save_image(tmp_path / f"grey{suffix}", GREY)), GREY[None])
        colour = read_pixels(save_image(tmp_path / f"colour{suffix}", COLOUR))
        np.testing.assert_array_equal(colour, COLOUR.transpose(2, 0, 1))
    for suffix in (".jpg", ".webp"):
        image = read_pixels(save_image(tmp_path / f"a{suffix}", np.full((8, 8), 128, np.uint8)))
        assert image.shape[1:] == (8, 8)
        assert np.abs(image.astype(int) - 128).max() <= 2
    for mode, suffix in (("RGB", "png"), ("P", "png"), ("RGBA", "png"), ("LA", "png"), ("CMYK", "tif")):
        np.testing.assert_array_equal(read_pixels(save_image(tmp_path / f"{mode}.{suffix}", GREY, mode)), GREY[None])


def test_every_mode_is_read_and_photos_are_turned_upright(tmp_path: Path) -> None:
    for name, pixels, mode, wanted in (
        ("bilevel.png", np.array([[0, 255], [255, 0]], np.uint8), "1", [[[0, 255], [255, 0]]]),
        ("sixteen.png", np.array([[0, 257, 32896, 65535]], np.uint16), None, [[[0, 1, 128, 255]]]),
        ("float.tif", np.array([[0, 0.5, 1]], np.float32), None, [[[0, 128, 255]]]),
        ("bytes.tif", np.array([[0, 128, 255]], np.int32), None, [[[0, 128, 255]]]),
        ("clear.png", np.array([[[0, 0, 0, 255], [0, 0, 0, 0]]], np.uint8), None, [[[0, 255]]]),  # nothing is white
    ):
        assert as_bytes(read_pixels(save_image(tmp_path / name, pixels, mode))).tolist() == wanted
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera on its side
    Image.fromarray(GREY).save(tmp_path / "a.png", exif=exif)
    np.testing.assert_array_equal(read_pixels(tmp_path / "a.png")[0], np.rot90(GREY, -1))
    seven = save_image(tmp_path / "b.tif", np.array([[0, 7]], np.float32))
    assert_raises(UnknownRange, read_pixels, seven, say="got float32 from 0 to 7; say which numbers become 0 and 1")
    words = save_image(tmp_path / "words.tif", np.array([[0, 300]], np.int32))
    assert_raises(UnknownRange, read_pixels, words, say="got int32 from 0 to 300; say which numbers become 0 and 1")


def test_grey_is_repeated_and_colour_becomes_its_luma() -> None:
    grey, colour = GREY[None], COLOUR.transpose(2, 0, 1)
    np.testing.assert_array_equal(with_channels(grey, 3), np.stack([GREY] * 3))
    assert with_channels(grey, 1) is grey
    assert with_channels(colour, 3) is colour
    assert np.abs(with_channels(colour, 1)[0] - COLOUR @ [0.299, 0.587, 0.114]).max() <= 1
    assert_raises(InputError, with_channels, grey, 2, say="1 channel or 3, not 2")
    said = "an image file is no sequence, but this network takes sequences (1×1×40)"
    assert_raises(InputError, read_image, "any.png", (1, 1, 40), say=said)


def test_files_are_resized_as_data_sets_are(tmp_path: Path) -> None:
    """Pillow and torch round apart only where a value lies between two pixels' levels."""
    noise = np.random.default_rng(0).integers(0, 256, (50, 41, 3), np.uint8)
    path = save_image(tmp_path / "a.png", noise)
    for size in ((9, 40), (64, 50), (100, 7)):
        image = read_image(path, (3, *size), fit="stretch")
        difference = np.abs(
            image.astype(int) - resize_images(torch.from_numpy(noise).permute(2, 0, 1)[None], size)[0].numpy()
        )
        assert difference.max() <= 1
        assert difference.mean() < 0.001
    assert_raises(InputError, read_image, path, (3, 28, 28), fit="crop", say='fit must be "pad" or "stretch"')


def test_images_too_large_are_refused_before_they_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, mode in {"a.png": "L", "b.png": "I;16", "a.jpg": "L", "a.gif": "L", "a.bmp": "1", "a.webp": "L"}.items():
        Image.new(mode, (8100, 8000)).save(tmp_path / name, lossless=True)  # of one colour: small as a file
    Image.new("L", (8100, 8000)).save(tmp_path / "a.tif", compression="tiff_deflate")
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda _: pytest.fail("decoded"))
    for path in tmp_path.iterdir():
        said = f"{path} has 8100×8000 pixels, 64.8 megapixels, but the limit is 64 megapixels; "
        assert_raises(InputError, read_image, path, (1, 28, 28), say=said)


def test_headers_that_say_more_than_is_there(tmp_path: Path) -> None:
    path = save_image(tmp_path / "a.png")  # beyond what Pillow itself reads
    contents = bytearray(path.read_bytes())
    contents[16:24] = (20_000).to_bytes(4, "big") * 2
    contents[29:33] = zlib.crc32(contents[12:29]).to_bytes(4, "big")
    path.write_bytes(contents)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_raises(InputError, read_pixels, path, say="a.png cannot be read as an image: Image size (400000000 pix")
    # a tile that is larger than its image
    tags = {256: 5, 257: 5, 258: 8, 259: 8, 262: 1, 277: 1, 322: 20_000, 323: 20_000, 324: 134, 325: 8}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    (tmp_path / "a.tif").write_bytes(b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(12))
    assert_raises(InputError, read_pixels, tmp_path / "a.tif", say="20000×20000 pixels in a tile, 400 megapixels")


def test_the_limit_is_set_and_holds_for_folders_too(tmp_path: Path) -> None:
    for name, folder in itertools.product("abcdef", ("one", "two")):
        save_image(tmp_path / "photos" / folder / f"{name}.png", np.zeros((100, 60), np.uint8))
    folder, file = f"folder:{tmp_path / 'photos'}", tmp_path / "photos/one/a.png"
    assert get_max_megapixels() == 64
    try:
        set_max_megapixels(0.006)
        load_dataset(folder)
        set_max_megapixels(0.005)
        said = "{} has 60×100 pixels, 0.006 megapixels, but the limit is 0.005 megapixels"
        assert_raises(InputError, load_dataset, folder, say=said.format(file))
        assert_raises(InputError, read_image, file, (1, 28, 28), name="“my cat”", say=said.format("“my cat”"))
        for megapixels in (0, 179, float("nan")):
            assert_raises(InputError, set_max_megapixels, megapixels, say="megapixels must be above 0 and at most 178")
    finally:
        set_max_megapixels(64)


def test_every_reader_of_folders_leaves_out_hidden_files_and_folders(tmp_path: Path) -> None:
    """``folder:``, ``ImageFiles`` and ``predict FOLDER``; links to folders are not followed."""
    from torchcaps.cli.predict import image_files, name_below
    from torchcaps.datasets import ImageFiles, load_dataset
    from torchcaps.datasets.images import image_files_in
    from torchcaps.training.image_spec import ImageSpec

    seen = [save_image(tmp_path / name / f"{n}.png") for name in "ab" for n in range(5)]
    for hidden in ("__MACOSX/a/._0.png", ".ipynb_checkpoints/0.png", "a/.0.png", "a/__MACOSX.png", ".cache/deep/0.png"):
        save_image(tmp_path / hidden)
    deep = save_image(tmp_path / "b" / "more" / "6.png")
    save_image(tmp_path / "b" / ".more" / "6.png")
    if os.name != "nt":
        (tmp_path / "b" / "circle").symlink_to(tmp_path, target_is_directory=True)
    description = ImageSpec(in_shape=(1, 28, 28), class_names=("a", "b"))
    assert image_files([tmp_path], description) == sorted([*seen, deep])
    assert name_below(deep, [tmp_path]) == Path("b/more/6.png")
    assert name_below(deep, [deep]) == name_below(deep, [deep.parent]) == Path("6.png")
    assert image_files_in(tmp_path / "a") == seen[:5]
    files = ImageFiles(tmp_path, (1, 6, 5))
    assert (files.class_names, [file for file, _ in files.files]) == (("a", "b"), seen)
    data = load_dataset(f"folder:{tmp_path}")
    assert (data.class_names, sum(map(len, (data.train, data.validation, data.test)))) == (("a", "b"), 10)
