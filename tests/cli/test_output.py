"""What is in names never reaches the terminal as anything but text."""

from __future__ import annotations

import ast
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torchcaps.cli
from support import holds
from torchcaps.analysis.results import Styled, Table
from torchcaps.cli.show import print_json, print_table, say
from torchcaps.errors import InputError, visible

Cli = Callable[..., Any]

HOSTILE = "a\x1b[31m\x1b]0;title\x07b\rc\nd\x7f\x9b2J\u202e\u2028\ud800[red]"
SHOWN = r"a\x1b[31m\x1b]0;title\x07b\rc\nd\x7f\x9b2J\u202e\u2028\ud800[red]"
NAMES = [HOSTILE, "\x1b[8m", "[bold]two[/bold]", "[/red]", "drei", "$\\foo$ 四", "\x9d5;x", "6\t", "7\n7", "[link=x]8"]


def assert_plain(text: str) -> None:
    """Nothing in it that a terminal obeys, but line breaks."""
    assert not [character for character in text if character != "\n" and not character.isprintable()], ascii(text)


def test_control_characters_are_shown() -> None:
    assert visible(HOSTILE) == visible(SHOWN) == SHOWN
    assert visible("“Größe” 四 [red] é \N{ZERO WIDTH JOINER}") == "“Größe” 四 [red] é \N{ZERO WIDTH JOINER}"


def test_whatever_is_printed_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(Table([(HOSTILE, Styled("[/red]", "bold")), ()], (HOSTILE, "[red]"), HOSTILE, note=[HOSTILE]))
    print_table(Table([("name", HOSTILE)]))
    say(HOSTILE, "[red]")
    printed = capsys.readouterr().out
    assert_plain(printed)
    for word in (SHOWN, "[red]", "[/red]"):
        assert word in printed
    value = {HOSTILE: [1, 2], "list": NAMES}
    print_json(value)
    printed = capsys.readouterr().out
    assert_plain(printed)
    assert json.loads(printed) == value


def test_a_title_of_several_lines_has_them() -> None:
    from torchcaps.analysis.figures import new_figure

    assert new_figure(3, 2, "one\ntwo\x1b").get_suptitle() == "one\ntwo\\x1b"


def test_commands_print_through_one_door() -> None:
    """No command calls click.echo or print by itself."""
    folder = Path(torchcaps.cli.__file__).parent
    for file in folder.glob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Call)]
        names = [getattr(call, "attr", getattr(call, "id", "")) for call in calls]
        echoes = [name for name in names if name in ("echo", "secho", "print_exception", "print")]
        assert len(echoes) <= {"show.py": 7, "app.py": 1, "__init__.py": 1}.get(file.name, 0), file


@pytest.fixture
def hostile_run(run_folder: Path, tmp_path: Path) -> Path:
    """A run whose classes have names that a terminal would obey."""
    folder = shutil.copytree(run_folder, tmp_path / "run\x1b[31m [red]")
    (folder / "best" / "classes.json").write_text(json.dumps({"class_names": NAMES}))
    return folder


@pytest.mark.parametrize(
    ("command", "shows"),
    [
        (["predict", "RUN", "IMAGE"], SHOWN),
        (["evaluate", "RUN", "--figure", "x.svg"], r"\x1b"),
        (["perturb", "RUN", "--capsule", HOSTILE, "--figure", "x.png"], SHOWN),
        (["perturb", "RUN", "--capsule", "x\x1b[31m"], r"x\x1b[31m"),
        (["evaluate", "RUN", "--data", "\x1b[31m"], r"\x1b[31m"),
        (["evaluate", "\x1b[31mgone"], r"\x1b[31mgone"),
        (["evaluate", "\x1b[31mgone", "--debug"], "Traceback"),
        (["\x1b[31m"], r"\x1b[31m"),
        (["reconstruct", "RUN", "--figure", "x.svg"], "wrote"),
        (["routing", "RUN", "--figure", "x.png"], "wrote"),
        (["curves", "RUN", "--figure", "x.svg"], "wrote"),
    ],
)
def test_no_command_sends_them(cli: Cli, hostile_run: Path, digit_file: Path, command: list[str], shows: str) -> None:
    places = {"RUN": hostile_run, "IMAGE": digit_file}
    result = cli(*(places.get(word, word) for word in command))
    assert result.code in (0, 2), result.err
    assert_plain(result.out + result.err)
    assert shows in result.out + result.err


def test_json_has_the_names_as_they_are(cli: Cli, hostile_run: Path, digit_file: Path) -> None:
    result = cli("predict", hostile_run, digit_file, "--json")
    assert_plain(result.out)
    (found,) = json.loads(result.out)
    assert list(found["lengths"]) == NAMES


def test_a_warning_is_a_plain_line(
    cli: Cli, run_folder: Path, digit_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn(*_: object, **__: object) -> None:
        warnings.warn(f"Glyph {HOSTILE} is missing", UserWarning, stacklevel=2)
        raise InputError("it ends here")

    monkeypatch.setattr("torchcaps.cli.look.open_classifier", warn)
    result = cli("predict", run_folder, digit_file)
    assert result.err == f"Warning: Glyph {SHOWN} is missing\nError: it ends here\n"


def test_the_assertion_can_fail() -> None:
    assert holds(assert_plain, "a\nb")
    assert not any(holds(assert_plain, text) for text in ("\x1b[31m", "\r", "\x9b", "\u202e", "\ud800"))
