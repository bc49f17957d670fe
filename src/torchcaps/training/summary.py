"""``summary.json``: what a run ended with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchcaps.analysis import Evaluation
from torchcaps.training.environment import hardware, peak_memory_mib, versions

if TYPE_CHECKING:
    from torchcaps.training.loop import Trainer


def summarise(trainer: Trainer, judged: Mapping[str, Evaluation]) -> dict[str, Any]:
    """What a run ended with, and all that a table of results needs besides.

    Args:
        trainer: After its last epoch.
        judged: The results of the best and the last epoch's weights on the test images.
    """
    config, position, fabric, dataset = trainer.config, trainer.position, trainer.fabric, trainer.dataset
    best_row, last_row = position.best(config.recipe.select), position.history[-1]
    position.note_peak(peak_memory_mib(fabric.device))
    peak = position.peak_memory_mib
    return {
        "preset": config.preset,
        "data": config.data,
        "out": str(trainer.out),
        "seed": config.seed,
        "precision": config.precision,
        "epochs": position.epoch,
        "best_epoch": best_row["epoch"],
        "select": config.recipe.select,
        "parameters": sum(p.numel() for p in trainer.network.parameters()),
        "images": {part: len(getattr(dataset, part)) for part in ("train", "validation", "test")},
        "in_shape": list(dataset.in_shape),
        "classes": dataset.num_classes,
        "objects": dataset.num_objects,
        "validation": {
            name: {"accuracy": row["validation_accuracy"], "loss": row["validation_loss"]}
            for name, row in (("best", best_row), ("last", last_row))
        },
        "test": {
            name: {
                "accuracy": result.accuracy,
                "error": result.error,
                "loss": result.loss,
                "images": result.num_images,
            }
            for name, result in judged.items()
        },
        "seconds": round(position.seconds, 1),
        "images_per_second": last_row["images_per_second"],
        "peak_memory_mib": None if peak is None else round(peak, 1),
        "captured": trainer.captured,
        "hardware": hardware(fabric.device) | {"processes": fabric.world_size},
        "versions": versions(fabric.device),
        "commit": position.commits[-1],
        "earlier_commits": position.commits[:-1],
        "command": position.commands[0],
        "resumed_with": position.commands[1:],
    }
