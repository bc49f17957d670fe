"""What an exported file is compared on, and what it says of itself: taken from a run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import UInt8
from torch import Tensor

from torchcaps.errors import InputError
from torchcaps.export.description import Description
from torchcaps.training import Run

SAMPLE = 32
"""Images that a file is compared on."""


def describe_run(run: Run) -> Description:
    """What an exported file says of a run's network."""
    return Description(
        in_shape=run.model.in_shape,
        class_names=run.class_names,
        preset=None if run.config is None else run.config.preset,
        objects=run.model.config.objects,
        fit=run.image_fit,
    )


def sample_images(run: Run, count: int = SAMPLE) -> tuple[UInt8[Tensor, "N C H W"], str]:
    """The first test images of a run's data, or random ones where the data are not on this machine.

    For a network that comes with torchcaps they are the embedded digits.

    Nothing is downloaded.

    Args:
        run: The run.
        count: How many at most.

    Returns:
        The images, and what they are, in words.
    """
    shape, data = run.model.in_shape, run.shown_data
    if data is None:
        return random_images(shape, count), f"{count} random images ({run.path} does not say what it was trained on)"
    try:
        if not run.has_data(data):
            return random_images(shape, count), f"{count} random images ({data} is not on this machine)"
        images = run.dataset(data).test.images[:count]
    except InputError as error:
        return random_images(shape, count), f"{count} random images (the data cannot be read: {error})"
    return images, f"the first {len(images)} test images of {data}"


def random_images(in_shape: Sequence[int], count: int = SAMPLE) -> UInt8[Tensor, "N C H W"]:
    """Noise, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, *in_shape), dtype=torch.uint8, generator=generator)
