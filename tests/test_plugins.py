"""Parts of one's own, from a file outside the package or an installed package, through every command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support import assert_raises, registered_for_now, small
from tiny_runs import write_bars
from torchcaps import create_model, list_presets, load_plugin
from torchcaps.errors import InputError
from torchcaps.parts import PARTS, build, describe

ROUTING = '''
"""Every vote that agrees with the mean counts more."""
import torchcaps
from torchcaps.nn import Routed, Routing
from torchcaps.ranges import PositiveFactor

@torchcaps.register("routing", "mine")
class Mine(Routing):
    """Args:
        temperature: What the agreement is divided by.
    """
    def __init__(self, temperature: PositiveFactor = 1.0):
        super().__init__()
        self.temperature = temperature

    def forward(self, votes, activations=None, *, return_coupling=False):
        mean = votes.weighted_sum(votes.compete(votes.zeros()))
        coupling = votes.compete(votes.agreement(torchcaps.squash(mean)) / self.temperature)
        poses = torchcaps.squash(votes.weighted_sum(coupling))
        return Routed(poses, coupling=coupling if return_coupling else None)
'''

PARTS_OF_A_PACKAGE = """
import torch
from torch import nn
from torchcaps import register
from torchcaps.models import register_preset
from torchcaps.nn import DenseVotes, Transform
from torchcaps.ops.losses import multi_hot
from torchcaps.ranges import Factor, ShareBelowOne, Width

@register("transform", "one-matrix")
class OneMatrix(Transform):
    def bind(self, size, std):
        self.size, self.weight = size, nn.Parameter(std * torch.randn(size.out_dim, size.in_dim))

    def forward(self, poses):
        I, _, J, _ = self.size
        return DenseVotes(poses, self.weight.expand(I, J, *self.weight.shape))

@register("backbone", "wide")
class Wide(nn.Sequential):
    def __init__(self, in_channels, *, wide_channels: Width = 8):
        super().__init__(nn.Conv2d(in_channels, wide_channels, 9), nn.ReLU())
        self.wide_channels = wide_channels

@register("loss", "brier")
class Brier(nn.Module):
    def __init__(self, brier_absent: Factor = 1.0):
        super().__init__()
        self.brier_absent = brier_absent

    def forward(self, scores, targets):
        present = multi_hot(scores, targets)
        return (present * (1 - scores) ** 2 + self.brier_absent * (1 - present) * scores**2).sum(1).mean()

@register("optimizer", "rmsprop")
class RMSprop(torch.optim.RMSprop):
    def __init__(self, params, learning_rate, *, rms_kept: ShareBelowOne = 0.99):
        super().__init__(params, lr=learning_rate, alpha=rms_kept)

register_preset("all-mine", "All of my own.", base="sabour2017",
    network={"transform": "one-matrix", "backbone": "wide", "classification_loss": "brier", "brier_absent": 0.5},
    recipe={"optimizer": "rmsprop", "rms_kept": 0.9})
"""
OWN = {
    "transform": {"name": "one-matrix"},
    "backbone": {"name": "wide", "wide_channels": 8},
    "classification_loss": {"name": "brier", "brier_absent": 0.5},
    "optimizer": {"name": "rmsprop", "rms_kept": 0.9},
}
"""What config.json holds of them."""

DRIVER = """
import contextlib, io, json, multiprocessing, sys
import torchcaps.cli
import torchcaps.explorer
import torchcaps.training.loop

def run(arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = exec(arguments[0]) or 0 if len(arguments) == 1 else torchcaps.cli.main(arguments)
    sys.__stdout__.write(json.dumps([code, out.getvalue(), err.getvalue()]) + chr(10))
    sys.__stdout__.flush()

for arguments in json.load(sys.stdin):
    if "fork" in multiprocessing.get_all_start_methods():
        process = multiprocessing.get_context("fork").Process(target=run, args=[arguments])
        process.start()
        process.join()
    else:
        run(arguments)
"""
"""Runs commands, each in a process of its own where the system can fork; one word is a program in Python."""

TRAIN = ["--epochs=1", "--accelerator=cpu", "--no-figures", "--max-shift=1", "--batch-size=16", "--validation-size=12"]
TRAIN += ["--primary-types=2", "--capsule-dim=4", "--decoder-hidden=16"]


def run(folder: Path, *commands: list[str], path: Path | None = None) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each command, called in a folder, in a new process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(path), environment.get("PYTHONPATH"))))
    call = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run([sys.executable, "-c", DRIVER], input=json.dumps(commands), check=False, **call)
    assert done.returncode == 0, done.stderr
    results: list[Any] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(commands), done.stderr
    return [tuple(result) for result in results]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With images, a picture, the routing's file, and a run that was trained with it."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "my_routing.py").write_text(ROUTING.strip() + "\n")
    write_bars(folder / "bars.npz")
    from PIL import Image

    Image.fromarray(np.load(folder / "bars.npz")["x"][0]).save(folder / "bar.png")
    train = [
        "train",
        "--plugin",
        "my_routing.py",
        "--routing",
        "mine",
        "--temperature",
        "0.5",
        "--data",
        "npz:bars.npz",
    ]
    ((code, out, err),) = run(folder, [*train, *TRAIN, "--conv-channels=8", "--out=run"])
    assert code == 0, err
    assert "torchcaps evaluate run --plugin my_routing.py" in out  # as it can be typed
    return folder


@pytest.mark.slow
def test_every_command_takes_it(folder: Path) -> None:
    config = json.loads((folder / "run" / "config.json").read_text())
    assert config["plugins"] == ["my_routing.py"]
    assert config["model"]["layers"][0]["routing"] == {"name": "mine", "temperature": 0.5}
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package, reason="the extra torchcaps[export] is not installed")
    commands: dict[str, list[str]] = {
        "evaluate": ["run", "--accelerator", "cpu"],
        "predict": ["run", "bar.png"],
        "reconstruct": ["run", "--figure", "reconstructed.png"],
        "routing": ["run", "--figure", "routing.png"],
        "perturb": ["run", "--figure", "perturbed.png"],
        "train --resume": ["run", "--epochs", "2"],
        "export": ["run", "--out", "model.onnx"],
    }
    explore = (
        "from torchcaps.plugins import load_plugin; load_plugin('my_routing.py')\n"
        "from pathlib import Path; import numpy as np\n"
        "from torchcaps.training import load_run; from torchcaps.explorer import open_explorer\n"
        "explorer = open_explorer(load_run(Path('run')), None, None)\n"
        "view = explorer.look(np.load('bars.npz')['x'][0][None])\n"
        "assert len(view.routing['maps']) >= 1"
    )
    given = [[*name.split(), *words, "--plugin", "my_routing.py"] for name, words in commands.items()]
    results = run(folder, *given, [explore], ["predict", "model.onnx", "bar.png"])  # a graph needs no code
    named = dict(zip((*commands, "explorer", "of a graph"), results, strict=True))
    for name, (code, out, err) in named.items():
        assert code == 0, (name, err)
        assert "Traceback" not in out + err
    for picture in ("reconstructed", "routing", "perturbed"):
        assert (folder / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
    assert "accuracy" in named["evaluate"][1].lower()
    assert "bar.png" in named["predict"][1]
    assert "bar.png" in named["of a graph"][1]
    assert json.loads((folder / "run" / "summary.json").read_text())["epochs"] == 2


@pytest.mark.slow
def test_without_its_plugin_a_run_says_so(folder: Path) -> None:
    """What a run's files name is never run by itself."""
    run_needs = [["evaluate", "run"], ["predict", "run", "bar.png"], ["train", "--resume", "run"], ["routing", "run"]]
    for code, out, err in run(folder, *run_needs):
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert 'there is no routing "mine"' in err
        assert err.rstrip().endswith("The run was made with plugins; add --plugin my_routing.py.")


def test_what_is_wrong_with_a_plugin_is_said_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    taken = "import torchcaps\ntorchcaps.models.register_preset('compact', 'Mine.')\n"
    for name, text, words in (
        (
            "broken",
            "import no_such_package",
            " cannot be loaded: ModuleNotFoundError: No module named 'no_such",
        ),
        (
            "twice",
            ROUTING.replace('"mine"', '"dynamic"'),
            ': there is a routing "dynamic" already; choose',
        ),
        ("optimizer", PARTS_OF_A_PACKAGE.replace('"rmsprop"', '"adam"'), ': there is an optimizer "adam" already'),
        ("preset", taken, ': there is a preset "compact" already'),
        (
            "kind",
            ROUTING.replace('"routing"', '"routng"'),
            ': there is no kind of part "routng"; did you mean',
        ),
        ("leaves", "raise SystemExit(3)", " cannot be loaded: SystemExit: 3"),
        ("mute", MUTE + "raise Mute", " cannot be loaded: Mute: Mute"),
        ("long", "raise ValueError('long ' * 10_000)", " cannot be loaded: ValueError: long long"),
        ("said", "import torchcaps\nraise torchcaps.InputError('said ' * 10_000)", ": said said"),
        ("nowhere", None, ": there is no such file"),
    ):
        if text is not None:
            Path(f"{name}.py").write_text(text)
        with registered_for_now(), pytest.raises(InputError) as caught:
            load_plugin(f"{name}.py")
        assert f"plugin {name}.py{words}" in str(caught.value)
        assert len(str(caught.value)) < 1000
    said = "nothing-installed: it is neither a file ….py nor an entry point"
    assert_raises(InputError, load_plugin, "nothing-installed", say=said)


@pytest.mark.slow
def test_options_of_a_plugin_s_part_that_do_not_fit(folder: Path) -> None:
    mine = ["train", "--plugin", "my_routing.py"]
    said = {
        "plugin nowhere.py: there is no such file": ["train", "--plugin", "nowhere.py"],
        'did you mean "mine"?': [*mine, "--routing", "mien"],
        "temperature must be above 0": [*mine, "--routing", "mine", "--temperature", "0"],
        "--temperature is an option of --routing mine, which is not chosen": [*mine, "--temperature", "2"],
        "--temperature": ["train", "--temperature", "2"],
        "One of your own is loaded by --plugin FILE.": ["presets", "all-mine"],
    }
    for words, (code, _, err) in zip(said, run(folder, *said.values()), strict=True):
        assert code == 2, err
        assert words in err
        assert "Traceback" not in err
        assert len(err) < 1000


@pytest.mark.slow
def test_every_kind_of_part_from_an_installed_package_by_its_entry_point(folder: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "my_parts-1.0.dist-info").mkdir(parents=True)
    (site / "my_parts.py").write_text(PARTS_OF_A_PACKAGE)
    (site / "my_parts-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: my_parts\nVersion: 1.0\n")
    (site / "my_parts-1.0.dist-info" / "entry_points.txt").write_text("[torchcaps.plugins]\nmy-parts = my_parts\n")
    options = ["--data", f"npz:{folder / 'bars.npz'}", *TRAIN, "--out", "run"]
    trained, evaluated, listed, missing, *mistyped = run(
        tmp_path,
        ["train", "all-mine", "--plugin=my-parts", *options],
        ["evaluate", "run", "--plugin", "my-parts", "--accelerator", "cpu"],
        ["import torchcaps; torchcaps.load_plugin('my-parts'); print(torchcaps.list_presets())"],
        ["train", "--plugin", "my-prts"],
        *(
            ["train", "--plugin=my-parts", f"--{kind.replace('_', '-')}", part["name"] + "s"]
            for kind, part in OWN.items()
        ),
        path=site,
    )
    assert trained[0] == evaluated[0] == listed[0] == 0, trained[2] + evaluated[2] + listed[2]
    assert "all-mine" in listed[1]
    assert missing[0] == 2
    assert "known entry points: my-parts" in missing[2]
    for part, (code, _, err) in zip(OWN.values(), mistyped, strict=True):
        assert code == 2
        assert f'did you mean "{part["name"]}"?' in err, err
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["plugins"] == ["my-parts"]
    held = {**config["model"], "transform": config["model"]["layers"][0]["transform"], **config["recipe"]}
    assert {kind: held[kind] for kind in OWN} == OWN
    ((code, _, err),) = run(tmp_path, ["evaluate", "run"], path=site)
    assert code == 2, "installed, but not named"
    assert "add --plugin my-parts" in err


def test_a_plugin_is_loaded_from_python_and_forgotten_with_its_parts(tmp_path: Path) -> None:
    (tmp_path / "own_parts_of_a_test.py").write_text(PARTS_OF_A_PACKAGE)
    with registered_for_now():
        load_plugin(tmp_path / "own_parts_of_a_test.py")
        network = create_model("all-mine", **small("all-mine")).eval()
        network.save_pretrained(tmp_path / "saved")
        again = type(network).from_pretrained(tmp_path / "saved")
        images = torch.rand(2, 1, 28, 28)
        assert torch.equal(again(images).scores, network(images).scores)
        assert {kind: describe(again)[kind] for kind in ("backbone", "classification_loss")} == {
            kind: OWN[kind] for kind in ("backbone", "classification_loss")
        }
        optimizer = build("optimizer", OWN["optimizer"], params=network.parameters(), learning_rate=0.1)
        assert optimizer.param_groups[0]["alpha"] == 0.9
    assert "all-mine" not in list_presets()
    assert "brier" not in PARTS["loss"]
    assert_raises(InputError, load_plugin, tmp_path / "nowhere.py", say="there is no such file")
    assert_raises(InputError, type(network).from_pretrained, tmp_path / "saved", say='no backbone "wide"')


HEAD = """
from typing import Any
import torch
from torch import nn
import torchcaps
from torchcaps.nn import Routed, Routing
"""


MUTE = """
class Mute(Exception):
    def __str__(self):
        raise RuntimeError("nothing to say")
"""


def wrong_routing(body: str) -> str:
    """A plugin whose routing, named as its file, does ``body``."""
    return f"""{HEAD}
@torchcaps.register("routing", __name__.removeprefix("torchcaps_plugin_"))
class Wrong(Routing):
    def forward(self, votes, activations=None, *, return_coupling=False):
        {body}
"""


def wrong_backbone(body: str) -> str:
    """A plugin whose backbone, named as its file, does ``body``."""
    return f"""{HEAD}
@torchcaps.register("backbone", __name__.removeprefix("torchcaps_plugin_"))
class Wrong(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, images):
        {body}
"""


WRONG = {
    "routing-raises": (wrong_routing("raise KeyError('mine')"), "plugin {}, line 11, in forward: KeyError: 'mine'"),
    "routing-leaves": (wrong_routing("raise SystemExit(3)"), "plugin {}, line 11, in forward: SystemExit: 3"),
    "routing-mute": (MUTE + wrong_routing("raise Mute"), "plugin {}, line 15, in forward: Mute: Mute; --debug"),
    "routing-nan": (
        wrong_routing("return Routed(torchcaps.squash(votes.weighted_sum(None)) * float('nan'))"),
        "or to mend what is not finite in Wrong; there was no checkpoint yet",
    ),
    "backbone-raises": (wrong_backbone("raise KeyError('mine')"), "plugin {}, line 15, in forward: KeyError: 'mine'"),
}


@pytest.mark.slow
def test_what_fails_within_a_part_of_a_plugin_is_its_own(folder: Path) -> None:
    """It is said where, before a folder is made."""
    commands = {}
    for kind, (code, _) in WRONG.items():
        (folder / f"{kind}.py").write_text(code)
        choice = kind.partition("-")[0]
        plugin = ["--plugin", f"{kind}.py", f"--{choice}", kind]
        commands[kind] = ["train", *plugin, "--data", "npz:bars.npz", *TRAIN, "--out", kind]
    for kind, (code, _, err) in zip(commands, run(folder, *commands.values()), strict=True):
        assert code == (1 if kind == "routing-nan" else 2), (kind, err)
        assert WRONG[kind][1].format(f"{kind}.py") in err
        assert "bug in torchcaps" not in err
        assert (folder / kind).exists() == (kind == "routing-nan")  # this one can be resumed once it is mended


@pytest.mark.slow
def test_plugins_import_their_neighbours_and_each_other(folder: Path) -> None:
    """A file is imported once, under either name; two that import each other are loaded in either order."""
    (folder / "a_neighbour.py").write_text("TEMPERATURE = 0.25\n")
    (folder / "uses_neighbour.py").write_text(f"from a_neighbour import TEMPERATURE\n{ROUTING}")
    code = (
        "from torchcaps.plugins import load_plugin; import sys\n"
        "before = list(sys.path); load_plugin('uses_neighbour.py'); assert sys.path == before\n"
        "import uses_neighbour; assert uses_neighbour.TEMPERATURE == 0.25\n"
    )
    for name, other in (("first", "second"), ("second", "first")):
        head = f"import {other}_plugin\n{HEAD}"
        body = "class Own(torchcaps.nn.DynamicRouting):\n    pass\n"
        text = f'{head}\n@torchcaps.register("routing", "{name}")\n{body}'
        (folder / f"{name}_plugin.py").write_text(text)
    load = "from torchcaps import load_plugin\nfor name in {!r}: load_plugin(name + '_plugin.py')\n"
    orders = (["first", "second"], ["second", "first"], ["first"], ["second"])
    for result in run(folder, [code], *([load.format(order)] for order in orders)):
        assert result[0] == 0, result
