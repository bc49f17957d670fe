"""Captured steps against plain ones, by a recorder that does on the CPU what a CUDA graph does on a GPU."""

from __future__ import annotations

import copy
import csv
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from recorder import Recorder
from support import small
from tiny_runs import StopAt, tiny_config
from torchcaps.datasets import Batch, BatchLoader
from torchcaps.errors import InputError
from torchcaps.models import Network, Recipe, create_model, get_preset, list_presets
from torchcaps.training import Diverged, Interrupted, loop, resume, train
from torchcaps.training import step as step_module
from torchcaps.training.capture import WARM_UP, choose_capture
from torchcaps.training.checkpoint import read_checkpoint
from torchcaps.training.progress import Silence
from torchcaps.training.step import TrainStep

BATCH = 4
SHAPE = (1, 20, 20)


def batches(number: int, preset: str, size: int = BATCH) -> list[Batch]:
    """Random images and labels; with several objects an image, their parts too."""
    generator = torch.Generator().manual_seed(1)
    objects = get_preset(preset).model.objects
    found = []
    for _ in range(number):
        images = torch.rand(size, *SHAPE, generator=generator)
        if objects == 1:
            found.append(Batch(images, torch.randint(10, (size,), generator=generator)))
        else:
            labels = torch.rand(size, 10, generator=generator).argsort(1)[:, :objects]
            found.append(Batch(images, labels, torch.rand(size, objects, *SHAPE, generator=generator)))
    return found


def network_of(preset: str) -> Network:
    torch.manual_seed(0)
    return create_model(preset, SHAPE, 10, **small(preset)).train()


def step_of(
    network: Network,
    precision: str = "32-true",
    recipe: Recipe | None = None,
    recorder: Recorder | None = None,
) -> TrainStep:
    """A plain step, or one that a recorder captures."""
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)  # type: ignore[arg-type]
    recipe = dataclasses.replace(recipe or Recipe(), batch_size=BATCH)
    return TrainStep(fabric, network, recipe, seed=3, capture=recorder)


def run(step: TrainStep, data: list[Batch], start: int = 0) -> None:
    for n, batch in enumerate(data, start):
        # what a loader gave is gone when it gives the next batch
        mine = Batch(*(None if part is None else part.clone() for part in batch))
        step(mine, n, 1e-3 * 0.7**n)
        for part in mine:
            if part is not None:
                part.zero_()


def state(step: TrainStep) -> list[Tensor]:
    """Weights, Adam's moments and steps, and the tally."""
    optimizer = step.optimizer.state_dict()["state"]
    moments = [value for entry in optimizer.values() for value in entry.values()]
    return [*step.network.state_dict().values(), *moments, torch.tensor(step.tally.read())]


def assert_same(one: list[Tensor], two: list[Tensor]) -> None:
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("preset", list_presets())
def test_captured_steps_are_the_plain_ones(preset: str) -> None:
    data = batches(7, preset)
    recipe, recorder = get_preset(preset).recipe, Recorder()
    one, two = (step_of(network_of(preset), recipe=recipe, recorder=each) for each in (None, recorder))
    run(one, data)
    run(two, data)
    assert (recorder.runs, recorder.replays) == (WARM_UP, 7 - WARM_UP)
    assert_same(state(one), state(two))


def test_half_precision_casts_its_weights_anew_at_each_replay() -> None:
    data = batches(7, "sabour2017")
    recorder = Recorder()
    one, two = (step_of(network_of("sabour2017"), "bf16-mixed", recorder=each) for each in (None, recorder))
    run(one, data)
    run(two, data)
    casts = [call for call in recorder.calls if "_to_copy" in str(call[0])]
    assert any(call[0] and call[3].dtype == torch.bfloat16 for call in casts)
    assert_same(state(one), state(two))


def test_dropout_is_a_function_of_the_step() -> None:
    data = batches(1, "baseline-cnn") * 7
    drawn: list[Tensor] = []
    network = network_of("baseline-cnn")
    assert isinstance(network.dropout, nn.Dropout)
    assert network.dropout.p > 0
    recorder = Recorder()
    step = step_of(network, recorder=recorder)
    for n, batch in enumerate(data):
        step(batch, n, 0.0)  # the weights stay, so that only dropout makes a difference
        drawn.append(torch.tensor(step.tally.read().last_loss))
    assert recorder.replays == 4
    assert len({float(loss) for loss in drawn}) == 7
    again = step_of(network_of("baseline-cnn"))
    for n in (5, 2):
        again(data[0], n, 0.0)
        assert again.tally.read().last_loss == drawn[n]


def test_a_smaller_batch_is_trained_on_as_it_is() -> None:
    whole, rest = batches(9, "sabour2017"), batches(1, "sabour2017", size=2)
    data = [*rest, *whole[:5], *rest, *whole[5:]]
    recorder = Recorder()
    one, two = (step_of(network_of("sabour2017"), recorder=each) for each in (None, recorder))
    run(one, data)
    run(two, data)
    assert (recorder.runs, recorder.replays) == (WARM_UP + 2, 9 - WARM_UP)
    assert_same(state(one), state(two))


def test_captured_steps_go_on_from_plain_ones() -> None:
    data = batches(10, "sabour2017")
    whole, first, second = (step_of(network_of("sabour2017"), recorder=each) for each in (None, Recorder(), Recorder()))
    run(whole, data)
    run(first, data[:5])
    second.restore(first.network.state_dict(), copy.deepcopy(first.optimizer.state_dict()))
    run(second, data[5:], start=5)
    assert_same(state(whole)[:-1], state(second)[:-1])


def test_a_checkpoint_of_another_device_brings_only_moments() -> None:
    data = batches(3, "sabour2017")
    one, two = step_of(network_of("sabour2017")), step_of(network_of("sabour2017"))
    run(one, data)
    saved = copy.deepcopy(one.optimizer.state_dict())
    group = {**saved["param_groups"][0], "lr": 0.5, "fused": False, "capturable": True}
    two.restore(one.network.state_dict(), {"state": saved["state"], "param_groups": [group]})
    assert (two.optimizer.param_groups[0]["fused"], two.optimizer.param_groups[0]["capturable"]) == (True, False)
    for step in (one, two):
        run(step, batches(2, "sabour2017"), start=3)
    assert_same(state(one)[:-1], state(two)[:-1])


def test_a_loss_that_is_lost_is_counted_where_it_was() -> None:
    data = batches(8, "sabour2017")
    step = step_of(network_of("sabour2017"), recorder=Recorder())
    run(step, data[:5])
    assert step.tally.read().first_bad == float("inf")
    step.tally.clear()
    data[6].images.fill_(float("nan"))
    run(step, data[5:], start=5)
    counted = step.tally.read()
    assert (counted.first_bad, counted.steps) == (1, 3)


# ---- whole runs


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """Runs are captured, each by one of these."""
    made: list[Recorder] = []

    def choose(*_: object) -> Recorder:
        made.append(Recorder())
        return made[-1]

    monkeypatch.setattr(step_module, "choose_capture", choose)
    return made


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("sabour2017", {"schedule": "one-cycle", "precision": "bf16"}),
        ("baseline-cnn", {"channels": (4, 4), "hidden": (8,)}),  # dropout
    ],
)
def test_a_captured_run_is_the_plain_one_wherever_it_is_broken(
    bars: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recorders: list[Recorder],
    preset: str,
    overrides: dict[str, object],
) -> None:
    config = tiny_config(bars, preset, **overrides)
    summaries = {"captured": train(config, tmp_path / "captured", progress=Silence(), figures=False)}
    with pytest.raises(Interrupted):
        train(config, tmp_path / "broken", progress=StopAt(8), figures=False)
    resume(tmp_path / "broken", progress=Silence(), figures=False)
    monkeypatch.undo()
    summaries["plain"] = train(config, tmp_path / "plain", progress=Silence(), figures=False)
    assert [(each.runs, each.replays) for each in recorders] == [(3, 15), (3, 5), (3, 7)]
    assert [summaries[name]["captured"] for name in ("captured", "plain")] == [True, False]
    weights = {
        name: read_checkpoint(tmp_path / name / "last.ckpt")["model"] for name in ("plain", "captured", "broken")
    }
    for name in ("captured", "broken"):
        assert_same(list(weights[name].values()), list(weights["plain"].values()))
        columns = zip(*(metrics(tmp_path / which) for which in (name, "plain")), strict=True)
        assert all(ours == theirs for ours, theirs in columns)


def test_a_captured_run_that_diverges_says_at_which_step(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorders: list[Recorder]
) -> None:
    own = loop.training_loader

    def ruined(*arguments: Any) -> BatchLoader:
        loader = own(*arguments)
        given = loader.batches

        def batches(epoch: int, start: int = 0) -> Iterator[Batch]:
            for n, batch in enumerate(given(epoch, start), start):
                yield batch._replace(images=batch.images * float("nan")) if (epoch, n) == (1, 2) else batch

        loader.batches = batches  # type: ignore[method-assign]
        return loader

    monkeypatch.setattr(loop, "training_loader", ruined)
    with pytest.raises(Diverged, match=r"at step 9 \(epoch 2, batch 3 of 6\)"):
        train(tiny_config(bars), tmp_path / "run", progress=Silence(), figures=False)
    assert recorders[0].replays > 0
    assert read_checkpoint(tmp_path / "run" / "last.ckpt")["progress"]["epoch"] == 1


def metrics(out: Path) -> list[dict[str, str]]:
    """The rows of a run without its times."""
    rows = list(csv.DictReader((out / "metrics.csv").open()))
    return [{name: value for name, value in row.items() if "second" not in name} for row in rows]


# ---- the recorder itself: it must see what would go wrong on a GPU


def test_a_number_of_pythons_is_frozen() -> None:
    place, factor = torch.zeros(()), [1.0]
    replay = Recorder().record(lambda: place.add_(factor[0]))  # type: ignore[arg-type,return-value]
    factor[0] = 5.0
    assert place == 0, "recording does nothing"
    replay()
    replay()
    assert place == 2


def test_memory_is_read_where_it_was() -> None:
    values, total = torch.ones(3), torch.zeros(())

    def work() -> None:
        total.copy_((values.view(3, 1) * 2).sum())

    replay = Recorder().record(work)
    values = torch.full((3,), 7.0)
    replay()
    assert total == 6, "another tensor is not the one that was recorded"


@pytest.mark.parametrize(
    "look", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x + torch.tensor(2.0), lambda x: x.nonzero()]
)
def test_nobody_looks_at_values_meanwhile(look: object) -> None:
    with pytest.raises(RuntimeError, match="not permitted"):
        Recorder().record(lambda: look(torch.ones(2)))  # type: ignore[operator,no-any-return]


def test_a_cast_from_before_is_seen() -> None:
    weight, total = torch.ones(2, requires_grad=True), torch.zeros(2)
    step_by_step = []
    for capture_cast in (True, False):
        early = weight.detach().bfloat16()

        def work(early: Tensor = early, inside: bool = capture_cast) -> None:
            total.copy_(weight.detach().bfloat16() if inside else early)

        replay = Recorder().record(work)
        with torch.no_grad():
            weight.add_(1)
        replay()
        step_by_step.append(torch.equal(total, weight.detach()))
    assert step_by_step == [True, False]


def test_who_is_captured() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert choose_capture("auto", cpu, 1) is None
    assert choose_capture("auto", cuda, 2) is None
    assert choose_capture("off", cuda, 1) is None
    for device, processes in ((cpu, 1), (cuda, 2)):
        with pytest.raises(InputError, match="only a single process on a CUDA GPU can be captured"):
            choose_capture("on", device, processes)
