"""Helpers of the analyses: evaluation mode, checked images in batches, names of classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from torchcaps.analysis.collector import collector_of
from torchcaps.datasets.features import are_features
from torchcaps.datasets.scaling import ROUNDING
from torchcaps.errors import InputError, WrongType
from torchcaps.models import CapsNet, Network
from torchcaps.models.images import check_image_shape
from torchcaps.ranges import COUNT
from torchcaps.tasks import task_of
from torchcaps.words import counted

BATCH = 256
"""Default number of images in a batch."""
Labels = Int[Tensor, "N"] | Int[Tensor, "N P"] | Float[Tensor, "N J"]
"""Class of each image, or classes of its P objects; or rows of labels or numbers."""


@contextmanager
def inference(model: nn.Module, *, gradients: bool = False) -> Iterator[None]:
    """Set evaluation mode and switch off gradients, except of images if asked; restore the model afterwards."""
    training = [module for module in model.modules() if module.training]
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad and gradients]
    model.eval()
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        with torch.inference_mode(not gradients):
            yield
    finally:
        for module in training:
            module.training = True
        for parameter in learning:
            parameter.requires_grad_(True)


def as_pixels(model: Network, images: Shaped[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
    """Convert images, uint8 of 0..255 or floating-point of 0..1, to pixels 0..1 of the network's dtype and device."""
    check_images(images, model)
    return to_pixels(model, images)


def to_pixels(model: Network, images: Shaped[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Convert as :func:`as_pixels` does, for images of any shape, such as the objects of images."""
    weight = next(model.parameters())
    if images.dtype == torch.uint8:
        return images.to(weight.device).to(weight.dtype).div_(255)
    return images.detach().to(weight.device, weight.dtype)


def check_images(images: Tensor, model: Network) -> None:
    """Raise TypeError or InputError unless images are pixels of the network's input shape."""
    if not isinstance(images, Tensor) or not (images.dtype == torch.uint8 or images.is_floating_point()):
        got = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise TypeError(f"images must be uint8 of 0..255 or floating-point of 0..1, got {got}")
    if images.is_nested or images.layout != torch.strided or images.is_meta:
        kind = "nested" if images.is_nested else "meta" if images.is_meta else "sparse"
        raise WrongType(f"images must be a dense tensor with numbers, got a {kind} tensor")
    check_image_shape(images.shape, model.in_shape, any_size=model.per_pixel)


def check_labels(model: Network, labels: Labels, num_images: int) -> None:
    """Raise TypeError or InputError unless there is a label for each image, in the form of the network's task."""
    task_of(model).check_targets(labels, model.num_classes, num_images=num_images)


def in_batches(
    model: Network, images: Shaped[Tensor, "N C H W"], labels: Labels | None, batch_size: int = BATCH
) -> Iterator[tuple[Float[Tensor, "B C H W"], Labels | None]]:
    """Check all images and labels, then yield batches of pixels (see :func:`as_pixels`) and labels."""
    check_images(images, model)
    if len(images) == 0:
        raise InputError("there must be at least one image, got none")
    COUNT.check("batch_size", batch_size)
    batch_size = min(batch_size, collector_of(task_of(model)).max_batch)
    if labels is not None:
        check_labels(model, labels, len(images))
    for start in range(0, len(images), batch_size):
        pixels = to_pixels(model, images[start : start + batch_size])
        yield pixels, None if labels is None else labels[start : start + batch_size].to(pixels.device)


def over_batches(
    function: Callable[[Float[Tensor, "B C H W"], Labels | None], Sequence[Tensor]],
    model: Network,
    images: Shaped[Tensor, "N C H W"],
    labels: Labels | None = None,
    batch_size: int = BATCH,
) -> list[Tensor]:
    """Call a function on all batches under :func:`inference`, and join each of the tensors that it returns."""
    with inference(model):
        batches = in_batches(model, images, labels, batch_size)
        parts = [[tensor.cpu() for tensor in function(*batch)] for batch in batches]
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


def class_labels(class_names: Sequence[str] | None, num_classes: int) -> list[str]:
    """Return the names of the classes, or their numbers for None; InputError unless each class has a name."""
    names = [str(j) for j in range(num_classes)] if class_names is None else [str(name) for name in class_names]
    if len(names) != num_classes:
        raise InputError(f"class_names must be {counted(num_classes, 'name')}, one for each class, got {len(names)}")
    return names


def join_names(names: Sequence[str], classes: Int[Tensor, "*P"] | Int[np.ndarray, "*P"]) -> str:
    """Join the names of the classes of an image: ``3 + 7``."""
    return " + ".join(names[int(j)] for j in classes.reshape(-1))


def require_one_object(model: Network, purpose: str, analysis: str) -> None:
    """Raise InputError if a network finds several objects in an image, or its task does not support an analysis.

    ``purpose`` is the subject of the sentence.
    """
    task_of(model).require(analysis, purpose)
    if model.objects != 1:
        raise InputError(f"{purpose} needs images of one object, but this network finds {model.objects} in each")


def require_pixels(model: Network, images: Tensor, purpose: str, *, planes: bool = False) -> None:
    """Raise InputError unless images have pixels of 0..1, as sequences and normalised images have not.

    Args:
        model: The network, which takes sequences if its images have height 1.
        images: The images.
        purpose: Subject of the sentence.
        planes: Images must have several rows and columns.
    """
    if planes and 1 in model.in_shape[1:]:
        raise InputError(f"{purpose} needs images of several rows and columns, but this network takes a single row")
    if images.dtype == torch.uint8:
        return
    if model.in_shape[1] == 1:
        raise InputError(
            f"{purpose} needs pixels of 0..1, but this network takes sequences, whose numbers have no range"
        )
    low, high = (float(end) for end in images.aminmax())
    if not (low >= -ROUNDING and high <= 1 + ROUNDING):
        raise InputError(f"{purpose} needs pixels of 0..1, got numbers from {low:g} to {high:g}")


def require_capsules(model: Network, purpose: str, analysis: str, *, decoder: bool = False) -> CapsNet:
    """Return the model if its task supports an analysis and it has capsules (and a decoder, if ``decoder``).

    Raises:
        InputError: It does not; ``purpose`` is the subject of the sentence.
    """
    task_of(model).require(analysis, purpose)
    if decoder and are_features(model.in_shape):
        raise InputError(
            f"{purpose} needs images of several rows and columns, but this network takes {model.in_shape[0]} features; "
            "torchcaps.analysis.predict has the numbers of its decoder"
        )
    if isinstance(model, CapsNet) and not (decoder and model.decoder is None):
        return model
    what = "this network" if isinstance(model, CapsNet) else f"a {type(model).__name__}"
    needed = "a decoder" if decoder else "capsules"
    raise InputError(f"{purpose} needs {needed}, which {what} does not have; the preset sabour2017 has both")


require_decoder = partial(require_capsules, decoder=True)
