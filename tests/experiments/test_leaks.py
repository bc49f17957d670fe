"""The pages about medical images, signals and scenes: their data are those of the runs, their tables the records."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from experiments.leaks import GROUPS, LEAKS, PLUGIN, leak_lines
from experiments.store import RESULTS, logs_of, read_runs
from support import registered_for_now
from torchcaps.datasets.loading import load_part
from torchcaps.plugins import import_file, load_plugin

ROOT = Path(__file__).parents[2]
#: Page of each group of rows, and the function whose data it draws.
PAGES = {
    "cells": ("medical-images", "draw_cells"),
    "signals": ("signals", "draw_records"),
    "scene": ("scenes", "draw_scene"),
}
MAX_WORDS = 700


@pytest.fixture
def drawn() -> Iterator[ModuleType]:
    with registered_for_now():
        load_plugin(PLUGIN)
        yield import_file(PLUGIN)


@pytest.mark.parametrize("prefix", GROUPS)
def test_a_page_draws_the_data_of_the_runs_and_shows_their_records(prefix: str, drawn: ModuleType) -> None:
    name, function = PAGES[prefix]
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert inspect.getsource(getattr(drawn, function)) in page
    runs = logs_of(LEAKS, read_runs(ROOT / RESULTS))
    assert {len(runs[f"{prefix}-{split}"]) for split in GROUPS[prefix][3]} == {3}
    assert "\n".join(leak_lines(prefix, runs)) in page
    assert len(page.split()) <= MAX_WORDS


@pytest.mark.parametrize("kind", ["cells", "records", "windows", "scene", "patches"])
def test_drawn_data_follow_from_their_seed(kind: str, drawn: ModuleType) -> None:
    draw = drawn.KINDS[kind][0]
    first, again, other = draw(0), draw(0), draw(1)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert any(not np.array_equal(first[name], other[name]) for name in first)


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize(
    ("grouped", "loose", "options"),
    [
        ("drawn:records-0", "drawn:windows-0", {"window": 128}),
        ("drawn-scene:scene-0", "drawn:patches-0", {"patch": 5, "scale": (0.0, 1.0)}),
    ],
)
def test_both_splits_of_a_page_have_the_same_images(grouped: str, loose: str, options: dict[str, object]) -> None:
    one, other = load_part(grouped, "all", **options).images, load_part(loose, "all").images
    torch.testing.assert_close(one.images, other.images, atol=1e-6, rtol=0)
    assert one.labels.equal(other.labels)
    assert one.names
    assert not other.names
