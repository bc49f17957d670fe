"""What judging a network needs: evaluation mode that is undone again, images as the network takes them, names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from torchcaps.errors import InputError, WrongType
from torchcaps.models import CapsNet, Network
from torchcaps.models.images import check_image_shape
from torchcaps.ops.labels import top_classes
from torchcaps.ranges import COUNT
from torchcaps.tasks import task_of

BATCH = 256
"""Images at a time, where nobody says otherwise."""
Labels = Int[Tensor, "N"] | Int[Tensor, "N P"] | Float[Tensor, "N J"]
"""The class of each image, or the classes of its P objects; rows of labels or numbers."""


@contextmanager
def inference(model: nn.Module, *, gradients: bool = False) -> Iterator[None]:
    """Evaluation mode without gradients, or only with those of images; afterwards the model is as it was."""
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
    """Images, uint8 of 0..255 or floating-point of 0..1, as pixels 0..1 of the network's dtype, on its device."""
    check_images(images, model.in_shape)
    return to_pixels(model, images)


def to_pixels(model: Network, images: Shaped[Tensor, "..."]) -> Float[Tensor, "..."]:
    """:func:`as_pixels` for images of any shape, such as the objects of images."""
    weight = next(model.parameters())
    if images.dtype == torch.uint8:
        return images.to(weight.device).to(weight.dtype).div_(255)
    return images.detach().to(weight.device, weight.dtype)


def check_images(images: Tensor, in_shape: tuple[int, int, int]) -> None:
    """Raise TypeError or InputError unless images are pixels of the shape that a network takes."""
    if not isinstance(images, Tensor) or not (images.dtype == torch.uint8 or images.is_floating_point()):
        got = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise TypeError(f"images must be uint8 of 0..255 or floating-point of 0..1, got {got}")
    if images.is_nested or images.layout != torch.strided or images.is_meta:
        kind = "nested" if images.is_nested else "meta" if images.is_meta else "sparse"
        raise WrongType(f"images must be a dense tensor with numbers, got a {kind} tensor")
    check_image_shape(images.shape, in_shape)


def check_labels(model: Network, labels: Labels, num_images: int) -> None:
    """Raise TypeError or InputError unless labels are in the form of a network's task, and as many as the images."""
    task_of(model).check_labels(labels, model.num_classes, num_images)


def in_batches(
    model: Network, images: Shaped[Tensor, "N C H W"], labels: Labels | None, batch_size: int = BATCH
) -> Iterator[tuple[Float[Tensor, "B C H W"], Labels | None]]:
    """Images as :func:`as_pixels` gives them and their labels, ``batch_size`` at a time, all of them checked first."""
    check_images(images, model.in_shape)
    if len(images) == 0:
        raise InputError("there must be at least one image, got none")
    COUNT.check("batch_size", batch_size)
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
    """The rows, one an image, of all tensors that a function returns of :func:`in_batches`; under :func:`inference`."""
    with inference(model):
        batches = in_batches(model, images, labels, batch_size)
        parts = [[tensor.cpu() for tensor in function(*batch)] for batch in batches]
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


def classes_of(scores: Float[Tensor, "B J"], objects: int) -> Int[Tensor, "B"] | Int[Tensor, "B P"]:
    """The class of the highest score, or, for several objects, the classes of the highest ones, the highest first."""
    return scores.argmax(-1) if objects == 1 else top_classes(scores, objects)


def class_labels(class_names: Sequence[str] | None, num_classes: int) -> list[str]:
    """The names of the classes, or their numbers if there are none; InputError unless each class has a name."""
    names = [str(j) for j in range(num_classes)] if class_names is None else [str(name) for name in class_names]
    if len(names) != num_classes:
        raise InputError(f"class_names must be {num_classes} names, one for each class, got {len(names)}")
    return names


def join_names(names: Sequence[str], classes: Int[Tensor, "*P"] | Int[np.ndarray, "*P"]) -> str:
    """The name of an image's class, or of the classes of all its objects, as a person reads them: ``3 + 7``."""
    return " + ".join(names[int(j)] for j in classes.reshape(-1))


def require_one_object(model: Network, purpose: str, analysis: str) -> None:
    """Raise InputError if a network sees several objects in an image, or its task does not support an analysis.

    ``purpose`` is the subject of the sentence.
    """
    task_of(model).require(analysis, purpose)
    if model.objects != 1:
        raise InputError(f"{purpose} needs images of one object, but this network finds {model.objects} in each")


def require_capsules(model: Network, purpose: str, analysis: str, *, decoder: bool = False) -> CapsNet:
    """Return the model, if its task supports an analysis and it has capsules, and a decoder where one is needed.

    Raises:
        InputError: It has not; the subject of the sentence is ``purpose``.
    """
    task_of(model).require(analysis, purpose)
    if isinstance(model, CapsNet) and not (decoder and model.decoder is None):
        return model
    what = "this network" if isinstance(model, CapsNet) else f"a {type(model).__name__}"
    needed = "a decoder" if decoder else "capsules"
    raise InputError(f"{purpose} needs {needed}, which {what} does not have; the preset sabour2017, for one, has")


require_decoder = partial(require_capsules, decoder=True)
