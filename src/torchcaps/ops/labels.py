"""Building blocks of the tasks' losses and scores: classes of several objects in an image, and regression errors.

P is the number of objects in an image. All objects of an image have different classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from torchcaps.checks import check_classes, checked
from torchcaps.errors import InputError
from torchcaps.ops.precision import full_dtype
from torchcaps.tracing import can_look, is_eager


def top_classes(scores: Float[Tensor, "*B J"], objects: int) -> Int[Tensor, "*B P"]:
    """Return the classes of the P highest scores in descending order. Equal scores keep the order of the classes.

    It uses argmax, because ``topk`` does not define the order of equal numbers, and ONNX has no stable sort.
    """
    left, classes = scores.detach(), []
    for _ in range(objects):
        classes.append(left.argmax(-1, keepdim=True))
        left = left.scatter(-1, classes[-1], -torch.inf)
    return torch.cat(classes, -1)


def is_correct(scores: Float[Tensor, "B J"], labels: Shaped[Tensor, "B ..."]) -> Bool[Tensor, "B"]:
    """Return True for each image whose highest scores belong exactly to its classes.

    Args:
        scores: Class scores.
        labels: The class of each image (B,); the classes of its P objects (B, P), P below J; or rows (B, J) with the
            largest numbers at the classes: one-hot rows, several ones, or the shares of mixed images. A row of zeros
            has no class, so no answer to it is correct.

    Source: Sabour, Frosst, Hinton 2017, section 6 (arXiv:1710.09829).
    """
    if labels.ndim == 1:
        return scores.argmax(-1) == labels
    if labels.shape == scores.shape:
        present = (labels > 0) & (labels == labels.amax(-1, keepdim=True))
        count = present.sum(-1, keepdim=True)
        ranked = present.gather(-1, scores.argsort(dim=-1, descending=True, stable=True))
        first = torch.arange(labels.shape[-1], device=labels.device) < count
        return ((ranked == first).all(-1)) & (count[:, 0] > 0)
    return (top_classes(scores, labels.shape[1]).sort(-1).values == labels.sort(-1).values).all(-1)


def match_labels(reference: Int[Tensor, "B P"], labels: Int[Tensor, "B P"]) -> Int[Tensor, "B P"]:
    """Return the permutation that reorders each row of labels so that it lines up with ``reference``.

    In ``labels.gather(1, match_labels(reference, labels))`` a class that both rows contain has the same column as in
    ``reference``. The remaining classes keep their order. The classes of a row are all different.
    """
    same = reference.unsqueeze(2) == labels.unsqueeze(1)  # (B, P reference, P labels)
    # sort both rows: first the common classes by their number, then the rest in their original order
    last = torch.iinfo(torch.int32).max + torch.arange(reference.shape[1], device=reference.device)
    first = torch.where(same.any(2), reference, last).argsort(1)
    second = torch.where(same.any(1), labels, last).argsort(1)
    return second.gather(1, first.argsort(1))


def one_hot(labels: Int[Tensor, "*B"], num_classes: int, name: str) -> Shaped[Tensor, "*B J"]:
    """Return a row for each label with a one at its class and zeros elsewhere.

    Unlike torch's function it never waits for the values of the labels, so it works under ``torch.vmap``.

    Args:
        labels: Classes, in 0..num_classes-1.
        num_classes: Number of classes (J).
        name: Name of the labels in an error message.

    Raises:
        InputError: Labels out of range on the CPU. Eager code on a GPU stops at a device-side assertion instead.
    """
    check_classes(name, labels, num_classes)
    if labels.device.type == "cuda" and is_eager():
        return F.one_hot(labels.long(), num_classes)  # the comparison below hides labels out of range
    return labels.unsqueeze(-1) == torch.arange(num_classes, device=labels.device)


@checked
def label_rows(scores: Float[Tensor, "B J"], targets: Int[Tensor, "B ..."], objects: int) -> Float[Tensor, "B J"]:
    """Convert the labels of P different objects in each image to one row of zeros and ones.

    Values are checked on the CPU only, because a check on a GPU waits for the device.

    Raises:
        InputError: Another number of objects, labels out of range, or two objects of one class in an image.
    """
    if targets.shape[1:] != (objects,):
        raise InputError(
            f"this network sees {objects} objects in an image, so targets must be their labels, of shape "
            f"({len(scores)}, {objects}), got {tuple(targets.shape)}"
        )
    rows = one_hot(targets, scores.shape[1], "labels").to(full_dtype(scores.dtype)).amax(1)
    if can_look(targets) and (rows.sum(1) < objects).any():
        image = int((rows.sum(1) < objects).nonzero()[0])
        raise InputError(
            f"the objects of an image must be of different classes, got {targets[image].tolist()} for image {image}"
        )
    return rows


@checked
def squared_error(
    values: Float[Tensor, "B J"], targets: Float[Tensor, "B J"], scale: Float[Tensor, "J"]
) -> Float[Tensor, ""]:
    """Return the mean over images and numbers of ((value − target) / scale)², the loss of a regression."""
    return ((values - targets) / scale).square().mean()


def sigmoid_cross_entropy(logits: Float[Tensor, "B J"], present: Float[Tensor, "B J"]) -> Float[Tensor, ""]:
    """Return the mean over images of the sum over classes of −T log σ(z) − (1 − T) log(1 − σ(z)), T 0 or 1."""
    return F.binary_cross_entropy_with_logits(logits, present, reduction="none").sum(-1).mean()


def decreasing(values: Float[Tensor, "B M"]) -> Float[Tensor, "B M"]:
    """Return the decreasing sequence with the smallest sum of squared differences from each row.

    It is p_k = min_{i ≤ k} max_{j ≥ k} mean(values_i … values_j), which needs no loop over the values, so that it can
    be exported.

    Source: Robertson, Wright, Dykstra 1988, "Order Restricted Statistical Inference", theorem 1.4.4.
    """
    M = values.shape[1]
    sums = F.pad(values.to(full_dtype(values.dtype)).cumsum(1), (1, 0))
    ends = torch.arange(1, M + 1, device=values.device)
    lengths = (ends - (ends - 1)[:, None]).clamp(min=1)  # (i, j)
    means = (sums[:, None, 1:] - sums[:, :-1, None]) / lengths  # (B, i, j), used where i ≤ j
    return torch.stack([means[:, : k + 1, k:].amax(2).amin(1) for k in range(M)], 1)


def grade_scores(thresholds: Float[Tensor, "B J"]) -> Float[Tensor, "B J"]:
    """Return a score for each of J grades that sum to 1, from estimates of P(grade ≥ k), k = 0 … J−1.

    The estimates are projected by :func:`decreasing`. The first one is not used, because every grade is 0 or higher.
    """
    above = decreasing(thresholds[:, 1:].clamp(0, 1))
    edges = F.pad(F.pad(above, (1, 0), value=1.0), (0, 1))
    return edges[:, :-1] - edges[:, 1:]
