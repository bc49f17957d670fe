"""``torchcaps share``: a trained network and its model card, put on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

import click

from torchcaps.cli.base import Command
from torchcaps.cli.export import card_options
from torchcaps.cli.output import say
from torchcaps.cli.runs import Which, open_run, run_argument


@click.command(
    "share",
    cls=Command,
    short_help="Put a network and its model card on the Hugging Face hub.",
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
