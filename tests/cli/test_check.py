"""``torchcaps check``: capsule code that is named on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]

CODE = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, axis=1, own=True):
        super().__init__()
        self.axis, self.own = axis, own
        self.weight = nn.Parameter(torch.randn(5, 12, 16, 8))

    def forward(self, poses, mask=None):
        votes = torch.einsum("jidk,bik->bjid", self.weight, poses)
        if mask is not None:
            votes = votes * mask[:, None, :, None]
        logits = votes.new_zeros(len(poses), 5, 12)
        for _ in range(3):
            total = (logits.softmax(self.axis).unsqueeze(3) * votes).sum(2)
            squared = total.square().sum(-1, keepdim=True)
            capsules = squared / (1 + squared) * total / (squared + 1e-9).sqrt()
            agreement = torch.einsum("bjid,bjd->bji", votes, capsules)
            logits = logits + (agreement if self.own else agreement.mean(0))
        return capsules

def mixes():
    return Layer(own=False)

def over_inputs():
    return Layer(2)

ready = Layer()
"""
SHAPE = ("--shape", "4,12,8")


@pytest.fixture(autouse=True)
def _code() -> None:
    Path("code.py").write_text(CODE)  # also the name of a module of Python's
    Path("mine").mkdir()
    Path("mine/layers.py").write_text(CODE)


@pytest.mark.parametrize("named", ["code.py:Layer", "code.py:ready", "mine.layers:Layer"])
def test_nothing_is_found(cli: Cli, named: str) -> None:
    result = cli("check", named, *SHAPE, "--mask")
    assert (result.code, result.err) == (0, "")
    source = named.partition(":")[0]
    assert f"Looked at Layer of {source}, called with poses and a mask (4, 12, 8): nothing was found." in result.out


def test_an_error_is_found(cli: Cli) -> None:
    result = cli("check", "code.py:mixes", *SHAPE)
    assert result.code == 1
    assert "called with poses (4, 12, 8): 1 finding." in result.out
    assert "error: mixes-images" in result.out
    assert all(word in result.out for word in ("found", "usual cause", "cure"))
    told = cli("check", "code.py:mixes", *SHAPE, "--json")
    assert told.code == 1
    found = json.loads(told.out)
    assert (found["class_name"], found["shape"], found["mask"]) == ("Layer", [4, 12, 8], False)
    assert [(each["name"], each["severity"]) for each in found["findings"]] == [("mixes-images", "error")]


def test_a_note_is_no_error(cli: Cli) -> None:
    result = cli("check", "code.py:over_inputs", *SHAPE)
    assert result.code == 0
    assert "note: softmax-over-inputs" in result.out
