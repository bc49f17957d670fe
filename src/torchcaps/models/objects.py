"""Several objects in one image: which classes its labels name, which its longest capsules do, and which of them match.

P is the number of objects in an image, each of another class.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torchcaps.ops.checks import NUMBERS, can_look, check_classes, check_dense, check_integers, check_one_device
from torchcaps.ops.precision import full_dtype


def longest(lengths: Float[Tensor, "*B J"], objects: int) -> Int[Tensor, "*B P"]:
    """The classes of the P longest capsules, the longest first; of equally long ones the first class comes first.

    ``topk`` leaves the order of equal numbers open, and ONNX has no stable sort; both have this argmax.
    """
    left, found = lengths.detach(), []
    for _ in range(objects):
        found.append(left.argmax(-1, keepdim=True))
        left = left.scatter(-1, found[-1], -torch.inf)
    return torch.cat(found, -1)


def is_right(lengths: Float[Tensor, "B J"], labels: Int[Tensor, "B"] | Int[Tensor, "B P"]) -> Bool[Tensor, "B"]:
    """Whether an image's longest capsule is its class, or its P longest capsules are exactly its P classes.

    Source: Sabour, Frosst, Hinton 2017, section 6 (arXiv:1710.09829).
    """
    if labels.ndim == 1:
        return lengths.argmax(-1) == labels
    given = longest(lengths, labels.shape[1])
    return (given.sort(-1).values == labels.sort(-1).values).all(-1)


def match(given: Int[Tensor, "B P"], labels: Int[Tensor, "B P"]) -> Int[Tensor, "B P"]:
    """The permutation of an image's labels that puts each beside the class that it is to be compared with.

    ``labels.gather(1, match(given, labels))`` stands beside ``given``: a class that is in both beside itself, the
    others in the order in which either came. The classes of a row are all different.
    """
    same = given.unsqueeze(2) == labels.unsqueeze(1)  # (B, P given, P labels)
    # both in one order: the classes that are in both by their number, then the others as they came
    last = torch.iinfo(torch.int32).max + torch.arange(given.shape[1], device=given.device)
    first = torch.where(same.any(2), given, last).argsort(1)
    second = torch.where(same.any(1), labels, last).argsort(1)
    return second.gather(1, first.argsort(1))


def label_rows(
    lengths: Float[Tensor, "B J"], labels: Int[Tensor, "B P"], objects: int, caller: str
) -> Float[Tensor, "B J"]:
    """Labels of several objects as one row of zeros and ones an image; errors as for :func:`check_labels`."""
    check_labels(labels, (len(lengths), objects), lengths.shape[1], caller)
    check_one_device(caller, lengths=lengths, targets=labels)
    rows = torch.zeros(lengths.shape, dtype=full_dtype(lengths.dtype), device=lengths.device)
    return rows.scatter_(1, labels.long(), 1)


def check_labels(labels: Tensor, shape: tuple[int, int], num_classes: int, caller: str) -> None:
    """Raise unless ``labels`` are the classes of P different objects in each image, of ``shape`` (B, P).

    Values are looked at on the CPU only: on a GPU that would wait for the device.

    Raises:
        TypeError: Labels that are not integers.
        ValueError: Another shape, labels that are no classes, or two objects of one class in an image.
    """
    check_dense(caller, "targets", labels, NUMBERS)
    if tuple(labels.shape) != shape:
        raise ValueError(
            f"{caller}: this network sees {shape[1]} objects in an image, so targets must be their labels, of shape "
            f"{shape}, got {tuple(labels.shape)}"
        )
    check_integers(caller, "labels", labels)
    check_classes(caller, "labels", labels, num_classes)
    if not can_look(labels):
        return
    ordered = labels.sort(-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(1)
    if twice.any():
        image = int(twice.nonzero()[0])
        raise ValueError(
            f"{caller}: the objects of an image must be of different classes, got {labels[image].tolist()} for "
            f"image {image}"
        )
