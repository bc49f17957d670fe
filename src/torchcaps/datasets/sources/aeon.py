"""Time series of the UCR and UEA archives, read with aeon: sequences of any length and number of channels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.image_set import ImageSet
from torchcaps.datasets.records import cut_records, pad_sequences
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.splits import RECORD, START
from torchcaps.errors import InputError, install, reason_of
from torchcaps.files import one_sentence


@register_dataset(
    "aeon",
    title="time series of the UCR and UEA archives, by their names: aeon:JapaneseVowels, aeon:GunPoint",
    source="https://timeseriesclassification.com, read with aeon, whose package contains some of them",
    licence="depends on the problem",
    takes_path=True,
    options=("window", "stride"),
)
def load_aeon(request: DataRequest) -> Splits:
    """Read a classification problem with aeon, split into the archive's training and test cases.

    The package of aeon contains JapaneseVowels and GunPoint; it downloads other problems.

    Raises:
        InputError: aeon is not installed or cannot read the problem.
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
        classes = sorted({str(label) for _, labels in parts.values() for label in labels})
        train, test = (
            ImageSet(
                torch.from_numpy(pad_sequences(list(cases), longest, f"aeon:{name}")),
                torch.tensor([classes.index(str(label)) for label in labels]),
            )
            for cases, labels in parts.values()
        )
    if request.window is not None:
        train, test = (_cut(each, request, part, f"aeon:{name}") for part, each in (("train", train), ("test", test)))
    return Splits(train, test, tuple(classes))


def _cut(cases: ImageSet, request: DataRequest, part: str, where: str) -> ImageSet:
    """Return windows of the cases."""
    assert request.window is not None
    windows = cut_records(cases.images.numpy(), request.window, request.stride, where)
    records = tuple(f"{part}[{n}]" for n in windows.record.tolist())
    about: Any = {"names": {RECORD: records}, "factors": {START: torch.from_numpy(windows.start)}}
    return ImageSet(torch.from_numpy(windows.images), cases.labels[windows.record], **about)
