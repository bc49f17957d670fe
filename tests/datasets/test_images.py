"""Image files to pixels; tests/analysis/test_predictions.py tests how they are brought to a network's shape."""

from __future__ import annotations

import functools
import os
import socket
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from support import assert_raises
from torchcaps.datasets import get_max_megapixels, load_dataset, read_image, resize_images, set_max_megapixels
from torchcaps.datasets.images import read_pixels, with_channels
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


def test_every_mode_becomes_eight_bits(tmp_path: Path, save_image: Callable[..., Path]) -> None:
    for name, pixels, mode, wanted in (
        ("bilevel.png", np.array([[0, 255], [255, 0]], np.uint8), "1", [[[0, 255], [255, 0]]]),
        ("sixteen.png", np.array([[0, 257, 32896, 65535]], np.uint16), None, [[[0, 1, 128, 255]]]),
        ("float.tif", np.array([[0, 0.5, 1]], np.float32), None, [[[0, 128, 255]]]),
        ("bytes.tif", np.array([[0, 128, 255]], np.int32), None, [[[0, 128, 255]]]),
        ("words.tif", np.array([[0, 32896, 65535]], np.int32), None, [[[0, 128, 255]]]),
        ("clear.png", np.array([[[0, 0, 0, 255], [0, 0, 0, 0]]], np.uint8), None, [[[0, 255]]]),  # nothing is white
    ):
        assert read_pixels(save_image(tmp_path / name, pixels, mode)).tolist() == wanted
    seven = save_image(tmp_path / "b.tif", np.array([[0, 7]], np.float32))
    assert_raises(InputError, read_pixels, seven, say="from 0 to 7 instead of 0..1")


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
    assert_raises(InputError, with_channels, grey, 2, say="1 channel or 3, not 2")


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


# sizes


@pytest.fixture
def _restored() -> Iterator[None]:
    """What a test sets holds for that test alone."""
    before = get_max_megapixels()
    yield
    set_max_megapixels(before)


PEAK = """
import resource, sys
from torchcaps.datasets import read_image
from torchcaps.errors import InputError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        read_image(path, (1, 28, 28))
        print("read")
    except InputError as error:
        print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read as on Linux")
def test_images_too_large_are_refused_before_they_are_decoded(tmp_path: Path) -> None:
    """Of one colour: small as files, however large; each in the same process, whose memory is looked at."""
    options = {".webp": {"lossless": True}, ".tif": {"compression": "tiff_deflate"}}
    modes = {"a.png": "L", "b.png": "I;16", "a.jpg": "L", "a.gif": "L", "a.bmp": "1", "a.webp": "L", "a.tif": "L"}
    for name, mode in modes.items():
        path = tmp_path / name
        Image.new(mode, (8100, 8000)).save(path, **options.get(path.suffix, {}))
    paths = [str(tmp_path / name) for name in modes]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PEAK, *paths], capture_output=True, text=True, check=True
    )
    *said, peak = done.stdout.splitlines()
    assert len(said) == len(modes)
    for path, words in zip(paths, said, strict=True):
        assert words.startswith(f"{path} has 8100×8000 pixels, 64.8 megapixels, but at most 64 megapixels are read; ")
    assert int(peak) < 30 * 1024  # KiB; decoded, the smallest of them takes 62 MiB
    assert done.stderr == ""


def test_headers_that_say_more_than_is_there(tmp_path: Path, save_image: Callable[..., Path]) -> None:
    path = save_image(tmp_path / "a.png")  # beyond what Pillow itself reads
    contents = bytearray(path.read_bytes())
    contents[16:24] = (20_000).to_bytes(4, "big") * 2
    contents[29:33] = zlib.crc32(contents[12:29]).to_bytes(4, "big")
    path.write_bytes(contents)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_raises(
            InputError, read_pixels, path, say=f"{path} cannot be read as an image: Image size (400000000 pix"
        )
    # a tile that is larger than its image
    tags = {256: 5, 257: 5, 258: 8, 259: 8, 262: 1, 277: 1, 322: 20_000, 323: 20_000, 324: 134, 325: 8}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    (tmp_path / "a.tif").write_bytes(b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(12))
    said = "a.tif has 20000×20000 pixels in a tile, 400 megapixels"
    assert_raises(InputError, read_pixels, tmp_path / "a.tif", say=said)


@pytest.mark.usefixtures("_restored")
def test_the_limit_is_set_and_holds_for_folders_too(tmp_path: Path, save_image: Callable[..., Path]) -> None:
    assert get_max_megapixels() == 64
    for name in "abcdef":
        for folder in ("one", "two"):
            save_image(tmp_path / "photos" / folder / f"{name}.png", np.zeros((100, 60), np.uint8))
    set_max_megapixels(0.006)
    load_dataset(f"folder:{tmp_path / 'photos'}")
    set_max_megapixels(0.005)
    for read in (
        lambda: read_image(tmp_path / "photos/one/a.png", (1, 28, 28)),
        lambda: load_dataset(f"folder:{tmp_path / 'photos'}", image_size=28),
    ):
        assert_raises(InputError, read, say="a.png has 60×100 pixels, 0.006 megapixels, but at most 0.005 megapixels")


@pytest.mark.usefixtures("_restored")
def test_limits_that_cannot_be() -> None:
    for megapixels in (0, -1, 179, float("nan"), float("inf")):
        assert_raises(InputError, set_max_megapixels, megapixels, say="megapixels must be above 0 and at most 178")
    assert get_max_megapixels() == 64


# what is no file, and what is damaged


@pytest.mark.skipif(os.name == "nt", reason="there are no FIFOs, sockets and devices among the files")
def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.png")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket.png"))
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "loop.png").symlink_to("loop.png")
    cases = {
        "fifo.png": "fifo.png: what is there is a FIFO",
        "socket.png": "socket.png: what is there is a socket",
        "folder.png": "folder.png: what is there is a folder",
        "/dev/zero": "there is no image file /dev/zero: what is there is a device",
        "loop.png": "loop.png cannot be read: ",
        "fifo.png/a.png": "there is no image file",
        "a\0b.png": "null byte",
        "x" * 300: "cannot be read: ",
    }
    for name, words in cases.items():
        assert_raises(InputError, read_pixels, tmp_path / name, say=words)


def test_names_in_errors(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("not an image")
    for path, words in (
        (tmp_path / "a.png", " cannot be read as an image; PNG,"),
        (tmp_path / "gone.png", "there is no"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            read_image(path, (1, 28, 28), name="“my cat”")
        assert "“my cat”" in str(caught.value)
        assert str(tmp_path) not in str(caught.value)


def test_the_error_stream_is_given_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever threads read images, and whether there is an error stream at all."""
    Image.fromarray(np.arange(30_000, dtype=np.uint8).reshape(100, 300)).save(tmp_path / "a.tif", compression="lzma")
    whole = (tmp_path / "a.tif").read_bytes()
    (tmp_path / "a.tif").write_bytes(whole[:60] + bytes(9) + whole[69:])
    with ThreadPoolExecutor(8) as threads:
        for future in [threads.submit(read_pixels, tmp_path / "a.tif") for _ in range(80)]:
            assert isinstance(future.exception(), InputError)
    os.write(2, b"heard")
    assert capfd.readouterr() == ("", "heard")
    Image.fromarray(GREY).save(tmp_path / "b.tif", compression="tiff_deflate")
    code = f"from torchcaps.datasets import read_image\nread_image({str(tmp_path / 'b.tif')!r}, (1, 6, 5))"
    without = functools.partial(os.close, 2)
    assert subprocess.run([sys.executable, "-c", code], preexec_fn=without, check=False).returncode == 0


def test_what_pillow_logs_is_not_printed(tmp_path: Path) -> None:
    Image.fromarray(COLOUR).save(tmp_path / "a.tif")
    whole = (tmp_path / "a.tif").read_bytes()
    samples = struct.pack("<HHI", 277, 3, 1)  # the tag of the samples of a pixel: 3
    (tmp_path / "a.tif").write_bytes(whole.replace(samples + b"\3\0", samples + b"\x03\xff"))
    code = f"from torchcaps.datasets import read_image\nread_image({str(tmp_path / 'a.tif')!r}, (1, 6, 5))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.startswith("Traceback")  # of the InputError, and nothing before it
    assert "InputError" in done.stderr
