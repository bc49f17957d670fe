"""Options that would do nothing are refused, and errors call options by the names that users type."""

import shutil
from pathlib import Path

import click
import pytest

from cli_support import Cli
from torchcaps.cli.app import COMMANDS, app
from torchcaps.models.files import SHIPPED
from torchcaps.training.rates import UNUSED_SETTINGS

#: A value of each option that is not a number.
VALUES = {"schedule": "constant", "select": "loss", "logger": "tensorboard"}
#: What a command needs besides a network.
WORDS = {"predict": ["digit.png"], "share": ["--repo", "someone/network"]}


def options_of(command: str) -> dict[str, click.Option]:
    context = click.Context(app)
    found = app.get_command(context, command)
    assert found is not None
    params = found.get_params(click.Context(found))
    return {each.name or "": each for each in params if isinstance(each, click.Option)}


@pytest.mark.parametrize("name", ["out", "figures", *UNUSED_SETTINGS])
def test_the_test_of_learning_rates_refuses_unused_options(name: str, cli: Cli) -> None:
    option = options_of("train")[name]
    typed = option.secondary_opts[0] if name == "figures" else option.opts[0]
    words = [typed] if option.is_flag else [typed, VALUES.get(name, "1")]
    result = cli("train", "first", "--find-learning-rate", *words)
    assert (result.code, f"{typed} is not used by --find-learning-rate" in result.err) == (2, True), result.err


def test_the_test_of_learning_rates_starts_with_the_named_weights(cli: Cli) -> None:
    result = cli("train", "first", "--find-learning-rate", "--init-from", "nowhere")
    assert (result.code, "there is no run folder nowhere" in result.err) == (2, True), result.err


@pytest.mark.parametrize("words", [("--port", "8000"), ("--no-browser",)])
def test_a_saved_page_is_not_served(words: tuple[str, ...], cli: Cli) -> None:
    result = cli("explore", "--save", "site", *words)
    assert (result.code, f"{words[0]} is for a served page" in result.err) == (2, True), result.err


@pytest.mark.parametrize("command", [name for name in COMMANDS if "which" in options_of(name)])
def test_a_saved_network_has_no_last_checkpoint(command: str, cli: Cli, digit_file: Path) -> None:
    shutil.copy(digit_file, "digit.png")
    result = cli(command, SHIPPED["compact"], *WORDS.get(command, []), "--which", "last")
    assert (result.code, "omit --which last" in result.err) == (2, True), result.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--range", "1,2,3"), "--range must have 2 entries"),
        (("--range", "-1"), "--range must be above 0"),
        (("--component", "99"), "--component must be 0 to 15, got 99"),
        (("--steps", "1"), "--steps must be 2 to 500, got 1"),
    ],
)
def test_errors_name_the_option_and_not_the_argument(words: tuple[str, ...], said: str, cli: Cli) -> None:
    result = cli("perturb", *words)
    assert (result.code, said in result.err) == (2, True), result.err
