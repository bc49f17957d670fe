"""`torchcaps.fit`: one's own network on one's own data, stopped and resumed to the bit; what a recipe can ask for."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset

import torchcaps
from tiny_runs import StopAt, same_weights, tiny_config
from torchcaps.datasets import Batch, load_dataset
from torchcaps.errors import InputError
from torchcaps.training import Interrupted, Progress, Recipe, fit, read_config, resume, train
from torchcaps.training.step import TrainStep, forward

RECIPE = Recipe(epochs=3, batch_size=16, learning_rate=1e-2, schedule="one-cycle")


def vectors(number: int = 100) -> tuple[Tensor, Tensor]:
    """Points around one of three centres, most of them around the first."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.multinomial(torch.tensor([0.8, 0.1, 0.1]), number, replacement=True, generator=generator)
    return 3 * torch.eye(5)[labels] + torch.randn(number, 5, generator=generator), labels


class Points(TorchDataset[Any]):
    """The same, one by one, with noise that is drawn when a point is taken."""

    def __init__(self) -> None:
        self.points, self.labels = vectors()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index] + 0.1 * torch.randn(5), self.labels[index]


def own_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def start(out: Path | None = None, data: Any = None, **options: Any) -> tuple[nn.Module, list[dict[str, Any]]]:
    network = own_network()
    given: dict[str, Any] = {"accelerator": "cpu", "progress": Progress(), "validation": vectors(40), "recipe": RECIPE}
    return network, fit(network, vectors() if data is None else data, out=out, **(given | options))


def test_one_s_own_module_learns_on_one_s_own_tensors() -> None:
    network, rows = start()
    assert [row["step"] for row in rows] == [7, 14, 21], "the last batch of an epoch is smaller"
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    assert rows[-1]["validation_accuracy"] > 0.8
    assert not network.training
    points, labels = vectors(40)
    best = max(rows, key=lambda row: (row["validation_accuracy"], -row["validation_loss"]))
    assert (network(points).argmax(1) == labels).float().mean() == pytest.approx(best["validation_accuracy"])


@pytest.mark.parametrize("kind", ["tensors", "torch Dataset"])
@pytest.mark.parametrize("step", [3, 7, 16])
def test_a_fit_that_is_stopped_goes_on_exactly(tmp_path: Path, kind: str, step: int) -> None:
    def data() -> Any:
        return Points() if kind == "torch Dataset" else vectors()

    whole, rows = start(tmp_path / "whole", data())
    with pytest.raises(Interrupted, match=f"stopped after step {step}; go on with: the same call of fit"):
        start(tmp_path / "broken", data(), progress=StopAt(step, signal.SIGTERM))
    again, found = start(tmp_path / "broken", data())
    assert same_weights(again.state_dict(), whole.state_dict())
    times = {"seconds", "images_per_second"}
    assert [{name: row[name] for name in row.keys() - times} for row in found] == [
        {name: row[name] for name in row.keys() - times} for row in rows
    ]
    assert {path.name for path in (tmp_path / "broken").iterdir()} == {"best", "last.ckpt", "metrics.csv"}
    assert same_weights(load_file(tmp_path / "broken" / "best" / "model.safetensors"), whole.state_dict())


def test_another_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    start(tmp_path / "run")
    for options, words in (
        ({"data": vectors(90)}, "not those that the run"),
        ({"recipe": RECIPE.replace({"learning_rate": 2e-2})}, "has learning_rate = 0.01; it cannot go on with 0.02"),
        ({"seed": 1}, "has seed = 0; it cannot go on with 1"),
    ):
        with pytest.raises(InputError, match=words):
            start(tmp_path / "run", **options)


def test_without_validation_the_last_epoch_counts(tmp_path: Path) -> None:
    network, rows = start(tmp_path / "run", validation=None)
    assert rows[-1]["validation_loss"] is None
    assert same_weights(network.state_dict(), load_file(tmp_path / "run" / "best" / "model.safetensors"))
    with pytest.raises(InputError, match="validation images, of which there are none"):
        start(validation=None, recipe=RECIPE.replace({"patience": 1}))


def test_a_network_of_torchcaps_on_an_image_set_and_on_a_data_set(bars: Path, tmp_path: Path) -> None:
    data = load_dataset(f"npz:{bars}", validation_size=12)
    small = {"conv_channels": 8, "primary_types": 2, "capsule_dim": 4, "decoder_hidden": (16,)}
    recipe = Recipe(epochs=2, batch_size=16, max_shift=1)
    given: dict[str, Any] = {"accelerator": "cpu", "progress": Progress()}
    rows = {}
    for name, images, more in (
        ("data set", data, {}),
        ("image set", data.train, {"validation": data.validation}),
        ("tensors", (data.train.images, data.train.labels), {"validation": data.validation}),
    ):
        torch.manual_seed(0)
        network = torchcaps.create_model("sabour2017", data.in_shape, 3, **small)
        rows[name] = torchcaps.fit(network, images, recipe, tmp_path / name, **given, **more)
        loaded = torchcaps.load_pretrained(tmp_path / name / "best")
        assert same_weights(loaded.state_dict(), network.state_dict())
    losses = {name: [row["validation_loss"] for row in found] for name, found in rows.items()}
    assert losses["data set"] == losses["image set"] == losses["tensors"]


def test_a_loss_of_one_s_own_and_what_does_not_fit() -> None:
    asked: list[int] = []

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        asked.append(len(labels))
        return nn.functional.multi_margin_loss(output, labels)

    start(loss=loss, recipe=RECIPE.replace({"epochs": 1}))
    assert asked == [16] * 6 + [4] + [40]
    with pytest.raises(InputError, match="the batch size must be at most 100"):
        start(recipe=RECIPE.replace({"batch_size": 101}))
    with pytest.raises(InputError, match="changed at random; leave that to your own data"):
        start(recipe=RECIPE.replace({"max_shift": 1}))


# ---- what a recipe can ask for


def gradients(weights: Tensor | None) -> Tensor:
    network = own_network().eval()
    points, labels = vectors()
    _, losses = forward(network, network, Batch(points, labels), None, weights)
    losses.total.backward()
    return torch.cat([each.grad.flatten() for each in network.parameters() if each.grad is not None])


def test_a_weighted_image_counts_by_its_weight_in_the_gradient() -> None:
    points, labels = vectors()
    weights = torch.tensor([0.5, 2.0, 3.0])[labels]
    network = own_network().eval()
    (nn.functional.cross_entropy(network(points), labels, reduction="none") * weights).mean().backward()
    wanted = torch.cat([each.grad.flatten() for each in network.parameters() if each.grad is not None])
    torch.testing.assert_close(gradients(weights), wanted)
    assert not torch.allclose(gradients(None), wanted)


def test_the_gradient_of_a_capsule_network_is_that_of_images_repeated(bars: Path) -> None:
    """Twice the weight is the image twice, through scores and reconstruction alike."""
    images = load_dataset(f"npz:{bars}").train.take(6)
    found = []
    for repeated in (True, False):
        torch.manual_seed(0)
        small = {"conv_channels": 4, "primary_types": 2, "capsule_dim": 4, "decoder_hidden": (8,)}
        network = torchcaps.create_model("sabour2017", images.in_shape, 3, **small)
        index = torch.tensor([0, 0, 1, 2, 3, 4, 5, 5]) if repeated else torch.arange(6)
        weights = None if repeated else torch.tensor([2.0, 1, 1, 1, 1, 2]) * 6 / 8
        batch = Batch(images.images[index].float() / 255, images.labels[index])
        forward(network, network, batch, None, weights)[1].total.backward()
        found.append(torch.cat([each.grad.flatten() for each in network.parameters() if each.grad is not None]))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-6)


def test_balanced_classes_make_rare_ones_count(tmp_path: Path) -> None:
    found = {}
    for weights in (None, "balanced", (1.0, 8.0, 8.0)):
        network, _ = start(recipe=RECIPE.replace({"class_weights": weights, "learning_rate": 1e-3}))
        points, labels = vectors(1000)
        found[weights] = (network(points).argmax(1) == labels)[labels > 0].float().mean()
    assert found["balanced"] > found[None]
    assert found[(1.0, 8.0, 8.0)] > found[None]
    small = torchcaps.create_model("compact", (1, 28, 28), 3)
    with pytest.raises(InputError, match="class_weights must be 3 numbers"):
        TrainStep(Fabric(accelerator="cpu", devices=1), small, Recipe(class_weights=(1.0,)), seed=0)
    with pytest.raises(InputError, match="needs a label for each training image"):
        start(data=Points(), recipe=RECIPE.replace({"class_weights": "balanced"}))


def test_a_gradient_is_cut_to_its_largest_norm() -> None:
    moved = {}
    for norm in (None, 1e-3):
        network = own_network()
        recipe = Recipe(optimizer={"name": "sgd", "momentum": 0.0}, max_gradient_norm=norm)
        step, before = TrainStep(Fabric(accelerator="cpu", devices=1), network, recipe, seed=0), own_network()
        step(Batch(*vectors()), 0, 1.0)
        pairs = zip(network.parameters(), before.parameters(), strict=True)
        moved[norm] = float(torch.cat([(one - other).detach().flatten() for one, other in pairs]).norm())
    assert moved[1e-3] == pytest.approx(1e-3, rel=1e-3)
    assert moved[None] > 1e-2


def test_patience_ends_a_run_that_does_not_improve(bars: Path, tmp_path: Path) -> None:
    config = tiny_config(bars, epochs=20, learning_rate=1e-30, patience=2)
    summary = train(config, tmp_path / "run", progress=Progress(), figures=False)
    assert (summary["best_epoch"], summary["epochs"]) == (1, 3)
    assert resume(tmp_path / "run", progress=Progress(), figures=False)["epochs"] == 3
    assert resume(tmp_path / "run", overrides={"patience": 4}, progress=Progress(), figures=False)["epochs"] == 5


@pytest.mark.parametrize("name", ["csv", "tensorboard", "lightning_fabric.loggers.CSVLogger"])
def test_metrics_go_to_loggers_too(bars: Path, tmp_path: Path, name: str) -> None:
    if name == "tensorboard":
        pytest.importorskip("tensorboard")
    out = tmp_path / "run"
    train(tiny_config(bars, epochs=2, logger=name), out, progress=Progress(), figures=False)
    if name == "csv":
        resume(out, overrides={"epochs": 3}, progress=Progress(), figures=False)
    if name == "tensorboard":
        assert list((out / "tensorboard").glob("events*"))
        return
    (file,) = (each for each in out.rglob("metrics.csv") if each.parent != out)
    rows = list(csv.DictReader(file.open()))
    own = list(csv.DictReader((out / "metrics.csv").open()))
    assert [float(row["validation/accuracy"]) for row in rows] == [float(row["validation_accuracy"]) for row in own]
    assert [row["step"] for row in rows] == [row["step"] for row in own]


def test_a_logger_that_is_not_there_is_refused_before_a_folder_is_made(bars: Path, tmp_path: Path) -> None:
    for name in ("tensorbord", "no.such.Logger", "lightning_fabric.loggers.NoSuch"):
        with pytest.raises(InputError, match=f"logger must be csv, tensorboard or PACKAGE.CLASS, got '{name}'"):
            train(tiny_config(bars, logger=name), tmp_path / "run", progress=Progress())
    assert not (tmp_path / "run").exists()


def test_a_run_of_the_time_before_loggers_had_names_is_read(bars: Path, tmp_path: Path) -> None:
    values = tiny_config(bars).to_dict()
    for wanted, name in ((True, "tensorboard"), (False, None)):
        recipe = {key: each for key, each in values["recipe"].items() if key not in ("logger", "compile", "patience")}
        (tmp_path / "config.json").write_text(json.dumps(values | {"recipe": recipe, "tensorboard": wanted}))
        assert read_config(tmp_path / "config.json") == tiny_config(bars, logger=name)


def test_a_compiled_network_trains_and_is_saved_as_it_is(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[nn.Module] = []
    own = torch.compile

    def compile_(network: nn.Module, **_: object) -> Any:
        compiled.append(network)
        return own(network, backend="eager")

    monkeypatch.setattr(torch, "compile", compile_)
    plain = train(tiny_config(bars, epochs=1), tmp_path / "plain", progress=Progress(), figures=False)
    summary = train(tiny_config(bars, epochs=1, compile=True), tmp_path / "run", progress=Progress(), figures=False)
    assert compiled, "it was never asked for"
    assert summary["validation"]["best"]["loss"] == pytest.approx(plain["validation"]["best"]["loss"], rel=1e-3)
    assert torchcaps.load_pretrained(tmp_path / "run" / "best").num_classes == 3
