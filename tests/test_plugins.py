"""Parts of one's own, from a file outside the package or an installed package, through every command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny_runs import write_bars

ROUTING = '''
"""Every vote that agrees with the mean counts more."""
from dataclasses import dataclass
from typing import ClassVar

from torchcaps import squash
from torchcaps.models import RoutingConfig, register_part
from torchcaps.nn import Routed, Routing
from torchcaps.ranges import PositiveFactor

class MyRouting(Routing):
    def __init__(self, temperature):
        super().__init__()
        self.temperature = temperature

    def forward(self, votes, activations=None, *, return_coupling=False):
        mean = votes.weighted_sum(votes.compete(votes.zeros()))
        coupling = votes.compete(votes.agreement(squash(mean)) / self.temperature)
        return Routed(squash(votes.weighted_sum(coupling)), coupling=coupling if return_coupling else None)

    def extra_repr(self):
        return f"temperature={self.temperature}"

@register_part
@dataclass(frozen=True, kw_only=True)
class MyRoutingConfig(RoutingConfig):
    name: ClassVar[str] = "mine"
    temperature: PositiveFactor = 1.0
    """What the agreement is divided by."""
    def build(self):
        return MyRouting(self.temperature)
'''

TRANSFORM = '''
"""Votes are the poses, turned by one matrix that all pairs share."""
from dataclasses import dataclass
from typing import ClassVar

import torch
from torchcaps.models import CapsNetConfig, Preset, TransformConfig, register_part, register_preset
from torchcaps.models.fields import replace
from torchcaps.nn import DenseVotes, Transform

class OneMatrix(Transform):
    def bind(self, size, std):
        self.size = size
        self.weight = torch.nn.Parameter(std * torch.randn(size.out_dim, size.in_dim))

    def forward(self, poses):
        I, _, J, _ = self.size
        return DenseVotes(poses, self.weight.expand(I, J, *self.weight.shape))

@register_part
@dataclass(frozen=True, kw_only=True)
class OneMatrixConfig(TransformConfig):
    name: ClassVar[str] = "one-matrix"
    def build(self):
        return OneMatrix()

register_preset(Preset(name="one-matrix-net", description="One matrix for all.", source="nowhere",
                       model=replace(CapsNetConfig(), {"transform": "one-matrix"})))
'''

DRIVER = """
import contextlib, io, json, sys
from torchcaps.cli import main
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""
"""Runs commands, one after the other, in a process of its own."""

TINY = "--conv-channels 8 --primary-types 2 --capsule-dim 4 --decoder-hidden 16 --batch-size 16 --validation-size 12"
TRAIN = f"--epochs 1 --accelerator cpu --no-figures --max-shift 1 {TINY}".split()


def run(folder: Path, *commands: list[str], path: Path | None = None) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each command, called in a folder, in a new process."""
    import os

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(path), environment.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps(commands),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results: list[Any] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(commands)
    return [tuple(result) for result in results]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With images, a picture, the routing's file, and a run that was trained with it."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "my_routing.py").write_text(ROUTING.strip() + "\n")
    assert len(ROUTING[ROUTING.index("class MyRouting(") :].split("\n\n@register")[0].splitlines()) <= 25
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
    ((code, out, err),) = run(folder, [*train, *TRAIN, "--out", "run"])
    assert code == 0, err
    assert "torchcaps evaluate run --plugin my_routing.py" in out  # as it can be typed
    return folder


def test_a_run_keeps_its_routing_and_names_its_plugin(folder: Path) -> None:
    config = json.loads((folder / "run" / "config.json").read_text())
    assert config["plugins"] == ["my_routing.py"]
    assert config["model"]["layers"][0]["routing"] == {"name": "mine", "temperature": 0.5}


def test_every_command_takes_it(folder: Path) -> None:
    commands: dict[str, list[str]] = {
        "evaluate": ["run", "--accelerator", "cpu"],
        "predict": ["run", "bar.png"],
        "reconstruct": ["run", "--out", "reconstructed.png"],
        "routing": ["run", "--out", "routing.png"],
        "perturb": ["run", "--out", "perturbed.png"],
        "memory": ["--routing", "mine", "--data", "npz:bars.npz", *TINY.split()],
        "train --resume": ["run", "--epochs", "2"],
        "presets": ["sabour2017"],
        "train --help": [],
    }
    given = [[*name.split(), *words, "--plugin", "my_routing.py"] for name, words in commands.items()]
    results = dict(zip(commands, run(folder, *given), strict=True))
    for name, (code, out, err) in results.items():
        assert code == 0, (name, err)
        assert "Traceback" not in out + err
    for picture in ("reconstructed", "routing", "perturbed"):
        assert (folder / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
    assert "accuracy" in results["evaluate"][1].lower()
    assert "bar.png" in results["predict"][1]
    assert json.loads((folder / "run" / "summary.json").read_text())["epochs"] == 2
    assert "--temperature" in results["train --help"][1]
    assert "What the agreement is divided by." in " ".join(results["train --help"][1].split())
    assert "|vb|mine]" in results["train --help"][1]


def test_the_explorer_looks_through_it(folder: Path) -> None:
    code = (
        "from torchcaps.plugins import load_plugin; load_plugin('my_routing.py')\n"
        "from pathlib import Path; import numpy as np\n"
        "from torchcaps.training import load_run; from torchcaps.explorer import open_explorer\n"
        "explorer = open_explorer(load_run(Path('run')), None, None)\n"
        "view = explorer.look(np.load('bars.npz')['x'][0][None])\n"
        "assert view.routing is not None; assert len(view.routing.maps) == 1\n"
        "print(explorer.title)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "run" in done.stdout


def test_it_is_exported(folder: Path) -> None:
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package, reason="the extra torchcaps[export] is not installed")
    ((code, _, err),) = run(folder, ["export", "run", "--plugin", "my_routing.py", "--out", "model.onnx"])
    assert code == 0, err
    ((code, out, err),) = run(folder, ["predict", "model.onnx", "bar.png"])  # a graph needs no code
    assert code == 0, err
    assert "bar.png" in out


def test_without_its_plugin_a_run_says_so(folder: Path) -> None:
    """What a run's files name is never run by itself."""
    run_needs = [["evaluate", "run"], ["predict", "run", "bar.png"], ["train", "--resume", "run"], ["routing", "run"]]
    for code, out, err in run(folder, *run_needs):
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert 'there is no routing "mine"' in err
        assert err.rstrip().endswith("The run was made with plugins; add --plugin my_routing.py.")


def test_what_is_wrong_with_a_plugin_is_said_in_a_sentence(folder: Path) -> None:
    (folder / "broken.py").write_text("import no_such_package\n")
    (folder / "twice.py").write_text(ROUTING.replace('"mine"', '"dynamic"'))
    results = run(
        folder,
        ["train", "--plugin", "my_routing.py", "--routing", "mien"],
        ["train", "--plugin", "nowhere.py"],
        ["train", "--plugin", "nothing-installed"],
        ["train", "--plugin", "broken.py"],
        ["train", "--plugin", "twice.py"],
        ["train", "--plugin", "my_routing.py", "--routing", "mine", "--temperature", "0"],
        ["train", "--temperature", "2"],
    )
    said = (
        'did you mean "mine"?',
        "there is no plugin nowhere.py",
        "there is no plugin nothing-installed: neither a file ….py nor an entry point",
        "plugin broken.py cannot be loaded: ModuleNotFoundError: No module named 'no_such_package'",
        'plugin twice.py: there is a routing "dynamic" already; choose another name',
        "temperature must be",
        "--temperature",
    )
    for (code, _, err), words in zip(results, said, strict=True):
        assert code == 2, err
        assert words in err
        assert "Traceback" not in err


def test_an_installed_package_is_a_plugin_by_its_entry_point(folder: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "matrices-1.0.dist-info").mkdir(parents=True)
    (site / "matrices.py").write_text(TRANSFORM)
    (site / "matrices-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: matrices\nVersion: 1.0\n")
    (site / "matrices-1.0.dist-info" / "entry_points.txt").write_text("[torchcaps.plugins]\nmatrices = matrices\n")
    options = ["--data", f"npz:{folder / 'bars.npz'}", *TRAIN, "--out", str(tmp_path / "run")]
    trained, evaluated, listed, missing = run(
        tmp_path,
        ["train", "one-matrix-net", "--plugin=matrices", *options],
        ["evaluate", "run", "--plugin", "matrices", "--accelerator", "cpu"],
        ["presets", "--plugin", "matrices"],
        ["train", "--plugin", "matrixes"],
        path=site,
    )
    assert trained[0] == evaluated[0] == listed[0] == 0, trained[2] + evaluated[2]
    assert "one-matrix-net" in listed[1]
    assert "elementwise, matrix, identity, one-matrix" in " ".join(listed[1].split())
    assert missing[0] == 2
    assert "known entry points: matrices" in missing[2]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["plugins"] == ["matrices"]
    ((code, _, err),) = run(tmp_path, ["evaluate", "run"], path=site)
    assert code == 2, "installed, but not named"
    assert "add --plugin matrices" in err


HEAD = """
from dataclasses import dataclass
from typing import Any, ClassVar
import torch
from torch import nn
import torchcaps
from torchcaps.models import BackboneConfig, RoutingConfig, register_part
from torchcaps.nn import Routed, Routing
"""


def wrong_routing(body: str) -> str:
    """A plugin whose routing, named as its file, does ``body``."""
    return (
        HEAD
        + f"""
class Wrong(Routing):
    def forward(self, votes, activations=None, *, return_coupling=False):
        {body}

@register_part
@dataclass(frozen=True, kw_only=True)
class WrongConfig(RoutingConfig):
    name: ClassVar[str] = __name__.removeprefix("torchcaps_plugin_")
    def build(self):
        return Wrong()
"""
    )


def wrong_backbone(body: str) -> str:
    """A plugin whose backbone, named as its file, does ``body``."""
    return (
        HEAD
        + f"""
class Wrong(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, images):
        {body}

@register_part
@dataclass(frozen=True, kw_only=True)
class WrongConfig(BackboneConfig):
    name: ClassVar[str] = __name__.removeprefix("torchcaps_plugin_")
    def build(self, in_shape):
        return Wrong()
"""
    )


WRONG = {
    "routing-raises": (wrong_routing("raise KeyError('mine')"), "plugin {}, line 12, in forward: KeyError: 'mine'"),
    "routing-tensor": (
        wrong_routing("return votes.weighted_sum(None)"),
        "Wrong must return Routed(poses, activations, coupling) of torchcaps.nn, got Tensor",
    ),
    "routing-outputs": (
        wrong_routing("return Routed(votes.weighted_sum(None)[:, :1])"),
        "Wrong must return poses of shape (B, J, D) = (B, 3, 4), got (2, 1, 4)",
    ),
    "routing-nothing": (
        wrong_routing("return Routed(None)"),
        "Wrong must return poses of shape (B, J, D) = (B, 3, 4), got NoneType",
    ),
    "routing-nan": (
        wrong_routing("return Routed(torchcaps.squash(votes.weighted_sum(None)) * float('nan'))"),
        "or to mend what is not finite in routing routing-nan; there was no checkpoint yet",
    ),
    "backbone-raises": (wrong_backbone("raise KeyError('mine')"), "plugin {}, line 16, in forward: KeyError: 'mine'"),
    "backbone-dtype": (
        wrong_backbone("return self.conv(images).double()"),
        "Wrong must return maps of the dtype and the number of its images",
    ),
    "backbone-batch": (
        wrong_backbone("return self.conv(images)[:1]"),
        "Wrong must return maps of the dtype and the number of its images",
    ),
}
NO_PART = {
    "no-build": ("    name: ClassVar[str] = 'wrong'", "routing WrongConfig has no build"),
    "no-name": ("    def build(self): ...", "routing WrongConfig has no name"),
    "no-default": (
        "    name: ClassVar[str] = 'wrong'\n    size: int\n    def build(self): ...",
        "routing WrongConfig has a field size without a default",
    ),
    "list": (
        "    name: ClassVar[str] = 'wrong'\n    sizes: Any = 0\n    def build(self): ...",
        "routing WrongConfig has a field sizes of type typing.Any; an option is",
    ),
    "taken": (
        "    name: ClassVar[str] = 'wrong'\n    epochs: int = 0\n    def build(self): ...",
        "routing WrongConfig has a field epochs, which is a recipe field already",
    ),
}


def test_what_fails_within_a_part_of_a_plugin_is_its_own(folder: Path) -> None:
    """It is said where, before a folder is made."""
    commands = {}
    for kind, (code, _) in WRONG.items():
        (folder / f"{kind}.py").write_text(code)
        choice = kind.partition("-")[0]
        options = TRAIN if choice == "routing" else TRAIN[: TRAIN.index("--conv-channels")]
        plugin = ["--plugin", f"{kind}.py", f"--{choice}", kind]
        commands[kind] = ["train", *plugin, "--data", "npz:bars.npz", *options, "--out", kind]
    for kind, (code, _, err) in zip(commands, run(folder, *commands.values()), strict=True):
        assert code == (1 if kind == "routing-nan" else 2), (kind, err)
        assert WRONG[kind][1].format(f"{kind}.py") in err
        assert "bug in torchcaps" not in err
        assert (folder / kind).exists() == (kind == "routing-nan")  # this one can be resumed once it is mended


def test_what_is_no_part_is_not_registered(folder: Path) -> None:
    head = "@register_part\n@dataclass(frozen=True, kw_only=True)\nclass WrongConfig(RoutingConfig):\n"
    for kind, (body, _) in NO_PART.items():
        (folder / f"{kind}.py").write_text(f"{HEAD}\n{head}{body}\n")
    results = run(folder, *(["train", "--plugin", f"{kind}.py"] for kind in NO_PART))
    for (code, _, err), (_, words) in zip(results, NO_PART.values(), strict=True):
        assert code == 2
        assert words in err, err
        assert "Traceback" not in err


def test_a_plugin_imports_its_neighbours_and_is_imported_once(folder: Path) -> None:
    (folder / "a_neighbour.py").write_text("TEMPERATURE = 0.25\n")
    (folder / "uses_neighbour.py").write_text(f"from a_neighbour import TEMPERATURE\n{ROUTING}")
    code = (
        "from torchcaps.plugins import load_plugin; import sys\n"
        "before = list(sys.path); load_plugin('uses_neighbour.py'); assert sys.path == before\n"
        "import uses_neighbour; assert uses_neighbour.TEMPERATURE == 0.25\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_an_unknown_preset_may_be_one_of_a_plugin(folder: Path) -> None:
    ((code, _, err),) = run(folder, ["presets", "one-matrix-net"])
    assert code == 2
    assert "One of your own is loaded by --plugin FILE." in err
