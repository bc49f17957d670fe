"""Damaged files, each read by the commands that read such files."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from hostile import edits
from hostile.program import call, keep_inside
from hostile.trials import WRONG_INPUT, Part, Rules, Trial

Command = tuple[str, ...]

RESUMED = ("run/**", "run/*", "run")
"""What a run that goes on writes: everything of its own."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Files to damage, and who reads them."""

    copies: tuple[str, ...]
    """What of the valid files is copied into the folder of a case."""
    files: tuple[str, ...]
    """Of these, the ones that are damaged, one at a time."""
    edits: Sequence[edits.Edit]
    """How."""
    commands: tuple[Command, ...]
    """Who reads them; ``{file}`` stands for the file that is damaged."""
    bombs: tuple[edits.Edit, ...] = ()
    """Edits that take long, done one time in twenty-five."""
    weight: int = 1
    """How often, relative to the others."""


EVALUATE: Command = ("evaluate", "run", "--accelerator", "cpu")
RESUME: Command = ("train", "--resume", "run", "--epochs", "3", "--no-figures")
PREDICT: Command = ("predict", "run", "images/grey.png")
PERTURB: Command = ("perturb", "run", "--out", "out.png", "--steps", "2")
DATASETS: Command = ("datasets", "npz:data.npz")
REPORT: Command = ("reproduce", "--report", "--results", "results", "--page", "page.md")
IMAGE_FILES = (
    *("images/grey.png", "images/colour.png", "images/deep.png", "images/palette.png", "images/photo.jpg"),
    *("images/scan.tiff", "images/packed.tiff", "images/bitmap.bmp", "images/drawing.gif", "images/web.webp"),
)
KMNIST = tuple(f"kmnist/{part}-{kind}.gz" for part in ("train", "t10k") for kind in
               ("images-idx3-ubyte", "labels-idx1-ubyte"))  # fmt: skip
LOG = "results/mnist/baseline-small/seed-0"

TARGETS: dict[str, Target] = {
    "config": Target(
        copies=("run", "data.npz", "images"),
        files=("run/config.json",),
        edits=edits.JSON,
        commands=(
            (*EVALUATE, "--json"),
            EVALUATE,
            RESUME,
            ("train", "--config", "run/config.json", "--out", "new", "--epochs", "1", "--no-figures"),
            ("memory", "--config", "run/config.json"),
            PREDICT,
        ),
        weight=3,
    ),
    "summary": Target(
        copies=("run", "data.npz"),
        files=("run/summary.json",),
        edits=edits.JSON,
        commands=(EVALUATE, ("export", "run", "--format", "folder", "--out", "shared"), RESUME),
        weight=2,
    ),
    "metrics": Target(
        copies=("run", "data.npz"),
        files=("run/metrics.csv",),
        edits=edits.CSV,
        commands=(
            ("curves", "run", "--out", "out.png"),
            ("curves", "run", "--out", "out.png"),
            ("export", "run", "--format", "folder", "--out", "shared"),
        ),
        weight=2,
    ),
    "network": Target(
        copies=("run", "data.npz", "images"),
        files=("run/best/config.json", "run/best/classes.json"),
        edits=edits.JSON,
        commands=(EVALUATE, PREDICT, PERTURB, ("routing", "run", "--out", "out.png", "--count", "2")),
        weight=3,
    ),
    "pretrained": Target(
        copies=("pretrained", "data.npz", "images"),
        files=("pretrained/config.json", "pretrained/classes.json"),
        edits=edits.JSON,
        commands=(
            ("predict", "pretrained", "images/grey.png"),
            ("evaluate", "pretrained", "--data", "npz:data.npz"),
            ("reconstruct", "pretrained", "--data", "npz:data.npz", "--out", "out.png", "--count", "2"),
        ),
    ),
    "weights": Target(
        copies=("run", "data.npz", "images"),
        files=("run/best/model.safetensors",),
        edits=edits.WEIGHTS,
        commands=((*EVALUATE, "--json"), PREDICT, PERTURB),
        weight=3,
    ),
    "checkpoint": Target(
        copies=("run", "data.npz"),
        files=("run/last.ckpt",),
        edits=edits.CHECKPOINT,
        commands=((*EVALUATE, "--which", "last"), RESUME, RESUME),
        weight=3,
    ),
    "npz": Target(
        copies=("data.npz", "run"),
        files=("data.npz",),
        edits=edits.NPZ,
        bombs=(edits.bomb_npz,),
        commands=(DATASETS, (*DATASETS, "--sample", "3", "--out", "out.png"), EVALUATE),
        weight=3,
    ),
    "idx": Target(
        copies=("kmnist",),
        files=KMNIST,
        edits=edits.IDX,
        bombs=(edits.bomb_gzip,),
        commands=(("datasets", "kmnist", "--data-dir", "kmnist"), ("datasets", "mnist", "--data-dir", "kmnist")),
        weight=2,
    ),
    "matlab": Target(
        copies=("svhn",),
        files=("svhn/train_32x32.mat", "svhn/test_32x32.mat"),
        edits=edits.BYTES,
        bombs=(edits.bomb_matlab,),
        commands=(("datasets", "svhn", "--data-dir", "svhn"),),
    ),
    "affnist": Target(
        copies=("affnist",),
        files=("affnist/test.mat",),
        edits=edits.BYTES,
        bombs=(edits.bomb_matlab,),
        commands=(("read_originals", "{file}"),),
    ),
    "smallnorb": Target(
        copies=("smallnorb",),
        files=(
            "smallnorb/smallnorb-5x46789x9x18x6x2x96x96-training-dat.mat.gz",
            "smallnorb/smallnorb-5x01235x9x18x6x2x96x96-testing-cat.mat.gz",
        ),
        edits=edits.IDX,
        bombs=(edits.bomb_gzip,),
        commands=(("datasets", "smallnorb", "--data-dir", "smallnorb"),),
    ),
    "cifar10": Target(
        copies=("cifar10",),
        files=("cifar10/cifar-10-binary.tar.gz",),
        edits=edits.IDX,
        bombs=(edits.bomb_gzip,),
        commands=(("datasets", "cifar10", "--data-dir", "cifar10"),),
    ),
    "image": Target(
        copies=("run", "images", "data.npz", "model.onnx"),
        files=IMAGE_FILES,
        edits=edits.IMAGES,
        bombs=(edits.bomb_png,),
        commands=(
            ("predict", "run", "{file}"),
            ("predict", "run", "{file}", "--json"),
            ("predict", "run", "images/grey.png", "{file}", "--fit", "stretch"),
            ("predict", "model.onnx", "{file}"),
            ("perturb", "run", "--image", "{file}", "--out", "out.png", "--steps", "2"),
            ("routing", "run", "--image", "{file}", "--out", "out.png"),
        ),
        weight=4,
    ),
    "onnx": Target(
        copies=("model.onnx", "images"),
        files=("model.onnx",),
        edits=edits.ONNX,
        commands=(
            ("predict", "model.onnx", "images/grey.png"),
            ("predict", "model.onnx", "images/grey.png", "images/colour.png", "--json"),
        ),
        weight=3,
    ),
    "photos": Target(
        copies=("photos",),
        files=("photos",),
        edits=edits.PHOTOS,
        commands=(
            ("datasets", "folder:photos"),
            ("datasets", "folder:photos", "--sample", "3", "--out", "out.png"),
            ("datasets", "folder:photos", "--image-size", "12", "--json"),
        ),
        weight=2,
    ),
    "log": Target(
        copies=("results",),
        files=tuple(f"{LOG}/{name}" for name in ("config.json", "summary.json", "measures.json"))
        + ("results/mnist/estimate.json",) * 3,
        edits=edits.JSON,
        commands=(REPORT,),
        weight=2,
    ),
    "log of epochs": Target(
        copies=("results",), files=(f"{LOG}/metrics.csv",), edits=edits.CSV, commands=(REPORT,)
    ),
}  # fmt: skip

ODD_PATHS = (
    *("", ".", "/", "..", "-", "~nobody/x", "x\x00y", "a/b", "run\x00", "\x1b[31mrun", "run\n", "x" * 300, "x/" * 3000),
    *("\udcff\udcfe", "/dev/null", "/proc/self/mem", "/root/../etc/passwd", "fifo", "loop", "data.npz", "images"),
    *("hf://x/y", "http://127.0.0.1:9/x", "run/best/model.safetensors", "C:\\run", "*", "$HOME", " ", "run/", "./run"),
)
PATH_COMMANDS: tuple[Command, ...] = (
    ("evaluate", "{}"),
    ("evaluate", "run", "--figure", "{}"),
    ("evaluate", "run", "--data", "npz:{}"),
    ("evaluate", "run", "--data", "folder:{}"),
    ("evaluate", "run", "--data", "digits", "--data-dir", "{}"),
    ("predict", "run", "{}"),
    ("predict", "{}", "images/grey.png"),
    ("predict", "{}"),
    ("perturb", "run", "--image", "{}"),
    ("perturb", "run", "--out", "{}"),
    ("reconstruct", "run", "--out", "{}"),
    ("routing", "{}"),
    ("curves", "{}"),
    ("curves", "run", "{}"),
    ("curves", "run", "--out", "{}"),
    ("train", "--config", "{}"),
    ("train", "--resume", "{}"),
    ("train", "--config", "run/config.json", "--epochs", "1", "--no-figures", "--out", "{}"),
    ("memory", "--config", "{}"),
    ("datasets", "npz:{}"),
    ("datasets", "folder:{}"),
    ("datasets", "mnist", "--data-dir", "{}"),
    ("datasets", "npz:data.npz", "--sample", "3", "--out", "{}"),
    ("robustness", "run", "--limit", "2", "--kind", "rotation", "--figure", "{}"),
    ("reproduce", "--report", "--results", "{}"),
    ("reproduce", "--report", "--results", "results", "--page", "{}"),
    ("explore", "{}"),
    ("export", "run", "--format", "folder", "--out", "{}"),
    ("export", "{}", "--format", "folder", "--out", "shared"),
    ("share", "{}", "--repo", "a/b"),
)
"""Where a path may stand."""

BOMBS = 0.04
"""Share of the cases, where a kind of file can, whose file unpacks to very much."""
PATHS = 0.12
"""Share of the cases in which the name of a file is odd, and not what is in it."""


class Mutations(Part):
    """Damaged files, and odd names of files."""

    name, cases, share = "mutations", 2000, 0.45

    def trial(self, number: int, random: Random, folder: Path) -> Trial:
        """A copy of valid files, one of them damaged, and a command that reads it."""
        if random.random() < PATHS:
            return self._odd_path(number, random, folder)
        names = list(TARGETS)
        name = random.choices(names, [TARGETS[each].weight for each in names])[0]
        target = TARGETS[name]
        for each in target.copies:
            copy(self.fixtures / each, folder)
        file, command = random.choice(target.files), random.choice(target.commands)
        bombs = target.bombs if random.random() < BOMBS else ()
        edit = random.choice(bombs or target.edits)
        try:
            said = edit(folder / file, random)
        except Exception as error:  # an edit may ask for what cannot be written, and then less is changed
            said = f"{edit.__name__}: {type(error).__name__}"
        arguments = [part.format(file=file) for part in command]
        rules = self._rules(name, arguments, edit)
        return Trial(
            number, f"torchcaps {' '.join(arguments)}; {file}: {said}", partial(read, arguments), folder, rules
        )

    def _rules(self, name: str, arguments: Sequence[str], edit: edits.Edit) -> Rules:
        trains = arguments[0] == "train"
        same = None
        if name == "weights" and edit in edits.BYTES and "--json" in arguments:
            same = (self.fixtures / "evaluation.json").read_text(encoding="utf-8")
        return Rules(
            interrupt=10 if trains else None,
            speaks=trains,
            timeout=self.timeout,
            writes=_written(arguments),
            bounded=not trains,
            same_output=same,
            no_nan=name == "weights",
        )

    def _odd_path(self, number: int, random: Random, folder: Path) -> Trial:
        for each in ("run", "data.npz", "images", "results"):
            copy(self.fixtures / each, folder)
        if random.random() < 0.5:
            os.mkfifo(folder / "fifo")
            (folder / "loop").symlink_to("loop")
        path, command = random.choice(ODD_PATHS), random.choice(PATH_COMMANDS)
        arguments = keep_inside([part.format(path) for part in command])
        trains = command[0] == "train"
        # a figure may go to any path that ends as one: none of these does
        writes = (*_written(arguments), *map(place_of, arguments[1:]))
        rules = Rules(
            interrupt=10 if trains else None,
            speaks=trains,
            timeout=self.timeout,
            writes=writes,
            bounded=not trains,
            terminal=False,
        )
        return Trial(number, f"torchcaps {arguments!r:.300}", partial(read, arguments), folder, rules)


def copy(source: Path, folder: Path) -> None:
    """Copy a valid file, or a folder of them."""
    if source.is_dir():
        shutil.copytree(source, folder / source.name)
    else:
        shutil.copy(source, folder)


def place_of(word: str) -> str:
    """What a command may write where a word of its line names the place: that, its folders, and names that go on."""
    named = word.partition("=")[2] if word.strip("-") and word.startswith("-") else word
    if not named:
        return ""
    place = os.path.normpath(named).partition("/")[0]
    return "*" if place == "." else f"{glob.escape(place)}*"


def _written(arguments: Sequence[str]) -> tuple[str, ...]:
    """The files that a command may write."""
    match arguments[0]:
        case "train" if "--resume" in arguments:
            return RESUMED
        case "train":
            return ("new", "new/*", "runs", "runs/*")
        case "export":
            return ("shared", "shared/*", "run/pretrained*", "pretrained*")
        case "reproduce":
            return (*("page.md", "images", "images/*"), *("results/results.md", "results/images*"))
        case "curves" | "perturb" | "reconstruct" | "routing":
            return ("out*.png", "run/figures*", "perturbation.png", "routing*.png")
        case "datasets":
            return ("out.png",)
    return ()


def read(arguments: Sequence[str]) -> int:
    """Run a command of torchcaps, or a function of this module that stands for one."""
    if arguments[0] == "read_originals":
        return as_command(_read_originals, arguments[1])
    if arguments[0] == "explore":
        return explore(arguments)
    return call(arguments)


def _read_originals(file: str) -> None:
    from torchcaps.datasets.sources.affnist import read_originals

    read_originals([Path(file)])


def as_command(function: Callable[[str], None], argument: str) -> int:
    """Call a function of the library as the command line would; anything but an InputError is a traceback."""
    from torchcaps.errors import InputError, visible

    try:
        function(argument)
    except InputError as error:
        print(visible(str(error)))
        return WRONG_INPUT
    return 0


def explore(arguments: Sequence[str]) -> int:
    """`torchcaps explore`, whose page is ready and then not served: it would be until Ctrl-C."""
    import uvicorn

    uvicorn.Server.run = lambda *_, **__: None
    return call([*arguments, "--no-browser"])
