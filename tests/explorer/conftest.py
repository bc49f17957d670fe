"""A small trained run, and a line on what was left out without a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from explorer_support import no_browser
from torchcaps.training import make_config, train


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out, even without -r s."""
    reason, reports = no_browser(), terminalreporter.stats.get("skipped", [])
    number = sum(str(reason) in str(report.longrepr) for report in reports)
    if number:
        terminalreporter.write_line(f"skipped {number}: {reason}", yellow=True)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the embedded digits, trained for a few seconds: right on nine of ten test images. Not to be changed."""
    folder = tmp_path_factory.mktemp("explorer") / "digits-run"
    small: dict[str, Any] = {"conv_channels": 16, "primary_types": 4, "decoder_hidden": (64, 256)}
    recipe: dict[str, Any] = {"epochs": 2, "batch_size": 32, "schedule": "one-cycle", "learning_rate": 0.004}
    config = make_config(
        "sabour2017", data="digits", limit_train=800, accelerator="cpu", precision="bf16", **small, **recipe
    )
    train(config, folder, figures=False)
    return folder
