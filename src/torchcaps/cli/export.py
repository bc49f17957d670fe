"""``torchcaps export`` and ``share``: a trained network as a file that runs elsewhere, as a folder, or on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from torchcaps.cli.base import Command, compose
from torchcaps.cli.runs import PATH, Which, has_folder, open_run, optional_run_argument, run_argument
from torchcaps.cli.show import say

Format = Literal["onnx", "torch", "folder"]

NAMES: dict[Format, str] = {"onnx": "model.onnx", "torch": "model.pt2", "folder": "pretrained"}
"""What each format's file is called where the user gives no name."""

card_options = compose(
    click.option(
        "--half", is_flag=True, help="Store the weights in half precision, and test them again after rounding."
    ),
    click.option(
        "--other-seed",
        "others",
        metavar="RUN",
        multiple=True,
        type=PATH,
        help="Another run of the same training with another seed: the model card gives the mean over all. May be "
        "given several times.",
    ),
)


@click.command(
    "export",
    cls=Command,
    examples=(
        ("export runs/sabour2017-digits-1", "RUN/model.onnx, checked against PyTorch by onnxruntime"),
        ("export runs/sabour2017-digits-1 --format torch --out digits.pt2", "for torch.export.load, without torchcaps"),
        ("export runs/sabour2017-digits-1 --format folder --half", "weights, classes and model card, to pass on"),
        ("export --out compact.onnx", "the network that comes with torchcaps"),
    ),
)
@optional_run_argument
@click.option(
    "--format",
    "kind",
    type=click.Choice(list(NAMES)),
    default="onnx",
    help="ONNX, a torch.export program, or a folder such as save_pretrained writes with a model card of the run. "
    "Reading a torch.export program can execute code: load one only from people you trust, and pass on one of the "
    "other two.",
)
@click.option(
    "--out", type=PATH, help="File (.onnx or .pt2) or new folder.  [default: model.onnx, model.pt2, pretrained in RUN]"
)
@card_options
def export(
    run_folder: Path | None, which: Which, kind: Format, out: Path | None, half: bool, others: tuple[Path, ...]
) -> None:
    """Write a trained network so that it runs elsewhere; without RUN, the network that comes with torchcaps.

    RUN is a run folder, a folder written by save_pretrained, or a repository of the hub such as someone/capsnet.
    A file takes any number of images (B, C, H, W) with pixels 0 to 1 and gives `lengths` and, where the network has a
    decoder, `reconstruction`. Its output is compared with the network's on test images, one at a time and many
    together; a file that differs by more than 1e-4 is not left behind. `torchcaps predict` takes an .onnx file.
    """
    if kind != "folder" and (half or others):
        raise click.UsageError(f"{'--half' if half else '--other-seed'} is for --format folder; leave it out")
    run = open_run(run_folder, which)
    path = (run_folder if has_folder(run_folder) else Path()) / NAMES[kind] if out is None else out
    if kind == "folder":
        from torchcaps.export import export_folder

        export_folder(run, path, which, half=half, others=others)
        say(f"wrote {path}; its README.md is the model card, torchcaps share puts it on the hub")
        return

    from torchcaps.export import describe_run, export_onnx, export_program, sample_images

    images, words = sample_images(run)
    write = export_onnx if kind == "onnx" else export_program
    agreement = write(run.model, path, describe_run(run), images)
    say(f"Compared with the network on {words}: {agreement}")
    say(f"wrote {path} ({path.stat().st_size / 2**20:.1f} MiB)")


@click.command(
    "share",
    cls=Command,
    examples=(
        ("share runs/sabour2017-digits-1 --repo someone/capsnet-digits", "for all to read"),
        ("share runs/sabour2017-digits-1 --repo someone/capsnet-digits --private", "for yourself"),
    ),
)
@run_argument
@click.option("--repo", metavar="NAME", required=True, help="Repository of the hub, made if it is not there.")
@click.option("--private", is_flag=True, help="If the repository is new, only you can read it.")
@card_options
def share(run_folder: Path, which: Which, repo: str, private: bool, half: bool, others: tuple[Path, ...]) -> None:
    """Put a run's network on the Hugging Face hub, with a model card of its data, recipe, accuracy and limits.

    Nothing else of the run is uploaded. The hub knows you by `hf auth login`, or by the environment variable HF_TOKEN.
    To see what would be uploaded: `torchcaps export RUN --format folder`.
    """
    from torchcaps.export import share as put

    address = put(open_run(run_folder, which), repo, which, private=private, half=half, others=others)
    say(f"shared at {address}")
