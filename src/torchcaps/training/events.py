"""TensorBoard events of a run, where asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchcaps.errors import InputError


class Events:
    """A context in which each epoch's metrics become events.

    Args:
        out: The run folder.
        wanted: Whether to write any.
    """

    def __init__(self, out: Path, wanted: bool) -> None:
        self._folder, self._wanted = out / "tensorboard", wanted

    @staticmethod
    def check() -> None:
        """Raise InputError if TensorBoard is not installed."""
        if importlib.util.find_spec("tensorboard") is None:
            raise InputError('--tensorboard needs the package tensorboard: pip install "torchcaps[tensorboard]"')

    def __enter__(self) -> None:
        if self._wanted:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))

    def __exit__(self, *_: object) -> None:
        if self._wanted:
            self._writer.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """An epoch's metrics."""
        if not self._wanted:
            return
        for name, value in row.items():
            if name not in ("epoch", "step") and value is not None:
                self._writer.add_scalar(name.replace("_", "/", 1), value, row["step"])
        self._writer.flush()
