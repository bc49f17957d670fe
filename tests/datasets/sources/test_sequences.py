"""Sequences of any lengths: read from .npz files and by aeon, padded with NaN, and classified whatever the padding."""

import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support import assert_raises
from torchcaps import create_model
from torchcaps.datasets import Augmentation, BatchLoader, Dataset, load_dataset
from torchcaps.datasets.user_data import Form, open_data
from torchcaps.errors import InputError
from torchcaps.nn import Capsules
from torchcaps.tasks import find_task
from torchcaps.training import Recipe, make_config
from torchcaps.training.data import fit_data
from torchcaps.training.devices import launch
from torchcaps.training.run import _prepare

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 3, 9))
Y, LENGTHS = np.arange(40) % 4, RANDOM.integers(2, 10, 40)
ARRAYS = {"x": X, "y": Y, "lengths": LENGTHS}


def load(folder: Path, **arrays: Any) -> Dataset:
    np.savez(folder / "a.npz", **arrays)
    return load_dataset(f"npz:{folder / 'a.npz'}")


def test_sequences_of_an_npz_file_are_padded_with_nan(tmp_path: Path) -> None:
    spoilt = X.copy()
    for sequence, length in zip(spoilt, LENGTHS, strict=True):
        sequence[:, length:] = np.inf  # not read
    data = load(tmp_path, **ARRAYS | {"x": spoilt}, x_test=X[:8], y_test=Y[:8], lengths_test=LENGTHS[:8])
    assert (data.in_shape, len(data.train), len(data.validation)) == ((3, 1, 9), 36, 4)
    for image, numbers, length in zip(data.test.images, X, LENGTHS[:8], strict=False):
        assert torch.equal(image[:, 0, :length], torch.from_numpy(numbers[:, :length]).float())
        assert image[:, 0, length:].isnan().all()
    (batch,) = BatchLoader(data.test, 8, shuffle=False).batches(0)
    assert torch.equal(batch.images.nan_to_num(), data.test.images.nan_to_num())
    moved = Augmentation(max_shift=1)
    assert_raises(
        InputError,
        BatchLoader,
        data.train,
        4,
        shuffle=True,
        augmentation=moved,
        say="only pictures, (N, C, H, W) of uint8",
    )


def test_what_no_sequences_are(tmp_path: Path) -> None:
    for changes, said in (
        ({"x": X[:, 0]}, "x must hold numbers in the shape (N, C, L)"),
        ({"lengths": LENGTHS[:5]}, "x must have lengths, whole numbers from 1 to 9, one for each of 40 sequences"),
        ({"lengths": LENGTHS - 2}, "x must have lengths, whole numbers from 1 to 9"),
        ({"lengths": LENGTHS + 1}, "x must have lengths, whole numbers from 1 to 9"),
        ({"lengths": LENGTHS / 2}, "x must have lengths, whole numbers from 1 to 9"),
        (
            {"x": np.full_like(X, np.nan)},
            "x has a number that is NaN, infinite or beyond float32 before the end of its sequence",
        ),
        ({"x_test": X, "y_test": Y}, "x_test must have lengths_test"),
    ):
        assert_raises(InputError, load, tmp_path, **ARRAYS | changes, say=said)


def test_aeon_reads_problems_of_its_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of aeon's interface: cases of several lengths, or an array where all are of one."""
    asked = []

    def load_classification(name: str, split: str, extract_path: str | None) -> tuple[Any, Any]:
        asked.append((name, extract_path))
        if name == "Missing":
            raise ValueError("no such problem")
        ragged = [np.ones((2, 3 + n)) for n in range(20 if split == "train" else 9)]
        return (ragged if name == "Ragged" else np.ones((20, 2, 5))), np.array(["10", "9"] * 10)[: len(ragged)]

    datasets = types.SimpleNamespace(__file__=str(tmp_path / "__init__.py"), load_classification=load_classification)
    monkeypatch.setitem(sys.modules, "aeon", types.SimpleNamespace(datasets=datasets))
    monkeypatch.setitem(sys.modules, "aeon.datasets", datasets)
    (tmp_path / "data" / "Ragged").mkdir(parents=True)
    ragged = load_dataset("aeon:Ragged")
    assert (ragged.in_shape, ragged.class_names, len(ragged.test)) == ((2, 1, 22), ("10", "9"), 9)
    assert ragged.test.images[1].isnan().sum() == 2 * (22 - 4)
    assert ragged.test.labels.tolist()[:3] == [0, 1, 0]
    assert asked == [("Ragged", str(tmp_path / "data"))] * 2
    assert_raises(InputError, load_dataset, "aeon:Missing", say="aeon cannot read Missing: no such problem")
    assert asked[-1] == ("Missing", None)
    monkeypatch.setitem(sys.modules, "aeon.datasets", None)
    with pytest.raises(InputError, match=r"aeon:Ragged needs aeon.*torchcaps\[aeon\]"):
        load_dataset("aeon:Ragged")


def test_padding_never_changes_a_result() -> None:
    torch.manual_seed(0)
    options = {"sequence_stride": 2, "conv_dropout": 0.3}
    short, long = (create_model("sequences", (3, 1, length), 4, **options).double().eval() for length in (9, 50))
    long.load_state_dict(short.state_dict())
    sequences = torch.full((40, 3, 1, 50), torch.nan, dtype=torch.float64)
    for row, numbers, length in zip(sequences, X, LENGTHS, strict=True):
        row[:, 0, :length] = torch.from_numpy(numbers[:, :length])
    together = long(sequences).scores
    assert torch.allclose(short(sequences[..., :9]).scores, together, rtol=1e-9)
    alone = create_model("sequences", (3, 1, int(LENGTHS[0])), 4, **options).double().eval()
    alone.load_state_dict(short.state_dict())
    assert torch.allclose(alone(sequences[:1, ..., : LENGTHS[0]]).scores, together[:1], rtol=1e-9)
    mask = long.primary(sequences).mask
    assert torch.equal(mask.unflatten(1, (8, -1)).sum(2)[:, 0], torch.from_numpy((LENGTHS + 3) // 4))
    long(sequences, torch.from_numpy(Y)).scores.sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in long.parameters())
    with torch.no_grad():
        chunks = long(sequences.repeat(100, 1, 1, 1)).scores  # some at a time go through the convolutions
    assert torch.allclose(chunks[:40], together)
    assert isinstance(long.primary(sequences), Capsules)


def test_arrays_that_could_be_sequences_name_lengths(tmp_path: Path) -> None:
    assert_raises(
        InputError, load, tmp_path, x=X, y=Y, say="if these are sequences (N, C, L), add an array lengths (N,)"
    )
    assert_raises(InputError, load, tmp_path, **ARRAYS, x_test=X, y_test=Y, say="x_test must have lengths_test")
    np.savez(tmp_path / "pictures.npz", x=X.astype(np.uint8), y=Y)
    with pytest.raises(InputError, match=r"save it with as many bits as the other images$"):
        load_dataset(f"npz:{tmp_path / 'pictures.npz'}", scale=(0, 4095))


def test_sequences_are_padded_to_a_length_and_never_resized(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **ARRAYS)
    spec, plain = f"npz:{tmp_path / 'a.npz'}", load(tmp_path, **ARRAYS)
    padded = load_dataset(spec, image_size=(1, 12))
    assert padded.in_shape == (3, 1, 12)
    assert torch.equal(padded.test.images[..., :9].nan_to_num(), plain.test.images.nan_to_num())
    assert padded.test.images[..., 9:].isnan().all()
    for size in (32, (1, 8), (2, 9)):
        assert_raises(InputError, load_dataset, spec, image_size=size, say="sequences of 9 steps are not resized to")


def test_fit_reads_each_sequence_up_to_its_length() -> None:
    form = Form(find_task("classes"), 4, (3, 1, 9))
    opened = open_data({"x": X, "y": Y, "lengths": LENGTHS}, form)
    images = opened.data.tensors[0]
    for image, numbers, length in zip(images, X, LENGTHS, strict=True):
        assert torch.equal(image[:, 0, :length], torch.from_numpy(numbers[:, :length]).float())
        assert image[:, 0, length:].isnan().all()
    for lengths in (LENGTHS[:5], LENGTHS - 2, LENGTHS + 1, LENGTHS / 2):
        data = {"x": X, "y": Y, "lengths": lengths}
        assert_raises(
            InputError, open_data, data, form, say="must have lengths, whole numbers from 1 to 9, one for each"
        )


def test_what_an_npz_file_holds_beyond_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", X)
    assert_raises(InputError, load_dataset, f"npz:{tmp_path / 'a.npy'}", say="np.savez('mine.npz', x=images, y=labels)")
    pixels = RANDOM.integers(0, 256, (40, 8, 8), np.uint8)
    for name in ("x_valid", "Y_DEV", "train", "x_train", "lengths_validation", "val_images"):
        arrays: dict[str, Any] = {"x": pixels, "y": Y, name: pixels}
        assert_raises(InputError, load, tmp_path, **arrays, say=f"has an array {name!r}, which is not read")
    assert len(load(tmp_path, x=pixels, y=Y, patients=Y, weights=Y).train) > 0


@pytest.mark.parametrize("preset", ["sequences", "baseline-cnn", "cnn-matched", "compact-shared"])
@pytest.mark.parametrize("door", ["run", "fit"])
def test_a_network_that_computes_with_padding_is_refused(tmp_path: Path, preset: str, door: str) -> None:
    long = np.concatenate([X] * 4, 2)  # 36 steps
    for lengths in (LENGTHS * 4, np.full_like(LENGTHS, 36)):
        np.savez(tmp_path / "a.npz", x=long, y=Y, lengths=lengths)
        if door == "run":
            config = make_config(preset, data=f"npz:{tmp_path / 'a.npz'}")
            call = partial(_prepare, config)
        else:
            network = create_model(preset, (3, 1, 36), 4)
            data: Any = {"x": long, "y": Y, "lengths": lengths}
            fabric = launch("cpu")
            form: Any = {"task": find_task("classes"), "loss": None, "scale": "auto", "keys": None, "groups": None}
            call = partial(fit_data, network, data, None, Recipe(batch_size=4), fabric, seed=0, workers=0, **form)
        if preset == "sequences" or lengths.min() == 36:
            call()
        else:
            assert_raises(
                InputError, call, say="this network computes with their padding; choose one that leaves it out"
            )
