"""``torchcaps explore``: a page to draw on and to watch capsules respond."""

from __future__ import annotations

import threading
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from torchcaps.cli.options import MaxMegapixels, OtherData, WhichEpoch, command
from torchcaps.cli.runs import open_runs, refuse_options
from torchcaps.cli.show import say
from torchcaps.ranges import Range

if TYPE_CHECKING:
    from torchcaps.explorer import Explorer


@command(
    ("explore", "the network that comes with torchcaps; Ctrl-C ends it"),
    ("explore runs/first-digits-1", "a network of your own"),
    ("explore runs/first-digits-1 runs/cnn-matched-digits-1", "two networks side by side"),
    ("explore runs/first-digits-1 --no-browser --port 8000", "serve the page at this port, without opening a browser"),
    ("explore runs/first-digits-1 --save site", "write the page as files, for any web server"),
)
def explore(
    run: Sequence[Path] = (),
    *,
    which: WhichEpoch = "best",
    source: OtherData,
    max_megapixels: MaxMegapixels = None,  # noqa: ARG001  applied when it is parsed
    port: Annotated[
        int | None, Range(0, 65_535, whole=True), "Port of the page (default: 7860, or a free one if that is taken)."
    ] = None,
    browser: Annotated[bool, "Open the page in the browser."] = True,
    save: Annotated[
        Path | None, "Write the page as files to this new folder; the network then runs in the browser."
    ] = None,
) -> None:
    """Draw, upload or pick an image and watch the capsules: lengths, reconstruction, components, routing.

    The page is served on this machine only, needs no internet, and sends nothing anywhere. Two networks are shown side
    by side, with the test images of the first.
    """
    if len(run) > 2:
        raise click.UsageError(f"explore takes one run, or two to show side by side, got {len(run)}")
    if save is not None:
        refuse_options(("port", "browser"), "is for a served page, but --save writes the page as files")
        if len(run) > 1:
            raise click.UsageError("--save writes the page of one network, got two")

    import torch

    from torchcaps.explorer import open_explorer, serving, write_page

    torch.set_num_threads(1)  # more threads do not speed up single images, and slow them down on a busy machine
    explorers = []
    for name, _, opened in open_runs(run, which):
        explorers.append(open_explorer(opened, source.data, source.data_dir, by_number=source.by_number))
        explorers[-1].name = name
    if save is not None:
        write_page(explorers[0], save)
        return say(f"Wrote the page to {save}.", f"To see it: python -m http.server --directory {save}")
    with serving(explorers, port) as address, until_stopped():
        announce(explorers, address, browser)
    return None


def _refuse_training(_: click.Context, __: click.Parameter, data: str | None) -> None:
    if data is not None:
        raise click.UsageError(f"--train was removed; first torchcaps train --data {data}, then torchcaps explore RUN")


explore.params.append(click.Option(["--train"], hidden=True, expose_value=False, callback=_refuse_training))


def announce(explorers: Sequence[Explorer], address: str, browser: bool) -> None:
    """Print the address of the page, and open it in the browser."""
    say(f"Exploring {' and '.join(each.title for each in explorers)} at {address}", "Ctrl-C ends it.")
    if browser:  # a text browser in the terminal would block the command
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


@contextmanager
def until_stopped() -> Iterator[None]:
    """Wait for Ctrl-C or SIGTERM at the end of the context; an earlier signal ends the wait at once."""
    from torchcaps.training.progress import noted_signals

    stopped = threading.Event()
    with noted_signals(react=stopped.set):
        yield
        while not stopped.wait(0.5):  # on Windows, Ctrl-C does not interrupt a wait without a timeout
            pass
