"""What is in names never reaches the terminal as anything but text."""

import json
import shutil
import warnings
from pathlib import Path

import pytest

from cli_support import Cli
from support import WRONG_PLURAL
from torchcaps.analysis.results import Styled, Table
from torchcaps.cli.show import print_json, print_table, say
from torchcaps.errors import InputError, visible

HOSTILE = "a\x1b[31m\x1b]0;title\x07b\rc\nd\x7f\x9b2J\u202e\u2028\ud800[red]"
SHOWN = r"a\x1b[31m\x1b]0;title\x07b\rc\nd\x7f\x9b2J\u202e\u2028\ud800[red]"
NAMES = [HOSTILE, "\x1b[8m", "[bold]two[/bold]", "[/red]", "drei", "$\\foo$ 四", "\x9d5;x", "6\t", "7\n7", "[link=x]8"]


def assert_plain(text: str) -> None:
    """Nothing in it that a terminal obeys, but line breaks."""
    assert not [character for character in text if character != "\n" and not character.isprintable()], ascii(text)


def test_whatever_is_printed_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    assert visible(HOSTILE) == visible(SHOWN) == SHOWN
    assert visible("“Größe” 四 [red] é \N{ZERO WIDTH JOINER}") == "“Größe” 四 [red] é \N{ZERO WIDTH JOINER}"
    print_table(Table([(HOSTILE, Styled("[/red]", "bold")), ()], (HOSTILE, "[red]"), HOSTILE, note=[HOSTILE]))
    say(HOSTILE, "[red]")
    printed = capsys.readouterr().out
    assert_plain(printed)
    assert all(word in printed for word in (SHOWN, "[red]", "[/red]"))
    value = {HOSTILE: [1, 2], "list": NAMES}
    print_json(value)
    printed = capsys.readouterr().out
    assert_plain(printed)
    assert json.loads(printed) == value


@pytest.fixture
def hostile_run(run_folder: Path, tmp_path: Path) -> Path:
    """A run whose classes have names that a terminal would obey."""
    folder = shutil.copytree(run_folder, tmp_path / "run\x1b[31m [red]")
    (folder / "best" / "classes.json").write_text(json.dumps({"class_names": NAMES}))
    return folder


def test_no_command_sends_them(cli: Cli, hostile_run: Path, digit_file: Path, tmp_path: Path) -> None:
    drawn = shutil.copytree(hostile_run, tmp_path / "drawn\x1b[31m [red]")  # data sets have names of whole characters
    names = [name.replace("\ud800", "") for name in NAMES]
    (drawn / "best" / "classes.json").write_text(json.dumps({"class_names": names}))
    for words, shows in (
        (["predict", hostile_run, digit_file], SHOWN),
        (["evaluate", drawn, "--by-number", "--figure", "x.svg"], r"\x1b"),
        (["perturb", drawn, "--by-number", "--capsule", names[0], "--figure", "x.png"], SHOWN[:12]),
        (["perturb", hostile_run, "--capsule", "x\x1b[31m"], r"x\x1b[31m"),
        (["evaluate", "\x1b[31mgone"], r"\x1b[31mgone"),
        (["evaluate", "\x1b[31mgone", "--debug"], "Traceback"),
        (["\x1b[31m"], r"\x1b[31m"),
        (["reconstruct", drawn, "--by-number", "--figure", "x.svg"], "wrote"),
        (["routing", drawn, "--by-number", "--figure", "x.png"], "wrote"),
        (["curves", hostile_run, "--figure", "x.svg"], "wrote"),
    ):
        result = cli(*words)
        assert result.code in (0, 2), result.err
        assert_plain(result.out + result.err)
        assert shows in result.out + result.err
    result = cli("predict", hostile_run, digit_file, "--json")
    assert_plain(result.out)
    assert list(json.loads(result.out)[0]["lengths"]) == NAMES


def test_warnings_are_plain_lines(
    cli: Cli, run_folder: Path, digit_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn(*_: object, **__: object) -> None:
        warnings.warn(f"Glyph {HOSTILE} is missing", UserWarning, stacklevel=2)
        raise InputError("it ends here")

    monkeypatch.setattr("torchcaps.cli.predict.open_classifier", warn)
    result = cli("predict", run_folder, digit_file)
    assert result.err == f"Warning: Glyph {SHOWN} is missing\nError: it ends here\n"


@pytest.mark.parametrize(
    "line",
    [
        "predict RUN ONE",
        "predict RUN ONE --out answers.csv",
        "predict RUN ONE --group one",
        "predict RUN ONE --figure p.png",
        "datasets digits --sample 1",
        "reconstruct RUN --count 1",
        "routing RUN",
        "probe RUN",
        "evaluate RUN",
        "presets compact",
    ],
)
def test_one_thing_is_in_the_singular(cli: Cli, run_folder: Path, digit_file: Path, line: str) -> None:
    shutil.copy(digit_file, "one.png")
    result = cli(*line.replace("RUN", str(run_folder)).replace("ONE", "one.png").split())
    assert not WRONG_PLURAL.search(result.out + result.err), result.out + result.err
