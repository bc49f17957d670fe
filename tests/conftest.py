"""What all tests share: one thread, a seed, and skips that say why."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from filelock import FileLock

from torchcaps.ops.memory import set_working_memory

if TYPE_CHECKING:
    from playwright.sync_api import Browser


pytest.register_assert_rewrite("support")


def pytest_configure() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it; tests send it
    torch.set_num_threads(1)  # sums in one order, and no fight over cores between tests that run side by side


def browser_path() -> str | None:
    """The first browser that is installed; None without one, or without playwright, which drives it."""
    browsers = map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))
    return next(filter(None, browsers), None) if importlib.util.find_spec("playwright") else None


def missing() -> Iterator[tuple[str, str]]:
    """The marks of tests that cannot run here, and what they need."""
    folder = os.environ.get("TORCHCAPS_DATA")
    if not folder or not any(Path(folder).glob("**/train-images-idx3-ubyte*")):
        yield "mnist", "needs MNIST: set TORCHCAPS_DATA to a folder with its four idx files"
    if browser_path() is None:
        yield "browser", "needs playwright and a browser: pip install playwright, apt-get install chromium"
    if not torch.cuda.is_available():
        yield "gpu", "needs a CUDA device: torch sees none here"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for mark, reason in missing():
        for item in items:
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation site, built once for all processes of the tests; a warning is an error."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "site"
    with FileLock(shared / "site.lock"):
        if not folder.exists():
            build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", f"{folder}.unfinished"]
            built = subprocess.run(build, cwd=Path(__file__).parents[1], capture_output=True, text=True)
            assert built.returncode == 0, built.stderr
            Path(f"{folder}.unfinished").rename(folder)
    return folder


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _working_memory() -> Iterator[None]:
    """A test may set the working memory; the next one finds it as it was."""
    yield
    set_working_memory(None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, closed before other modules run: Playwright keeps an event loop in this thread."""
    from playwright.sync_api import sync_playwright

    alone = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox", *alone])
        yield browser
        browser.close()


@pytest.fixture
def timm_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """``import timm`` gives a stand-in."""
    import timm_stub

    monkeypatch.setitem(sys.modules, "timm", timm_stub)
