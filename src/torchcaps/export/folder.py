"""Export a trained network as a folder with a model card, or upload that folder to the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from torchcaps.analysis import evaluate
from torchcaps.checks import checked
from torchcaps.errors import InputError
from torchcaps.export.card import TrainingRecord
from torchcaps.export.record import training_record
from torchcaps.files import atomic_folder, real, require_new_folder
from torchcaps.models import load_pretrained
from torchcaps.models.files import SHIPPED
from torchcaps.training import Run

Which = Literal["best", "last"]


@checked
def export_folder(
    run: Run,
    path: str | Path,
    which: Which = "best",
    *,
    half: bool = False,
    others: Sequence[str | Path] = (),
    source: str | None = None,
) -> TrainingRecord:
    """Write a run's network as a folder: config.json, model.safetensors, classes.json and a model card, README.md.

    The folder appears in full or not at all. :func:`torchcaps.load_pretrained` reads it, and every command accepts it
    as RUN.

    Args:
        run: A finished run.
        path: New or empty folder.
        which: Epoch of the weights of ``run.model``.
        half: Store the weights in half precision, and test the stored weights again.
        others: Folders of runs of the same configuration with other seeds, for a mean over seeds in the card.
        source: Name to load in the card's example; see :meth:`torchcaps.CapsNet.save_pretrained`.

    Returns:
        The facts about the training in the card.

    Raises:
        InputError: ``path`` is not empty; the configurations of the runs differ; or, with ``half``, the data of the run
            are not on this machine.
        OSError: The folder cannot be written.
    """
    path = Path(path)
    require_new_folder(path)
    if real(path) in SHIPPED.values():
        source = path.name
    record, saved = _saved(run, which, half, others)
    with atomic_folder(path) as folder:
        run.model.save_pretrained(folder, source=source, **saved)
    return record


@checked
def share(
    run: Run,
    repository: str,
    which: Which = "best",
    *,
    private: bool = False,
    half: bool = False,
    others: Sequence[str | Path] = (),
    token: str | None = None,
) -> str:
    """Upload the files of :func:`export_folder` to a repository of the Hugging Face hub.

    See :func:`export_folder` and :meth:`torchcaps.CapsNet.push_to_hub` for arguments, result and errors.
    """
    record, saved = _saved(run, which, half, others)
    message = f"{record.preset.name} on {record.data_title}, made with torchcaps"
    return run.model.push_to_hub(repository, private=private, commit_message=message, token=token, **saved)


def _saved(run: Run, which: Which, half: bool, others: Sequence[str | Path]) -> tuple[TrainingRecord, dict[str, Any]]:
    """Return the facts for the card, with ``half`` also the error of the stored weights, and the files' contents."""
    record = training_record(run, which, others)
    if half:
        if not run.has_data():
            assert run.config is not None
            raise InputError(
                f"weights in half precision must be tested again, but {run.config.data} is not on this machine"
            )
        with tempfile.TemporaryDirectory() as temporary:
            run.model.save_files(Path(temporary), torch.float16)
            rounded = load_pretrained(temporary)
        record = dataclasses.replace(record, stored_error=evaluate(rounded, run.dataset().test).error)
    return record, {
        "images": run.images.to_dict(),
        "training": record,
        "dtype": torch.float16 if half else None,
    }
