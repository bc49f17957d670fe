"""The one command for all ratios of docs/speed.md, run tiny: the numbers mean nothing, everything else is real."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from math import isnan
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support import assert_raises
from torchcaps.ops.memory import get_working_memory, set_working_memory

ROOT = Path(__file__).parents[2]

PAGE = """# Speed
<!-- figures: written by benchmarks/run.py -->
old
<!-- end of figures -->
between
<!-- errors: written by benchmarks/run.py -->
<!-- end of errors -->
<!-- choice: written by benchmarks/run.py -->
<!-- end of choice -->
the end
"""

PARTS = "convolution, choice, training_step, epoch, squash, routing"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import run

    return run


@pytest.fixture
def measuring(run: ModuleType) -> ModuleType:
    import measuring

    return measuring


@pytest.fixture
def speed_page(run: ModuleType) -> ModuleType:
    import speed_page

    return speed_page


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE, encoding="utf-8")
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder of this process's instruction set, which is called avx512 whatever it is."""
    return tmp_path / "out" / "avx512"


@pytest.fixture(autouse=True)
def _instruction_set(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "instruction_set", lambda: "avx512")


@pytest.fixture
def _no_processes(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks, and the large layer's times, are made up; `test_a_process_of_its_own` has a real one."""
    monkeypatch.setattr(run.routing, "isolated", lambda _, name, *size: (8.0, 2.0) if name == "naive" else (1.0, 1.0))
    monkeypatch.setattr(run.training_step, "isolated", lambda _, name, *rest: 4.0 if name.startswith("naive") else 1.0)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table(page: Path, name: str) -> list[list[str]]:
    """The cells of a table of the page, without its header."""
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- {name}: written by benchmarks/run.py -->", f"<!-- end of {name} -->"
    lines = text.partition(begin)[2].partition(end)[0].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")][2:]


def quick(tmp_path: Path, page: Path, *arguments: str) -> list[str]:
    return [*arguments, "--quick", "--out", str(tmp_path / "out"), "--page", str(page)]


@pytest.mark.usefixtures("_no_processes")
def test_one_command_checks_times_and_writes_everything(
    run: ModuleType,
    speed_page: ModuleType,
    page: Path,
    out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run.training_step, "multiplies_bf16", lambda: True)
    assert run.main(quick(tmp_path, page)) == 0

    found = {path.stem: rows(path) for path in out.glob("*.csv")}
    assert found.keys() == {*PARTS.split(", "), "convolution_errors"}
    for row in (row for part in found.values() for row in part):
        assert row["torch"] == torch.__version__
        assert row["threads"] == str(torch.get_num_threads())
        assert row["commit"]
        assert row["options"] == "--quick"
    for row in (row for name, part in found.items() if name != "convolution_errors" for row in part):
        assert float(row["median_ms"] or row["peak_mib"]) > 0
    assert {row["contender"] for row in found["routing"]} == {"torchcaps", "naive", "reference", "own"}
    assert {(row["case"], row["contender"]) for row in found["squash"]} == {
        (case, name) for case in ("forward", "forward + backward") for name in ("as printed", "XifengGuo", "torchcaps")
    }
    assert {(row["what"], row["batch"]) for row in found["training_step"]} == {
        ("step", "2"),
        ("infer", "1"),
        ("infer", "512"),
    }
    assert {row["images"] for row in found["epoch"]} == {"4"}
    errors = {(row["convolution"], row["input"], row["of"]) for row in found["convolution_errors"]}
    assert len(errors) == 3 * (4 + 3)
    assert ("primary", "one-hot", "gradient of features") in errors
    assert ("first", "random", "gradient of features") not in errors  # images need none
    assert {(row["pass"], row["batch"], row["backend"]) for row in found["choice"]} == {
        (what, batch, backend)
        for what in ("forward", "forward + backward")
        for batch in ("1", "2")
        for backend in ("auto", "plain", "columns", "transform")
    }

    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Speed\n<!-- figures: written by benchmarks/run.py -->\n\n| ratio | goal | AVX2 |")
    assert "<!-- end of figures -->\nbetween\n" in text
    assert text.endswith("<!-- end of choice -->\nthe end\n")
    assert "old" not in text
    shown = capsys.readouterr().out
    figures = table(page, "figures")
    assert [line[0] for line in figures] == [row.what for row in speed_page.ROWS]
    assert all(line[0] in shown for line in figures)
    assert all(line[2:5] == ["not measured", "", ""] for line in figures)
    assert all(float(line[5]) > 0 for line in figures)
    assert {line[7] for line in figures if line[1]} <= {"yes", "**no**"}
    assert {line[7] for line in figures if not line[1]} == {""}
    by_name = {line[0]: [line[1], *line[5:]] for line in figures}
    assert by_name["large layer, peak memory: torchcaps ÷ naive"] == ["≤ 0.06", "0.5", "", "**no**"]
    assert by_name["large layer, time: torchcaps ÷ naive"] == ["≤ 0.06", "0.125", "0.125 to 0.125", "**no**"]
    assert by_name["step, peak memory: torchcaps ÷ naive"] == ["≤ 0.33", "0.25", "", "yes"]
    assert "AVX2: not measured.\n" in text
    assert f"torch {torch.__version__}" in text
    assert len(table(page, "errors")) == len(errors)
    assert len(table(page, "choice")) == 2 * 5  # compact has five convolutions


def test_it_says_what_the_cpu_has(
    run: ModuleType, tmp_path: Path, page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "cpu_flags", lambda: ["avx2", "avx512f"])
    monkeypatch.setattr(run, "multiplies_bf16", lambda: False)
    assert run.main(quick(tmp_path, page, "convolution")) == 0
    shown = capsys.readouterr().out
    assert "CPU: avx2 avx512f\n" in shown
    assert "torch computes with: avx512; bfloat16: emulated\n" in shown


@pytest.mark.usefixtures("_no_processes")
def test_emulated_bfloat16_is_left_out(
    run: ModuleType, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.training_step, "multiplies_bf16", lambda: False)
    assert run.main(quick(tmp_path, page, "training_step")) == 0
    (line,) = (line for line in table(page, "figures") if "bf16" in line[0])
    assert line[5:] == ["left out: bfloat16 is emulated here", "", ""]
    assert not any("bf16" in row["contender"] for row in rows(tmp_path / "out" / "avx512" / "training_step.csv"))


@pytest.mark.usefixtures("_no_processes")
def test_a_run_replaces_its_own_part_and_column_and_keeps_the_others(
    run: ModuleType, speed_page: ModuleType, page: Path, out: Path, tmp_path: Path
) -> None:
    other = out.parent / "avx2"
    other.mkdir(parents=True)
    old = {
        "convolution": {
            "facts": {"cpu": "another"},
            "measured": {speed_page.PRIMARY: {"value": 0.125, "low": 0.1, "high": 0.2}},
            "left_out": {},
        }
    }
    (other / "figures.json").write_text(json.dumps(old), encoding="utf-8")
    assert run.main(quick(tmp_path, page, "convolution")) == 0
    first = table(page, "figures")
    assert first[0][1:5] == ["≤ 0.25", "0.125", "0.1 to 0.2", "yes"]
    assert float(first[0][5]) > 0
    assert first[-1][5] == "not measured"
    assert "AVX2: cpu another.\n" in page.read_text(encoding="utf-8")

    assert run.main(quick(tmp_path, page, "routing", "--no-large", "--rounds", "1")) == 0
    second = table(page, "figures")
    assert second[0] == first[0]
    assert second[-1][5] == "left out"
    assert float(second[-3][5]) > 0
    assert json.loads((other / "figures.json").read_text(encoding="utf-8")) == old
    facts = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("AVX-512: ")]
    assert [line.split(")")[0] for line in facts] == ["AVX-512: (convolution", "AVX-512: (routing"]
    assert facts[1].endswith("options --rounds 1 --no-large --quick.")
    assert {path.name for path in out.iterdir()} == {
        "convolution.csv",
        "convolution_errors.csv",
        "routing.csv",
        "figures.json",
    }
    assert {row["I"] for row in rows(out / "routing.csv")} == {"36"}


def test_the_page_is_written_again_without_measuring(
    run: ModuleType, speed_page: ModuleType, page: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "PARTS", {})
    out.mkdir(parents=True)
    found = {"epoch": {"facts": {}, "measured": {speed_page.EPOCH: {"value": 0.5}}, "left_out": {}}}
    (out / "figures.json").write_text(json.dumps(found), encoding="utf-8")
    assert run.main(quick(tmp_path, page, "--rewrite")) == 0
    (line,) = (line for line in table(page, "figures") if line[0] == speed_page.EPOCH)
    assert line[5:] == ["0.5", "", "yes"]


def _half(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *arguments, **options: 0.5 * function(*arguments, **options)


@pytest.mark.parametrize(
    ("part", "broken", "say"),
    [
        ("routing", "torchcaps", "weights' gradient: torchcaps is"),
        ("routing", "naive", "capsules: the contender naive computes something else"),
        ("routing", "own", "capsules: the contender own computes something else"),
        ("convolution", "torchcaps", "primary convolution, one-hot input, gradient of features: torchcaps is"),
        ("choice", "convolve", "compact, primary: transform is"),
        ("training_step", "naive", "gradients are"),
        ("squash", "torchcaps", "squash, torchcaps: outputs differ from the printed formula's"),
        ("squash", "XifengGuo", "squash, XifengGuo: gradients differ from the printed formula's"),
    ],
)
def test_wrong_results_stop_it(
    run: ModuleType,
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    part: str,
    broken: str,
    say: str,
) -> None:
    module: Any = getattr(run, part)
    if part == "choice":
        right = module.convolve

        def convolve(*arguments: Any, backend: str) -> Tensor:
            return right(*arguments, backend=backend) * (0.5 if backend == "transform" else 1)

        monkeypatch.setattr(module, "convolve", convolve)
    elif part == "training_step":
        import naive

        monkeypatch.setattr(naive, "naive_routing", _half(naive.naive_routing))
    else:
        monkeypatch.setitem(module.CONTENDERS, broken, _half(module.CONTENDERS[broken]))
    assert run.main(quick(tmp_path, page)) == 1
    wrong = capsys.readouterr().err
    assert wrong.startswith("wrong results, nothing was timed:\n")
    assert say in wrong
    assert not (tmp_path / "out").exists()
    assert page.read_text(encoding="utf-8") == PAGE


@pytest.mark.parametrize(
    ("arguments", "say"),
    [
        (["routine"], f"there is no part routine; parts are {PARTS}"),
        (["--isa", "sse"], "invalid choice: 'sse'"),
        (["--quick", "--page", "page.md"], "--page is made from what lies in --out"),
        (["--quick", "--rewrite"], "--rewrite needs --page and --out"),
    ],
)
def test_bad_arguments(run: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], say: str) -> None:
    assert_raises(SystemExit, run.main, arguments, say="2")
    assert say in capsys.readouterr().err


def test_a_page_without_a_place_for_a_table_is_refused_before_anything_is_timed(
    run: ModuleType, page: Path, tmp_path: Path
) -> None:
    page.write_text(PAGE.replace("<!-- end of choice -->", ""), encoding="utf-8")
    assert_raises(SystemExit, run.main, quick(tmp_path, page), say="the page has no place for the table")
    assert not (tmp_path / "out").exists()


def test_the_page_in_docs_has_the_ratios_that_were_recorded(speed_page: ModuleType) -> None:
    path = ROOT / "docs" / "speed.md"
    speed_page.check_page(path)
    rows = {line.split(" | ")[0].strip("| "): line for line in path.read_text(encoding="utf-8").splitlines()}
    for line in (ROOT / "experiments/results/speed.jsonl").read_text(encoding="utf-8").splitlines():
        each = json.loads(line)
        assert each["part"] == "latency" or f"| {each['ratio']:.3g} |" in rows[each["what"]], each["what"]


# ---- another instruction set


def test_avx2_is_asked_of_another_process(
    run: ModuleType, measuring: ModuleType, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], dict[str, str]]] = []

    def start(command: list[str], env: dict[str, str], check: bool) -> subprocess.CompletedProcess[bytes]:
        asked.append((command, env))
        return subprocess.CompletedProcess(command, 7)

    for name in measuring.AS_AVX2:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(run.subprocess, "run", start)
    arguments = quick(tmp_path, page, "routing", "--isa", "avx2")
    assert run.main(arguments) == 7
    ((command, env),) = asked
    assert command == [sys.executable, str(ROOT / "benchmarks" / "run.py"), *arguments]
    assert env == os.environ | {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
    assert page.read_text(encoding="utf-8") == PAGE


def test_a_cpu_that_does_not_become_avx2(
    run: ModuleType, measuring: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in measuring.AS_AVX2.items():
        monkeypatch.setenv(name, value)
    assert run.main(["--quick", "--isa", "avx2"]) == 2
    assert "torch computes with avx512 on this CPU all the same" in capsys.readouterr().err


def test_a_process_kept_to_avx2_emulates_bfloat16(measuring: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    for flags, expected in ((["avx2", "avx512f"], False), (["avx2", "avx512_bf16"], True), (["asimd", "bf16"], True)):
        monkeypatch.setattr(measuring, "cpu_flags", lambda flags=flags: flags)
        assert measuring.multiplies_bf16() is expected
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert not measuring.multiplies_bf16()


@pytest.mark.skipif("AVX" not in torch.backends.cpu.get_cpu_capability(), reason="a CPU without AVX2")
def test_avx2_for_real(page: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py")]
    arguments = quick(tmp_path, page, "convolution", "--rounds", "1", "--isa", "avx2")
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch computes with: avx2; bfloat16: emulated" in done.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"avx2"}
    assert {row["computes_with"] for row in rows(tmp_path / "out" / "avx2" / "convolution.csv")} == {"avx2"}
    first = table(page, "figures")[0]
    assert float(first[2]) > 0
    assert first[5] == "not measured"


# ---- the yardsticks


def test_the_yardsticks_hold_plain_convolutions_with_weights_of_their_own(run: ModuleType) -> None:
    for name in ("naive fp32 full", "cnn fp32"):
        module = run.training_step.Contender(name, dict(run.QUICK.network)).module
        convolutions = [each for each in module.modules() if isinstance(each, nn.Conv2d)]
        assert len(convolutions) == 2
        assert all(type(each) is nn.Conv2d for each in convolutions)


class Doubled(nn.Conv2d):
    """A convolution that does something else: a yardstick that took it over would show it."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_a_plain_convolution_is_pytorchs_own_whatever_it_copies(run: ModuleType) -> None:
    import naive

    other = Doubled(3, 4, 5, stride=2)
    features = torch.randn(2, 3, 9, 9)
    plain = naive.plain_convolution(other)
    assert torch.equal(2 * plain(features), other(features))
    with torch.no_grad():
        other.weight.zero_()
    assert plain.weight.abs().sum() > 0


# ---- the choice among ways to convolve


def test_the_worst_choice_is_the_figure(
    run: ModuleType, speed_page: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice, taken = run.choice, {"auto": 4.0, "plain": 2.0, "columns": 100.0, "transform": 5.0}
    monkeypatch.setattr(choice, "timed", lambda work: lambda: taken[work.args[3]])
    part = choice.measure(run.QUICK)
    assert part.figures == {speed_page.CHOICE: 2.0}
    for row in part.records:
        assert (row["rounds"] == 0) == (row["backend"] == "columns")  # over three times slower than the fastest
        assert ("best" in row) == (row["backend"] == "auto")
        assert row.get("best", "plain") == "plain"
        assert row.get("auto_over_best", 2.0) == 2.0


# ---- the statistic


def test_the_forms_of_the_squash_are_those_of_their_sources(run: ModuleType) -> None:
    # ‖(3, 4)‖ = 5: 25/26 · (3, 4)/5; of (0, 0) the printed formulas have no gradient, ours has
    vector = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    for name, function in run.squash.CONTENDERS.items():
        assert torch.allclose(function(vector), torch.tensor([[15 / 26, 20 / 26]], dtype=torch.float64)), name
        zero = torch.zeros(1, 2, requires_grad=True)
        (gradient,) = torch.autograd.grad(function(zero).sum(), zero)
        assert gradient.isfinite().all() == (name != "as printed"), name


def test_contenders_take_turns_and_change_places(measuring: ModuleType) -> None:
    calls: list[str] = []
    found = measuring.in_turns({name: lambda name=name: calls.append(name) or name for name in "abc"}, 2, warm_up=1)
    assert "".join(calls) == "cbaabccba"
    assert found == {"a": ["a", "a"], "b": ["b", "b"], "c": ["c", "c"]}


def test_a_ratio_within_rounds_does_not_see_a_machine_that_slows_down(measuring: ModuleType) -> None:
    speeds = [1, 1, 1, 9, 9, 9, 9]  # of the machine, by round
    under, over = [10.0 * speed for speed in speeds], [12.0 * speed for speed in speeds]
    over[1] = 300.0  # something struck one of the two
    found = measuring.ratio(over, under)
    assert found.value == pytest.approx(1.2)
    assert (found.low, found.high, found.rounds) == (pytest.approx(1.2), pytest.approx(1.2), 7)
    assert found.of_medians == pytest.approx(1.2)
    under[3] = 10.0  # now the median times come from two halves of the machine's day
    assert measuring.ratio(over, under).of_medians == pytest.approx(10.8)
    assert measuring.ratio(over, under).value == pytest.approx(1.2)
    assert measuring.ratio([2.0], [4.0]) == (0.5, 0.5, 0.5, 0.5, 1)


def test_figures_are_held_against_their_goals(speed_page: ModuleType) -> None:
    for value, at_least, reached in ((1.0, True, True), (0.9, True, False), (1.0, False, True), (1.1, False, False)):
        row = speed_page.Row("part", "what", 1.0, at_least)
        assert row.reached(value) == ("yes" if reached else "**no**")
        assert row.bound == ("≥ 1" if at_least else "≤ 1")
    assert speed_page.Row("part", "what").reached(3.0) == ""


def test_a_process_of_its_own(run: ModuleType, measuring: ModuleType) -> None:
    """It computes with the same threads and working memory, and its peak is its own."""
    before = get_working_memory()
    try:
        set_working_memory(0.5)
        elapsed, peak = measuring.isolated(run.routing.probe, "torchcaps", 4, 600, 10, 16, 8)
    finally:
        set_working_memory(before)
    assert elapsed > 0
    assert isnan(peak) if sys.platform == "win32" else 3 < peak < 300  # MiB; weights and their gradient are 5.9
