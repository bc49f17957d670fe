"""Scenes: patches of parts that share no pixel, components of training pixels only, kappa, and the map."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.metrics import balanced_accuracy_score, cohen_kappa_score

from support import assert_raises
from torchcaps.analysis import Evaluation, evaluate
from torchcaps.datasets import load_dataset
from torchcaps.datasets.loading import load_part
from torchcaps.errors import InputError
from torchcaps.models import create_model

H, W, BANDS, CLASSES = 40, 48, 5, 3
pytestmark = pytest.mark.filterwarnings("ignore:.*labelled pixels of", "ignore:The spectra of")


def scene(seed: int = 0) -> dict[str, np.ndarray]:
    """Stripes of classes; the first band numbers the pixels, so that tests know which pixels a patch holds."""
    rng = np.random.default_rng(seed)
    labels = (np.indices((H, W)).sum(0) // 7 % CLASSES + 1) * (rng.random((H, W)) < 0.7)
    cube = rng.normal(size=(H, W, BANDS)).astype(np.float32)
    cube[..., 0] = np.arange(H * W).reshape(H, W)
    return {"cube": cube, "labels": labels}


def save(folder: Path, **arrays: Any) -> str:
    np.savez(folder / "s.npz", **(scene() | arrays))
    return f"scene:{folder / 's.npz'}"


@pytest.mark.parametrize("patch", [3, 5, 7])
@pytest.mark.parametrize("group", [None, "field"])
def test_no_pixel_is_in_patches_of_two_parts(patch: int, group: str | None, tmp_path: Path) -> None:
    fields = np.indices((H, W))[0] // 10 * 10 + np.indices((H, W))[1] // 12
    spec = save(tmp_path, field=fields)
    labels = scene()["labels"]
    tested = set[int]()
    for fold in (None, "1/3", "2/3", "3/3"):
        for seed in (0, 1):
            data = load_dataset(spec, patch=patch, group=group, fold=fold, seed=seed)
            pixels = {part: set(images.images[:, 0].unique().long().tolist()) for part, images in data.parts.items()}
            assert sum(map(len, pixels.values())) == len(set.union(*pixels.values()))
            groups = [set(images.names["group"]) for images in data.parts.values()]
            assert sum(map(len, groups)) == len(set.union(*groups))
            for images in data.parts.values():
                middle = images.images[:, 0, patch // 2, patch // 2].long()
                assert torch.equal(middle, images.factors["row"] * W + images.factors["column"])
                assert (labels.flatten()[middle] - 1).tolist() == images.labels.tolist()
        if fold is not None:
            own = set((data.test.factors["row"] * W + data.test.factors["column"]).tolist())
            assert tested.isdisjoint(own)
            tested |= own
    assert tested == set(np.flatnonzero(labels).tolist())  # the folds together test each labelled pixel


def test_a_patch_is_the_square_around_a_pixel_with_a_mirrored_edge(tmp_path: Path) -> None:
    arrays = scene()
    images = load_part(save(tmp_path), "all", patch=5).images
    padded = np.pad(arrays["cube"], ((2, 2), (2, 2), (0, 0)), "reflect")
    for n in range(0, len(images), 37):
        row, column = (int(images.factors[name][n]) for name in ("row", "column"))
        square = padded[row : row + 5, column : column + 5].transpose(2, 0, 1)
        np.testing.assert_array_equal(images.images[n].numpy(), square)


def test_components_are_those_of_the_training_pixels(tmp_path: Path) -> None:
    arrays = scene()
    spec = save(tmp_path)
    data, plain = (load_dataset(spec, patch=5, pca=pca) for pca in (3, None))
    assert data.in_shape == (3, 5, 5)
    middles = plain.train.images[:, :, 2, 2].numpy().astype(np.float64)
    oracle = PCA(3, whiten=True).fit(middles)
    for part in ("train", "validation", "test"):
        theirs = oracle.transform(plain.parts[part].images[:, :, 2, 2].numpy().astype(np.float64))
        np.testing.assert_allclose(abs(data.parts[part].images[:, :, 2, 2].numpy()), abs(theirs), rtol=1e-3, atol=1e-4)
    # other spectra of all pixels that are not for training change no training pixel
    is_train = np.zeros((H, W), bool)
    is_train[data.train.factors["row"], data.train.factors["column"]] = True
    changed = np.where(is_train[..., None], arrays["cube"], 7 * arrays["cube"] + 3).astype(np.float32)
    again = load_dataset(save(tmp_path, cube=changed), patch=5, pca=3)
    assert torch.equal(again.train.images[:, :, 2, 2], data.train.images[:, :, 2, 2])
    assert not torch.equal(again.test.images, data.test.images)


def test_numbers_of_an_evaluation_and_the_map(tmp_path: Path) -> None:
    part = load_part(save(tmp_path), "all", patch=5)
    names = np.array(["a", "b", "c", "not in this scene"])
    lacking = load_part(save(tmp_path, class_names=names), "all", patch=5)
    assert lacking.class_names == tuple(names)
    assert torch.equal(lacking.images.labels, part.images.labels)
    torch.manual_seed(0)
    model = create_model("baseline-cnn", (BANDS, 5, 5), CLASSES, channels=(4,), hidden=(8,), pool=1, dropout=0.0)
    result: Any = evaluate(model, part.images, class_names=part.class_names)
    truth, answers = result.labels, result.predictions
    assert result.kappa == pytest.approx(cohen_kappa_score(truth, answers), abs=1e-6)
    assert result.accuracy == pytest.approx((truth == answers).mean(), abs=1e-6)
    assert result.balanced_accuracy == pytest.approx(balanced_accuracy_score(truth, answers), abs=1e-6)
    assert result.to_dict()["kappa"] == result.kappa
    figures = result.figures()
    assert list(figures) == ["", "-map"]
    drawn = [image.get_array() for axes in figures["-map"].axes for image in axes.get_images()]
    assert [each.shape[:2] for each in drawn] == [(H, W)] * 3
    wrong = np.zeros((H, W), bool)
    wrong[tuple(result.places.T)] = truth != answers
    assert np.array_equal(np.asarray(drawn[2])[..., 2] < 0.5, wrong)


@pytest.mark.parametrize("seed", range(5))
def test_kappa_is_that_of_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels, scores = rng.integers(0, 4, 50), rng.random((50, 4)).astype(np.float32)
    scores[np.arange(50), labels] += 0.1 * seed
    result = Evaluation(labels, scores, 0.0, tuple("abcd"))
    assert result.kappa == pytest.approx(cohen_kappa_score(labels, scores.argmax(1)), abs=1e-6)


@pytest.mark.parametrize(
    ("arrays", "options", "said"),
    [
        ({}, {"patch": 4}, "patch (--patch) must be an odd number of pixels, as a square around one, got 4"),
        ({}, {"patch": (3, 5)}, "patch (--patch) must be an odd number"),
        ({}, {"pca": 6}, "pca (--pca) must be at most 5, the number of independent bands in"),
        ({"cube": np.full((H, W, 2), 0.1)}, {"pca": 1}, "pca (--pca) must be at most 0"),
        ({}, {"patch": 21}, "has 40 rows and 48 columns, too few to split them in 3 blocks of 2 patches of 21×21"),
        ({"field": np.where(np.indices((H, W))[0] < 4, np.nan, 1)}, {"group": "field"}, "column 0 has nan in place of"),
        ({}, {"image_size": 8}, "is cut into patches; set patch (--patch) in place of image_size"),
        ({}, {"group": "field"}, "field (--group) must be an array (40, 48), like labels"),
        ({"cube": np.zeros((H, W))}, {}, "cube must be finite numbers (H, W, bands), got float64 (40, 48)"),
        ({"cube": np.full((H, W, 2), np.nan)}, {}, "cube must be finite numbers"),
        ({"labels": 2 * scene()["labels"]}, {}, "labels has no pixel of class 1 of"),
        ({"labels": np.zeros((H, W), int)}, {}, "labels must be whole numbers (40, 48), from 1 for classes"),
        ({"labels": np.ones((H, H), int)}, {}, "labels must be whole numbers (40, 48)"),
        ({"labels": np.full((H, W), 1.5)}, {}, "got float64 (40, 48)"),
        ({"labels": np.full((H, W), 2**40)}, {}, "got int64 (40, 48) up to 1099511627776"),
        ({"labels": np.full((H, W), -1)}, {}, "labels must be whole numbers (40, 48)"),
        ({"labels": np.full((H, W), 255, np.uint8)}, {}, "labels has no pixel of class 1 of 255"),
        ({"cube": np.full((H, W, 2), 1e200)}, {}, "cube must be finite numbers"),
        ({"class_names": np.array(["a", "b"])}, {}, "class_names must be 3 texts, got (2,)"),
        ({"labels": np.ones((H, W), int)}, {}, "has only the class 1; at least two are needed"),
    ],
)
def test_what_is_no_scene(arrays: dict[str, Any], options: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert_raises(InputError, load_dataset, save(tmp_path, **arrays), **({"patch": 3} | options), say=said)


def test_labels_may_be_whole_floats_as_matlab_stores_them(tmp_path: Path) -> None:
    whole = load_dataset(save(tmp_path), patch=3)
    floats = load_dataset(save(tmp_path, labels=scene()["labels"].astype(float)), patch=3)
    for part, images in whole.parts.items():
        assert torch.equal(images.labels, floats.parts[part].labels)


def test_without_an_array_and_other_data(tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", cube=np.zeros((4, 4, 2)))
    said = "has no array \"labels\"; it holds 'cube'"
    assert_raises(InputError, load_dataset, f"scene:{tmp_path / 's.npz'}", say=said)
    assert_raises(InputError, load_dataset, "digits", pca=3, say="digits takes no pca (--pca), which is for scene:PATH")
    said = "pca (--pca) needs training pixels"
    assert_raises(InputError, load_part, save(tmp_path), "all", patch=3, pca=2, say=said)


def test_pixels_in_no_part_are_counted(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="labelled pixels of .* are in no part") as record:
        data = load_dataset(save(tmp_path, cube=scene()["cube"].clip(-1, 1)), patch=5)
    left, total = sum(map(len, data.parts.values())), int((scene()["labels"] > 0).sum())
    assert any(f"{total - left:,} of {total:,} labelled pixels" in str(each.message) for each in record)
