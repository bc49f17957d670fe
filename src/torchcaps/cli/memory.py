"""``torchcaps memory``: what training will need, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from torchcaps.cli.fields import given_fields
from torchcaps.cli.output import add_row, count, print_pairs, print_table, table
from torchcaps.cli.runs import PATH
from torchcaps.cli.train import RunCommand, build_config

EXAMPLES = (
    ("memory sabour2017 --data mnist --batch-size 512", "the paper's network on MNIST, a larger batch"),
    ("memory sabour2017 --data mnist --image-size 64", "larger images"),
    ("memory baseline-cnn --data mnist --batch-size 64", "the paper's CNN"),
    ("memory sabour2017-multimnist --data multimnist", "two digits in an image"),
)


@click.command(
    "memory",
    cls=RunCommand,
    short_help="What memory training will need, by part.",
    examples=EXAMPLES,
)
@click.argument("preset", required=False)
@click.option("--config", "config_file", type=PATH, help="Take a run's config.json.")
@click.pass_context
def memory(context: click.Context, /, preset: str | None, config_file: Path | None, **fields: Any) -> None:
    """Estimate the peak memory of training on the CPU, by part, before anything runs.

    It takes the options of `torchcaps train`.
    """
    config = build_config(preset, config_file, given_fields(context, fields))

    import torchcaps.training.loop  # noqa: F401  what training imports is the estimate's first part
    from torchcaps.datasets import data_shape
    from torchcaps.training import available_memory_mib, estimate_memory, largest_batch
    from torchcaps.training.data import check_objects
    from torchcaps.training.environment import PRECISION_WORDS, resolve_precision
    from torchcaps.training.launch import count_processes

    config = resolve_precision(config)
    in_shape, num_classes, num_images, objects = data_shape(
        config.data, data_dir=config.data_dir, image_size=config.image_size
    )
    check_objects(config.data, objects, config)
    shape = in_shape, num_classes, num_images
    estimate = estimate_memory(config, *shape)
    rows = table("part", "MiB")
    for name, mib in estimate.parts.items():
        add_row(rows, name, f"{mib:,.0f}")
    add_row(rows, "peak", f"{estimate.total:,.0f}", style="bold")
    print_table(rows)
    available = available_memory_mib()
    devices, shared = count_processes(config).devices, ""
    facts: list[tuple[str, object]] = [
        ("Batch", f"{count(estimate.batch_size)} images a step and process"),
        ("Precision", PRECISION_WORDS[config.precision]),
    ]
    if devices > 1:
        shared = ", over all processes"
        facts.append(("Processes", f"{devices} on this machine, {devices * estimate.total:,.0f} MiB together"))
    if available is not None:
        most = largest_batch(config, *shape, available)
        facts += [("There is", f"{available:,.0f} MiB"), ("Largest batch", f"about {count(most)} images{shared}")]
    print_pairs(facts)
