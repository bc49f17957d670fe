"""What judging a network needs: evaluation mode that is undone again, and images as the network wants them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from torchcaps.checks import INTEGERS
from torchcaps.errors import InputError
from torchcaps.models import CapsNet, Network, get_preset, list_presets
from torchcaps.models.images import check_image_shape
from torchcaps.models.output import top_classes
from torchcaps.ranges import COUNT


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards each module trains or not as it did before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """:func:`evaluating`, and no gradient into the weights; afterwards all is as it was."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        with evaluating(model):
            yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """:func:`evaluating`, and no gradients."""
    with evaluating(model), torch.inference_mode():
        yield


def as_pixels(model: Network, images: Shaped[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
    """Images as the network takes them: pixels 0..1, in the dtype and on the device of its weights.

    ``images`` are uint8 of 0..255, or floating-point of 0..1. It is a TypeError if they are of another dtype, an
    InputError if they have a shape the network was not built for.
    """
    check_images(images)
    check_image_shape(images.shape, model.in_shape)
    return to_pixels(model, images)


def to_pixels(model: Network, images: Shaped[Tensor, "..."]) -> Float[Tensor, "..."]:
    """:func:`as_pixels` for images of any shape, such as the objects of images."""
    check_images(images)
    weight = next(model.parameters())
    if images.dtype == torch.uint8:
        return images.to(weight.device).to(weight.dtype).div_(255)
    return images.detach().to(weight.device, weight.dtype)


def check_images(images: Tensor) -> None:
    """Raise TypeError unless images are a tensor of pixels."""
    if not isinstance(images, Tensor) or not (images.dtype == torch.uint8 or images.is_floating_point()):
        got = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise TypeError(f"images must be uint8 of 0..255 or floating-point of 0..1, got {got}")


def in_batches(
    model: Network,
    images: Shaped[Tensor, "N C H W"],
    labels: Int[Tensor, "N"] | Int[Tensor, "N P"] | None,
    batch_size: int,
) -> Iterator[tuple[Float[Tensor, "B C H W"], Int[Tensor, "B"] | Int[Tensor, "B P"] | None]]:
    """Images as :func:`as_pixels` gives them and their labels, ``batch_size`` at a time, all of them checked first."""
    check_images(images)
    check_image_shape(images.shape, model.in_shape)
    if len(images) == 0:
        raise InputError("there must be at least one image, got none")
    COUNT.check("batch_size", batch_size)
    if labels is not None:
        check_labels(model, labels, len(images))
    for start in range(0, len(images), batch_size):
        pixels = to_pixels(model, images[start : start + batch_size])
        yield pixels, None if labels is None else labels[start : start + batch_size].to(pixels.device)


def check_labels(model: Network, labels: Int[Tensor, "N"] | Int[Tensor, "N P"], num_images: int) -> None:
    """Raise TypeError or InputError unless labels are a network's classes, one for each object in an image."""
    if not isinstance(labels, Tensor) or labels.dtype not in INTEGERS:
        got = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"labels must be integers, got {got}")
    objects = model.objects
    if labels.shape != ((num_images,) if objects == 1 else (num_images, objects)):
        wanted = f"({num_images},), one" if objects == 1 else f"({num_images}, {objects}), {objects}"
        raise InputError(
            f"labels must have shape {wanted} for each image, as the network sees {objects} in it, got "
            f"{tuple(labels.shape)}"
        )
    if num_images and (labels.min() < 0 or labels.max() >= model.num_classes):
        raise InputError(
            f"labels must be 0 to {model.num_classes - 1}, as the network has {model.num_classes} classes, got "
            f"{int(labels.min())}..{int(labels.max())}"
        )
    if objects > 1 and (labels.sort(1).values.diff(dim=1) == 0).any():
        raise InputError("the objects of an image must be of different classes, got labels with a class twice")


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


def require_capsules(model: Network, purpose: str, *, decoder: bool = False) -> CapsNet:
    """The model, if it has capsules, and a decoder where one is needed.

    Raises:
        InputError: It has not; the subject of the sentence is ``purpose``, and the presets that have get named.
    """
    if isinstance(model, CapsNet) and not (decoder and model.decoder is None):
        return model
    what = "this network" if isinstance(model, CapsNet) else f"a {type(model).__name__}"
    needed = "a decoder" if decoder else "capsules"
    presets = {name: get_preset(name) for name in list_presets()}
    fits = [name for name, each in presets.items() if (each.network.get("decoder") if decoder else each.has_capsules)]
    raise InputError(
        f"{purpose} needs {needed}, but {what} has no {needed.removeprefix('a ')}; presets that can: {', '.join(fits)}"
    )


require_decoder = partial(require_capsules, decoder=True)
