"""What a run does: it learns, chooses its best epoch, tests once, stops where nothing is finite, and says so."""

import copy
import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import torchcaps
from support import small
from tiny_runs import NARROW, Heard, go_on, judged, rows, run, same_weights, tiny_config
from torchcaps import analysis
from torchcaps.analysis import evaluate
from torchcaps.datasets import Batch, load_dataset
from torchcaps.errors import InputError
from torchcaps.models import CapsNet, Losses, create_model, get_preset, list_presets
from torchcaps.tasks import find_task
from torchcaps.training import (
    Diverged,
    Progress,
    Recipe,
    TrainConfig,
    load_run,
    make_config,
    train,
)
from torchcaps.training.checkpoint import read_checkpoint
from torchcaps.training.loop import Trainer
from torchcaps.training.step import forward


def weights(out: Path) -> dict[str, Tensor]:
    return read_checkpoint(out / "last.ckpt")["model"]


def test_a_run_and_its_folder(bars: Path, tmp_path: Path) -> None:
    heard, out = Heard(), tmp_path / "run"
    summary = run(tiny_config(bars), out, heard)
    found = rows(out)
    assert [row["epoch"] for row in found] == ["1", "2", "3"]
    assert float(found[-1]["train_loss"]) < float(found[0]["train_loss"])
    assert not [name for name in found[0] if "test" in name]
    best = max(found, key=lambda row: (float(row["validation_accuracy"]), -float(row["validation_loss"])))
    assert summary["best_epoch"] == int(best["epoch"])
    assert json.loads((out / "summary.json").read_text()) == summary
    assert summary["images"] == {"train": 108, "validation": 12, "test": 30}
    assert (summary["epochs"], summary["test"]["last"]["images"], summary["precision"]) == (3, 30, "32")
    assert summary["versions"]["torch"] == torch.__version__
    assert heard.said[2:] == [
        "Images: 108 training, 12 validation, 30 test; 1×18×18, 3 classes",
        "Device: cpu, float32",
    ]
    assert heard.steps == list(range(1, 19))
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    best_files = {f"best/{name}" for name in ("config.json", "model.safetensors", "classes.json")}
    assert files == {"config.json", "metrics.csv", "last.ckpt", "summary.json", *best_files}


def test_the_test_images_are_looked_at_once(tiny: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, looked, heard = analysis.evaluate, list[tuple[int, int]](), Heard()

    def evaluated(network: Any, images: Any, **options: Any) -> Any:
        looked.append((len(heard.rows), len(images)))
        return own(network, images, **options)

    monkeypatch.setattr(analysis, "evaluate", evaluated)
    summary = run(tiny, tmp_path / "run", heard)
    networks = 1 if summary["best_epoch"] == 3 else 2  # the best epoch's and the last one's
    assert looked == [(3, 30)] * networks


FAMILIES = ("compact-shared", "baseline-cnn", "torch-tutorial", "keras-tutorial", "hinton2018-paper", "vb2020")


@pytest.mark.slow
@pytest.mark.parametrize("preset", FAMILIES)
def test_presets_train_on_a_small_data_set_by_their_own_recipes(preset: str, tmp_path: Path) -> None:
    recipe = make_config(preset).recipe
    size = None if recipe.crop is None else recipe.crop + 4
    limits = {
        "limit_train": recipe.limit_train or 2 * recipe.batch_size,
        "limit_test": recipe.limit_test or 60,
        "validation_size": recipe.validation_size or 60,
    }
    config = make_config(preset, data="digits", epochs=1, image_size=size, **limits, **small(preset))
    summary = run(config, tmp_path / "run")
    assert summary["images"]["train"] == limits["limit_train"]
    assert summary["images"]["test"] == min(limits["limit_test"], 360)  # fewer than keras-tutorial's 1,000
    assert summary["in_shape"] == [1, recipe.crop or 28, recipe.crop or 28]


@pytest.mark.parametrize("preset", [name for name in list_presets() if get_preset(name).network["objects"] == 2])
@pytest.mark.usefixtures("two_bars")
def test_presets_for_two_objects_train_on_pairs(preset: str, tmp_path: Path) -> None:
    narrow, out = small(preset) | ({} if "cnn" in preset else {"capsule_dim": 4}), tmp_path / "run"
    summary = run(make_config(preset, epochs=2, batch_size=16, **narrow), out)
    assert (summary["objects"], summary["in_shape"]) == (2, [1, 22, 22])
    assert float(rows(out)[1]["train_loss"]) < float(rows(out)[0]["train_loss"])
    assert summary["test"]["best"]["images"] == 30
    assert load_run(out).dataset().num_objects == 2


@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_a_run_learns_and_is_judged_in_float32(bars: Path, tmp_path: Path, precision: str) -> None:
    out, heard = tmp_path / "run", Heard()
    summary = run(tiny_config(bars, precision=precision, epochs=12, learning_rate=5e-3), out, heard)
    assert summary["test"]["last"]["accuracy"] > 0.9
    assert summary["precision"] == precision
    assert any("12 times as long" in line for line in heard.said) is (precision == "bf16")
    assert {tensor.dtype for tensor in weights(out).values()} == {torch.float32}
    for which in ("best", "last"):
        found = load_run(out, which=which)
        exact, half = (evaluate(found.model, found.dataset().test, precision=p) for p in ("32", "bf16"))
        assert summary["test"][which]["accuracy"] == exact.accuracy
        assert summary["test"][which]["loss"] == pytest.approx(exact.loss, rel=1e-6)
        assert half.loss != pytest.approx(exact.loss, rel=1e-6)


@pytest.mark.slow
def test_a_run_draws_what_its_network_has(bars: Path, tmp_path: Path) -> None:
    decoded = {"reconstructions", "perturbation", "routing", "routing-statistics"}
    cnn: dict[str, Any] = {"preset": "baseline-cnn", "channels": (4,), "hidden": (8,)}
    for overrides, more in (({}, decoded), ({"num_iterations": 0, "decoder": False}, set()), (cnn, set())):
        out = tmp_path / str(len(overrides))
        train(tiny_config(bars, epochs=1, **overrides), out, progress=Progress())
        pictures = {path.stem: path for path in (out / "figures").iterdir()}
        assert set(pictures) == {"samples", "curves", "confusion"} | more
        for path in pictures.values():
            with Image.open(path) as picture:
                assert min(picture.size) > 200
                assert len(picture.convert("L").getcolors(1 << 20) or []) > 10, "the picture is empty"


def test_the_best_epoch_is_that_of_all_sittings(bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [(0.5, 0.5, 0.5), (0.4, 0.4, 0.4), (0.6, 0.6, 0.5), (0.6, 0.6, 0.7), (0.3, 0.6, 0.7), (0.3, 0.6, 0.7)]
    monkeypatch.setattr(Trainer, "validate", lambda trainer, _: judged(*results[trainer.state.epoch]))
    ways = {"accuracy": [1, 0, 1, 0, 1, 0], "loss": [1, 1, 0, 0, 1, 0], "balanced-accuracy": [1, 0, 0, 1, 1, 0]}
    for select, improved in ways.items():
        heard, out = Heard(), tmp_path / select
        run(tiny_config(bars, select=select), out, heard)
        assert go_on(out, heard, epochs=6)["best_epoch"] == 5
        assert [row["improved"] for row in heard.rows] == improved
        assert "improved" not in (out / "metrics.csv").read_text()


def test_a_run_ends_by_accuracy_or_without_patience(bars: Path, tmp_path: Path) -> None:
    run(tiny_config(bars, learning_rate=5e-3), tmp_path / "whole")
    accuracies = [float(row["validation_accuracy"]) for row in rows(tmp_path / "whole")]
    assert accuracies[0] < accuracies[1], "else this test says nothing"
    config = tiny_config(bars, learning_rate=5e-3, stop_at=accuracies[1])
    assert run(config, tmp_path / "good")["epochs"] == 2
    config = tiny_config(bars, epochs=20, learning_rate=1e-30, patience=2)
    summary = run(config, tmp_path / "bored")
    assert summary["epochs"] == summary["best_epoch"] + 2 < 20
    assert summary["warning"].startswith("the network has learned nothing")


def test_a_loss_that_is_nan_stops_the_run(tiny: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, calls = CapsNet.loss, list[int]()

    def ruined(network: CapsNet, *args: Any) -> Losses:
        losses, _ = own(network, *args), calls.append(1)
        return losses._replace(total=losses.total * float("nan")) if network.training and len(calls) == 10 else losses

    monkeypatch.setattr(CapsNet, "loss", ruined)
    # six steps and one validation batch of the first epoch, then the third step of the second epoch
    words = r"NaN or infinite by step 9 \(epoch 2, batch 3 of 6\).*smaller --weight-std.*keeps the last good checkpoint"
    with pytest.raises(Diverged, match=words):
        run(tiny, tmp_path / "run")
    checkpoint = read_checkpoint(tmp_path / "run" / "last.ckpt")
    assert checkpoint["progress"]["epoch"] == 1
    assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())


@pytest.mark.parametrize("batch_size", [108, 36])
def test_an_update_that_ruins_the_weights_is_not_kept(bars: Path, tmp_path: Path, batch_size: int) -> None:
    config = tiny_config(bars, learning_rate=1e38, batch_size=batch_size, epochs=1)
    with pytest.raises(Diverged, match=r"became NaN or infinite by step .* has no checkpoint yet"):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run" / "last.ckpt").exists()
    assert not (tmp_path / "run" / "best").exists()


def test_some_devices_are_looked_at_once_in_a_while(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    monkeypatch.setattr(Trainer, "report_every", property(lambda _: 4, lambda *_: None), raising=False)
    run(tiny_config(bars), tmp_path / "seldom", heard)
    assert heard.steps == [4, 6, 8, 12, 16, 18]
    monkeypatch.undo()
    run(tiny_config(bars), tmp_path / "often")
    assert same_weights(weights(tmp_path / "seldom"), weights(tmp_path / "often"))
    losses = [[row["train_loss"] for row in rows(tmp_path / name)] for name in ("seldom", "often")]
    assert losses[0] == losses[1]


# ---- a step


def gradients(network: nn.Module, images: Batch, weights: Tensor | None) -> Tensor:
    network.zero_grad()
    forward(network, network, images, find_task("classes").loss_of_module(None, None), weights)[1].total.backward()
    return torch.cat([each.grad.flatten() for each in network.parameters() if each.grad is not None])


def test_a_weighted_image_counts_as_if_it_came_more_often(bars: Path) -> None:
    """Through scores and reconstruction alike."""
    images = load_dataset(f"npz:{bars}").train.take(6)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(18 * 18, 3))
    for network in (create_model("sabour2017", images.in_shape, 3, **NARROW), linear):
        found = []
        for repeated in (True, False):
            index = torch.tensor([0, 0, 1, 2, 3, 4, 5, 5]) if repeated else torch.arange(6)
            weights = None if repeated else torch.tensor([2.0, 1, 1, 1, 1, 2]) * 6 / 8
            found.append(gradients(network, Batch(images.images[index].float() / 255, images.labels[index]), weights))
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-6)
        plain = gradients(network, Batch(images.images.float() / 255, images.labels), None)
        assert not torch.allclose(plain, found[0], rtol=1e-3)


def test_a_gradient_is_cut_to_its_largest_norm() -> None:
    moved = {}
    for norm in (None, 1e-4):
        torch.manual_seed(0)
        network, data = nn.Linear(5, 3), (torch.rand(8, 5), torch.arange(8) % 3)
        before = network.weight.detach().clone(), network.bias.detach().clone()
        sgd = {"name": "sgd", "momentum": 0.0}
        recipe = Recipe(optimizer=sgd, max_gradient_norm=norm, learning_rate=1.0, epochs=1, batch_size=8)
        torchcaps.fit(network, data, recipe, accelerator="cpu", progress=Progress())
        steps = [one - other for one, other in zip(network.parameters(), before, strict=True)]
        moved[norm] = float(torch.cat([step.detach().flatten() for step in steps]).norm())
    assert moved[1e-4] == pytest.approx(1e-4, rel=0.02)
    assert moved[None] > 5e-4


@pytest.mark.parametrize("is_precise", [True, False])
def test_batch_normalisation_is_judged_by_images_as_they_are(is_precise: bool) -> None:
    images, labels = torch.full((40, 1, 8, 8), 255, dtype=torch.uint8), torch.arange(40) % 2
    network = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 2))
    recipe = Recipe(epochs=3, batch_size=8, max_shift=4, precise_norm=is_precise)  # what comes in is black
    torchcaps.fit(network, (images, labels), recipe, accelerator="cpu", progress=Progress())
    mean = float(network[0].running_mean)
    assert mean == pytest.approx(1) if is_precise else mean < 0.9


def test_a_checkpoint_of_another_device_brings_only_moments(bars: Path, out: Path, tmp_path: Path) -> None:
    run(tiny_config(bars, epochs=2), tmp_path / "other")
    checkpoint = read_checkpoint(out / "last.ckpt")
    group = checkpoint["optimizer"]["param_groups"][0]
    group |= {"lr": torch.tensor(0.5), "fused": False, "capturable": True}
    torch.save(checkpoint, out / "last.ckpt")
    go_on(out, epochs=2)
    assert same_weights(weights(out), weights(tmp_path / "other"))
    assert read_checkpoint(out / "last.ckpt")["optimizer"]["param_groups"][0]["fused"] is True


def test_a_compiled_network_trains_and_is_saved(bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, compiled = torch.compile, list[nn.Module]()

    def compile_(network: nn.Module, **_: object) -> Any:
        compiled.append(network)
        return own(network, backend="eager")

    monkeypatch.setattr(torch, "compile", compile_)
    plain = run(tiny_config(bars, epochs=1), tmp_path / "plain")
    summary = run(tiny_config(bars, epochs=1, compile=True), tmp_path / "run")
    assert compiled, "it was never asked for"
    assert summary["validation"]["best"]["loss"] == pytest.approx(plain["validation"]["best"]["loss"], rel=1e-3)
    assert torchcaps.load_pretrained(tmp_path / "run" / "best").num_classes == 3


def test_loggers_by_name(bars: Path, tmp_path: Path) -> None:
    out = tmp_path / "class"
    run(tiny_config(bars, epochs=2, logger="lightning_fabric.loggers.CSVLogger"), out)
    (logged,) = out.rglob("lightning_logs/*/metrics.csv")
    losses = [float(row["train/loss"]) for row in csv.DictReader(logged.open())]
    assert losses == [float(row["train_loss"]) for row in rows(out)]
    with pytest.raises(InputError, match=r"logger must be tensorboard or .* got 'no_such'"):
        run(tiny_config(bars, logger="no_such"), tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
    pytest.importorskip("tensorboard")
    run(tiny_config(bars, epochs=1, logger="tensorboard"), tmp_path / "board")
    go_on(tmp_path / "board", epochs=2)
    assert list((tmp_path / "board" / "tensorboard").rglob("events.*"))


def test_averaged_weights_are_validated_saved_and_tested(tmp_path: Path) -> None:
    """The average of each step again, beside the weights that the same run has without one."""
    torch.manual_seed(0)
    images, labels = torch.randint(256, (24, 1, 4, 4), dtype=torch.uint8), torch.arange(24) % 3
    plain = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    averaged, start = copy.deepcopy(plain), copy.deepcopy(plain).state_dict()
    path: list[dict[str, Tensor]] = []

    class Steps(Progress):
        def step(self, **_: object) -> None:
            path.append({name: each.clone() for name, each in plain.state_dict().items()})

    recipe = Recipe(epochs=2, batch_size=8, optimizer={"name": "sgd", "momentum": 0.0}, learning_rate=0.5)
    torchcaps.fit(plain, (images, labels), recipe, accelerator="cpu", progress=Steps())
    recipe = recipe.replace({"average_weights": 0.75})
    torchcaps.fit(averaged, (images, labels), recipe, accelerator="cpu", progress=Progress())
    assert len(path) == 6
    for name, each in averaged.state_dict().items():
        expected = start[name]
        for weights_then in path:
            expected = 0.75 * expected + 0.25 * weights_then[name]
        torch.testing.assert_close(each, expected)
        assert not torch.equal(each, path[-1][name])


def test_the_networks_of_a_run_have_averaged_weights(bars: Path, tmp_path: Path) -> None:
    run(tiny_config(bars, average_weights=0.9, epochs=2), tmp_path / "run")
    checkpoint, best = read_checkpoint(tmp_path / "run" / "last.ckpt"), load_run(tmp_path / "run").model
    last = load_run(tmp_path / "run", which="last").model
    trained = dict(zip(dict(last.named_parameters()), checkpoint["trained"], strict=True))
    assert same_weights(last.state_dict(), checkpoint["model"])
    assert not any(torch.equal(trained[name], each) for name, each in last.named_parameters())
    batch = load_dataset(f"npz:{bars}").test
    accuracy = evaluate(last, batch).accuracy
    assert accuracy == json.loads((tmp_path / "run" / "summary.json").read_text())["test"]["last"]["accuracy"]
    assert best.num_classes == 3
