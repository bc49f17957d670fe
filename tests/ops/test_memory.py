"""The limit on work buffers, on a CPU and on a GPU."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest
import torch

from torchcaps.kernels.memory import block_bytes, get_working_memory, gpu_memory_mib, set_working_memory

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _unknown_gpus() -> Iterator[None]:
    gpu_memory_mib.cache_clear()
    yield
    gpu_memory_mib.cache_clear()


@pytest.mark.parametrize(("gib", "mib"), [(4, 512), (8, 512), (24, 1536), (80, 5120)])
def test_a_large_gpu_has_a_sixteenth_of_its_memory_by_default(
    gib: int, mib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = types.SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    assert get_working_memory(CUDA) == mib
    assert block_bytes(CUDA, 16) == mib * 2**20
    assert block_bytes(torch.device("cpu"), 16) == 16 * 2**20
    assert get_working_memory() == get_working_memory(torch.device("cpu")) == 512
    set_working_memory(64)
    assert get_working_memory(CUDA) == get_working_memory() == 64
    set_working_memory(None)
    assert get_working_memory(CUDA) == mib
    assert get_working_memory() == 512


def test_devices_without_memory_of_their_own_have_the_limit_of_a_cpu() -> None:
    assert get_working_memory(torch.device("meta")) == 512
