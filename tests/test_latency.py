"""The latency benchmark: differences are seen before anything is timed, and both take turns."""

from __future__ import annotations

import importlib.util
import types
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def latency(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # as when it is run as a script
    spec = importlib.util.spec_from_file_location("latency", BENCHMARKS / "latency.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("by", "wrong"), [(0.0, 0), (5e-5, 0), (2e-3, 1), (np.nan, 1)])
def test_differences_are_seen(latency: types.ModuleType, by: float, wrong: int) -> None:
    contenders = {
        "torch": lambda images: (images, images),
        "onnxruntime": lambda images: (images, images + by),
    }
    lines = latency.check(contenders, np.zeros((3, 1, 2, 2), np.float32))
    assert len(lines) == wrong
    assert all(line.startswith("batch 3: outputs differ by ") for line in lines)


def test_both_are_timed_once_a_round_and_change_places(
    latency: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    clock = iter(range(1000))

    def now() -> float:
        calls.append("clock")
        return float(next(clock))

    monkeypatch.setattr(latency, "time", types.SimpleNamespace(sleep=lambda _: calls.append("pause"), perf_counter=now))
    contenders = {name: lambda images, name=name: calls.append(name) for name in ("a", "b")}
    times = latency.time_in_turns(contenders, np.zeros(1), rounds=3)
    assert times == {"a": [1000.0] * 3, "b": [1000.0] * 3}
    turns = [tuple(calls[n : n + 5]) for n in range(0, len(calls), 5)]
    expected = [("pause", name, "clock", name, "clock") for name in ("b", "a", "a", "b")]
    assert turns[:4] == expected, "neither the pause nor the first run of a turn is timed"
    assert len(turns) == 2 * (3 + latency.WARM_UP)


def test_an_unknown_preset_times_nothing(
    latency: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["latency.py", "--presets", "compcat"])
    assert latency.main() == 1
    assert 'did you mean "compact"?' in capsys.readouterr().err
