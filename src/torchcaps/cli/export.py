"""``torchcaps export`` and ``share``: a trained network as a file that runs elsewhere, as a folder, or on the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import click

from torchcaps.cli.options import Given, RunFolder, WhichEpoch, command
from torchcaps.cli.runs import has_folder, open_run
from torchcaps.cli.show import say

Format = Literal["onnx", "torch", "folder"]

NAMES: dict[Format, str] = {"onnx": "model.onnx", "torch": "model.pt2", "folder": "pretrained"}
"""What each format's file is called where the user gives no name."""

Half = Annotated[bool, Given("Store the weights in half precision, and test them again after rounding.")]
Others = Annotated[
    Sequence[Path],
    Given(
        "Another run of the same training with another seed: the model card gives the mean over all. May be given "
        "several times.",
        metavar="RUN",
        name="--other-seed",
    ),
]


@command(
    ("export runs/sabour2017-digits-1", "RUN/model.onnx, checked against PyTorch by onnxruntime"),
    ("export runs/sabour2017-digits-1 --format torch --out digits.pt2", "for torch.export.load, without torchcaps"),
    ("export runs/sabour2017-digits-1 --format folder --half", "weights, classes and model card, to pass on"),
    ("export --out compact.onnx", "the network that comes with torchcaps"),
)
def export(
    run_folder: RunFolder = None,
    *,
    which: WhichEpoch = "best",
    kind: Annotated[
        Format,
        Given(
            "ONNX, a torch.export program, or a folder such as save_pretrained writes with a model card of the run. "
            "Reading a torch.export program can execute code: load one only from people you trust, and pass on one of "
            "the other two.",
            name="--format",
        ),
    ] = "onnx",
    out: Annotated[
        Path | None,
        Given("File (.onnx or .pt2) or new folder.", default="model.onnx, model.pt2, pretrained in RUN"),
    ] = None,
    half: Half = False,
    others: Others = (),
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


@command(
    ("share runs/sabour2017-digits-1 --repo someone/capsnet-digits", "for all to read"),
    ("share runs/sabour2017-digits-1 --repo someone/capsnet-digits --private", "for yourself"),
)
def share(
    run_folder: Annotated[Path, Given(metavar="RUN")],
    *,
    which: WhichEpoch = "best",
    repo: Annotated[str, Given("Repository of the hub, made if it is not there.", metavar="NAME")],
    private: Annotated[bool, Given("If the repository is new, only you can read it.")] = False,
    half: Half = False,
    others: Others = (),
) -> None:
    """Put a run's network on the Hugging Face hub, with a model card of its data, recipe, accuracy and limits.

    Nothing else of the run is uploaded. The hub knows you by `hf auth login`, or by the environment variable HF_TOKEN.
    To see what would be uploaded: `torchcaps export RUN --format folder`.
    """
    from torchcaps.export import share as put

    address = put(open_run(run_folder, which), repo, which, private=private, half=half, others=others)
    say(f"shared at {address}")
