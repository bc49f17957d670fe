"""What all tests share: one thread, a seed, and skips that say why."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from torchcaps.ops.memory import get_working_memory, set_working_memory

pytest.register_assert_rewrite("support")
# after its asserts learn to explain themselves
from support import NO_BROWSER, NO_GPU, NO_MNIST, browser_path, has_mnist  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def pytest_configure() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it; tests send it
    torch.set_num_threads(1)  # sums in one order, and no fight over cores between tests that run side by side


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skips = {}
    if not has_mnist(os.environ.get("TORCHCAPS_DATA")):
        skips["mnist"] = pytest.mark.skip(reason=NO_MNIST)
    if browser_path() is None:
        skips["browser"] = pytest.mark.skip(reason=NO_BROWSER)
    if not torch.cuda.is_available():
        skips["gpu"] = pytest.mark.skip(reason=NO_GPU)
    for item in items:
        for name, skip in skips.items():
            if item.get_closest_marker(name):
                item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out, even without -r s."""
    reports = terminalreporter.stats.get("skipped", [])
    for reason in (NO_MNIST, NO_BROWSER, NO_GPU):
        number = sum(reason in str(report.longrepr) for report in reports)
        if number:
            terminalreporter.write_line(f"skipped {number}: {reason}", yellow=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _working_memory() -> Iterator[None]:
    """A test may set the working memory; the next one finds it as it was."""
    before = get_working_memory()
    yield
    set_working_memory(before)


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
