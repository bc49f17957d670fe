"""Odd command lines, made from the options that the command line itself says it has."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from random import Random

import click

from hostile.mutations import ODD_PATHS, copy, explore, place_of
from hostile.program import call, keep_inside
from hostile.trials import Part, Rules, Trial

ODD_NUMBERS = (
    *("0", "-1", "1", "2", "3", "17", "999999", "1000000", "2147483648", "9223372036854775807", "9223372036854775808"),
    *("-9223372036854775809", "1e3", "1e308", "-1e308", "1e400", "nan", "inf", "-inf", "0.0", "-0.0", "0.5", "1e-300"),
    *("9" * 5000, "0x10", "1_000", "١٢", " 1", "1 ", "+1", "--1", "", "none", "true", "1,2", "½"),
)
LARGE = ("2", "3", "17", "1000", "65536", "1000000", "1000000000000", "9223372036854775807")
SIZES = (
    *("--devices", "--num-nodes", "--num-iterations", "--batch-size", "--image-size", "--conv-channels", "--max-shift"),
    *("--primary-types", "--capsule-dim", "--epochs", "--validation-size"),
)
"""Options in which a large number does most."""
ODD_LISTS = (
    *("", ",", "1,", ",1", "0", "-1,5", "1,2,3", ",".join("1" * 3000), "99999999999999999999", "none", "none,1", "1.5"),
    *("nan,1", "inf", "0,0,0", "1e308,-1e308", "512;1024", "1 2", "0.1,0.2,0.2", "-0.5", "2,1000000000000"),
)
ODD_WORDS = (
    *("", " ", "none", "None", "auto", "digits", "mnist", "smallnorb", "svhn", "npz:", "npz:data.npz", "folder:photos"),
    *("folder:", "npz:/", "npz:\x00", "x:y", ":", "\x1b[31m", "[bold]", "a/b", "--", "-h", "%s", "é", "x" * 5000),
    *("\udcff", "0", "-1", "sabour2017", "baseline-cnn", "Ash", "ash", "Birch", "3", "multimnist", "digits-pairs"),
)
FIGURES = ("out.png", "out.pdf", "out.svg", "out.xyz", "out", ".png", "a/b/c.png", "photos.png/x.png", "data.npz/x.png")
TINY = "--conv-channels 8 --primary-types 2 --capsule-dim 4 --decoder-hidden 16 --batch-size 16 --epochs 1"
SMALL = "--limit-train 100 --limit-test 50 --validation-size 12 --accelerator cpu --no-figures"
WRITES = (
    *(
        "inside*",
        "out*",
        "new*",
        "runs*",
        "run/figures*",
        "run/model.*",
        "run/pretrained*",
        "a",
        "a/*",
        "shared*",
        "page*",
    ),
    *(
        "*.png",
        "*.pdf",
        "*.svg",
        "model.onnx",
        "model.pt2",
        "pretrained*",
        "results/*",
        "images*",
        "docs*",
        "x" * 20 + "*",
    ),
)
"""What commands may write where nothing was refused: figures, runs and exported networks, where they were told to."""
PATIENCE = 8.0
"""Seconds until a command that works gets Ctrl-C."""


class Commands(Part):
    """Odd command lines.

    A command may end well, be refused with exit code 2, or diverge (1); one that still works after a while must end by
    Ctrl-C, as the user's own would.
    """

    name, cases, share = "commands", 500, 0.25

    def trial(self, number: int, random: Random, folder: Path) -> Trial:
        """A command with what it needs, and some of its options with odd values."""
        for each in ("run", "data.npz", "images", "photos", "results", "model.onnx"):
            copy(self.fixtures / each, folder)
        arguments = keep_inside(_draw(random))
        # files of the names that were typed are the user's wish
        there = ("run", "results", "images", "data.npz", "photos", "model.onnx")
        writes = (*WRITES, *(place_of(word) for word in arguments[1:] if word not in there))
        rules = Rules(
            interrupt=PATIENCE,
            speaks=arguments[:1] == ["train"],
            timeout=self.timeout, writes=writes, bounded=False, terminal=False
        )  # fmt: skip
        run = explore if arguments and arguments[0] == "explore" else call
        return Trial(number, f"torchcaps {shlex.join(arguments)}"[:3000], partial(run, arguments), folder, rules)


def _draw(random: Random) -> list[str]:
    from torchcaps.cli.app import app

    if random.random() < 0.03:
        return [random.choice((*ODD_WORDS, "trian", "--version", "--help")) for _ in range(random.randrange(4))]
    name = random.choice([*app.commands, "train", "train", "train", "memory", "evaluate", "robustness"])
    command = app.commands[name]
    arguments = [name, *_usual(name, random)]
    if name in ("train", "memory") and random.random() < 0.3:  # alone: another error would come before it
        return [*arguments, random.choice(SIZES), random.choice(LARGE)]
    # --debug shows tracebacks, as it should
    options = [each for each in command.params if isinstance(each, click.Option) and each.opts != ["--debug"]]
    for option in random.sample(options, min(len(options), random.choice((1, 1, 2, 3, 4)))):
        arguments += _odd(option, random)
    if random.random() < 0.1:
        arguments.insert(random.randrange(1, len(arguments) + 1), random.choice((*ODD_WORDS, *ODD_PATHS[:20])))
    if random.random() < 0.05:
        arguments.append("--debuggery")
    return arguments


def _usual(name: str, random: Random) -> list[str]:
    """What makes a command small and able to work; the path among it is odd at times."""
    run = "run" if random.random() < 0.85 else random.choice(ODD_PATHS)
    match name:
        case "train" | "memory":
            data = random.choice((["--data", "npz:data.npz"], ["--data", "npz:data.npz"], ["--data", "digits"], []))
            preset = random.choice(([], [], ["sabour2017"], ["tf-notebook"], ["baseline-cnn"], ["no-such-preset"]))
            tiny = (
                TINY.split() if preset != ["baseline-cnn"] else ["--channels", "4,6", "--hidden", "8", "--epochs", "1"]
            )
            out = ["--out", "new"] if name == "train" else []
            small = SMALL.split() if name == "train" else SMALL.split()[:-1]
            return [*preset, *data, *tiny, *small, *out]
        case "evaluate" | "reconstruct" | "perturb" | "routing" | "curves" | "export" | "explore":
            return [run]
        case "predict":
            return [run, "images/grey.png"]
        case "robustness":
            return [run, "--limit", "4"]
        case "share":
            return [run, "--repo", random.choice(("a/b", *ODD_WORDS))]
        case "presets":
            return random.choice(([], ["sabour2017"], [random.choice(ODD_WORDS)]))
        case "datasets":
            return random.choice(([], ["digits"], ["npz:data.npz"], ["folder:photos"], [random.choice(ODD_WORDS)]))
        case "reproduce":
            return random.choice(
                (["--report", "--results", "results"], ["digits", "--list"], ["digits"], ["mnist"], [])
            )
    return []


def _odd(option: click.Option, random: Random) -> list[str]:
    """An option with a value that it was not made for, or hardly."""
    name = random.choice([*option.opts, *option.secondary_opts])
    if option.is_flag:
        return [f"{name}=x"] if random.random() < 0.1 else [name]
    kind = type(option.type).__name__
    if kind == "OrNone":
        kind = type(option.type.inner).__name__
    if random.random() < 0.03:
        return [name]
    match kind:
        case "IntRange" | "IntParamType" | "FloatParamType" | "FloatRange":
            value = random.choice((*ODD_NUMBERS, *LARGE, *LARGE))
        case "Integers" | "Numbers":
            value = random.choice((*ODD_LISTS, *ODD_NUMBERS))
        case "Choice":
            value = random.choice((*option.type.choices, *option.type.choices, *ODD_WORDS))
        case "FigurePath":
            value = random.choice((*FIGURES, *ODD_PATHS))
        case "Path":
            value = random.choice((*ODD_PATHS, "run", "run/config.json", "results", "new"))
        case _:
            value = random.choice((*ODD_WORDS, *ODD_PATHS, *ODD_NUMBERS))
    return [f"{name}={value}"] if random.random() < 0.3 else [name, value]
