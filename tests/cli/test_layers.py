"""``torchcaps routing --layer`` on a network of two capsule layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from own_parts import two_layers
from torchcaps.models import create_model

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of a layer on a map and one of the classes, as save_pretrained writes it."""
    folder = tmp_path_factory.mktemp("layers") / "deep"
    fields = {"conv_channels": 4, "primary_types": 2, "decoder_hidden": (6,)}
    create_model("sabour2017", layers=two_layers(), **fields).save_pretrained(folder)
    return folder


def test_any_layer_is_followed(cli: Cli, deep_folder: Path) -> None:
    options = ("--data", "digits", "--count", "3")
    result = cli("routing", deep_folder, *options, "--layer", "1", "--input-capsule", "8", "--figure", "first.png")
    assert (result.code, result.err) == (0, "")
    assert {path.name for path in Path().iterdir()} == {"first.png", "first-statistics.png"}
    assert "longest type" in result.out
    assert "Input capsule 8: type 0, row 1, column 2" in result.out
    assert "type 2" in result.out
    inner = json.loads(cli("routing", deep_folder, *options, "--layer", "1", "--json", "--figure", "a.png").out)
    last = json.loads(cli("routing", deep_folder, *options, "--json", "--figure", "b.png").out)
    assert (inner["layer"], inner["class_names"]) == (1, ["type 0", "type 1", "type 2"])
    assert (inner["grid"], len(inner["input_capsules"]), inner["in_space"]) == ([2, 6, 6], 72, True)
    assert (last["layer"], len(last["class_names"])) == (2, 10)
    assert (last["grid"], len(last["input_capsules"])) == ([3, 4, 4], 48)


def test_a_layer_that_is_not_there_is_one_sentence(cli: Cli, deep_folder: Path) -> None:
    result = cli("routing", deep_folder, "--data", "digits", "--layer", "3")
    assert result.code == 2
    assert "layer must be from 1 to 2, as the network has so many capsule layers, got 3" in result.err
    assert result.err.count("\n") == 1
