"""``torchcaps export`` and ``share``: write a trained network as a file or a folder, or upload it to the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from torchcaps.cli.options import WhichEpoch, command
from torchcaps.cli.runs import files_of, open_run, refuse_options
from torchcaps.cli.show import say
from torchcaps.files import check_targets

Format = Literal["onnx", "torch", "folder"]
NAMES: dict[Format, str] = {"onnx": "model.onnx", "torch": "model.pt2", "folder": "pretrained"}
"""Default name of the file or folder of each format."""
Half = Annotated[bool, "Store float16 weights, and test the network again after rounding."]
OtherSeeds = Annotated[Sequence[Path], "Run of another seed, for means in the model card; may be repeated."]


@command(
    ("export runs/first-digits-1", "RUN/model.onnx, checked against PyTorch by onnxruntime"),
    ("export runs/first-digits-1 --format torch --out digits.pt2", "for torch.export.load, without torchcaps"),
    ("export runs/first-digits-1 --format folder --half", "weights, classes and model card, to share"),
    ("export --out compact.onnx", "the network that comes with torchcaps"),
)
def export(
    run: Path | None = None,
    *,
    which: WhichEpoch = "best",
    format: Annotated[Format, "ONNX, a torch.export program, or a folder with weights and a model card."] = "onnx",
    out: Annotated[Path | None, "File or new folder (default: model.onnx, model.pt2 or pretrained, in RUN)."] = None,
    overwrite: Annotated[bool, "Replace the file of --out."] = False,
    half: Half = False,
    other_seed: OtherSeeds = (),
) -> None:
    """Write a trained network as a file that runs without torchcaps, or as a folder to share.

    A file takes any number of images (B, C, H, W) with pixels 0 to 1, or of sequences (B, C, 1, l) of any length up to
    the longest in training. It returns `lengths` and, if the network has a decoder, `reconstruction`. Its output is
    compared with the network's on test images, one at a time and many together; a file that differs by more than 1e-4
    is removed. `torchcaps predict` reads .onnx files.
    Reading a torch.export program can execute code, so load programs only from people you trust.
    """
    if format != "folder":
        refuse_options(("half", "other_seed"), "is for --format folder")
    else:
        refuse_options(("overwrite",), "replaces a file, but --format folder writes a new folder")
    path = out or (run if run is not None and run.is_dir() else Path()) / NAMES[format]
    if format != "folder":
        check_targets([path], files_of(run), overwrite=overwrite)
    opened = open_run(run, which)
    from torchcaps import export as to

    if format == "folder":
        to.export_folder(opened, path, which, half=half, others=other_seed)
        return say(f"wrote {path}; its README.md is the model card, torchcaps share puts it on the hub")
    images, words = to.sample_images(opened)
    write = to.export_onnx if format == "onnx" else to.export_program
    agreement = write(opened.model, path, to.describe_run(opened), images)
    say(f"Compared with the network on {words}: {agreement}")
    return say(f"wrote {path} ({path.stat().st_size / 2**20:.1f} MiB)")


@command(
    ("share runs/first-digits-1 --repo someone/capsnet-digits", "public"),
    ("share runs/first-digits-1 --repo someone/capsnet-digits --private", "only you can read it"),
)
def share(
    run: Path,
    *,
    which: WhichEpoch = "best",
    repo: Annotated[str, "Repository of the hub, OWNER/NAME; created if missing."],
    private: Annotated[bool, "Make a new repository private."] = False,
    half: Half = False,
    other_seed: OtherSeeds = (),
) -> None:
    """Upload a run's network to the Hugging Face hub, with a model card of its data, recipe, accuracy and limits.

    Nothing else of the run is uploaded. Log in by `hf auth login`, or set the environment variable HF_TOKEN.
    `torchcaps export RUN --format folder` writes the same files to your disk.
    """
    from torchcaps.export import share as put

    address = put(open_run(run, which), repo, which, private=private, half=half, others=other_seed)
    say(f"shared at {address}")
