"""The campaign before a release: every part at a tiny scale, and the judge, which sees each kind of fault."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import click
import numpy as np
import pytest
import torch
from PIL import Image

from torchcaps.errors import InputError

ROOT = Path(__file__).parents[2]
CAMPAIGN = [sys.executable, str(ROOT / "benchmarks" / "campaign.py"), "--jobs", "1", "--timeout", "60"]
PARTS = ("mutations", "commands", "calls", "requests", "kills")

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="a campaign needs Linux")


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Its modules by name."""
    import importlib

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return lambda name: importlib.import_module(f"hostile.{name}")


def campaign(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*CAMPAIGN, *arguments], capture_output=True, text=True, check=False, env=environment)


# ---- all of it


def test_every_part_runs(tmp_path: Path) -> None:
    pytest.importorskip("gradio", reason="the extra torchcaps[explore] is not installed")
    pytest.importorskip("onnxruntime", reason="the extra torchcaps[export] is not installed")
    out = tmp_path / "campaign.json"
    done = campaign("--seed", "5", "--scale", "0.002", "--out", str(out))
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert list(tmp_path.iterdir()) == [out]
    assert found["seed"] == 5
    assert {name: part["cases"] for name, part in found["parts"].items()} == dict(
        zip(PARTS, (4, 1, 6, 1, 1), strict=True)
    )
    for name, part in found["parts"].items():
        assert part["tried"] == part["cases"] == sum(part["outcomes"].values())
        assert part["failed"] == sum(failure["part"] == name for failure in found["failures"])
    assert (done.returncode == 1) == bool(found["failures"])
    # the explorer has answered its page's own question, and ended without leaving anything
    assert [failure["what"] for failure in found["failures"] if failure["case"] == "requests:end"] == []
    for failure in found["failures"]:  # what the release would have to mend
        assert failure["faults"]
        assert f"{failure['case']}  " in done.stdout


def test_one_case_is_tried_again_and_shown() -> None:
    done = campaign("--seed", "5", "--case", "calls:3")
    assert done.returncode in (0, 1), done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("calls:3: ")
    assert lines[-1].startswith("--- in ")
    kept = Path(lines[-1].removeprefix("--- in "))
    assert (kept / "run" / "config.json").exists()
    shutil.rmtree(kept.parent)


def test_a_case_is_the_same_for_the_same_seed(hostile: Callable[[str], ModuleType]) -> None:
    commands, requests, kills = hostile("commands"), hostile("requests"), hostile("kills")
    draws: list[Callable[[Random], object]] = [
        commands._draw,
        kills._settings,
        lambda random: requests._draw(random, 7860),
    ]
    for draw in draws:
        drawn = [draw(Random(seed)) for seed in range(30)]
        assert drawn == [draw(Random(seed)) for seed in range(30)]
        assert len({repr(each) for each in drawn}) > 20


@pytest.mark.parametrize(
    ("arguments", "say"),
    [
        (["--parts", "calls,cals"], "there is no part cals; parts are mutations, commands, calls, requests, kills"),
        (["--case", "calls"], "a case is a part and a number such as mutations:12, got calls"),
    ],
)
def test_bad_arguments(arguments: list[str], say: str) -> None:
    done = campaign(*arguments)
    assert done.returncode == 2
    assert say in done.stderr


# ---- the judge


def fail_with_a_traceback() -> int:
    return {}["no such key"]


def print_and_return(text: str, code: int = 0, *, err: str = "") -> Callable[[], int]:
    def work() -> int:
        sys.stdout.write(text)
        sys.stderr.write(err)
        return code

    return work


def sleep() -> int:
    time.sleep(60)
    return 0


def write(*names: str, code: int = 0) -> Callable[[], int]:
    def work() -> int:
        for name in names:
            Path(name).write_text("new")
        return code

    return work


def take_memory() -> int:
    return 0 * len(bytearray(b"x") * (200 * 2**20))


def die() -> int:
    os.kill(os.getpid(), 9)
    return 0


def start_processes() -> int:
    return sum(subprocess.Popen(["sleep", "60"]).returncode or 0 for _ in range((os.cpu_count() or 1) + 8)) or sleep()


BUG = "Error: KeyError: 'x'\nThis is a bug in torchcaps"
REFUSED: dict[str, Any] = {"writes": ("out.png",)}
# what is done, the rules, and the faults that are seen
JUDGED: dict[str, tuple[Callable[[], int], dict[str, Any], list[str]]] = {
    "done": (print_and_return("well\n"), {}, []),
    "refused": (print_and_return("", 2, err="Error: no\n"), {}, []),
    "a traceback": (fail_with_a_traceback, {}, ["traceback KeyError"]),
    "a bug": (print_and_return("", 70, err=BUG), {}, ["exit 70 KeyError"]),
    "another code": (print_and_return("", 3), {}, ["exit 3"]),
    "diverged": (print_and_return("", 1, err="the loss became NaN or infinite"), {}, []),
    "a failure that is none": (print_and_return("", 1), {}, ["exit 1"]),
    "killed": (die, {}, ["killed by signal 9"]),
    "a hang": (sleep, {"timeout": 0.3}, ["hang"]),
    "interrupted": (sleep, {"interrupt": 0.3}, []),
    "interrupted, without a word": (sleep, {"interrupt": 0.3, "speaks": True}, ["silent"]),
    "processes": (start_processes, {}, ["too many processes"]),
    "a warning": (print_and_return("", err="x.py:1: UserWarning: odd\n"), {}, ["leaked UserWarning"]),
    "our own warning": (print_and_return("Warning: a small batch\n"), {}, []),
    "an escape sequence": (print_and_return("\x1b[31mred\n"), {}, ["control characters"]),
    "one on stderr": (print_and_return("", err="\x9b31m"), {}, ["control characters"]),
    "one that was typed": (print_and_return("", err="\x1b[31m"), {"terminal": False}, []),
    "a file": (write("out.png"), REFUSED, []),
    "a file though refused": (write("out.png", code=2), REFUSED, ["files touched: 'out.png'"]),
    "another file": (write("other.png"), REFUSED, ["files touched: 'other.png'"]),
    "a changed file": (write("there"), REFUSED, ["files touched: 'there'"]),
    "a temporary file": (write("tmp/x"), REFUSED, ["left in the temporary folder: 'tmp/x'"]),
    "half a file": (write("out.png", ".out.png.a1_bcdef.png"), REFUSED, ["left half-written: '.out.png.a1_bcdef.png'"]),
    "memory": (take_memory, {}, ["memory"]),
    "memory of what may": (take_memory, {"bounded": False}, []),
    "another output": (print_and_return("98 %"), {"same_output": "99 %"}, ["damage unnoticed"]),
    "nan": (print_and_return("Loss  nan"), {"no_nan": True}, ["NaN printed"]),
    "its own fault": (print_and_return("fault: it differs\n", 70), {"says_faults": True}, ["it differs"]),
}


@pytest.mark.parametrize("case", JUDGED)
def test_the_judge(
    hostile: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    forks, trials = hostile("forks"), hostile("trials")
    monkeypatch.setattr(trials, "MOST_MEMORY", 100)
    work, rules, faults = JUDGED[case]
    folder = tmp_path / "case"
    folder.mkdir()
    (folder / "there").write_text("old")
    trial = trials.Trial(0, case, work, folder, trials.Rules(**rules))
    begin = time.monotonic()
    ((_, ended, before),) = forks.run(iter([trial]), 1)
    _, found = trials.judge(trial, ended, before)
    assert found == faults, (ended.out, ended.err)
    assert time.monotonic() - begin < 30  # what sleeps for longer was killed


@pytest.mark.parametrize(
    ("prints", "faults"), [(False, []), (True, ["control characters"])], ids=["in an error's message", "printed"]
)
def test_a_message_of_a_call_may_quote_what_was_given(
    hostile: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prints: bool,
    faults: list[str],
) -> None:
    """The campaign itself printed the message: nothing of the library's had gone to a terminal."""
    calls, forks, trials = hostile("calls"), hostile("forks"), hostile("trials")

    def function(path: str) -> None:
        if prints:
            print(path)
        raise ValueError(f"no file {path}")

    monkeypatch.setattr(calls, "_draw", lambda name, seed: (function, {"path": "\x1b[31m\x9b2J"}, []))
    fixtures, folder = tmp_path / "fixtures", tmp_path / "case"
    fixtures.mkdir()
    folder.mkdir()
    trial = calls.Calls(fixtures, 60.0).trial(0, Random(0), folder)
    ((_, ended, before),) = forks.run(iter([trial]), 1)
    assert trials.judge(trial, ended, before) == ("refused", faults)
    assert r"ValueError: no file \x1b[31m\x9b2J" in ended.out


def test_a_function_that_stands_for_a_command_prints_as_one(
    hostile: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str) -> None:
        raise InputError(f"no file {name}")

    assert hostile("mutations").as_command(refuse, "\x1b[31m") == 2
    assert capsys.readouterr().out == "no file \\x1b[31m\n"


OUTSIDE = ("/", "/dev/null", "~", "~nobody/x", "..", "../x", "a/../../x", "/root/../etc/x")


def test_nothing_is_written_outside(hostile: Callable[[str], ModuleType]) -> None:
    """A case once drew a figure beside a device: whoever runs a campaign may have the right to."""
    program = hostile("program")
    for path in OUTSIDE:
        for line in (["--out", path], [f"--figure={path}"], [path, "--out"], ["--out", "x", f"npz:{path}"]):
            kept = program.keep_inside(["curves", *line])
            assert len(kept) == 1 + len(line)
            assert not any(path == word or word.endswith((f"={path}", f":{path}")) for word in kept)
    assert program.keep_inside(["predict", "/dev/null"]) == ["predict", "/dev/null"]  # which is only read
    assert program.keep_inside(["curves", "run", "--out", "a/b..c/x.png"]) == ["curves", "run", "--out", "a/b..c/x.png"]


READ = {"--resume", "--config", "--image", "--other-seed", "--init-from"}
"""Options that take a path and write nothing there."""


def test_every_option_that_writes_is_known(hostile: Callable[[str], ModuleType]) -> None:
    from torchcaps.cli.app import app

    paths = {
        name
        for command in app.commands.values()
        for option in command.params
        if isinstance(option, click.Option) and isinstance(option.type, click.Path)
        for name in option.opts
    }
    assert paths - READ == set(hostile("program").WRITERS)


# ---- requests


def test_the_page_answers_its_own_question_and_nothing_is_elsewhere(hostile: Callable[[str], ModuleType]) -> None:
    """Were the question not the page's, all of them would be refused, and a campaign would find nothing."""
    pytest.importorskip("gradio", reason="the extra torchcaps[explore] is not installed")
    from explorer_support import served, small_network
    from torchcaps.explorer import Explorer

    requests, side = hostile("requests"), hostile("fixtures").SIDE
    with served(Explorer(small_network(in_shape=(1, side, side)))) as address:
        port = int(address.rpartition(":")[2].strip("/"))

        def ask(method: str, path: str) -> tuple[int, bytes]:
            question = requests._own_question()
            status, _, answer = requests._exchange(port, method, path, requests._own_headers(port, question), question)
            return status, answer

        status, answer = ask("POST", requests.OWN)
        assert status == 200, answer
        assert len(json.loads(answer)["scores"]) == 4
        for method, paths in requests.SERVED.items():
            assert {path: ask(method, path)[0] for path in paths} == dict.fromkeys(paths, 200)
            others = set(requests.PATHS) - set(paths)
            assert {path: ask(method, path)[0] for path in others} == dict.fromkeys(others, 404)


OWN_PAGE = {"Host": "127.0.0.1:7860", "Origin": "http://127.0.0.1:7860"}
OTHER_PAGE = OWN_PAGE | {"Origin": "http://evil.example"}
# a request, how it is answered, and the fault that is seen
ANSWERED: dict[str, tuple[str, str, dict[str, str], tuple[int, dict[str, str], bytes], str | None]] = {
    "the page": ("GET", "/", OWN_PAGE, (200, {}, b"<html>"), None),
    "a question": ("POST", "/ask/pick", OWN_PAGE, (200, {}, b"{}"), None),
    "a refusal": ("POST", "/ask/pick", OTHER_PAGE, (403, {}, b""), None),
    "nothing there": ("GET", "/config", OWN_PAGE, (404, {}, b""), None),
    "something there": ("GET", "/config", OWN_PAGE, (200, {}, b"{}"), "status 200 where nothing of the page is"),
    "something half there": ("POST", "/ask/pic", OWN_PAGE, (405, {}, b""), "status 405 where nothing of the page is"),
    "another method": ("PUT", "/ask/pick", OWN_PAGE, (200, {}, b""), "status 200 where nothing of the page is"),
    "another page": ("POST", "/ask/pick", OTHER_PAGE, (200, {}, b"{}"), "a foreign page is answered: "),
    "another page may read": (
        *("GET", "/", OTHER_PAGE),
        (403, {"access-control-allow-origin": "*"}, b""),
        "a foreign page may read: *",
    ),
    "another host": ("GET", "/", OWN_PAGE | {"Host": "evil.example"}, (200, {}, b""), "another host is answered: "),
    "an error": ("POST", "/ask/pick", OWN_PAGE, (500, {}, b"oh"), "status 500: b'oh'"),
    "a secret": ("GET", "/", OWN_PAGE, (200, {}, b"root:x:0:0"), "a secret: b'root:x:0'"),
}


@pytest.mark.parametrize("case", ANSWERED)
def test_the_judge_of_requests(
    hostile: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    case: str,
) -> None:
    requests = hostile("requests")
    method, path, headers, answer, fault = ANSWERED[case]
    monkeypatch.setattr(requests, "_exchange", lambda *_: answer)
    log = tmp_path / "log"
    log.touch()
    code = requests._ask(7860, method, path, headers, b"", tmp_path, log)
    said = [line.removeprefix("fault: ") for line in capsys.readouterr().out.splitlines() if line.startswith("fault: ")]
    assert (code == 70) == (fault is not None)
    assert len(said) == (fault is not None)
    assert all(line.startswith(str(fault)) for line in said)


# ---- the edits


def make_file(kind: str, path: Path) -> Path:
    """A small file of a kind."""
    match kind:
        case "JSON":
            path.write_text(json.dumps({"a": 1, "b": {"c": [1, 2], "d": "text"}, "e": None}))
        case "CSV":
            path.write_text("epoch,loss\n1,0.5\n2,0.25\n")
        case "NPZ":
            np.savez(path.with_suffix(".npz"), x=np.zeros((9, 4, 4), np.uint8), y=np.arange(9) % 3)
            path.with_suffix(".npz").rename(path)
        case "IMAGES":
            Image.fromarray(np.zeros((18, 18), np.uint8)).save(path, "PNG")
        case "CHECKPOINT":
            torch.save({"model": {"w": torch.ones(3)}, "progress": {"epoch": 1}}, path)
        case "IDX":
            import gzip

            path.write_bytes(gzip.compress(b"\0\0\x08\x01\0\0\0\x04abcd" * 100, mtime=0))
        case "WEIGHTS":
            from safetensors.torch import save_file

            save_file({"w": torch.ones(3, 2), "v": torch.zeros(4)}, path)
        case "BYTES":
            path.write_bytes(bytes(range(256)))
    return path


@pytest.mark.parametrize("kind", ["JSON", "CSV", "NPZ", "IMAGES", "CHECKPOINT", "IDX", "WEIGHTS", "BYTES"])
def test_edits_change_a_file_and_are_the_same_again(
    hostile: Callable[[str], ModuleType], tmp_path: Path, kind: str
) -> None:
    edits, trials = hostile("edits"), hostile("trials")
    changed = 0
    for seed in range(40):
        results = []
        for turn in range(2):
            folder = tmp_path / f"{seed}-{turn}"
            folder.mkdir()
            file = make_file(kind, folder / "file")
            before, random = trials.snapshot(folder), Random(seed)
            edit = random.choice(getattr(edits, kind))
            said = edit(file, random)
            after = trials.snapshot(folder)
            assert before.keys() >= after.keys(), f"{said}: more than the file was written"
            results.append((said, after if kind not in ("NPZ", "CHECKPOINT") else None))  # zip archives hold the time
            changed += before != after
        assert results[0] == results[1]
    assert changed > 60


def test_a_bomb_is_small(hostile: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edits = hostile("edits")
    monkeypatch.setattr(edits, "BOMB", 2**26)
    monkeypatch.setattr(edits, "BLOCK", 2**22)
    file = make_file("NPZ", tmp_path / "x.npz")
    edits.bomb_npz(file, Random(0))
    with zipfile.ZipFile(file) as archive:
        assert archive.getinfo("x.npy").file_size >= 2**26
    assert file.stat().st_size < 2**20
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    edits.bomb_png(tmp_path / "x.png", Random(1))
    with Image.open(tmp_path / "x.png") as image:
        assert image.size[0] * image.size[1] > 64e6
    assert (tmp_path / "x.png").stat().st_size < 2**20


# ---- runs beside each other


def test_one_bit_that_differs_is_seen(hostile: Callable[[str], ModuleType]) -> None:
    kills = hostile("kills")
    first = {"model": {"w": torch.tensor([1.0, -0.0])}, "rows": [{"loss": 0.5, "seconds": 1.0}], "empty": None}
    second = {"model": {"w": torch.tensor([1.0, -0.0])}, "rows": [{"loss": 0.5, "seconds": 2.0}], "empty": None}
    assert kills._unequal(first, second, kills.TIMES) == []
    assert kills._unequal(first, second, ()) == [".rows[0].seconds"]
    second["model"]["w"][1] = 0.0
    assert kills._unequal(first, second, kills.TIMES) == [".model.w"]
    del second["empty"]
    second["rows"][0]["loss"] = 0.50000001
    assert sorted(kills._unequal(first, second, kills.TIMES)) == [".empty", ".model.w", ".rows[0].loss"]
