"""`torchcaps.fit`: one's own network on one's own data, stopped and resumed to the bit."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Subset, TensorDataset

import torchcaps
from support import assert_raises
from tiny_runs import NARROW, StopAt, same_weights
from torchcaps.datasets import BatchLoader, load_dataset
from torchcaps.errors import InputError
from torchcaps.training import Interrupted, Progress, Recipe, fit

RECIPE = Recipe(epochs=3, batch_size=16, learning_rate=1e-2, schedule="one-cycle")


def vectors(number: int = 100) -> tuple[Tensor, Tensor]:
    """Points around one of three centres, most of them around the first."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.multinomial(torch.tensor([0.8, 0.1, 0.1]), number, replacement=True, generator=generator)
    return 3 * torch.eye(5)[labels] + torch.randn(number, 5, generator=generator), labels


class Points(TorchDataset[Any]):
    """The same, one by one, with noise that is drawn when a point is taken."""

    def __init__(self) -> None:
        (self.points, self.labels), self.readers = vectors(), torch.zeros(1, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.readers[0] = os.getpid()
        return self.points[index] + 0.1 * torch.randn(5), self.labels[index]


def own_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def start(out: Path | None = None, data: Any = None, **options: Any) -> tuple[nn.Module, list[dict[str, Any]]]:
    network = own_network()
    given: dict[str, Any] = {"accelerator": "cpu", "progress": Progress(), "validation": vectors(40), "recipe": RECIPE}
    rows = fit(network, vectors() if data is None else data, out=out, **(given | options))
    return network, [{name: row[name] for name in row.keys() - {"seconds", "images_per_second"}} for row in rows]


def test_one_s_own_module_learns_on_one_s_own_tensors() -> None:
    network, rows = start()
    assert [row["step"] for row in rows] == [7, 14, 21], "the last batch of an epoch is smaller"
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    assert rows[-1]["validation_accuracy"] > 0.8
    assert not network.training
    points, labels = vectors(40)
    best = max(rows, key=lambda row: (row["validation_accuracy"], -row["validation_loss"]))
    assert (network(points).argmax(1) == labels).float().mean() == pytest.approx(best["validation_accuracy"])


@pytest.mark.parametrize(("data", "step"), [(vectors, 7), (vectors, 16), (Points, 3)])
def test_a_fit_that_is_stopped_goes_on_exactly(tmp_path: Path, data: Any, step: int) -> None:
    whole, rows = start(tmp_path / "whole", data())
    with pytest.raises(Interrupted, match=f"stopped after step {step}; resume with: the same call of fit"):
        start(tmp_path / "broken", data(), progress=StopAt(step, signal.SIGTERM))
    for name in ("last.ckpt", "metrics.csv", "best/model.safetensors"):  # of a process that was killed as it wrote
        left = tmp_path / "broken" / name
        left.parent.mkdir(exist_ok=True)
        left.with_name(f".{left.name}.01234567{left.suffix}").touch()
    again, found = start(tmp_path / "broken", data())
    assert same_weights(again.state_dict(), whole.state_dict())
    assert found == rows
    assert {path.name for path in (tmp_path / "broken").rglob("*")} == {
        "best",
        "last.ckpt",
        "metrics.csv",
        "model.safetensors",
    }
    assert same_weights(load_file(tmp_path / "broken" / "best" / "model.safetensors"), whole.state_dict())


def test_processes_that_read_ahead_change_nothing() -> None:
    found = []
    for workers in (0, 2):
        data = Points()
        network, rows = start(data=data, workers=workers, recipe=RECIPE.replace({"epochs": 1}))
        found.append((network.state_dict(), rows))
        assert (int(data.readers[0]) == os.getpid()) is (workers == 0)
    assert same_weights(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_each_process_takes_its_share_of_a_batch() -> None:
    for data in (TensorDataset(*vectors(7)), Subset(Points(), range(7))):
        shares = [BatchLoader(data, 3, shuffle=False, rank=rank, world_size=2).batches(0) for rank in (0, 1)]
        pairs = list(zip(*shares, strict=True))
        assert [[len(each.labels) for each in pair] for pair in pairs] == [[1, 2], [1, 2], [0, 1]]
        assert torch.equal(torch.cat([each.labels for pair in pairs for each in pair]), vectors(7)[1])


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    start(tmp_path / "run")
    options: dict[str, Any]
    for options, words in (
        ({"out": tmp_path / "run", "data": vectors(90)}, "was trained on other images"),
        ({"out": tmp_path / "run", "seed": 1}, "has seed = 0; it cannot resume with 1"),
        ({"recipe": {"batch_size": 101}}, "the batch size is 101, but an epoch has only 100 images"),
        ({"recipe": {"max_shift": 1}}, "set max_shift=0 (--max-shift 0), or augment other data in your own data set"),
        ({"recipe": {"patience": 1}, "validation": None}, "need validation images, but the data have none"),
    ):
        recipe = RECIPE.replace(options.pop("recipe", {}))
        assert_raises(InputError, start, say=words, recipe=recipe, **options)


def test_batch_normalisation_of_single_images_is_refused() -> None:
    network = nn.Sequential(own_network(), nn.BatchNorm1d(3))
    options: Any = {"accelerator": "cpu", "progress": Progress(), "recipe": RECIPE.replace({"batch_size": 1})}
    assert_raises(InputError, fit, network, vectors(), say="set batch_size (--batch-size) to 2 or more", **options)


def test_without_validation_the_last_epoch_counts(tmp_path: Path) -> None:
    network, rows = start(tmp_path / "run", validation=None)
    assert rows[-1]["validation_loss"] is None
    assert same_weights(network.state_dict(), load_file(tmp_path / "run" / "best" / "model.safetensors"))


def test_a_network_of_torchcaps_on_an_image_set_and_on_a_data_set(bars: Path, tmp_path: Path) -> None:
    data = load_dataset(f"npz:{bars}", validation_size=12)
    recipe, validation = Recipe(epochs=2, batch_size=16, max_shift=1), {"validation": data.validation}
    rows = {}
    for name, images, more in (
        ("data set", data, {}),
        ("image set", data.train, validation),
        ("tensors", (data.train.images, data.train.labels), validation),
    ):
        torch.manual_seed(0)
        network = torchcaps.create_model("sabour2017", data.in_shape, 3, **NARROW)
        rows[name] = fit(network, images, recipe, tmp_path / name, accelerator="cpu", progress=Progress(), **more)
        loaded = torchcaps.load_pretrained(tmp_path / name / "best")
        assert same_weights(loaded.state_dict(), network.state_dict())
    losses = {name: [row["validation_loss"] for row in found] for name, found in rows.items()}
    assert losses["data set"] == losses["image set"] == losses["tensors"]


def test_a_network_with_a_part_that_is_not_registered_keeps_its_weights(bars: Path, tmp_path: Path) -> None:
    class Own(torchcaps.nn.DynamicRouting):
        pass

    data = load_dataset(f"npz:{bars}", validation_size=12)
    network = torchcaps.create_model("sabour2017", data.in_shape, 3, routing=Own(), conv_channels=4, primary_types=2)
    recipe = Recipe(epochs=1, batch_size=54)
    fit(network, data, recipe, tmp_path / "run", accelerator="cpu", progress=Progress())
    assert {path.name for path in (tmp_path / "run" / "best").iterdir()} == {"model.safetensors"}
    assert same_weights(load_file(tmp_path / "run" / "best" / "model.safetensors"), network.state_dict())


def test_a_loss_of_one_s_own() -> None:
    """An image counts by its share of a batch, also in a smaller last one."""
    network, rows = start(loss=nn.functional.multi_margin_loss, recipe=RECIPE.replace({"epochs": 1}))
    points, labels = vectors(40)
    wanted = nn.functional.multi_margin_loss(network(points), labels).item()
    assert rows[-1]["validation_loss"] == pytest.approx(wanted)


def test_balanced_classes_make_rare_ones_count() -> None:
    found = {}
    for weights in (None, "balanced", (1.0, 8.0, 8.0)):
        network, _ = start(recipe=RECIPE.replace({"class_weights": weights, "learning_rate": 1e-3}))
        points, labels = vectors(1000)
        found[weights] = (network(points).argmax(1) == labels)[labels > 0].float().mean()
    assert found["balanced"] > found[None]
    assert found[(1.0, 8.0, 8.0)] > found[None]
