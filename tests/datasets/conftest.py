"""What the tests of data sets share: no test sees this machine's cache or the network by accident."""

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from tiny_runs import mnist_files, write_files

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
def small_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that passes for MNIST's, of 100 training and 40 test digits: an L of ink where MNIST has its digits."""
    random, images = np.random.default_rng(0), [np.zeros((n, 28, 28), np.uint8) for n in (100, 40)]
    for each in images:
        each[:, 4:24, 8:11] = each[:, 21:24, 8:20] = random.integers(1, 256, (len(each), 1, 1))
    return write_files(tmp_path / "mnist", mnist_files(monkeypatch, images, [np.arange(n) % 10 for n in (100, 40)]))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[dict[str, bytes]], str]]:
    """Serves files over HTTP on this machine; gives the address to put before their names."""
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path / "served")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

        def start(files: dict[str, bytes]) -> str:
            write_files(tmp_path / "served", files)
            return f"http://127.0.0.1:{http.server_port}/"

        yield start
        http.shutdown()
