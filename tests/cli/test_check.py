"""``torchcaps check``: capsule code that is named on the command line."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

import torchcaps
from cli_support import Cli

CODE = """
import torch
from torchcaps.nn import Capsules, DenseCapsules, DynamicRouting

class Layer(DenseCapsules):
    def __init__(self, **options):
        super().__init__(12, 8, out_capsules=5, capsule_dim=16, **options)

class Mixes(Layer):
    def forward(self, poses):
        return super().forward(poses + poses.mean(0))

class Flat(torch.nn.Module):  # a fixed weighted sum of the inputs
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(12, 5, 16, 8))

    def forward(self, poses):
        return torch.einsum("bik,ijdk->bjd", poses, self.weight)

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


def test_strict_fails_for_warnings_too(cli: Cli) -> None:
    for made, severity in (("Layer", None), ("over_inputs", "note"), ("Flat", "warning"), ("Mixes", "error")):
        codes = [cli("check", f"code.py:{made}", *SHAPE, *more).code for more in ((), ("--strict",))]
        assert codes == [severity == "error", severity in ("error", "warning")], made


def test_a_badge_says_what_was_found(cli: Cli) -> None:
    for made, summary in (("Layer", "no mistake was found"), ("Flat", "1 finding"), ("Mixes", "1 finding")):
        badge = Path(f"{made}.svg")
        assert (
            f"![torchcaps check: {summary}]({badge})" in cli("check", f"code.py:{made}", *SHAPE, "--badge", badge).out
        )
        image = ElementTree.parse(badge).getroot()
        assert image.attrib["aria-label"] == f"torchcaps check: {summary}"
    assert json.loads(cli("check", "code.py:Layer", *SHAPE, "--badge", "other.svg", "--json").out)["findings"] == []


def test_a_badge_replaces_no_file(cli: Cli) -> None:
    Path("mine.svg").write_text("mine")
    refused = cli("check", "code.py:Layer", *SHAPE, "--badge", "mine.svg")
    assert (refused.code, "--overwrite" in refused.err) == (2, True)
    assert Path("mine.svg").read_text() == "mine"
    cli.out("check", "code.py:Layer", *SHAPE, "--badge", "mine.svg", "--overwrite")
    assert "<svg" in Path("mine.svg").read_text()
    alone = cli("check", "code.py:Layer", *SHAPE, "--overwrite")
    assert (alone.code, "--badge" in alone.err) == (2, True)


def test_a_sentence_for_a_method_section_names_version_input_and_findings(cli: Cli) -> None:
    for made, ending in (("Layer", "no mistake was found."), ("Mixes", "1 finding: mixes-images.")):
        sentence = json.loads(cli("check", f"code.py:{made}", *SHAPE, "--json").out)["sentence"]
        assert sentence.endswith(ending)
        assert all(word in sentence for word in (torchcaps.__version__, "4×12×8"))
        assert sentence in " ".join(cli("check", f"code.py:{made}", *SHAPE).out.split())
