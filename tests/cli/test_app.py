"""The way in: help, speed, exit codes, and what is said when something goes wrong inside."""

from __future__ import annotations

import errno
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchcaps import __version__
from torchcaps.cli.app import app

COMMANDS = [
    "train",
    "evaluate",
    "predict",
    "reconstruct",
    "perturb",
    "routing",
    "curves",
    "presets",
    "datasets",
    "export",
    "share",
    "explore",
    "robustness",
    "probe",
    "detect",
]
HEAVY = (
    "torch",
    "matplotlib",
    "lightning_fabric",
    "sklearn",
    "torchmetrics",
    "numpy",
    "PIL",
    "huggingface_hub",
    "pooch",
)

Cli = Callable[..., Any]


def test_all_commands_are_listed(cli: Cli) -> None:
    assert list(app.later) == COMMANDS
    listed = cli("--help").out.partition("Commands:")[2].split("\n")
    assert [line.split()[0] for line in listed if line] == COMMANDS
    assert not [line for line in listed if line.endswith("...")], "a short help is cut"


def test_without_arguments_there_is_help(cli: Cli) -> None:
    assert cli() == cli("--help")
    assert cli().code == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(cli: Cli, command: str) -> None:
    result = cli(command, "--help")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"Usage: torchcaps {command}")
    assert f"torchcaps {command}" in result.out.partition("Examples:")[2]
    assert "--debug" in result.out
    assert result == cli(command, "-h")
    assert max(map(len, result.out.splitlines())) <= 100


def test_version(cli: Cli) -> None:
    assert cli("--version").out == f"torchcaps, version {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["evaluate", "--help"], ["predict", "--nonsense"]])
def test_help_is_quick_and_loads_nothing_heavy(arguments: list[str], environment: dict[str, str]) -> None:
    program = (
        "import sys, time\n"
        "from torchcaps.cli import main\n"
        f"main({arguments!r})\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "print('\\nloaded', loaded, 'seconds', time.process_time())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    loaded, _, seconds = done.stdout.splitlines()[-1].partition(" seconds ")
    assert loaded == "loaded []"
    assert float(seconds) < 1.0


def test_as_a_module(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "torchcaps"]
    assert subprocess.run([*command, "--version"], capture_output=True, env=environment).returncode == 0
    wrong = subprocess.run([*command, "trian"], capture_output=True, text=True, env=environment)
    assert (wrong.returncode, wrong.stderr) == (2, 'Error: there is no command "trian"; did you mean "train"?\n')


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not say that a reader has gone away")
@pytest.mark.parametrize("arguments", [["--json"], []], ids=["json", "table"])
def test_a_reader_that_goes_away(environment: dict[str, str], arguments: list[str]) -> None:
    command = [sys.executable, "-m", "torchcaps", "datasets", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1
    process.stderr.close()


@pytest.mark.skipif(sys.platform == "win32", reason="the shell is POSIX's")
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_run_without_any_output_is_whole(environment: dict[str, str], tmp_path: Path, closed: str) -> None:
    options = "--data digits --limit-train 64 --limit-test 20 --validation-size 20 --epochs 1 --batch-size 32 "
    options += "--conv-channels 8 --primary-types 2 --no-decoder --no-figures --accelerator cpu"
    command = f"{shlex.quote(sys.executable)} -m torchcaps train {options} --out {shlex.quote(str(tmp_path / 'run'))}"
    assert subprocess.run(f"{command} {closed}", shell=True, env=environment, cwd=tmp_path).returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["epochs"] == 1


def raising(error: BaseException) -> Callable[..., None]:
    def raise_it(*_: Any, **__: Any) -> None:
        raise error

    return raise_it


def interrupted() -> BaseException:
    from torchcaps.training import Interrupted

    return Interrupted(Path("runs/a b"), 7, 130)


def diverged() -> BaseException:
    from torchcaps.training import Diverged

    return Diverged("the loss became nan at step 3")


ENDS: list[tuple[Callable[[], BaseException], int, str]] = [
    (interrupted, 130, f"stopped after step 7; go on with: torchcaps train --resume '{Path('runs/a b')}'\n"),
    (diverged, 1, "Error: the loss became nan at step 3\n"),
    (KeyboardInterrupt, 130, "\nInterrupted.\n"),
    (
        lambda: OSError(errno.ENOSPC, "No space left on device", "run/last.ckpt"),
        2,
        "Error: run/last.ckpt: no space left on the device; make room, or choose another place\n",
    ),
    (lambda: PermissionError(errno.EACCES, "Permission denied", "run"), 2, "Error: run: Permission denied\n"),
    (
        lambda: OSError("the checkpoint x could not be written: y"),
        2,
        "Error: the checkpoint x could not be written: y\n",
    ),
    (
        MemoryError,
        2,
        "Error: there is not enough memory; take a smaller --batch-size, smaller images or a smaller network\n",
    ),
]


@pytest.mark.parametrize(("error", "code", "message"), ENDS)
def test_how_training_may_end(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: Callable[[], BaseException], code: int, message: str
) -> None:
    monkeypatch.setattr("torchcaps.training.train", raising(error()))
    result = cli("train")
    assert (result.code, result.out, result.err) == (code, "", message)


def too_much(*_: Any, **__: Any) -> None:
    import torch

    torch.empty(2**58, dtype=torch.uint8)  # more than an address can name: refused by any machine


def device_is_full(*_: Any, **__: Any) -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


@pytest.mark.parametrize(
    "fail",
    [
        too_much,
        device_is_full,
        raising(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes.")),
        raising(RuntimeError("[enforce fail at x] DefaultCPUAllocator: can't allocate memory: you tried\nto allocate")),
        raising(RuntimeError("MPS backend out of memory (MPS allocated: 18.00 GB)")),
    ],
)
def test_not_enough_memory(cli: Cli, monkeypatch: pytest.MonkeyPatch, fail: Callable[..., None]) -> None:
    monkeypatch.setattr("torchcaps.training.train", fail)
    result = cli("train")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert result.err.startswith("Error: there is not enough memory; take a smaller --batch-size")


def test_other_runtime_errors_are_no_lack_of_memory(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchcaps.training.train", raising(RuntimeError("shared memory is inconsistent")))
    assert cli("train").code == 70


def test_a_bug_is_called_one(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchcaps.training.train", raising(KeyError("oops")))
    result = cli("train")
    assert result.code == 70
    assert result.err.startswith("Error: KeyError: 'oops'\nThis is a bug in torchcaps")
    assert "Traceback" not in result.err


@pytest.mark.parametrize("arguments", [["--debug", "train"], ["train", "--debug"]])
def test_debug_shows_the_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr("torchcaps.training.train", raising(KeyError("oops")))
    result = cli(*arguments)
    assert result.code == 70
    assert "Traceback (most recent call last)" in result.err
    assert "KeyError: 'oops'" in result.err


def test_debug_shows_the_traceback_of_wrong_input(cli: Cli) -> None:
    result = cli("presets", "sabour", "--debug")
    assert (result.code, "Traceback" in result.err) == (2, True)
    said = (
        'Error: there is no preset "sabour"; did you mean "sabour2017"? One of your own is loaded by --plugin FILE.\n'
    )
    assert result.err.endswith(said)


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK", "NODE_RANK"])
def test_only_the_first_process_speaks(cli: Cli, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    spoken = cli("presets", "nonsense")
    monkeypatch.setenv(variable, "0")
    assert cli("presets", "nonsense") == spoken
    monkeypatch.setenv(variable, "1")
    silent = cli("presets", "nonsense")
    assert (silent.code, silent.err) == (spoken.code, "")


def test_the_environment_of_processes_does_not_leak_into_bugs(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only one process met must not vanish: --debug speaks in each."""
    monkeypatch.setenv("RANK", "3")
    assert "Traceback" in cli("presets", "nonsense", "--debug").err
