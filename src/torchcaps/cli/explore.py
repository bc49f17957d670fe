"""``torchcaps explore``: a page on which one draws and watches capsules respond."""

from __future__ import annotations

import threading
import webbrowser
from pathlib import Path

import click

from torchcaps.cli.base import Command
from torchcaps.cli.output import say
from torchcaps.cli.runs import (
    Which,
    dataset_options,
    images_for,
    max_megapixels_option,
    open_run,
    optional_run_argument,
)


@click.command(
    "explore",
    cls=Command,
    short_help="Draw, and watch the capsules respond, in the browser.",
    examples=(
        ("explore", "the network that comes with torchcaps; Ctrl-C ends it"),
        ("explore runs/sabour2017-digits-1", "a network of your own"),
        ("explore runs/sabour2017-digits-1 --no-browser --port 8000", "only serve it, at a port of its own"),
    ),
)
@optional_run_argument
@dataset_options
@max_megapixels_option
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Where to listen on 127.0.0.1.  [default: 7860 or another free one]"
)
@click.option("--no-browser", is_flag=True, help="Do not open the browser, only print the address.")
def explore(
    run_folder: Path | None, which: Which, data: str | None, data_dir: str | None, port: int | None, no_browser: bool
) -> None:
    """Draw, upload or pick an image and watch the capsules: lengths, reconstruction, components, routing.

    The page is served on this machine only, needs no internet, and sends nothing anywhere. RUN is a run folder, a
    folder written by save_pretrained, or a repository of the hub such as someone/capsnet; without it, the page shows
    the network that comes with torchcaps. It needs the extra torchcaps[explore].
    """
    import torch

    from torchcaps.explorer import open_explorer, serve

    torch.set_num_threads(1)  # an image at a time is no quicker with more, and much slower while others compute
    run = open_run(run_folder, which)
    explorer = open_explorer(run, images_for(run, data), data_dir)

    def ready(address: str) -> None:
        say(f"Exploring {explorer.title} at {address}", "Ctrl-C ends it.")
        if not no_browser:  # a browser in the terminal would keep the page from being served
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

    serve(explorer, port, ready)
