"""What the tests of all functions share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torchcaps.ops.memory import get_working_memory, set_working_memory


@pytest.fixture(autouse=True)
def _working_memory() -> Iterator[None]:
    """A test may set the working memory; the next one finds it as it was."""
    before = get_working_memory()
    yield
    set_working_memory(before)
