"""Valid files of every kind that torchcaps reads, made on the fly and small."""

from __future__ import annotations

import contextlib
import gzip
import io
import shutil
import struct
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from hostile.program import call

SIDE = 18
CLASSES = ("ash", "birch", "cedar")
TINY = {"conv_channels": 8, "primary_types": 2, "capsule_dim": 4, "decoder_hidden": (16,), "batch_size": 16}
RESULTS = Path(__file__).parents[2] / "results"
LOGGED = "mnist/baseline-small/seed-0"
"""The log of results/ that is copied."""


def make(folder: Path, seed: int) -> int:
    """Make all of them.

    ```text
    data.npz          150 images of three classes
    run/              a finished run of two epochs on them
    pretrained/       what torchcaps export --format folder writes of it
    model.onnx        the same for onnxruntime
    evaluation.json   what torchcaps evaluate --json prints of it
    images/           one image in each format
    photos/           a folder data set
    kmnist/           four gzipped idx files of KMNIST's shapes
    svhn/ affnist/    Matlab files
    smallnorb/ cifar10/
    results/          the logs of one run, and an estimate
    ```

    Returns:
        0, as an exit code.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    images, labels = bars(rng, 150)
    np.savez(folder / "data.npz", x=images, y=labels, class_names=np.array(CLASSES))
    _make_networks(folder)
    _make_images(folder / "images", images[0], rng)
    _make_photos(folder / "photos", images, labels)
    _make_idx(folder / "kmnist")
    _make_matlab(folder, images)
    _make_smallnorb(folder / "smallnorb")
    _make_cifar10(folder / "cifar10")
    log = folder / "results" / LOGGED
    shutil.copytree(RESULTS / LOGGED, log)
    _write_estimate(folder / "results")
    return 0


def _write_estimate(results: Path) -> None:
    """The estimated time of one row of the table of MNIST."""
    from torchcaps.reproduce import get_table
    from torchcaps.reproduce.estimate import Timing, write_timings

    timing = Timing(60.0, {"processor": "one of this year", "threads": 2}, {"torch": "2.13.0"})
    write_timings(results, get_table("mnist"), {"compact-r3": timing})


def bars(rng: np.random.Generator, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of a bar at the top, in the middle or at the bottom, in noise; and which of the three."""
    labels = np.arange(number) % len(CLASSES)
    images = rng.integers(0, 80, (number, SIDE, SIDE))
    for image, label in zip(images, labels, strict=True):
        image[3 + 5 * label : 6 + 5 * label, 2:16] += 150
    return images.astype(np.uint8), labels


def _make_networks(folder: Path) -> None:
    from torchcaps.training import make_config, train

    config = make_config(
        "sabour2017", data="npz:data.npz", epochs=2, validation_size=12, max_shift=1, accelerator="cpu", **TINY
    )
    train(config, folder / "run", figures=False)
    for arguments in (
        ["export", "run", "--format", "folder", "--out", "pretrained"],
        ["export", "run", "--out", "model.onnx"],
    ):
        if (code := call(arguments)) != 0:
            raise RuntimeError(f"torchcaps {' '.join(arguments)} ended with {code}")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        call(["evaluate", "run", "--accelerator", "cpu", "--json"])
    (folder / "evaluation.json").write_text(printed.getvalue(), encoding="utf-8")


def _make_images(folder: Path, grey: np.ndarray, rng: np.random.Generator) -> None:
    folder.mkdir()
    image, colour = Image.fromarray(grey), Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8))
    image.save(folder / "grey.png")
    colour.save(folder / "colour.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(folder / "deep.png")
    colour.convert("P").save(folder / "palette.png", transparency=0)
    colour.save(folder / "photo.jpg")
    image.save(folder / "scan.tiff")
    colour.save(folder / "packed.tiff", compression="tiff_lzw")
    colour.save(folder / "bitmap.bmp")
    colour.convert("P").save(folder / "drawing.gif", save_all=True, append_images=[image.convert("P")])
    colour.save(folder / "web.webp")


def _make_photos(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    for number, (image, label) in enumerate(zip(images[:24], labels, strict=False)):
        path = folder / CLASSES[label] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


def _make_idx(folder: Path) -> None:
    folder.mkdir()
    for part, number in (("train", 60_000), ("t10k", 10_000)):
        labels = (np.arange(number) % 10).astype(np.uint8)
        for kind, values in (
            ("images-idx3-ubyte", np.zeros((number, 28, 28), np.uint8)),
            ("labels-idx1-ubyte", labels),
        ):
            header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
            (folder / f"{part}-{kind}.gz").write_bytes(gzip.compress(header + values.tobytes(), mtime=0))


def _make_matlab(folder: Path, images: np.ndarray) -> None:
    from scipy.io import savemat

    (folder / "svhn").mkdir()
    (folder / "affnist").mkdir()
    for number, name in enumerate(("train_32x32.mat", "test_32x32.mat")):
        pixels, labels = np.zeros((32, 32, 3, 20), np.uint8), np.full((20, 1), 1 + number, np.uint8)
        savemat(folder / "svhn" / name, {"X": pixels, "y": labels}, do_compression=number == 0)
    digits = np.zeros((1600, 20), np.uint8)
    digits[: images.shape[1]] = 200
    original = {"affNISTdata": {"image": digits, "label_int": np.arange(20)[None] % 10}}
    savemat(folder / "affnist" / "test.mat", original, do_compression=True)


def _make_smallnorb(folder: Path) -> None:
    """Files that are right up to their values, of which there are too few."""
    folder.mkdir()
    for part in ("smallnorb-5x46789x9x18x6x2x96x96-training", "smallnorb-5x01235x9x18x6x2x96x96-testing"):
        for kind, code, shape in (
            ("dat.mat", 0x1E3D4C55, (24_300, 2, 96, 96)),
            ("cat.mat", 0x1E3D4C54, (24_300, 1, 1)),
        ):
            header = struct.pack(f"<Ii{len(shape)}i", code, len(shape) if kind == "dat.mat" else 1, *shape)
            (folder / f"{part}-{kind}.gz").write_bytes(gzip.compress(header + bytes(4 * 24_300), mtime=0))


def _make_cifar10(folder: Path) -> None:
    """The archive with files of a hundred records instead of ten thousand."""
    folder.mkdir()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = 100 * 3073
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    (folder / "cifar-10-binary.tar.gz").write_bytes(gzip.compress(packed.getvalue(), mtime=0))
