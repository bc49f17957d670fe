"""The data sets of ``examples/brain_tissue.py``, made of a head of balls."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import registered_for_now
from torchcaps.datasets import load_dataset
from torchcaps.errors import InputError
from torchcaps.plugins import load_plugin

nib = pytest.importorskip("nibabel")
EXAMPLE = Path(__file__).parents[2] / "examples" / "brain_tissue.py"
CENTRE, RADII = (98, 120, 94), (60, 40)  # left to right, back to front, bottom to top; of the head and its white part


@pytest.fixture(autouse=True)
def brain() -> Iterator[Any]:
    """The example, loaded as a plugin."""
    with registered_for_now():
        load_plugin(EXAMPLE)
        yield next(each for each in sys.modules.values() if getattr(each, "__file__", None) == str(EXAMPLE))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the three files: a ball of white matter in a ball of grey matter."""
    folder = tmp_path_factory.mktemp("head")
    (folder / "mni152").mkdir()
    squares = [
        (np.arange(side, dtype=np.float32) - centre) ** 2 for side, centre in zip((197, 233, 189), CENTRE, strict=True)
    ]
    distance = np.sqrt(squares[0][:, None, None] + squares[1][:, None] + squares[2])
    white = distance < RADII[1]
    grey = (distance < RADII[0]) & ~white
    for name, values in {"t1": 90 * grey + 200 * white, "gm": 255 * grey, "wm": 255 * white}.items():
        file = folder / "mni152" / f"mni_icbm152_{name}_tal_nlin_sym_09a_converted.nii.gz"
        nib.Nifti1Image(values.astype(np.uint8), np.eye(4)).to_filename(file)
    return folder


def test_slices_of_one_part_are_neighbours_and_parts_have_a_gap(brain: Any, head: Path) -> None:
    data = load_dataset("brain-slices", data_dir=head)
    assert (data.task.name, data.in_shape, data.class_names) == ("pixels", (1, 96, 72), brain.CLASS_NAMES)
    image, classes = brain.read_head(head)
    assert image.shape == classes.shape == (70, 96, 72)
    owner = {}
    for part in ("train", "validation", "test"):
        images = getattr(data, part)
        for pixels, mask in zip(images.images[:, 0].numpy(), images.labels.numpy(), strict=True):
            same = [n for n in range(70) if (image[n] == pixels).all() and (classes[n] == mask).all()]
            if pixels.any() and len(same) == 1:
                owner[same[0]] = part
    assert set(owner.values()) == {"train", "validation", "test"}
    near = [(n, m) for n in owner for m in owner if abs(n - m) <= brain.GAP and owner[n] != owner[m]]
    assert near == []


def test_a_voxel_has_the_most_probable_class(brain: Any, head: Path) -> None:
    image, classes = brain.read_head(head)
    z, y, x = np.indices(classes.shape) * 2 + 0.5
    place = (x + 26, y + 24, z + 16)
    distance = np.sqrt(sum((axis - centre) ** 2 for axis, centre in zip(place, CENTRE, strict=True)))
    for inside, outside, name in ((0, 38, 2), (42, 58, 1), (62, 999, 0)):
        assert (classes[(distance > inside) & (distance < outside)] == name).all()
    assert set(np.unique(image[distance < 38])) == {200}


def test_blocks_hold_tissue_and_parts_are_apart_from_back_to_front(brain: Any, head: Path) -> None:
    data = load_dataset("brain-blocks", data_dir=head)
    assert (data.in_shape, data.num_classes) == ((1, 20, 20, 20), 3)
    for images in (data.train, data.validation, data.test):
        assert len(images) > 0
        assert all(mask.shape == (20, 20, 20) and mask.any() for mask in images.labels)
    assert len(data.train) > 4 * len(data.test), "only training blocks overlap"


def test_without_nilearn_the_sentence_says_what_to_install(brain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brain, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="the head is a part of the package nilearn: pip install nilearn"):
        load_dataset("brain-slices")
