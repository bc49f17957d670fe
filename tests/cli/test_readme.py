"""What the README tells its readers to type is what the command line takes, and what every commit is checked with."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from torchcaps.cli.app import app
from torchcaps.cli.fields import given_fields
from torchcaps.cli.train import OPTIONS, build_config
from torchcaps.errors import InputError
from torchcaps.models import get_preset

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CI = ROOT / ".ci" / "run"
CHECKERS = ("ruff", "mypy", "pytest")


def commands_in(script: str) -> list[list[str]]:
    """The words of each command of a shell script, the program without its folder."""
    found = []
    for line in script.splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            program, *arguments = words[:end]
            found.append([program.rpartition("/")[2], *arguments])
            words = words[end + 1 :]
    return found


def bash_blocks(text: str) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def calls_in(text: str) -> list[str]:
    """What stands after ``torchcaps`` in the bash blocks and between backticks."""
    inline = re.findall(r"(?<!`)`(torchcaps [^`\n]+)`", text)
    commands = commands_in("\n".join([*bash_blocks(text), *inline]))
    return [shlex.join(arguments) for program, *arguments in commands if program == "torchcaps"]


def check(call: str) -> None:
    """Parse a call of the command line as far as it goes without running it.

    Raises:
        InputError: An unknown command, preset, data set, or field of the preset.
        click.UsageError: An unknown option, or a value that it does not take.
    """
    from torchcaps.datasets import list_datasets
    from torchcaps.datasets.registry import look_up

    assert list_datasets()  # reading the list registers them
    context = click.Context(app, info_name="torchcaps")
    name, command, arguments = app.resolve_command(context, shlex.split(call))
    assert command is not None
    parsed = command.make_context(name, arguments, parent=context)
    values = parsed.params
    if name in ("train", "memory"):
        fields = {option.name: values[option.name] for option in OPTIONS if option.name is not None}
        config = build_config(values["preset"], None, given_fields(parsed, fields))
        look_up(config.data)
    elif name == "presets" and values["name"] not in (None, "NAME"):
        get_preset(values["name"])
    elif name == "datasets" and values["name"] not in (None, "NAME"):
        look_up(values["name"])
    elif values.get("data"):
        look_up(values["data"])


@pytest.mark.parametrize("call", calls_in(README))
def test_every_call_in_the_readme_parses(call: str) -> None:
    check(call)


def test_the_readme_shows_every_command() -> None:
    assert {call.split()[0] for call in calls_in(README)} == set(app.commands)


@pytest.mark.parametrize(
    "call",
    [
        "trian",
        "train --epoch 3",
        "train sabour2071",
        "train --data mnits",
        "train baseline-cnn --num-iterations 3",
        "train --precision 16",
        "memory sabour2017 --batch-size many",
        "evaluate",
        "evaluate run --data mnits",
        "curves run --out x.bmp",
        "presets sabour",
        "datasets mnits",
    ],
)
def test_the_check_can_fail(call: str) -> None:
    with pytest.raises((InputError, click.UsageError)):
        check(call)


def test_calls_are_found_wherever_they_stand() -> None:
    text = "`torchcaps presets`\n```bash\na && .venv/bin/torchcaps train x  # y\n```\n```\ntorchcaps no\n```\n"
    assert calls_in(text) == ["train x", "presets"]


def checks_in(script: str) -> set[str]:
    """The checks that a script runs, without options that only change what is reported."""
    return {
        " ".join(word for word in command if not word.startswith("--durations"))
        for command in commands_in(script)
        if command[0] in CHECKERS
    }


def test_the_readme_checks_what_every_commit_passes() -> None:
    if not CI.exists():
        pytest.skip("no .ci/run here: a source distribution does not hold it")
    _, second, *_ = bash_blocks(README)
    checks = {"ruff check .", "ruff format --check .", "mypy", "pytest --cov"}
    assert checks_in(second) == checks
    assert checks_in(CI.read_text(encoding="utf-8")) == checks
