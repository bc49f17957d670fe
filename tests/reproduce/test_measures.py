"""Where the images of a measure come from; what is measured on them is tested with the analysis and the jobs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchcaps.datasets import load_dataset
from torchcaps.models import create_model
from torchcaps.reproduce import Measure, measures
from torchcaps.training import Run, make_config


@pytest.fixture
def run() -> Run:
    network = create_model("baseline-cnn", channels=(2,), hidden=(4,), dropout=0.0)
    config = make_config("baseline-cnn", data="digits", data_dir="~/of-the-run")
    return Run(Path("run"), network, config, None, tuple("0123456789"))


@pytest.mark.parametrize(("named", "looked_in"), [(None, "of-the-run"), ("~/named", "named")])
def test_affnist_and_its_originals_are_looked_for_in_one_folder(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str | None, looked_in: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    originals = tmp_path / looked_in / "affnist" / "test_batches"
    originals.mkdir(parents=True)
    asked: list[Any] = []

    def load(name: str, *, data_dir: str | None, limit_test: int | None) -> Any:
        asked.append(data_dir)
        return SimpleNamespace(test=load_dataset("digits", limit_test=limit_test).test)

    monkeypatch.setattr(measures, "load_dataset", load)
    found = measures.measure(run, Measure(kind="affnist", images=5), named)
    assert (found["images"], found["source"]) == (5, "original")
    assert [Path(each).name for each in asked] == [looked_in]
    originals.rmdir()
    assert measures.measure(run, Measure(kind="affnist", images=5), named)["source"] == "made"


def test_without_a_configuration_the_usual_places_count(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
    monkeypatch.setattr("pooch.os_cache", lambda project: Path(project))
    test = load_dataset("digits", limit_test=5).test
    monkeypatch.setattr(measures, "load_dataset", lambda *_, data_dir, **__: SimpleNamespace(test=test, at=data_dir))
    bare = dataclasses.replace(run, config=None)
    assert measures.measure(bare, Measure(kind="affnist"))["source"] == "made"


def test_views_from_familiar_sides_are_those_of_the_same_data(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def load(name: str, **_: Any) -> Any:
        asked.append(name)
        return SimpleNamespace(test=load_dataset("digits", limit_test=5).test)

    monkeypatch.setattr(measures, "load_dataset", load)
    assert run.config is not None
    views = dataclasses.replace(run, config=dataclasses.replace(run.config, data="viewpoints-azimuth", data_dir=None))
    found = measures.measure(views, Measure(kind="familiar"))
    assert asked == ["viewpoints-azimuth-familiar"]
    assert found["images"] == 5
    assert found["error"] == pytest.approx(1 - found["accuracy"])


def capsules(routing: str) -> Run:
    network = create_model("sabour2017", conv_channels=4, primary_types=2, decoder=False, routing=routing)
    return Run(Path("run"), network, make_config("sabour2017", data="digits"), None, tuple("0123456789"))


@pytest.mark.parametrize("routing", ["dynamic", "self", "self-attention", "inverted-attention", "em", "vb"])
def test_coupling_is_measured_for_every_routing(routing: str) -> None:
    found = measures.measure(capsules(routing), Measure(kind="coupling", images=6))
    assert found["images"] == 6
    assert 0 <= found["entropy"] <= 1 + 1e-6
    assert found["dead"] in [n / 10 for n in range(11)]


def test_uniform_coupling_has_the_largest_entropy() -> None:
    run = capsules("dynamic")
    run.model.class_capsules.routing.num_iterations = 1
    assert measures.measure(run, Measure(kind="coupling", images=6))["entropy"] == pytest.approx(1)


def test_latency_is_a_median_of_calls_with_one_image(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr("torchcaps.reproduce.measures.time.perf_counter", lambda: next(clock) * 0.004)
    seen: list[int] = []
    run.model.register_forward_pre_hook(lambda _, images: seen.append(len(images[0])))
    bare = dataclasses.replace(run, config=dataclasses.replace(run.config, data_dir=None))
    assert measures.measure(bare, Measure(kind="latency")) == {"milliseconds": pytest.approx(4.0)}
    assert seen == [1] * (10 + measures.CALLS)
