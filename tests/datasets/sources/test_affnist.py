import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from support import assert_raises
from torchcaps.datasets import ImageSet, load_dataset
from torchcaps.datasets.sources import affnist
from torchcaps.datasets.sources.affnist import affine_versions, find_originals, placed, read_originals
from torchcaps.errors import InputError


def digits(n: int = 20) -> ImageSet:
    """A frame of ink as wide as MNIST's digits."""
    images = torch.zeros(n, 1, 28, 28, dtype=torch.uint8)
    images[..., 4:24, 4:24] = 255
    images[..., 6:22, 6:22] = 0
    return ImageSet(images, torch.arange(n) % 10)


def corners(part: ImageSet) -> set[tuple[int, int]]:
    """Where the ink of the images begins."""
    rows = (part.images > 0).any(3)[:, 0].int().argmax(1)
    columns = (part.images > 0).any(2)[:, 0].int().argmax(1)
    return set(zip(rows.tolist(), columns.tolist(), strict=True))


def test_mnist40_trains_on_digits_in_the_middle_and_judges_by_digits_at_fixed_random_places(small_mnist: Path) -> None:
    first, other = (load_dataset("mnist-40", data_dir=small_mnist, seed=seed, validation_size=50) for seed in (0, 1))
    assert first.in_shape == (1, 40, 40)
    assert corners(first.train) == {(10, 14)}  # type: ignore[arg-type]
    assert torch.equal(first.test.images, other.test.images)
    for part in (first.train, first.validation, first.test):
        ink = part.images.flatten(1).count_nonzero(1)  # type: ignore[union-attr]
        assert ink.unique().tolist() == [3 * 20 + 3 * 9], "all of it is there"
    assert len(corners(first.validation)) > 30
    assert corners(placed(digits(3000))) == {(y, x) for y in range(4, 17) for x in range(4, 17)}


def test_versions_of_digits_keep_all_their_ink() -> None:
    made = affine_versions(digits(), versions=16)
    assert made.images.shape == (320, 1, 40, 40)
    # a frame of 2 pixels: 144 of them, scaled by 0.64 to 1.44
    ink = made.images.double().sum((1, 2, 3)) / 255 / 144
    assert 0.6 < ink.min() <= ink.max() < 1.5
    for image in made.images[:60, 0]:  # none is cut by the edge
        rows, columns = (image > 0).any(1).nonzero(), (image > 0).any(0).nonzero()
        assert min(rows[-1] - rows[0], columns[-1] - columns[0]) >= 15


def test_one_number_moves_one_thing() -> None:
    pixels = digits(1).images
    still = torch.full((1, 6), 0.5, dtype=torch.float64)  # no turn, no shear, no scaling, in the middle
    assert torch.equal(affnist._transformed(pixels, still)[:, :, 6:34, 6:34], pixels)
    for place, (rows, columns) in enumerate(((24, 24), (20, 24), (20, 24), (24, 20))):
        changed = still.clone()  # turned by 20 degrees; sheared; scaled in width; in height
        changed[0, place] = 1.0
        image = affnist._transformed(pixels, changed)[0, 0] > 127
        height, width = int(image.any(1).sum()), int(image.any(0).sum())
        assert abs(height - rows) <= (1 if place else 3)
        assert abs(width - columns) <= (1 if place else 3)


def test_a_digit_too_large_for_the_canvas_is_put_in_its_middle_and_none_stays_none() -> None:
    large = ImageSet(torch.full((4, 1, 76, 76), 255, dtype=torch.uint8), torch.arange(4))
    assert (affine_versions(large, versions=2).images == 255).all()
    blank = ImageSet(torch.zeros(3, 1, 28, 28, dtype=torch.uint8), torch.arange(3))
    assert affine_versions(blank, versions=2).images.count_nonzero() == 0


def test_the_first_versions_are_a_sample_and_the_same_as_those_of_all() -> None:
    whole = affine_versions(digits(40), versions=4)
    assert torch.equal(whole.labels[:40].bincount(), torch.full((10,), 4))
    assert not torch.equal(whole.labels[:40], whole.labels[40:80])
    for limit in (1, 40, 70, 1000):
        some = affine_versions(digits(40), versions=4, limit=limit)
        assert torch.equal(some.images, whole.images[:limit])
        assert torch.equal(some.labels, whole.labels[:limit])


def test_affnist_is_mnist40_with_another_test_set(small_mnist: Path) -> None:
    data = load_dataset("affnist", data_dir=small_mnist, limit_test=60)
    other = load_dataset("mnist-40", data_dir=small_mnist)
    assert torch.equal(data.train.images, other.train.images)  # type: ignore[union-attr]
    assert torch.equal(data.validation.images, other.validation.images)
    assert len(data.test) == 60
    assert len(load_dataset("affnist", data_dir=small_mnist).test) == 40 * 32


def write_original(path: Path, n: int = 6, first: int = 0, **changed: object) -> np.ndarray:
    """A file of the original form; each image has its number in its first pixel, and a row of ink."""
    images = np.zeros((n, 40, 40), np.uint8)
    images[:, 0, 0] = first + np.arange(n)
    images[:, 5, 10:30] = 255
    fields = {
        "affine_cf": np.zeros((6, n)),
        "image": images.reshape(n, 1600).T,
        "label_int": (np.arange(n) % 10)[None].astype(np.uint8),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {name: value for name, value in {**fields, **changed}.items() if value is not None}
    savemat(path, {"affNISTdata": fields}, do_compression=True)
    return images


def test_original_files_are_read_upright_where_they_are(small_mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_originals(small_mnist) is None
    images = write_original(small_mnist / "affnist" / "test.mat", 30)
    test = load_dataset("affnist", data_dir=small_mnist).test
    number = test.images[:, 0, 0, 0].long()
    assert number.sort().values.tolist() == list(range(30)) != number.tolist()  # the first n are a sample
    assert torch.equal(test.images[:, 0], torch.from_numpy(images)[number])
    assert torch.equal(test.labels, number % 10)
    few = load_dataset("affnist", data_dir=small_mnist, limit_test=7).test
    assert torch.equal(few.images, test.images[:7])
    (small_mnist / "affnist" / "test.mat").unlink()
    batches = small_mnist / "affnist" / "test_batches"
    write_original(batches / "1.mat")
    assert find_originals(small_mnist) == [batches / f"{number}.mat" for number in range(1, 33)]
    monkeypatch.setattr(affnist, "VERSIONS", 2)
    assert_raises(
        InputError, load_dataset, "affnist", data_dir=small_mnist, say=f"there is no file {batches / '2.mat'}"
    )
    write_original(batches / "2.mat", first=6)
    test = load_dataset("affnist", data_dir=small_mnist).test
    assert test.images[:, 0, 0, 0].sort().values.tolist() == list(range(12))


def test_original_files_of_another_form(tmp_path: Path) -> None:
    path = tmp_path / "test.mat"
    for changed in (
        {"image": None},
        {"image": np.zeros((784, 6), np.uint8)},
        {"image": np.zeros((1600, 6))},
        {"label_int": np.zeros((1, 5), np.uint8)},
        {"label_int": np.array(["abcdef"])},
    ):
        write_original(path, **changed)
        assert_raises(InputError, read_originals, [path], say=f"{path} is not affNIST's: ")


@pytest.mark.mnist
def test_the_published_test_images(mnist_dir: Path) -> None:
    # published results rest on these images: whatever moves them is a break
    for name, number, digest in (
        ("affnist", 1_000, "b067e4785a41de78ca4de33d6f16f455e7610b7a8fcdf8aa852591d3b7b0f423"),
        ("mnist-40", 10_000, "5e2d731cb7dd9768e427103d7df19e314f6c8aa47e1d36c5c88ea3acf507b6a8"),
        ("multimnist", 10_000, "f6448bdd8e249e39bbf5b013954e183030792c8242702879b133881a238600c6"),
    ):
        data = load_dataset(name, data_dir=mnist_dir, limit_test=number)
        assert (len(data.train), len(data.validation), len(data.test)) == (55_000, 5_000, number)
        assert hashlib.sha256(data.test.images.numpy()).hexdigest() == digest
