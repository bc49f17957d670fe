"""The model card, README.md beside the weights: what a reader must know first. Its words are in ``card.md.jinja``."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from torchcaps._version import __version__
from torchcaps.errors import visible
from torchcaps.parts import describe, flat, own_parts
from torchcaps.ranges import as_text
from torchcaps.tasks import task_of

if TYPE_CHECKING:
    from torchcaps.models.record import TrainingRecord


def model_card(
    network: nn.Module,
    training: TrainingRecord | None = None,
    source: str | None = None,
    *,
    class_names: Sequence[str] | None = None,
    half: bool = False,
) -> str:
    """A README.md with the metadata that the Hugging Face hub reads. It does not depend on the time or the machine.

    Args:
        network: A :class:`torchcaps.models.Network`.
        training: What is known of its training; None where nothing is.
        source: What ``load_pretrained`` is given to load it: a repository of the hub with its owner, or the name of a
            network that comes with torchcaps; the card's own folder if None.
        class_names: The name of each class; None where the classes have numbers only.
        half: Whether the weights are stored in half precision.

    Raises:
        ImportError: Jinja or the hub's client is not installed; both come with the extra ``app``.
    """
    import jinja2

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
    name = f"{training.preset.name} on {training.data_title}" if training else kind
    template = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        {"network": network, "training": training, "source": source, "class_names": class_names, "half": half},
        kind=kind,
        name=name,
        task=task,
        headings=list(metric.cells(0.0))[::-1],
        version=__version__,
        metadata=_metadata(network, training, name),
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        changed={option: value for option, value in flat(tree).items() if value != published.get(option)},
        own_parts=own_parts("network", tree),
        # those that the training names; a file that is called parts.py, where it names none
        plugins=[word for option, word in itertools.pairwise(words) if option == "--plugin"] or ["parts.py"],
    )


def _escape(text: str) -> str:
    """A name as Markdown shows it and nothing else: no link, no HTML, no emphasis, no line of its own."""
    text = re.sub(r"[\\`*\[\]|~$@]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=www)\.", r"\\\g<0>", visible(text))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _metadata(network: nn.Module, training: TrainingRecord | None, name: str) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    tags = ["torchcaps", "pytorch"]
    if network.has_capsules:
        tags += ["capsule-network", "dynamic-routing", "arxiv:1710.09829"]
    data = ModelCardData(library_name="torchcaps", pipeline_tag="image-classification", tags=tags)
    if training is not None:
        first, metric = training.results[0], task_of(network).metric
        measured = first.best_error if training.which == "best" else first.last_error
        measured = measured if training.stored_error is None else training.stored_error
        result = EvalResult(
            task_type="image-classification",
            dataset_type=training.data or "own-images",
            dataset_name=training.data_title,
            dataset_split="test",
            metric_type=metric.hub,
            metric_value=round(metric.hub_value(measured), 6),
        )
        data.model_name, data.datasets, data.eval_results = name, training.data, [result]
    return data.to_yaml()
