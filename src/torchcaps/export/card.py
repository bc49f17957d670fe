"""Model card: the README.md beside a network's weights. Its text is in ``card.md.jinja``."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from torchcaps._version import __version__
from torchcaps.checks import check
from torchcaps.errors import visible
from torchcaps.parts import describe, flat, own_parts
from torchcaps.ranges import as_text
from torchcaps.tasks import task_of
from torchcaps.words import counted, plural

if TYPE_CHECKING:
    from torchcaps.models.presets.registry import Preset


@dataclass(frozen=True, kw_only=True)
class SeedResult:
    """Result of one training run: test errors (0..1) of the epoch chosen by validation and of the last epoch."""

    seed: int
    best_epoch: int
    best_error: float
    last_error: float


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """Facts about a network's training for its model card."""

    preset: Preset
    """Preset of the network and its recipe."""
    data: str | None
    """Name of the data set for ``load_dataset``; None for the user's own files."""
    data_title: str
    data_source: str
    data_licence: str
    images: Mapping[str, int]
    """Number of images in ``train``, ``validation`` and ``test``."""
    recipe: Mapping[str, Any]
    """Settings of the recipe to show, in their order."""
    last_epoch: int
    precision: Literal["32", "bf16"]
    which: Literal["best", "last"]
    """Epoch of the weights: the best or the last."""
    results: tuple[SeedResult, ...]
    """Result of this network, then results of the same training with other seeds."""
    stored_error: float | None = None
    """Test error (0..1) of the stored weights, if storing rounded them and the error was measured again."""
    command: str
    """Command that repeats the training."""
    seconds: float
    hardware: str
    versions: Mapping[str, str]
    """Versions of torchcaps, torch and Python."""
    example: str = "image.png"
    """A file to predict, in the example."""
    has_pixels: bool = True
    """False for other numbers, such as sequences."""
    preparation: str | None = None
    """Preprocessing of the drawings, in words; None if the images are not drawings."""


def model_card(
    network: nn.Module,
    training: TrainingRecord | None = None,
    source: str | None = None,
    *,
    class_names: Sequence[str] | None = None,
    half: bool = False,
) -> str:
    """Return the text of a README.md with the metadata of the Hugging Face hub, independent of time and machine.

    Args:
        network: A :class:`torchcaps.models.Network`.
        training: Facts about the training; None if unknown.
        source: Name to load in the card's example: a repository of the hub, OWNER/NAME, or a network that comes with
            torchcaps; None: the card's folder.
        class_names: Name of each class; None: classes have only numbers.
        half: The weights are stored in half precision.

    Raises:
        ImportError: Jinja or the hub's client is not installed; both come with the extra ``app``.
    """
    import jinja2

    check("model_card: network", network, nn.Module)
    task = task_of(network)
    metric = task.metric
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "text": lambda value: _escape(as_text(value)),
        "error": metric.show_error,
        "cells": lambda error: metric.cells(1 - error),
        "spread": metric.spread,
        "literal": lambda text: visible(json.dumps(text, ensure_ascii=False)),
        "quoted": lambda text: visible(shlex.quote(text)),
        "on_one_line": visible,
    }
    tree = describe(network)
    published = flat(training.preset.network) if training else {}
    words = shlex.split(training.command) if training else []
    kind = "Capsule network" if network.has_capsules else "Convolutional network"
    kind = "Slot network" if network.has_slots else kind
    name = f"{training.preset.name} on {training.data_title}" if training else kind
    template = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        {"network": network, "training": training, "source": source, "class_names": class_names, "half": half},
        kind=kind,
        name=name,
        task=task,
        headings=list(metric.cells(0.0))[::-1],
        counted=counted,
        plural=plural,
        version=__version__,
        metadata=_metadata(network, training, name),
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        changed={option: value for option, value in flat(tree).items() if value != published.get(option)},
        own_parts=own_parts("network", tree),
        # plugins of the training command; parts.py is an example if it has none
        plugins=[word for option, word in itertools.pairwise(words) if option == "--plugin"] or ["parts.py"],
    )


def _escape(text: str) -> str:
    """Escape a name so that Markdown shows it literally, without links, HTML, emphasis or line breaks."""
    text = re.sub(r"[\\`*\[\]|~$@]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=www)\.", r"\\\g<0>", visible(text))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _metadata(network: nn.Module, training: TrainingRecord | None, name: str) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    tags = ["torchcaps", "pytorch"]
    if network.has_capsules:
        tags += ["capsule-network", "dynamic-routing", "arxiv:1710.09829"]
    hub_task = "image-segmentation" if network.per_pixel or network.has_slots else "image-classification"
    data = ModelCardData(library_name="torchcaps", pipeline_tag=hub_task, tags=tags)
    if training is not None:
        first, metric = training.results[0], task_of(network).metric
        measured = first.best_error if training.which == "best" else first.last_error
        measured = measured if training.stored_error is None else training.stored_error
        result = EvalResult(
            task_type=hub_task,
            dataset_type=training.data or "own-images",
            dataset_name=training.data_title,
            dataset_split="test",
            metric_type=metric.hub,
            metric_value=round(metric.hub_value(measured), 6),
        )
        is_known = not math.isnan(measured)
        data.model_name, data.datasets, data.eval_results = name, training.data, [result] if is_known else None
    return data.to_yaml()
