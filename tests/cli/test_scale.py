"""The range of a run's pixels reaches every command: images of 12 bits, in every form, are read as floats of 0..1."""

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cli_support import Cli
from support import assert_raises
from tiny_runs import run, tiny_config
from torchcaps.datasets import Dataset, ImageFiles, load_dataset
from torchcaps.errors import InputError
from torchcaps.explorer import open_explorer
from torchcaps.training import load_run

SCALE = (0, 4095)
SUFFIXES = {"png": ".png", "tif": ".tif", "int tif": ".tif", "float tif": ".tif", "signed tif": ".tif", "pgm": ".pgm"}
DTYPES = {"int tif": np.int32, "float tif": np.float32}
FORMS = ["npz uint16", "npz int32", "npz float32", *(f"{kind} {file}" for kind in ("folder", "csv") for file in DTYPES)]
FORMS += ["folder png", "folder tif", "csv png"]


def bars(count: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images of 18×18 pixels and 12 bits, uint16, and their three classes: the place of a bar."""
    rng, labels = np.random.default_rng(seed), np.arange(count) % 3
    images = rng.integers(0, 1_300, (count, 18, 18))
    for image, label in zip(images, labels, strict=True):
        image[3 + 5 * label : 6 + 5 * label, 2:16] += 2_400
    images[:, 0, 0], images[:, 0, 1] = 4_095, np.arange(count) * 16 + 1
    return images.astype(np.uint16), labels


def write(folder: Path, form: str, images: np.ndarray, labels: np.ndarray, *, unit: bool = False) -> str:
    """Write a data set of its own test images in a form; ``unit``: as floats of 0..1. Return what names it."""
    kind, _, file = form.partition(" ")
    folder.mkdir(parents=True)
    if kind == "npz":
        x: Any = (images / 4095).astype(np.float32) if unit else images.astype(file)
        np.savez(folder / "own.npz", x=x, y=labels, x_test=x, y_test=labels)
        return f"npz:{folder / 'own.npz'}"
    rows = ["image,label,split"]
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        for part in ("train", "test"):
            path = folder / part / str(label) / f"{number}{'.tif' if unit else SUFFIXES[file]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            save(path, image, file, unit=unit)
            rows.append(f"{path.relative_to(folder)},{label},{part}")
    (folder / "table.csv").write_text("\n".join(rows))
    return f"folder:{folder}" if kind == "folder" else f"csv:{folder / 'table.csv'}"


def save(path: Path, image: np.ndarray, file: str = "png", *, unit: bool = False) -> Path:
    Image.fromarray((image / 4095).astype(np.float32) if unit else image.astype(DTYPES.get(file, np.uint16))).save(path)
    return path


def images_of(data: Dataset) -> torch.Tensor:
    """The test images in the order of their numbers, which their second pixel tells."""
    images = data.test.images
    return images[images[:, 0, 0, 1].argsort()]


@pytest.mark.parametrize("form", FORMS)
def test_all_levels_reach_the_network_in_every_form(tmp_path: Path, form: str) -> None:
    images, labels = bars(24)
    data = load_dataset(write(tmp_path / "own", form, images, labels), scale=SCALE)
    assert torch.allclose(images_of(data)[:, 0], torch.from_numpy(images / 4095).float(), atol=1e-6, rtol=0)
    assert len((images_of(data) * 4095).round().unique()) == len(np.unique(images))  # no level is lost
    assert load_dataset(data.name, scale=SCALE, image_size=9).test.images.dtype == torch.float32


@pytest.mark.parametrize("form", FORMS)
def test_without_a_range_12_bits_are_refused_or_said(tmp_path: Path, form: str) -> None:
    spec = write(tmp_path / "own", form, *bars(24))
    if form in ("folder png", "folder tif", "csv png"):
        with pytest.warns(UserWarning, match="is above 4,095, but 65,535 is white, so they are dark.*--scale 0,4095"):
            load_dataset(spec)
    else:
        with pytest.raises(InputError, match=r"say which numbers become 0 and 1, such as scale=\(0, 4095\)"):
            load_dataset(spec)


@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_range_is_said(tmp_path: Path, form: str) -> None:
    with pytest.warns(UserWarning, match="is above 4,095, but 100,000 is white.* The range was set in training or by"):
        load_dataset(write(tmp_path / "own", form, *bars(24)), scale=(0, 100_000))


def test_full_ranges_need_no_word(tmp_path: Path) -> None:
    images, labels = bars(24)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = load_dataset(write(tmp_path / "own", "folder png", images * 16, labels))
        assert torch.allclose(images_of(data)[:, 0], torch.from_numpy(images * 16 / 65535).float(), atol=1e-6)
        bytes_ = load_dataset(write(tmp_path / "bytes", "folder tif", images // 16 * 257, labels))
        assert bytes_.test.images.dtype == torch.uint8  # 16 bits that hold 8


def test_files_of_8_bits_beside_12_are_refused(tmp_path: Path) -> None:
    images, labels = bars(24)
    spec = write(tmp_path / "own", "folder png", images, labels)
    Image.fromarray((images[0] // 16).astype(np.uint8)).save(tmp_path / "own/train/0/0.png")
    assert_raises(InputError, load_dataset, spec, scale=SCALE, say="0.png is read with 8 bits, so its")
    with pytest.warns(UserWarning, match="No number of more than 8 bits in all images of .* is above 4,095"):
        load_dataset(spec)


def test_files_are_streamed_with_a_range(tmp_path: Path) -> None:
    images, labels = bars(6)
    write(tmp_path / "own", "folder png", images, labels)
    files = ImageFiles(tmp_path / "own", (1, 18, 18), scale=SCALE)
    image, _ = files[0]
    number = int(files.files[0][0].stem)
    assert torch.allclose(image[0], torch.from_numpy(images[number] / 4095).float(), atol=1e-6)
    assert ImageFiles(tmp_path / "own", (1, 18, 18))[0][0].dtype == torch.uint8


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run ``twelve`` on images of 12 bits, and the same network as ``unit`` on floats of 0..1."""
    folder = tmp_path_factory.mktemp("scale")
    images, labels = bars(60)
    for name, unit in (("twelve", False), ("unit", True)):
        spec = write(folder / f"{name}-data", "npz uint16", images, labels, unit=unit)
        run(tiny_config(folder, data=spec, scale=None if unit else SCALE, epochs=1), folder / name)
    shutil.copytree(folder / "twelve/best", folder / "unit/best", dirs_exist_ok=True)
    spec = json.loads((folder / "twelve/best/classes.json").read_text())
    assert spec["scale"] == [*SCALE]
    (folder / "unit/best/classes.json").write_text(json.dumps(spec | {"scale": None}))
    others = bars(30, seed=1)
    for form in FORMS:
        for unit in (False, True):
            write(folder / "others" / ("unit" if unit else "twelve") / form.replace(" ", "-"), form, *others, unit=unit)
    for number, image in enumerate(others[0][:4]):
        save(folder / f"twelve-{number}.png", image)
        save(folder / f"unit-{number}.tif", image, unit=True)
    return folder


def spec_of(runs: Path, form: str, name: str) -> str:
    folder, kind = runs / "others" / name / form.replace(" ", "-"), form.partition(" ")[0]
    return f"{kind}:{folder / {'npz': 'own.npz', 'csv': 'table.csv', 'folder': ''}[kind]}"


COMMANDS = [
    "evaluate RUN --data DATA",
    "detect RUN --data DATA --against AGAIN --epsilons 0.1 --steps 2",
    "perturb RUN --data DATA --index 2",
    "perturb RUN --image FILE",
    "robustness RUN --data DATA --angles 0,15 --epsilons 0,0.1 --steps 2",
    "routing RUN --data DATA --index 2",
    "routing RUN --image FILE",
    "predict RUN FILE",
]


def told(result: Any) -> Iterator[Any]:
    """All numbers that a command prints."""
    if isinstance(result, dict):
        for name, value in result.items():
            if name not in ("seconds",):
                yield from told(value)
    elif isinstance(result, list):
        for value in result:
            yield from told(value)
    elif isinstance(result, int | float):
        yield float(result)


@pytest.mark.parametrize(
    ("command", "form"),
    # one door reads all forms for all commands: each form with the first command, each command with one form
    [(COMMANDS[0], form) for form in FORMS] + list(zip(COMMANDS[1:], FORMS[::-1], strict=False)),
)
def test_the_range_of_a_run_reaches_every_command(runs: Path, cli: Cli, command: str, form: str) -> None:
    answers = []
    for name in ("twelve", "unit"):
        files = {"RUN": runs / name, "DATA": spec_of(runs, form, name), "AGAIN": spec_of(runs, form, name)}
        files["FILE"] = runs / f"{name}-2.{'png' if name == 'twelve' else 'tif'}"
        words = [str(files.get(word, word)) for word in command.split()]
        answers.append(list(told(cli.json(*words))))
    twelve, unit = answers
    assert len(twelve) == len(unit) > 2
    np.testing.assert_allclose(twelve, unit, rtol=1e-3, atol=1e-6)


def test_the_range_of_a_run_reaches_the_explorer(runs: Path) -> None:
    explorers = [open_explorer(load_run(runs / name), spec_of(runs, "npz uint16", name)) for name in ("twelve", "unit")]
    for image in range(4):
        seen = [
            explorer.read("a", (runs / file).read_bytes()).image
            for explorer, file in zip(explorers, (f"twelve-{image}.png", f"unit-{image}.tif"), strict=True)
        ]
        assert np.array_equal(*seen)
        assert seen[0].dtype == np.uint8
        assert seen[0].max() > 200
        assert np.array_equal(*(explorer.pick(image)[0] for explorer in explorers))


def test_dark_files_are_said_once(runs: Path, cli: Cli) -> None:
    result = cli("predict", runs / "unit", *(runs / f"twelve-{number}.png" for number in range(4)))
    assert result.code == 0
    assert result.err.count("No number of more than 8 bits in an image file is above 4,095, but 65,535 is white") == 1


@pytest.mark.slow
def test_the_range_of_a_run_reaches_its_onnx_file(runs: Path, cli: Cli) -> None:
    pytest.importorskip("onnxscript", reason="the extra torchcaps[export] is not installed")
    from torchcaps.export import OnnxModel

    assert cli("export", runs / "twelve", "--out", "twelve.onnx").code == 0
    files = [runs / f"twelve-{number}.png" for number in range(4)]
    (exported, own) = (list(told(cli.json("predict", network, *files))) for network in ("twelve.onnx", runs / "twelve"))
    np.testing.assert_allclose(exported, own, atol=1e-4)
    model, (images, _) = OnnxModel("twelve.onnx"), bars(30, seed=1)
    floats = model((images[:4, None] / 4095).astype(np.float32)).scores
    for dtype in (np.uint16, np.int32, np.int64):
        np.testing.assert_allclose(model(images[:4, None].astype(dtype)).scores, floats, atol=1e-6)
