"""What the README and the documentation tell their readers to type is what the command line takes.

And what the README checks is what every commit is checked with.
"""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import click
import pytest

from support import registered_for_now
from torchcaps.cli.app import app
from torchcaps.cli.fields import given_fields
from torchcaps.cli.train import build_config, run_options
from torchcaps.errors import InputError
from torchcaps.models import get_preset

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *ROOT.glob("results/README.md"), *sorted((ROOT / "docs").rglob("*.md"))]
CI = ROOT / ".ci" / "run"
CHECKERS = ("ruff", "mypy", "pytest")
#: What pages write where any value may stand, and one that may. Paths, such as RUN, are taken as they are.
PLACEHOLDERS = {"PRESET": "sabour2017", "NAME": "digits", "TABLE": "mnist", "B": "64", "N": "1"}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def commands_in(script: str) -> list[list[str]]:
    """The words of each command of a shell script, the program without its folder."""
    found = []
    for line in script.replace("\\\n", " ").splitlines():
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
    """What stands after ``torchcaps`` or ``-m torchcaps`` in the bash blocks and between backticks, each once."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    inline = [" ".join(call.split()) for call in re.findall(r"`(torchcaps\s[^-`][^`]*)`", outside)]
    calls = []
    for program, *arguments in commands_in("\n".join([*bash_blocks(text), *inline])):
        if program != "torchcaps":
            if ("-m", "torchcaps") not in itertools.pairwise(arguments):
                continue  # not ours
            arguments = arguments[arguments.index("torchcaps") + 1 :]
        calls.append(shlex.join(PLACEHOLDERS.get(word, word) for word in arguments))
    return list(dict.fromkeys(calls))


def scripts_in(text: str) -> list[str]:
    """The files that the bash blocks and the words between backticks give to ``python``."""
    commands = commands_in("\n".join([*bash_blocks(text), *re.findall(r"`(python [^`\n]+)`", text)]))
    return [
        arguments[0] for program, *arguments in commands if program == "python" and not arguments[0].startswith("-")
    ]


def check(call: str) -> None:
    """Parse a call of the command line as far as it goes without running it.

    Raises:
        InputError: An unknown command, preset, data set, table, or field of the preset.
        click.UsageError: An unknown option, or a value that it does not take.
    """
    from torchcaps.datasets import find_dataset

    context = click.Context(app, info_name="torchcaps")
    name, command, arguments = app.resolve_command(context, shlex.split(call))
    assert command is not None
    parsed = command.make_context(name, arguments, parent=context)
    values = parsed.params
    if name == "train":
        fields = {option.name: values[option.name] for option in run_options() if option.name is not None}
        config = build_config(values["preset"], None, given_fields(parsed, fields))
        find_dataset(config.data)
    elif name == "presets" and values["name"] is not None:
        get_preset(values["name"])
    elif name == "datasets" and values["name"] is not None:
        find_dataset(values["name"])
    elif values.get("data"):
        find_dataset(values["data"])


CALLS = {name_of(page): calls_in(page.read_text(encoding="utf-8")) for page in PAGES}


@pytest.mark.parametrize("page", [page for page, calls in CALLS.items() if calls])
def test_every_call_on_a_page_parses(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where the plugins lie that pages name
    for call in CALLS[page]:
        with registered_for_now():
            try:
                check(call)
            except (InputError, click.UsageError) as error:
                pytest.fail(f"torchcaps {call}: {error}")


def test_pages_of_the_documentation_have_calls() -> None:
    assert CALLS["README.md"]
    assert CALLS["docs/index.md"]
    assert "train sabour2017 --data mnist --batch-size 2048 --out /shared/run" in CALLS["docs/scaling.md"]


def test_scripts_on_pages_are_there() -> None:
    scripts = [script for page in PAGES for script in scripts_in(page.read_text(encoding="utf-8"))]
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


def test_the_page_of_commands_shows_every_one() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert {call.split()[0] for call in calls_in(page)} == set(app.later)


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 450


@pytest.mark.parametrize(
    "call",
    [
        "trian",
        "train --epoch 3",
        "train sabour2071",
        "train --data mnits",
        "train baseline-cnn --num-iterations 3",
        "train --precision 16",
        "train sabour2017 --batch-size many",
        "curves",
        "evaluate run --data mnits",
        "curves run --figure x.bmp",
        "presets sabour",
        "datasets mnits",
    ],
)
def test_the_check_can_fail(call: str) -> None:
    with pytest.raises((InputError, click.UsageError)):
        check(call)


def test_calls_are_found_wherever_they_stand() -> None:
    text = (
        "`torchcaps presets`\n"
        "```bash\na && .venv/bin/torchcaps train x  # y\ntorchrun -n 2 \\\n    -m torchcaps curves\n```\n"
        "```\ntorchcaps no `torchcaps no`\n```\n`torchcaps train\nPRESET`, `torchcaps --version`, `torchcaps train x`\n"
    )
    assert calls_in(text) == ["train x", "curves", "presets", "train sabour2017"]


def test_scripts_are_found() -> None:
    assert scripts_in("`python a.py --x`\n```bash\npython -m b\npython c.py\n```\n") == ["c.py", "a.py"]


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
    checks = {"ruff check .", "ruff format --check .", "mypy", "pytest --cov -n auto --dist worksteal"}
    assert checks_in(second) == checks
    assert checks_in(CI.read_text(encoding="utf-8")) == checks
