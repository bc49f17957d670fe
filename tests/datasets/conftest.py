"""What the tests of data sets share: no test sees this machine's cache or the network by accident."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torchcaps.datasets import ImageSet

_NAMED = os.environ.get("TORCHCAPS_DATA")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of downloads and no TORCHCAPS_DATA."""
    folder = tmp_path / "cache"
    monkeypatch.setattr("pooch.os_cache", lambda project: folder / project)
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return folder / "torchcaps"


@pytest.fixture
def mnist_dir() -> Path:
    """The real MNIST files."""
    from torchcaps.datasets.sources.mnist import MNIST

    if not _NAMED or MNIST.find(Path(_NAMED)) is None:
        pytest.skip("the environment variable TORCHCAPS_DATA names no folder with the four MNIST files")
    return Path(_NAMED)


@pytest.fixture
def make_set() -> Callable[..., ImageSet]:
    """Makes sets of random images, every pixel at least 1 so that zeros can only come from a shift."""

    def make(n: int = 12, shape: tuple[int, int, int] = (1, 6, 5), classes: int = 3) -> ImageSet:
        random = torch.Generator().manual_seed(n)
        images = torch.randint(1, 256, (n, *shape), generator=random, dtype=torch.uint8)
        return ImageSet(images, torch.arange(n) % classes)

    return make


@pytest.fixture
def save_image() -> Callable[..., Path]:
    """Writes an array as an image file, making its folder."""

    def save(path: Path, pixels: np.ndarray | None = None, mode: str | None = None) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(np.full((6, 5), 9, np.uint8) if pixels is None else pixels)
        (image.convert(mode) if mode else image).save(path)
        return path

    return save


@pytest.fixture
def small_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that passes for MNIST's, of 100 training and 40 test digits: an L of ink where MNIST has its digits."""
    from torchcaps.datasets.sources import mnist

    folder, random = tmp_path / "mnist", np.random.default_rng(0)
    folder.mkdir()
    for part, n in (("train", 100), ("t10k", 40)):
        images = np.zeros((n, 28, 28), np.uint8)
        images[:, 4:24, 8:11] = images[:, 21:24, 8:20] = random.integers(1, 256, (n, 1, 1))
        for name, array in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", np.arange(n, dtype=np.uint8) % 10)):
            monkeypatch.setitem(mnist.SHAPES, f"{part}-{name}", array.shape)
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (folder / f"{part}-{name}").write_bytes(header + array.tobytes())
    return folder


@pytest.fixture
def serve() -> Iterator[Callable[[dict[str, bytes]], str]]:
    """Serves files over HTTP on this machine; gives the address to put before their names."""
    served: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = served.get(self.path[1:])
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"") + ("half" in self.path)))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

        def start(files: dict[str, bytes]) -> str:
            served.update(files)
            return f"http://127.0.0.1:{http.server_port}/"

        yield start
        http.shutdown()
