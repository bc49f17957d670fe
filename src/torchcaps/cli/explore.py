"""``torchcaps explore``: a page on which one draws and watches capsules respond, or a network learn."""

from __future__ import annotations

import os
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from torchcaps.cli.options import Data, DataDir, MaxMegapixels, WhichEpoch, command
from torchcaps.cli.runs import open_runs, refuse_options
from torchcaps.cli.show import say, typed
from torchcaps.ranges import Range

if TYPE_CHECKING:
    from torchcaps.explorer import Explorer


@command(
    ("explore", "the network that comes with torchcaps; Ctrl-C ends it"),
    ("explore runs/first-digits-1", "a network of your own"),
    ("explore runs/first-digits-1 runs/cnn-matched-digits-1", "two networks side by side"),
    ("explore --train digits", "watch a network learn; about a minute"),
    ("explore runs/first-digits-1 --no-browser --port 8000", "only serve it, at a port of its own"),
    ("explore runs/first-digits-1 --save site", "write the page as files, for any web server"),
)
def explore(
    run: Sequence[Path] = (),
    *,
    which: WhichEpoch = "best",
    train: Annotated[str | None, "Train the preset first on this data set, and watch it learn."] = None,
    data: Data = None,
    data_dir: DataDir = None,
    max_megapixels: MaxMegapixels = None,  # noqa: ARG001  applied as it is read
    port: Annotated[int | None, Range(0, 65_535, whole=True), "Where to listen; by default 7860 or a free one."] = None,
    browser: Annotated[bool, "Open the page in the browser, not only print its address."] = True,
    save: Annotated[Path | None, "Write the page to this new folder, where the network runs in the browser."] = None,
) -> None:
    """Draw, upload or pick an image and watch the capsules: lengths, reconstruction, components, routing.

    The page is served on this machine only, needs no internet, and sends nothing anywhere. Two networks are shown side
    by side, with the images of the first.
    """
    if len(run) > 2:
        raise click.UsageError(f"one network is explored, or two side by side, got {len(run)}")
    if save is not None:
        refuse_options(("port", "browser"), "is for a page that is served, and --save writes one")
        if len(run) > 1:
            raise click.UsageError("--save writes the page of one network, got two")
    if train is not None:
        if run:
            raise click.UsageError("--train trains a network of its own; leave RUN or --train out")
        refuse_options(("which", "data", "save"), "does not go with --train")
        return watch(train, data_dir, port, browser)

    import torch

    from torchcaps.explorer import open_explorer, serving, write_page

    torch.set_num_threads(1)  # an image at a time is no quicker with more, and much slower while others compute
    explorers = []
    for name, _, opened in open_runs(run, which):
        explorers.append(open_explorer(opened, data, data_dir))
        explorers[-1].name = name
    if save is not None:
        write_page(explorers[0], save)
        return say(f"Wrote the page to {save}.", f"See it by: python -m http.server --directory {save}")
    with serving(explorers, port) as address, until_stopped():
        announce(explorers, address, browser)
    return None


def watch(data: str, data_dir: str | None, port: int | None, browser: bool) -> None:
    """Train a network in an ordinary run, and serve the page of it meanwhile, and afterwards until Ctrl-C."""
    import torch

    from torchcaps.cli.train import show_summary
    from torchcaps.explorer import Learning, serving
    from torchcaps.training import load_run, make_config, train
    from torchcaps.training.progress import choose_progress

    config = make_config(data=data, data_dir=data_dir)
    torch.set_num_threads(max((os.cpu_count() or 2) - 1, 1))  # one core is for the page
    learning = Learning(config, choose_progress())
    with serving([learning.explorer], port, learning) as address:
        announce([learning.explorer], address, browser)
        summary = train(config, progress=learning, figures=False, command=typed())
        with until_stopped():
            learning.end(load_run(summary["out"]), summary["test"]["best"]["accuracy"])
            show_summary(summary)


def announce(explorers: Sequence[Explorer], address: str, browser: bool) -> None:
    """Print where the page is, and open it in the browser."""
    say(f"Exploring {' and '.join(each.title for each in explorers)} at {address}", "Ctrl-C ends it.")
    if browser:  # a browser in the terminal would keep the command from going on
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


@contextmanager
def until_stopped() -> Iterator[None]:
    """Wait for Ctrl-C or SIGTERM at the end of the context; one that comes earlier counts too."""
    from torchcaps.training.progress import noted_signals

    stopped = threading.Event()
    with noted_signals(react=stopped.set):
        yield
        while not stopped.wait(0.5):  # on Windows, Ctrl-C does not end a wait without a limit
            pass
