"""What ``torchcaps train`` says of the step, the objects and the crops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torchcaps.cli.train import run_options

Cli = Callable[..., Any]


def test_every_option_stands_once() -> None:
    names = [name for option in run_options() for name in option.opts + option.secondary_opts]
    assert len(names) == len(set(names))
    assert {"--objects", "--crop", "--standardise", "--pool"} <= set(names)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--objects", "2"), "an image of digits holds 1 object, but the network looks for 2; set --objects 1"),
        (("--crop", "40"), "crop is 40 pixels"),
        (("--crop", "12"), "the smallest size that fits is 17×17"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    cli: Cli, tiny: tuple[str, ...], arguments: tuple[str, ...], words: str
) -> None:
    result = cli("train", *tiny, *arguments)
    assert result.code == 2
    assert words in result.err
    assert result.err.count("\n") == 1


def test_crops_are_trained_on(cli: Cli, tiny: tuple[str, ...]) -> None:
    result = cli("train", *tiny, "--crop", "20", "--flip", "--max-rotation", "10", "--out", "run")
    assert result.code == 0, result.err
    assert cli("evaluate", "run").code == 0
