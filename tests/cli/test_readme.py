"""What the README and the documentation tell their readers to type is what the command line takes."""

import itertools
import re
import shlex
from pathlib import Path

import click
import pytest

from support import registered_for_now
from torchcaps.cli.app import COMMANDS, app
from torchcaps.cli.train import build_config, run_options
from torchcaps.datasets import find_dataset
from torchcaps.models import get_preset

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: What pages write where any value may stand, and one that may. Paths, such as RUN, are taken as they are.
PLACEHOLDERS = {"PRESET": "sabour2017", "DATA": "digits", "TABLE": "mnist", "B": "64", "N": "1"}


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


def check(call: str) -> None:
    """Parse a call of the command line as far as it goes without running it.

    Raises:
        InputError: An unknown command, preset, data set, table, or field of the preset.
        click.UsageError: An unknown option, or a value that it does not take.
    """
    context = click.Context(app, info_name="torchcaps")
    name, command, arguments = app.resolve_command(context, shlex.split(call))
    parsed = command.make_context(name, arguments, parent=context)
    values = parsed.params
    if name == "train":
        given = click.core.ParameterSource.COMMANDLINE
        names = {option.name for options in run_options().values() for option in options}
        overrides = {n: value for n, value in values.items() if n in names and parsed.get_parameter_source(n) is given}
        find_dataset(build_config(values["preset"], None, overrides).data)
    elif name == "presets" and values["preset"] is not None:
        get_preset(values["preset"])
    elif data := values.get("data"):
        find_dataset(data)


def test_every_call_on_a_page_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where the plugins lie that pages name
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for call in calls_in(text):
            with registered_for_now():
                check(call)
        python = commands_in("\n".join([*bash_blocks(text), *re.findall(r"`(python [^`\n]+)`", text)]))
        for program, *words in python:
            assert program != "python" or words[0].startswith("-") or (ROOT / words[0]).is_file(), words


def test_the_page_of_commands_shows_every_one_and_the_readme_is_short() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert {call.split()[0] for call in calls_in(page)} == set(COMMANDS)
    assert len(README.split()) <= 480
    assert calls_in(README)


def test_the_two_commands_of_the_readme_are_whole_and_none_of_their_lines_hides_a_step() -> None:
    """Each is one shell command, which a reader sees at the width of a page on GitHub."""
    install, contribute = bash_blocks(README)
    programs = [[words[0] for words in commands_in(block)] for block in (install, contribute)]
    assert programs == [["python3", "pip", "torchcaps"], ["python3", "pip", "ruff", "ruff", "mypy", "pytest"]]
    for block in (install, contribute):
        lines = block.splitlines()
        assert len(lines) == 4
        assert all(line.endswith(" \\") for line in lines[:-1])
        assert max(map(len, lines)) <= 100
