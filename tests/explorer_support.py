"""What the explorer's tests share: networks, and the wait for the page."""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from torchcaps.explorer import Explorer, open_explorer
from torchcaps.models import Network, create_model
from torchcaps.models.files import SHIPPED
from torchcaps.training import load_run

if TYPE_CHECKING:
    from playwright.sync_api import Page


def small_network(
    preset: str = "sabour2017", num_classes: int = 4, in_shape: tuple[int, int, int] = (1, 18, 20), **fields: Any
) -> Network:
    """An untrained network, in evaluation mode, whose coupling differs from uniform."""
    torch.manual_seed(0)
    small: dict[str, Any] = {"channels": (2, 2), "hidden": (6,)}
    if preset != "baseline-cnn":
        small = {"conv_channels": 6, "primary_types": 3, "capsule_dim": 5}
        small |= {"decoder_hidden": (8,)} if fields.get("decoder", True) else {}
    model = create_model(preset, in_shape, num_classes, **(small | fields)).eval()
    if hasattr(model, "class_capsules"):
        with torch.no_grad():
            model.class_capsules.transform.weight.mul_(100)
    return model


def shipped() -> Explorer:
    """The network that comes with torchcaps."""
    return open_explorer(load_run(SHIPPED["compact"]))


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a plain file server of a folder, as a saved page has it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:  # without it, a failed test would wait for the server for ever
            server.shutdown()


def settle(page: Page) -> None:
    """Wait until nothing is asked or drawn any more."""
    page.locator('.explorer[aria-busy="false"] .verdict strong').wait_for()


def png(image: np.ndarray) -> bytes:
    """The contents of an image file."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()
