"""Time series of the UCR and UEA archives, read by aeon: sequences of one or more channels, of any lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from torchcaps.datasets.dataset import ImageSet, Splits
from torchcaps.datasets.reading import one_sentence
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.errors import InputError, install, reason_of


def pad(sequences: Sequence[Float[np.ndarray, "C l"]], length: int, where: str) -> Float32[Tensor, "N C 1 L"]:
    """Sequences of any lengths as numbers of one shape, NaN after the end of each.

    Raises:
        InputError: A number is NaN or infinite; the sentence begins with ``where``.
    """
    padded = torch.full((len(sequences), len(sequences[0]), 1, length), torch.nan)
    for row, each in zip(padded, sequences, strict=True):
        if not np.isfinite(each).all():
            raise InputError(f"{where} has a number that is NaN or infinite before the end of its sequence")
        row[:, 0, : each.shape[1]] = torch.from_numpy(np.asarray(each, np.float32))
    return padded


@register_dataset(
    "aeon",
    title="time series of the UCR and UEA archives, by their names: aeon:JapaneseVowels, aeon:GunPoint",
    source="https://timeseriesclassification.com, read by aeon, whose package brings some of them",
    licence="that of the problem",
    takes_path=True,
)
def load_aeon(request: DataRequest) -> Splits:
    """Read a classification problem by aeon, with the archive's own training and test cases.

    JapaneseVowels and GunPoint come with aeon's package; others are downloaded by it.

    Raises:
        InputError: aeon is not installed, or cannot read the problem.
    """
    try:
        import aeon.datasets as archive  # type: ignore[import-not-found]
    except ImportError as error:
        raise InputError(f"aeon:{request.path} needs aeon, {reason_of(error)}: {install('aeon')}") from None
    name = str(request.path)
    bundled = Path(archive.__file__).parent / "data"
    folder = str(bundled) if (bundled / name).is_dir() else None
    with one_sentence(f"aeon cannot read {name}"):
        parts = {part: archive.load_classification(name, part, folder) for part in ("train", "test")}
    longest = max(each.shape[1] for cases, _ in parts.values() for each in cases)
    classes = sorted(map(str, set(parts["train"][1])))
    train, test = (
        ImageSet(pad(cases, longest, f"aeon:{name}"), torch.tensor([classes.index(str(label)) for label in labels]))
        for cases, labels in parts.values()
    )
    return Splits(train, test, tuple(classes))
