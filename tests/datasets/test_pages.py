"""Pages of TIFF files and frames of animations: channels of an image, or slices of a volume, and a run keeps which."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cli_support import Cli
from support import assert_raises
from tiny_runs import tiny_config
from torchcaps.analysis.mask_answers import output_files, write_mask
from torchcaps.datasets import ImageFiles, PatchSet, load_dataset, read_image
from torchcaps.datasets.images import read_pixels
from torchcaps.datasets.masks import read_mask
from torchcaps.errors import InputError
from torchcaps.explorer.state import open_explorer
from torchcaps.training import load_run, train

RANDOM = np.random.default_rng(0)
DEPTH, SIDE = 5, 18


def stack(*, colour: bool = False, dtype: Any = np.uint8) -> np.ndarray:
    return RANDOM.integers(0, np.iinfo(dtype).max, (DEPTH, SIDE, SIDE, *[3] * colour), dtype)


def save(path: Path, pages: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    first, *more = map(Image.fromarray, pages)
    first.save(path, save_all=True, append_images=more, **({"lossless": True} if path.suffix == ".webp" else {}))
    return path


def write_classes(root: Path, suffix: str = "tif", count: int = 20, **form: Any) -> dict[Path, np.ndarray]:
    stacks = {root / "ab"[n % 2] / f"{n}.{suffix}": stack(**form) for n in range(count)}
    for path, pages in stacks.items():
        save(path, pages)
    return stacks


@pytest.mark.parametrize("suffix", ["tif", "gif", "png", "webp"])
def test_pages_are_channels(tmp_path: Path, suffix: str) -> None:
    stacks = write_classes(tmp_path, suffix)
    data = load_dataset(f"folder:{tmp_path}", pages="channels")
    assert data.in_shape == (DEPTH, SIDE, SIDE)
    expected = {each.tobytes() for each in stacks.values()}
    read = {each.numpy().tobytes() for part in (data.train, data.validation, data.test) for each in part.images}
    assert read == expected
    files = ImageFiles(tmp_path, (DEPTH, SIDE, SIDE), pages="channels")
    assert {each.numpy().tobytes() for each, _ in (files[n] for n in range(20))} == expected
    resized = load_dataset(f"folder:{tmp_path}", pages="channels", image_size=8)
    assert resized.in_shape == (DEPTH, 8, 8)


def test_tables_and_other_forms_of_pages(tmp_path: Path) -> None:
    write_classes(tmp_path / "one", colour=True)
    assert load_dataset(f"folder:{tmp_path / 'one'}", pages="channels").in_shape == (3 * DEPTH, SIDE, SIDE)
    stacks = write_classes(tmp_path / "two", dtype=np.uint16)
    rows = [f"{path.relative_to(tmp_path)},{path.parent.name}" for path in stacks]
    (tmp_path / "t.csv").write_text("\n".join(["image,label", *rows]))
    data = load_dataset(f"csv:{tmp_path / 't.csv'}", pages="channels")
    assert data.in_shape == (DEPTH, SIDE, SIDE)
    largest = max(float(part.images.max()) for part in (data.train, data.validation, data.test))
    assert largest == pytest.approx(max(each.max() for each in stacks.values()) / 65535)
    path, pages = next(iter(stacks.items()))
    assert np.allclose(read_image(path, pages.shape, pages="channels"), pages / 65535, atol=1e-6)


def test_pages_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_classes(tmp_path)
    save(tmp_path / "a/0.tif", stack()[:3])
    words = "0.tif has 3 channels in its pages, but 5 are needed"
    assert_raises(InputError, load_dataset, f"folder:{tmp_path}", pages="channels", say=words)
    assert_raises(InputError, load_dataset, f"folder:{tmp_path}", pages="depth", say="set --pages channels")
    assert_raises(
        InputError, load_dataset, "digits", pages="channels", say="digits takes no pages (--pages), which is for"
    )
    mixed = [Image.fromarray(np.zeros((4, 4), kind)) for kind in (np.uint8, np.uint16)]
    mixed[0].save(tmp_path / "mixed.tif", save_all=True, append_images=mixed[1:])
    say = "its pages hold numbers of different kinds"
    assert_raises(InputError, read_pixels, tmp_path / "mixed.tif", pages="channels", say=say)
    sizes = [Image.fromarray(np.zeros((side, 4), np.uint8)) for side in (4, 6)]
    sizes[0].save(tmp_path / "sizes.tif", save_all=True, append_images=sizes[1:])
    say = "has pages of 4×4 and of 4×6 pixels; all must have one size"
    assert_raises(InputError, read_pixels, tmp_path / "sizes.tif", pages="channels", say=say)


def write_volumes(root: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    volumes = {}
    for n in range(12):
        mask = RANDOM.integers(0, 2, (DEPTH, SIDE, SIDE), np.uint8)
        volumes[str(n)] = (stack(), mask)
        save(root / f"images/{n}.tif", volumes[str(n)][0])
        save(root / f"masks/{n}.tif", mask)
    return volumes


def test_pages_are_the_depth_of_volumes(tmp_path: Path) -> None:
    volumes = write_volumes(tmp_path)
    data = load_dataset(f"folder:{tmp_path}", pages="depth")
    assert isinstance(data.train, PatchSet)
    assert data.in_shape == (1, DEPTH, SIDE, SIDE)
    expected = {image.tobytes(): mask.tobytes() for image, mask in volumes.values()}
    for part in (data.train, data.validation, data.test):
        for image, mask in zip(part.images, part.labels, strict=True):
            assert expected[image.numpy().tobytes()] == mask.numpy().tobytes()
    assert load_dataset(f"folder:{tmp_path}", pages="depth", patch=4).in_shape == (1, 4, 4, 4)
    assert_raises(InputError, load_dataset, f"folder:{tmp_path}", say="has 5 pages, but one is read")
    save(tmp_path / "masks/3.tif", np.zeros((1, SIDE, SIDE), np.uint8))
    assert_raises(InputError, load_dataset, f"folder:{tmp_path}", pages="depth", say="3.tif is 1×18×18, but")
    assert_raises(InputError, load_dataset, f"folder:{tmp_path}", pages="channels", say="masks/0.tif has 5 pages")


def test_masks_of_volumes_are_written_as_pages(tmp_path: Path) -> None:
    path, mask = tmp_path / "scan.png", stack() % 2
    target = output_files(tmp_path / "masks", {path: Path(path.name)}, "depth")[path]
    assert target.name == "scan.tif"
    write_mask(mask, target)
    assert np.array_equal(read_mask(target, "mask", is_volume=True).positions, mask)  # of the values 0 and 1


def test_a_run_keeps_what_pages_are(tmp_path: Path) -> None:
    stacks, cli, run_folder = write_classes(tmp_path / "data"), Cli(), tmp_path / "run"
    write_classes(tmp_path / "other")
    data, other = f"folder:{tmp_path / 'data'}", f"folder:{tmp_path / 'other'}"
    config = tiny_config(tmp_path, data=data, pages="channels", epochs=1, validation_size=2, batch_size=4)
    train(config, run_folder, figures=False)
    run = load_run(run_folder)
    assert run.images.pages == "channels"
    path, pages = next(iter(stacks.items()))
    assert np.array_equal(open_explorer(run).read(path.name, path.read_bytes()).image, pages)
    for words in (
        ["predict", run_folder, path],
        ["evaluate", run_folder],
        ["evaluate", run_folder, "--data", other],
        ["robustness", run_folder, "--data", other],
        ["perturb", run_folder, "--image", path, "--figure", tmp_path / "p.png"],
        ["datasets", data, "--pages", "channels"],
    ):
        result = cli(*words)
        assert result.code == 0, (words, result.err)
    flat = save(tmp_path / "flat.png", stack()[:1])
    assert "has 1 channel in its pages, but 5 are needed" in cli("predict", run_folder, flat).err
