"""The times of the explorer: one page view of each page; the numbers mean nothing, everything else is real."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from explorer_support import shipped
from torchcaps.explorer import serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.browser
def test_a_visit_times_the_first_answer_and_each_movement(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.delitem(sys.modules, "browser", raising=False)
    import browser as times

    explorer = shipped()
    with times.site(explorer) as saved, serving([explorer], 0) as served:
        for address in (saved, served):
            first, strokes = times.visit(browser, address)
            assert 0 < first < 60_000
            assert 20 <= len(strokes) <= len(times.STROKE)  # on a crowded machine two movements may share an answer
            assert all(0 <= each < 60_000 for each in strokes)
    assert times.said([1.0, 2.0, 3.0, 4.0]) == "2 ms (1 to 4; 4 times)"
