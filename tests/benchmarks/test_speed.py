"""The benchmarks, run tiny from the first line to the last: their numbers mean nothing, everything else is real."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
RATIOS = ROOT / "experiments" / "results" / "speed.jsonl"


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import speed

    return speed


def call_here(module: str, function: str, *given: Any) -> Any:
    """Stand in for ``measuring.isolated``, in this process."""
    return getattr(sys.modules[module], function)(*given)


@pytest.mark.slow
def test_every_section_checks_times_and_writes(
    speed: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import contenders
    import measuring
    import mixtures
    import routings
    import steps

    for section in (mixtures, routings, steps):
        monkeypatch.setattr(section, "isolated", call_here)
        monkeypatch.setattr(section, "peak_mib", lambda make, calls: (make()(), 1.0)[1])
    assert (
        measuring.isolated("steps", "step_peak", "torchcaps", 2, contenders.QUICK.network) > 0
    )  # in a process of its own
    threads, out = str(torch.get_num_threads()), tmp_path / "speed.jsonl"
    assert speed.main(["--quick", "--threads", threads, "--out", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    measured = {line["ratio"] for line in lines}
    kept = {json.loads(line)["ratio"] for line in RATIOS.read_text(encoding="utf-8").splitlines()}
    larger = {f"{preset}, step: torchcaps (compiled) ÷ torchcaps" for preset in speed.Sizes().compiled_presets}
    larger |= {each for each in kept if each.endswith("forward + backward: compiled ÷ torchcaps")}  # mixtures
    emulated = "step, full: torchcaps (bf16) ÷ torchcaps (float32)"  # not measured where bfloat16 is emulated
    assert kept - measured <= {emulated, *larger}
    assert all(line["value"] > 0 and line["torch"] == torch.__version__ and line["quick"] for line in lines)
    capsys.readouterr()
    assert speed.main(["--table", str(out)]) == 0
    shown = [each for each in measured if not each.endswith("÷ uniform coupling")]
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(shown) < 2 + len(measured)


def test_the_page_has_the_ratios_of_the_file(speed: ModuleType) -> None:
    assert speed.table(RATIOS) in (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")


def test_all_ratios_of_the_table_have_the_others_on_top(speed: ModuleType) -> None:
    pairs = [line.split(" | ")[0] for line in speed.table(RATIOS).splitlines()[2:]]
    assert not [pair for pair in pairs if pair.rpartition(": ")[2].startswith(("torchcaps ÷", "chosen"))]
    recorded = {"value": 0.25, "low": 0.2, "high": 0.5}
    assert speed._label("step, peak memory: torchcaps ÷ naive") == ("step, peak memory: naive ÷ torchcaps", True)
    assert speed._cell(recorded, True) == "4 (2 to 5)"
    assert speed._label("MNIST's layer, EM ÷ uniform coupling") == ("MNIST's layer, EM ÷ uniform coupling", False)


@pytest.mark.parametrize("section", ["routing", "convolution", "step"])
def test_wrong_results_stop_it(
    speed: ModuleType, section: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import contenders
    import convolutions
    import routings

    exact, convolve = routings.ROUTINGS["torchcaps"], convolutions.convolve
    monkeypatch.setitem(routings.ROUTINGS, "torchcaps", lambda *given: 1.001 * exact(*given))
    monkeypatch.setattr(convolutions, "convolve", lambda *given, **more: 1.001 * convolve(*given, **more))
    monkeypatch.setattr(contenders.NaiveCapsNet, "capsules", lambda self, images: torch.rand(len(images), 10, 16))
    assert speed.main(["--quick", section]) == 1
    told = capsys.readouterr()
    assert "wrong results" in told.err
    assert "÷" not in told.out


def test_an_unknown_section_is_refused(speed: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        speed.main(["rooting"])
    sections = "convolution, choice, step, compile, routing, mixtures, slots, costs, export"
    assert f"sections are {sections}" in capsys.readouterr().err


def test_a_ratio_is_the_median_of_the_rounds_ratios(speed: ModuleType) -> None:
    from measuring import ratio

    assert ratio([2.0, 30.0, 4.0], [1.0, 10.0, 1.0]) == (3.0, 2.5, 3.5)
    assert ratio([2.0], [1.0]) == (2.0, 2.0, 2.0)


@pytest.mark.slow
def test_a_dry_run_of_the_gpus_benchmark(
    speed: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is compiled here: the section "compile" of speed.py compiles the same networks, in the test above."""
    import gpu

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)
    assert gpu.main(["--dry-run", "--out", str(tmp_path / "gpu.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    found = {(line["what"], line.get("contender")) for line in lines}
    for precision in ("fp32", "bf16"):
        assert {(f"training step, {precision}", name) for name in ("torchcaps", "compiled", "naive")} <= found
    assert ("routing, forward + backward, full", "naive") in found
    assert lines[-1]["what"] == "epoch of 66 images, bf16, compiled"
    assert all(line.get("milliseconds", line.get("seconds")) > 0 and line["gpu"] == "none: a dry run" for line in lines)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_the_gpus_table_is_that_of_its_records(speed: ModuleType) -> None:
    import gpu

    lines = [json.loads(line) for line in RATIOS.with_name("gpu.jsonl").read_text(encoding="utf-8").splitlines()]
    assert gpu.table(lines) in (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_large_images_are_a_table(
    speed: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import large_images

    monkeypatch.setattr(large_images, "isolated", call_here)
    assert large_images.main(["--quick"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[3:]]
    assert [row[0].removeprefix("| ") for row in rows] == [*large_images.HEADS, *large_images.PRESETS]
    assert all(float(row[3].removesuffix(" |")) > 0 for row in rows)


def test_large_maps_are_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import measuring
    import pixels

    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(measuring, "CLOCK", measuring.CLOCK)
    monkeypatch.setattr(pixels, "isolated", call_here)
    monkeypatch.setattr(pixels, "peak_mib", lambda make, calls: (make()(), 1.0)[1])
    assert pixels.main(["--quick", "--rounds", "2", *pixels.LAYERS]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[3:]]
    assert [row[0].removeprefix("| ") for row in rows] == [name for name in pixels.LAYERS for _ in pixels.MODES]
    assert all(row[2] == "1, 1, 1.00" for row in rows)
