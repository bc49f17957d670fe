"""The numbers of the page *Watch a layer learn*.

    python docs/learning_page.py vote       # docs/assets/learning/vote.json, from the weights of `compact`
    python docs/learning_page.py measure    # the table of the page: its own scripts in a browser, 20 random seeds
    python docs/learning_page.py picture    # docs/images/learning.png

``vote`` needs MNIST (``TORCHCAPS_DATA`` or a download). All other pictures need playwright and Chromium (or
``CHROMIUM=/path/to/one``); ``measure`` takes a few minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchcaps import load_pretrained
from torchcaps.datasets import load_dataset
from torchcaps.explorer.patches import find_patches
from torchcaps.models import CapsNet

if TYPE_CHECKING:
    from playwright.sync_api import Browser

DOCS = Path(__file__).parent
FOLDER, IMAGE = DOCS / "assets" / "learning", DOCS / "images" / "learning.png"
PLAYGROUND = DOCS.parent / "src" / "torchcaps" / "explorer" / "page" / "playground.css"
DIGIT = 4  # number of the test image: a four
DECIMALS = 4  # of the numbers in vote.json
SEEDS, STEPS, NOISE, RATES = 20, 300, 0.1, (0.3, 1, 3, 10)
MEASURE = "async options => (await import('/assets/learning/layer.js')).measure(options)"


def one_vote(pixels: Tensor) -> dict[str, Any]:
    """Return the numbers of one vote in each cell of `compact`, for an image.

    Args:
        pixels: Bytes of the image (H, W).

    Returns:
        The image, and for each cell the pose, the matrix and the coupling of the capsule that is most strongly coupled
        with the winning class; ``sum`` is the weighted sum of the votes of all capsules. Numbers are rounded.
    """
    network = load_pretrained("compact")
    assert isinstance(network, CapsNet)
    with torch.no_grad():
        image = pixels[None, None].float() / 255
        output = network(image, return_coupling=True)
        poses = network.capsules(image)[0].poses[0]  # (I, K)
    winner = int(output.lengths.argmax())
    coupling = output.coupling[0, :, winner]  # (I,)
    matrices = network.layers[-1].transform.matrices.detach()[:, winner]  # (I, D, K)
    votes = torch.einsum("idk,ik->id", matrices, poses)
    types, rows, columns = network.flow[-2].grid
    strongest = coupling.unflatten(0, (types, rows * columns)).argmax(0)  # (rows · columns,)
    capsules = strongest * rows * columns + torch.arange(rows * columns)
    return {
        "digit": winner,
        "shape": list(pixels.shape),
        "pixels": pixels.flatten().tolist(),
        "size": [rows, columns],
        "patch": find_patches(network),
        "types": types,
        "classes": output.lengths.shape[1],
        "first": int(coupling[capsules].argmax()),
        "sum": rounded(torch.einsum("i,id->d", coupling, votes)),
        "cells": [
            {"pose": rounded(poses[i]), "matrix": rounded(matrices[i]), "coupling": rounded(coupling[i])}
            for i in capsules
        ],
    }


def rounded(numbers: Tensor) -> Any:
    """Return numbers as lists, with few decimals, so that the file stays small."""
    values = numbers.tolist()
    each = lambda value: [each(one) for one in value] if isinstance(value, list) else round(value, DECIMALS)  # noqa: E731
    return each(values)


@contextlib.contextmanager
def served(folder: Path = DOCS) -> Iterator[str]:
    """Serve a folder on this machine; the address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        extensions_map = http.server.SimpleHTTPRequestHandler.extensions_map | {".js": "text/javascript"}

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def measure(browser: Browser, address: str, distractors: int, rate: float, seeds: int = SEEDS) -> list[list[Any]]:
    """Train with and without routing in a browser; the results (seeds, [3 iterations, uniform])."""
    page = browser.new_page()
    page.goto(f"{address}/assets/learning/")
    options = {"seeds": seeds, "steps": STEPS, "iterations": [3, 1], "rate": rate, "noise": NOISE}
    results: list[list[Any]] = page.evaluate(MEASURE, options | {"distractors": distractors})
    page.close()
    return results


def row(distractors: int, rate: float, results: list[list[Any]]) -> str:
    """Return a row of the page's table."""
    spread = lambda numbers, digits: f"{mean(numbers):.{digits}f} ± {stdev(numbers):.{digits}f}"  # noqa: E731
    accuracy = [[100 * result[n]["accuracy"] for result in results] for n in (1, 0)]
    difference = [routed - uniform for uniform, routed in zip(*accuracy, strict=True)]
    loss = [spread([result[n]["loss"] for result in results], 3) for n in (1, 0)]
    cells = [str(distractors), f"{rate:g}", *(spread(each, 1) for each in accuracy), spread(difference, 1), *loss]
    return f"| {' | '.join(cells)} |".replace("| -", "| −")


def print_table(browser: Browser, address: str) -> None:
    """Measure and print all rows."""
    for distractors in (0, 1, 2):
        for rate in RATES:
            results = measure(browser, address, distractors, rate)
            print(row(distractors, rate, results))
            coupled = [f"{mean(result[0][name] for result in results):.2f}" for name in ("own", "distractor")]
            winners = [f"{mean(result[n]['winner'] for result in results):.2f}" for n in (0, 1)]
            print("  coupling with the right whole, own parts and distractors:", *coupled)
            print("  mean length of the winner, 3 iterations and uniform:", *winners, flush=True)


def take_picture(browser: Browser, address: str) -> None:
    """Take the picture of the page after its training."""
    page = browser.new_page(viewport={"width": 760, "height": 700})
    page.goto(f"{address}/assets/learning/")
    style = PLAYGROUND.read_text(encoding="utf-8") + (FOLDER / "learning.css").read_text(encoding="utf-8")
    page.set_content(f"<style>body {{ font: 15px sans-serif }} {style}</style><div class='playground learning'></div>")
    page.add_script_tag(url="/assets/learning/learning.js", type="module")
    page.locator(".side").first.wait_for()
    for _ in range(STEPS // 10):
        page.evaluate("document.querySelector('.learning').learning.advance(10)")
    page.locator(".learning").screenshot(path=IMAGE)


def main() -> None:
    """Write the file, print the table, or take the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["vote", "measure", "picture"])
    what = parser.parse_args().what
    if what == "vote":
        pixels = load_dataset("mnist").test.images[DIGIT, 0]
        (FOLDER / "vote.json").write_text(json.dumps(one_vote(pixels), separators=(",", ":")) + "\n", encoding="utf-8")
        return
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with served() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        (print_table if what == "measure" else take_picture)(browser, address)
        browser.close()


if __name__ == "__main__":
    main()
