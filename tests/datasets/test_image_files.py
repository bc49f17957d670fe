"""What an image file holds beyond one page of 8 bits: every reader takes it, or refuses it in a sentence."""

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support import assert_raises
from torchcaps.analysis import load_image
from torchcaps.datasets import ImageFiles, load_dataset, read_photo
from torchcaps.datasets.images import read_pixels
from torchcaps.datasets.masks import read_mask
from torchcaps.errors import InputError

RANDOM = np.random.default_rng(0)
SIDE = 8
PAGES = [np.full((SIDE, SIDE), 40 * n, np.uint8) for n in range(1, 6)]


def saved(pages: list[np.ndarray], suffix: str, **options: Any) -> bytes:
    """Return the contents of an image file of these pages."""
    buffer = io.BytesIO()
    first, *more = map(Image.fromarray, pages)
    first.save(buffer, suffix, **options, **({"save_all": True, "append_images": more} if more else {}))
    return buffer.getvalue()


def chunk(kind: bytes, contents: bytes) -> bytes:
    return struct.pack(">I", len(contents)) + kind + contents + struct.pack(">I", zlib.crc32(kind + contents))


def png_of_16_bits(colours: np.ndarray) -> bytes:
    """Return a PNG file of 16 bits a channel in colour, which Pillow reads and cannot write."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in colours)
    header = struct.pack(">2I5B", SIDE, SIDE, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def with_a_flip(contents: bytes, mark: bytes) -> bytes:
    """Flip a bit in the pixels of a file, eight bytes behind a mark."""
    place = contents.index(mark) + len(mark) + 8
    return contents[:place] + bytes([contents[place] ^ 4]) + contents[place + 1 :]


def stereo(contents: bytes) -> bytes:
    """Say that the second picture of a file is another view, as of a camera with two lenses."""
    size = len(contents) - contents.index(b"\xff\xd8\xff", 10)
    entry = struct.pack("<LL", 0, size)
    assert contents.count(entry) == 1
    return contents.replace(entry, struct.pack("<LL", 0x020002, size))


IMAGEJ = "ImageJ=1.11a\nimages=5\nslices=5\nloop=false\n"
NOISE = RANDOM.integers(0, 256, (SIDE, SIDE), np.uint8)
BEYOND: dict[str, tuple[str, bytes, str]] = {
    "pages of TIFF": ("a.tif", saved(PAGES, "TIFF"), "has 5 pages, but one is read"),
    "packed pages": ("a.tiff", saved(PAGES, "TIFF", compression="tiff_lzw"), "has 5 pages, but one is read"),
    "frames of GIF": ("a.gif", saved(PAGES, "GIF"), "has 5 pages, but one is read"),
    "frames of PNG": ("a.png", saved(PAGES, "PNG"), "has 5 pages, but one is read"),
    "frames of WebP": ("a.webp", saved(PAGES, "WEBP", lossless=True), "has 5 pages, but one is read"),
    "two views": ("a.jpg", stereo(saved(PAGES[:2], "MPO")), "has 2 pages, but one is read"),
    "pages that are not listed": (
        "a.tif",
        saved(PAGES[:1], "TIFF", tiffinfo={270: IMAGEJ}),
        "lists fewer pages than it holds; save it again",
    ),
    "a file that says it is cut": (
        "a.tif",
        saved(PAGES[:1], "TIFF", tiffinfo={270: '{"shape": [5, 8, 8], "truncated": true}'}),
        "lists fewer pages than it holds",
    ),
    "a fourth channel": (
        "a.tif",
        saved([np.dstack([NOISE] * 4)], "TIFF").replace(struct.pack("<HHL", 338, 3, 1) + b"\2", b"R\1\3\0\1\0\0\0\0"),
        "has 4 channels, of which 3 would be read",
    ),
    "signed numbers": (
        "a.tif",
        saved([NOISE], "TIFF", tiffinfo={339: 2}),
        "has signed numbers of 8 bits; save it with unsigned numbers",
    ),
    "colours of 12 bits": (
        "a.png",
        png_of_16_bits(RANDOM.integers(0, 4096, (SIDE, SIDE, 3))),
        "has 16 bits a channel and numbers below 4,096",
    ),
    "colours of 12 bits in a PPM file": (
        "a.ppm",
        b"P6 8 8 65535\n" + RANDOM.integers(0, 4096, (SIDE, SIDE, 3)).astype(">u2").tobytes(),
        "has 16 bits a channel and numbers below 4,096",
    ),
    "two plain images in a row": ("a.pgm", b"P2 1 2 9\n1 2\n# next\nP2 1 2 9\n3 4\n", "goes on after its pixels"),
    "two images in a row": ("a.pgm", saved([NOISE], "PPM") * 2, "goes on after its pixels; save one image a file"),
    "a wrong checksum": ("a.png", with_a_flip(saved([NOISE], "PNG"), b"IDAT"), "cannot be read as a"),
}


def tiff(pixels: np.ndarray, order: str, white_is_0: bool, packed: bool, planar: bool, side: int) -> bytes:
    """Return the contents of a TIFF file in a byte order, (H, W) or (H, W, 3), with an orientation ``side``."""
    samples, size, coloured = pixels.ndim * 2 - 3, pixels.dtype.itemsize, pixels.ndim == 3
    planes = list(np.moveaxis(pixels, -1, 0)) if planar and coloured else [pixels]
    strips = [each.astype(each.dtype.newbyteorder(order)).tobytes() for each in planes]
    strips = [zlib.compress(each) if packed else each for each in strips]
    places = [8 + sum(map(len, strips[:n])) for n in range(len(strips))]
    tags = {256: [pixels.shape[1]], 257: [pixels.shape[0]], 258: [8 * size] * samples, 259: [8 if packed else 1]}
    tags |= {262: [2 if coloured else 1 - white_is_0], 273: places, 274: [side], 277: [samples]}
    tags |= {278: [pixels.shape[0]], 279: list(map(len, strips)), 284: [1 + planar]}
    tags |= {339: [{"u": 1, "i": 2, "f": 3}[pixels.dtype.kind]] * samples}
    entries, extra = b"", b"".join(strips)
    for tag, values in tags.items():
        packed_values = struct.pack(f"{order}{len(values)}I", *values)
        if len(values) > 1:
            packed_values, extra = struct.pack(f"{order}I", 8 + len(extra)), extra + packed_values
        entries += struct.pack(f"{order}HHI", tag, 4, len(values)) + packed_values
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8 + len(extra))
    return head + extra + struct.pack(f"{order}H", len(tags)) + entries + bytes(4)


TURNED: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda image: image,
    3: lambda image: image[::-1, ::-1],
    5: lambda image: image.swapaxes(0, 1),
    6: lambda image: np.rot90(image, -1),
    8: np.rot90,
}
WHOLE_RANGE = {np.dtype(kind): (np.iinfo(kind).min, np.iinfo(kind).max) for kind in ("u1", "u2", "u4", "i2", "i4")}


@pytest.mark.parametrize("side", TURNED)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", ["u1", "u2", "u4", "i2", "i4", "f4"])
def test_numbers_of_tiff_files_are_read_right_or_refused(
    tmp_path: Path, kind: str, order: str, packed: bool, side: int
) -> None:
    """Pillow returns other numbers of some of these files."""
    low, high = WHOLE_RANGE.get(np.dtype(kind), (0, 1))
    read = 0
    for shape in ((6, 9), (6, 9, 3)):
        numbers = RANDOM.uniform(low, high, shape).astype(kind)
        for white_is_0, planar in ((False, False), (True, False), (False, True)):
            (tmp_path / "a.tif").write_bytes(tiff(numbers, order, white_is_0, packed, planar, side))
            try:
                pixels = read_pixels(tmp_path / "a.tif", scale=None if kind in ("u1", "u2", "f4") else (low, high))
            except InputError:
                continue
            expected = TURNED[side]((numbers.astype(float) - low) / (high - low))
            expected = 1 - expected if white_is_0 and numbers.ndim == 2 else expected
            values = pixels / (255 if pixels.dtype == np.uint8 else 1)
            tolerance = 1 / 200 if numbers.ndim == 3 else 1e-6  # Pillow reads the upper 8 bits of colours
            np.testing.assert_allclose(values.transpose(1, 2, 0).squeeze(), expected, 0, tolerance)
            read += 1
    assert read >= {"u1": 6, "u2": 3}.get(kind, 0)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("u2", ("<", True, False, False), "has more than 8 bits, of which 0 is white; save it with 0 as black"),
        ("f4", (">", True, False, False), "has more than 8 bits, of which 0 is white"),
        ("i4", (">", False, True, False), "has big-endian numbers, compressed; save it without compression"),
        ("u4", ("<", False, False, False), "has numbers above 2,147,483,647, half of the range of its 32 bits; save"),
        ("u2", ("<", False, False, True), "has more than 8 bits in separate planes, uncompressed; save each"),
    ],
)
def test_tiff_files_that_pillow_misreads_are_refused(tmp_path: Path, kind: str, options: Any, words: str) -> None:
    numbers = np.ones((6, 9, 3) if options[-1] else (6, 9)).astype(kind)
    numbers[0, 0] = np.iinfo(kind).max if kind[0] == "u" else 1
    (tmp_path / "a.tif").write_bytes(tiff(numbers, *options, side=1))
    assert_raises(InputError, read_pixels, tmp_path / "a.tif", say=words)
    assert_raises(InputError, read_mask, tmp_path / "a.tif", "a.tif", say=words)


def in_a_folder(path: Path) -> Path:
    """Put other images beside a file, in two classes; return the folder."""
    root = path.parent.parent
    for name in ("a", "b"):
        for n in range(8):
            (root / name).mkdir(exist_ok=True)
            Image.fromarray(PAGES[n % 5]).save(root / name / f"{n}.bmp")
    return root


def from_a_table(path: Path) -> object:
    root = in_a_folder(path)
    lines = [f"{name}/{n}.bmp,{name}" for name in ("a", "b") for n in range(8)]
    (root / "t.csv").write_text("\n".join(["image,label", f"{path.relative_to(root)},a", *lines]))
    return load_dataset(f"csv:{root / 't.csv'}", image_size=8)


def beside_masks(path: Path) -> object:
    root = path.parent.parent
    for folder in ("images", "masks"):
        (root / folder).mkdir()
        for n in range(8):
            Image.fromarray(PAGES[0] * (folder == "images") + n % 2).save(root / folder / f"{n}.png")
    Image.fromarray(PAGES[0] * 0).save(root / "masks/9.png")
    (root / f"images/9{path.suffix}").write_bytes(path.read_bytes())
    return load_dataset(f"folder:{root}", task="pixels")


def from_python(path: Path) -> object:
    files = ImageFiles(in_a_folder(path), (1, SIDE, SIDE))
    return [files[n] for n in range(len(files)) if files.files[n][0] == path]


DOORS: dict[str, Callable[[Path], object]] = {
    "read_pixels": read_pixels,
    "read_photo": lambda path: read_photo(path, (1, SIDE, SIDE)),
    "load_image": lambda path: load_image(path, (1, SIDE, SIDE)),
    "folder": lambda path: load_dataset(f"folder:{in_a_folder(path)}", image_size=8),
    "table": from_a_table,
    "images beside masks": beside_masks,
    "ImageFiles": from_python,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", BEYOND)
def test_what_is_not_read_is_refused(tmp_path: Path, name: str, door: str) -> None:
    file, contents, words = BEYOND[name]
    path = tmp_path / "set" / "a" / file
    path.parent.mkdir(parents=True)
    path.write_bytes(contents)
    assert_raises(InputError, DOORS[door], path, say=words)


@pytest.mark.parametrize("name", [name for name, (file, *_) in BEYOND.items() if file[-3:] not in ("jpg", "ebp")])
def test_masks_are_refused_as_images_are(tmp_path: Path, name: str) -> None:
    file, contents, words = BEYOND[name]
    (tmp_path / file).write_bytes(contents)
    assert_raises(InputError, read_mask, tmp_path / file, file, say=words)


def test_previews_and_reduced_copies_are_no_pages(tmp_path: Path) -> None:
    (tmp_path / "phone.jpg").write_bytes(saved([NOISE, NOISE[:4, :4]], "MPO", quality=100))
    assert np.abs(read_pixels(tmp_path / "phone.jpg")[0].astype(int) - NOISE).max() < 4
    for tag, value in ((254, 1), (254, 4), (255, 2)):
        pages = [Image.fromarray(each) for each in (NOISE, NOISE[::2, ::2])]
        pages[1].encoderinfo = {"tiffinfo": {tag: value}}  # type: ignore[attr-defined]
        pages[0].save(tmp_path / "reduced.tif", save_all=True, append_images=pages[1:])
        with Image.open(tmp_path / "reduced.tif") as file:
            assert file.n_frames == 2  # type: ignore[attr-defined]
        assert np.array_equal(read_pixels(tmp_path / "reduced.tif")[0], NOISE)


def test_portable_maps_are_read(tmp_path: Path) -> None:
    for suffix, pixels in (("pgm", NOISE), ("ppm", np.dstack([NOISE, NOISE, 255 - NOISE])), ("pbm", NOISE > 127)):
        Image.fromarray(pixels).save(tmp_path / f"a.{suffix}")
        expected = pixels.astype(np.uint8) * (255 if pixels.dtype == bool else 1)
        assert np.array_equal(read_pixels(tmp_path / f"a.{suffix}"), np.atleast_3d(expected).transpose(2, 0, 1))
    (tmp_path / "b.pgm").write_bytes(b"P5 8 8 4095\n" + np.full(64, 4095, ">u2").tobytes() + b"\n")
    assert read_pixels(tmp_path / "b.pgm").min() == 1  # the header says the range
    with pytest.raises(InputError, match="names its own range, and Pillow applies it"):
        read_pixels(tmp_path / "b.pgm", scale=(0, 4095))
    for header in (b"P2 2 1 9\n9 0\n", b"P5 2 1 9\n\x09\0"):
        (tmp_path / "c.pgm").write_bytes(header)
        assert read_pixels(tmp_path / "c.pgm").tolist() == [[[255, 0]]]
        with pytest.raises(InputError, match="names its own range, and Pillow applies it"):
            read_pixels(tmp_path / "c.pgm", scale=(0, 9))


@pytest.mark.parametrize("white", [1, 2, 63, 100, 254, 255, 300, 4095, 65535])
@pytest.mark.parametrize("plain", [True, False])
def test_masks_keep_the_numbers_of_portable_maps(tmp_path: Path, white: int, plain: bool) -> None:
    numbers = np.arange(min(white, 20) + 1)
    pixels = " ".join(map(str, numbers)).encode() if plain else numbers.astype("u1" if white < 256 else ">u2").tobytes()
    (tmp_path / "m.pgm").write_bytes(b"P%d %d 1 %d\n" % (2 if plain else 5, len(numbers), white) + pixels)
    mask = read_mask(tmp_path / "m.pgm", "m.pgm")
    assert np.array_equal(np.array(mask.values)[mask.positions], numbers[None])


def test_colours_of_16_bits_are_read(tmp_path: Path) -> None:
    colours = RANDOM.integers(0, 65536, (SIDE, SIDE, 3))
    (tmp_path / "a.png").write_bytes(png_of_16_bits(colours))
    assert np.array_equal(read_pixels(tmp_path / "a.png"), (colours >> 8).transpose(2, 0, 1))
