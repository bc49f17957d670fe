"""``torchcaps check``: capsule code that is named on the command line."""

import json
from pathlib import Path

import pytest

from cli_support import Cli

CODE = """
from torchcaps.nn import Capsules, DenseCapsules, DynamicRouting

class Layer(DenseCapsules):
    def __init__(self, **options):
        super().__init__(12, 8, out_capsules=5, capsule_dim=16, **options)

class Mixes(Layer):
    def forward(self, poses):
        return super().forward(poses + poses.mean(0))

class Ignores(Layer):
    def forward(self, capsules):
        return super().forward(Capsules.of(capsules).poses)

def over_inputs():
    return Layer(routing=DynamicRouting(softmax_over="inputs"))

ready = Layer()
"""
SHAPE = ("--shape", "4,12,8")


@pytest.fixture(autouse=True)
def _code() -> None:
    Path("code.py").write_text(CODE)  # also the name of a module of Python's
    Path("mine").mkdir()
    Path("mine/layers.py").write_text(CODE)


def test_nothing_is_found(cli: Cli) -> None:
    for source, name in (("code.py", "Layer"), ("code.py", "ready"), ("mine.layers", "Layer")):
        out = cli.out("check", f"{source}:{name}", *SHAPE, "--mask")
        assert f"Checked Layer of {source}, called with poses and a mask (4, 12, 8): no mistake was found." in out


def test_only_an_error_is_one(cli: Cli) -> None:
    for made, options, kind, name, severity in (
        ("Mixes", (), "Mixes", "mixes-images", "error"),
        ("Ignores", ("--mask",), "Ignores", "padding-changes-result", "error"),
        ("over_inputs", (), "Layer", "softmax-over-inputs", "note"),
    ):
        result, told = (cli("check", f"code.py:{made}", *SHAPE, *options, *more) for more in ((), ("--json",)))
        assert result.code == told.code == (severity == "error")
        assert f"called with poses{' and a mask' * bool(options)} (4, 12, 8): 1 finding." in result.out
        assert all(word in result.out for word in (f"{severity}: {name}", "found", "usual cause", "cure"))
        found = json.loads(told.out)
        assert (found["class_name"], found["shape"], found["mask"]) == (kind, [4, 12, 8], bool(options))
        assert [(each["name"], each["severity"]) for each in found["findings"]] == [(name, severity)]
