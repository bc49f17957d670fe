"""The way in: what all commands share, speed, exit codes, and what is said when something goes wrong inside."""

import errno
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.shell_completion import ShellComplete

from cli_support import Cli
from torchcaps import __version__
from torchcaps.cli.app import COMMANDS, app
from torchcaps.cli.options import PLUGIN
from torchcaps.cli.show import Table, print_table
from torchcaps.datasets import list_datasets
from torchcaps.files import write_json
from torchcaps.models import list_presets
from torchcaps.training import Diverged, Interrupted

HEAVY = ("torch", "matplotlib", "lightning_fabric", "sklearn", "numpy", "PIL", "huggingface_hub", "pooch")
NEEDS: dict[str, str] = {
    "evaluate": "RUN",
    "predict": "RUN DIGIT",
    "reconstruct": "RUN --count 2",
    "perturb": "RUN",
    "routing": "RUN --count 2",
    "curves": "RUN",
    "presets": "compact",
    "datasets": "digits --sample 5",
    "robustness": "RUN --limit 5 --kind rotation",
    "probe": "RUN --limit 200",
    "detect": "RUN --limit 5 --steps 1",
}
"""Commands and what they need, of those that print JSON and those that draw."""


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_contract_of_each_command(cli: Cli, run_folder: Path, digit_file: Path, command: str) -> None:
    """Help; an option that is none, with the nearest one; JSON; a figure, beside the table and beside the JSON."""
    out = cli.out(command, "--help")
    assert out.startswith(f"Usage: torchcaps {command}")
    assert f"torchcaps {command}" in out.partition("Examples:")[2]
    assert max(map(len, out.splitlines())) <= 100
    lines = cli.out(command, "-h").splitlines()
    assert max(map(len, lines)) <= 100
    options, examples = "\n".join(lines).partition("\nExamples:")[::2]
    assert 2 < len(re.findall("^  -", options, re.MULTILINE)) <= 10
    assert 1 <= examples.count("  torchcaps ") <= 3
    assert len(lines) <= 28  # a screen, with long help wrapped
    wrong = cli(command, "--debgu")
    assert (wrong.code, wrong.out, wrong.err.count("\n"), "--debug" in wrong.err) == (2, "", 1, True)
    if command not in NEEDS:
        return
    words = [{"RUN": run_folder, "DIGIT": digit_file}.get(word, word) for word in NEEDS[command].split()]
    figure = [] if command == "detect" else ["--figure", "new/x.png"]
    told, json_told = cli(command, *words, *figure), cli(command, *words, "--json", *figure)
    assert told.code == json_told.code == 0, told.err + json_told.err
    assert json.loads(json_told.out)
    if figure:
        assert "wrote new/x.png\n" in told.out
        assert "wrote new/x-2.png\n" in json_told.err, "it writes over no figure"
        assert Path("new/x.png").stat().st_size > 1000


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_wrapped_and_never_cut(cli: Cli, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    options = cli.out(command, "--help").partition("Examples:")[0]
    assert " …" not in options
    assert " ".join(PLUGIN.split()) in " ".join(options.split())


def test_names_stay_whole_in_a_narrow_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for command, names in (
        ("presets", list_presets()),
        ("datasets", [each.name for each in list_datasets() if not each.takes_path]),
    ):
        lines = cli(command).out.splitlines()
        assert max(map(len, lines[3:])) <= 60
        assert set(names) <= {line.split(" ")[0] for line in lines}


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_numbers_and_names_stay_whole(columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A number that continues in the next line is read as another one."""
    rows = [("smallnorb-elevation-familiar", "73,257", "1×128×128", "0.25 % (smallnorb)"), ("told in a line",), ()]
    table = Table(rows, ("data set", "train", "shape", "error\nmeasured"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        print_table(table)
    printed = capsys.readouterr().out
    assert {word for row in rows for cell in row for word in cell.split()} <= set(
        printed.replace(",\n", "\n").replace(", ", " ").split()
    )
    assert max(map(len, printed.splitlines())) <= columns


def test_all_commands_are_listed(cli: Cli) -> None:
    listed = cli("--help").out.partition("Commands:")[2].split("\n")
    assert [line.split()[0] for line in listed if line] == list(COMMANDS)
    assert not [line for line in listed if line.endswith("...")], "a short help is cut"
    assert cli() == cli("--help")
    assert cli("--version").out == f"torchcaps, version {__version__}\n"


def test_names_are_completed() -> None:
    shell = ShellComplete(app, {}, "torchcaps", "_TORCHCAPS_COMPLETE")
    for name in ("first-digits-1", "first-digits-2"):
        write_json(Path("runs", name, "config.json"), {})
    Path("runs/nothing").mkdir()
    for line, words in (
        ("ev", ["evaluate"]),
        ("train torch-", ["torch-notebook", "torch-tutorial"]),
        ("presets torch-", ["torch-notebook", "torch-tutorial"]),
        ("train --data smallnorb-a", ["smallnorb-azimuth", "smallnorb-azimuth-familiar"]),
        ("datasets dig", ["digits"]),
        ("evaluate runs/f", ["runs/f", "runs/first-digits-1", "runs/first-digits-2"]),
        ("evaluate --split t", ["test", "train"]),
    ):
        *before, last = line.split()
        assert [each.value for each in shell.get_completions(before, last)] == words


def test_help_loads_nothing_heavy(environment: dict[str, str]) -> None:
    calls = [["--help"], ["evaluate", "--help"], ["predict", "--nonsense"]]
    program = f"import sys\nfrom torchcaps.cli import main\nfor words in {calls}: main(words)\n"
    program += f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not say that a reader has gone away")
@pytest.mark.parametrize(
    ("variables", "turns"), [({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "passive"}, "None")]
)
def test_threads_do_not_wait_long_for_each_other(variables: dict[str, str], turns: str) -> None:
    """The variable is set before torch is loaded, unless the user has set how threads wait."""
    code = "import os, sys; from torchcaps.cli import main; main(['--version'])\n"
    code += "print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")} | variables
    run = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == f"{turns} False"


def test_a_reader_that_goes_away(environment: dict[str, str]) -> None:
    command, pipe = [sys.executable, "-m", "torchcaps", "datasets", "--json"], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the shell is POSIX's")
def test_a_run_without_any_output_is_whole(environment: dict[str, str], tmp_path: Path, tiny: tuple[str, ...]) -> None:
    command = shlex.join([sys.executable, "-m", "torchcaps", "train", *tiny, "--out", "run"])
    assert subprocess.run(f"{command} <&- >&- 2>&-", shell=True, env=environment, cwd=tmp_path).returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["epochs"] == 1


NO_MEMORY = "Error: there is not enough memory; use a smaller --batch-size"
STOPPED = f"stopped after step 7; resume with: torchcaps train --resume '{Path('runs/a b')}'"
ENDS: list[tuple[BaseException, int, str]] = [
    (KeyboardInterrupt(), 130, "\nInterrupted."),
    (OSError(errno.ENOSPC, "No space", "run/last.ckpt"), 2, "Error: run/last.ckpt: no space left on the device; free"),
    (PermissionError(errno.EACCES, "Permission denied", "run"), 2, "Error: run: Permission denied"),
    (OSError("x could not be written: y"), 2, "Error: x could not be written: y"),
    (MemoryError(), 2, NO_MEMORY),
    (RuntimeError("[x] DefaultCPUAllocator: can't allocate memory: you\ntried"), 2, NO_MEMORY),
    (RuntimeError("MPS backend out of memory (MPS allocated: 18.00 GB)"), 2, NO_MEMORY),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), 2, NO_MEMORY),
    (RuntimeError("shared memory is odd"), 70, "Error: RuntimeError: shared memory is odd\nThis is a bug in torchcaps"),
    (Interrupted(Path("runs/a b"), 7, 130), 130, STOPPED),
    (Diverged("the loss became nan at step 3"), 1, "Error: the loss became nan at step 3"),
]


def test_how_a_command_may_end(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, code, message in ENDS:

        def end(*_: Any, error: BaseException = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr("torchcaps.training.train", end)
        result = cli("train")
        assert (result.code, result.out) == (code, "")
        assert result.err.startswith(message)
        assert result.err.count("\n") == 1 + message.count("\n")
        for arguments in (["--debug", "train"], ["train", "--debug"]):
            assert "Traceback (most recent call last)" in cli(*arguments).err


def test_only_the_first_process_speaks(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchcaps.training.train", lambda *_, **__: {})
    spoken = cli("presets", "nonsense")
    for variable in ("RANK", "LOCAL_RANK", "NODE_RANK"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "0")
            assert cli("presets", "nonsense") == spoken
            patch.setenv(variable, "1")
            silent = cli("presets", "nonsense")
            assert (silent.code, silent.err) == (spoken.code, "")
            assert cli("train").out == ""
            # what only one process met must not vanish: --debug speaks in each
            assert "Traceback" in cli("presets", "nonsense", "--debug").err
