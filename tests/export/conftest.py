"""One registry of operators for all exports."""

import functools
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_registry() -> Iterator[None]:
    """The exporter lists 2,000 operators for each ONNX file, a third of a second; here it lists them once."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:  # the extra torchcaps[export] is not installed
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
        yield
