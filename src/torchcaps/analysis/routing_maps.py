"""What routing does, iteration by iteration: where the coupling goes, how decided it is, and whether it settles.

B images, I primary capsules, J classes, T iterations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from torchcaps.analysis.figures import (
    COLOURS,
    GAP,
    LINE,
    MARGIN,
    MUTED,
    SMALL,
    TITLE,
    Sheet,
    column_width,
    drawable,
    new_figure,
    shorten,
    style_axes,
    text_width,
    tile_size,
    use_whole_numbers,
)
from torchcaps.analysis.inference import class_labels, in_batches, inference, require_capsules
from torchcaps.analysis.strengths import DRAWN_ITERATIONS
from torchcaps.errors import InputError
from torchcaps.machine import MIB
from torchcaps.models import CapsNet, Model
from torchcaps.models.objects import longest
from torchcaps.nn import DynamicRouting
from torchcaps.ops.dynamic_routing import RoutingRound, SoftmaxOver, compute_votes, routing_rounds
from torchcaps.ops.memory import get_working_memory
from torchcaps.ops.squash import safe_norm
from torchcaps.ranges import ITERATIONS

if TYPE_CHECKING:
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """Every number of each routing iteration of some images; of iteration t, ``logits[t - 1]`` and so on.

    Args:
        images: Pixels 0..1.
        logits: b_ij at the beginning of the iteration.
        coupling: c_ij, the softmax of the logits.
        weighted_sum: s_j = Σ_i c_ij û_j|i, and the bias where the network has one.
        capsules: v_j = squash(s_j).
        agreement: ⟨û_j|i, v_j⟩; the next iteration begins with ``logits + agreement``.
        lengths: ‖v_j‖ after each iteration.
        entropy: See :class:`RoutingStatistics`.
        logit_change: See :class:`RoutingStatistics`.
        grid: Types, height and width of the primary capsules; I is their product.
        grouping: How primary capsules are formed, ``"channels"`` or ``"raster"``.
        softmax_over: The axis on which capsules compete, ``"outputs"`` (j) or ``"inputs"`` (i).
        leaky: Whether a "none of the above" competes too.
    """

    images: Float[np.ndarray, "B C H W"]
    logits: Float[np.ndarray, "T B I J"]
    coupling: Float[np.ndarray, "T B I J"]
    weighted_sum: Float[np.ndarray, "T B J D"]
    capsules: Float[np.ndarray, "T B J D"]
    agreement: Float[np.ndarray, "T B I J"]
    lengths: Float[np.ndarray, "T B J"]
    entropy: Float[np.ndarray, "T B"]
    logit_change: Float[np.ndarray, "T B"]
    grid: tuple[int, int, int]
    grouping: str
    softmax_over: SoftmaxOver
    leaky: bool

    @property
    def maps(self) -> Float[np.ndarray, "T B J types H W"]:
        """The coupling on the grid of the primary capsules: capsule i = (type·H + y)·W + x.

        With ``grouping="raster"``, a primary capsule is a run of K neighbouring values of one flattened channel and
        has no single location: the grid then shows the capsules in the order of their index only, not in space.
        """
        iterations, images, _, classes = self.coupling.shape
        return self.coupling.swapaxes(2, 3).reshape(iterations, images, classes, *self.grid)

    @property
    def uniform(self) -> float:
        """The coupling of iteration 1 without a prior: 1 / (number of competitors)."""
        competitors = self.coupling.shape[3 if self.softmax_over == "outputs" else 2]
        return 1 / (competitors + self.leaky)


@dataclass(frozen=True, eq=False)
class RoutingStatistics:
    """How decided the coupling is after each iteration, and how much the logits change; a column for each image.

    Args:
        entropy: Mean entropy of the coupling over the axis on which capsules compete (with "none of the above" where
            it competes), divided by its maximum: 1 is uniform coupling, 0 all to one.
        logit_change: Mean of |b_ij(t+1) − b_ij(t)|, the agreement |⟨û_j|i, v_j⟩| of iteration t. That of the last
            iteration is what one more iteration would add.
    """

    entropy: Float[np.ndarray, "T N"]
    logit_change: Float[np.ndarray, "T N"]


def trace_routing(
    model: Model, images: Shaped[Tensor, "B C H W"], *, num_iterations: int | None = None, batch_size: int = 64
) -> RoutingTrace:
    """Follow the routing of images from iteration to iteration.

    :func:`torchcaps.routing_rounds` does it for votes of your own.

    Args:
        model: A capsule network; in evaluation mode meanwhile, and afterwards as it was.
        images: uint8 of 0..255 or floating-point of 0..1. All numbers of their routing, 3·T·B·I·J + 2·T·B·J·D, are
            kept in memory: for large sets there is :func:`routing_statistics`.
        num_iterations: T, 1 to 1,000; the network's own if None.
        batch_size: Images at a time.

    Raises:
        TypeError: Images of another dtype.
        InputError: A network without capsules, without dynamic routing or without any iteration, images it was not
            built for, or a number out of its range.

    Example:
        >>> from torchcaps import create_model
        >>> from torchcaps.analysis import trace_routing
        >>> from torchcaps.datasets import load_dataset
        >>> trace = trace_routing(create_model("sabour2017"), load_dataset("digits").test.images[:4])
        >>> trace.agreement[0, 3].shape  # iteration 1 of the fourth image: input capsules, classes
        (1152, 10)
        >>> trace.maps[-1].mean(2).shape  # last iteration, averaged over capsule types: images, classes, places
        (4, 10, 6, 6)
    """
    network, routing, iterations = _check(model, num_iterations)
    pixels, followed = [], []
    with inference(network):
        for batch, rounds in _follow(network, routing, images, iterations, batch_size):
            pixels.append(batch.float().cpu())
            numbers = (torch.stack(each) for each in zip(*rounds, strict=True))  # (T, B, ...)
            followed.append([each.float().cpu() for each in (*numbers, *_measure(rounds, routing))])
    logits, coupling, weighted_sum, capsules, agreement, entropy, change = (
        torch.cat(parts, 1) for parts in zip(*followed, strict=True)
    )
    return RoutingTrace(
        images=torch.cat(pixels).numpy(),
        logits=logits.numpy(),
        coupling=coupling.numpy(),
        weighted_sum=weighted_sum.numpy(),
        capsules=capsules.numpy(),
        agreement=agreement.numpy(),
        lengths=safe_norm(capsules, eps=network.config.length_eps).numpy(),
        entropy=entropy.numpy(),
        logit_change=change.numpy(),
        grid=network.primary_grid,
        grouping=network.config.grouping,
        softmax_over=routing.softmax_over,
        leaky=routing.leaky,
    )


def routing_statistics(
    model: Model, images: Shaped[Tensor, "N C H W"], *, num_iterations: int | None = None, batch_size: int = 64
) -> RoutingStatistics:
    """Entropy of the coupling and change of the logits at each iteration, for any number of images.

    Args:
        model: A capsule network; in evaluation mode meanwhile, and afterwards as it was.
        images: uint8 of 0..255 or floating-point of 0..1.
        num_iterations: T, 1 to 1,000; the network's own if None.
        batch_size: Images at a time.

    Raises:
        TypeError: Images of another dtype.
        InputError: As for :func:`trace_routing`.
    """
    network, routing, iterations = _check(model, num_iterations)
    with inference(network):
        followed = [
            _measure(rounds, routing) for _, rounds in _follow(network, routing, images, iterations, batch_size)
        ]
    entropy, change = (torch.cat(parts, 1).float().cpu().numpy() for parts in zip(*followed, strict=True))
    return RoutingStatistics(entropy, change)


def figure_coupling(
    trace: RoutingTrace,
    index: int = 0,
    class_names: Sequence[str] | None = None,
    *,
    max_classes: int = 10,
    title: str | None = None,
) -> Figure:
    """Coupling maps of one image: a row for each iteration, a column for each class, the image beside them.

    A map is the coupling on the grid of the primary capsules, averaged over their types, white where it is uniform;
    the length of the class capsule after that iteration stands under it.

    Args:
        trace: From :func:`trace_routing`.
        index: Which of its images.
        class_names: The name of each class; its number if None.
        max_classes: Of more classes, only those of the longest capsules are shown.
        title: Above the figure.

    Raises:
        InputError: There is no such image, not one name for each class, ``max_classes`` below one, or more than 100
            iterations, which do not fit into one figure.
    """
    if not 0 <= index < len(trace.images):
        raise InputError(f"index must be 0 to {len(trace.images) - 1}, as so many images were traced, got {index}")
    if max_classes < 1:
        raise InputError(f"max_classes must be at least 1, got {max_classes}")
    iterations, _, classes = trace.lengths.shape
    DRAWN_ITERATIONS.check("the number of iterations in a figure", iterations)
    names = drawable(class_labels(class_names, classes))
    ordered = longest(torch.from_numpy(trace.lengths[-1, index]), min(max_classes, classes)).numpy()
    shown = np.sort(ordered)
    maps = trace.maps[:, index].mean(2)[:, shown]  # (T, shown, H, W)
    lengths = trace.lengths[:, index]

    title = title or "Routing: where each class takes its input from"
    places = "on the grid of the primary capsules"
    if trace.grouping == "raster":
        places = "of the primary capsules in the order of their index, not in space (raster grouping)"
    subtitle = f"coupling {places}, averaged over their types; below: length of the capsule"
    if len(shown) < classes:
        subtitle = f"the {len(shown)} longest of {classes} classes; {subtitle}"
    tile, picture = tile_size(*maps.shape[2:]), tile_size(*trace.images.shape[2:])
    pitch = (column_width(tile, [names[j] for j in shown]) + GAP, tile[1] + LINE + 2 * GAP)
    rows = [f"iteration {t}" for t in range(1, iterations + 1)]
    left = MARGIN + picture[0] + 2 * MARGIN + text_width(rows) + GAP
    top = MARGIN + 0.3 + 2 * LINE + LINE
    right, bottom = left + len(shown) * pitch[0], top + iterations * pitch[1]
    wide = max(right + 1.2, MARGIN + max(text_width([title], TITLE), text_width([subtitle], SMALL)))
    sheet = Sheet(wide + MARGIN, max(bottom, top + picture[1] + LINE) + MARGIN)
    sheet.text(title, MARGIN, MARGIN, size=TITLE)
    sheet.text(subtitle, MARGIN, MARGIN + 0.25, size=SMALL, color=MUTED)
    sheet.image(trace.images[index], MARGIN, top, picture)
    sheet.text("image", MARGIN + picture[0] / 2, top + picture[1] + GAP / 2, ha="center", color=MUTED)

    norm = _around(trace.uniform, maps)
    for column, j in enumerate(shown):
        centre = left + (column + 0.5) * pitch[0] - GAP / 2
        weight = "bold" if j == ordered[0] else "normal"
        sheet.text(shorten(names[j], pitch[0] - GAP), centre, top - GAP / 2, ha="center", va="bottom", weight=weight)
        for t in range(iterations):
            y = top + t * pitch[1]
            drawn = sheet.map(maps[t, column], centre - tile[0] / 2, y, tile, colours="RdBu_r", norm=norm)
            sheet.text(
                f"{lengths[t, j]:.2f}",
                centre,
                y + tile[1] + GAP / 2,
                size=SMALL,
                ha="center",
                color=MUTED,
                weight=weight,
            )
    for t, row in enumerate(rows):
        sheet.text(row, left - GAP, top + t * pitch[1] + tile[1] / 2, ha="right", va="center")
    sheet.text("coupling", right + MARGIN, top - 2 * GAP, size=SMALL, va="bottom", color=MUTED)
    bar = sheet.figure.colorbar(drawn, cax=sheet.axes(right + MARGIN, top, (0.13, bottom - top - LINE - 2 * GAP)))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=SMALL)
    ends = [float(end) for end in bar.mappable.get_clim()]
    ticks = {ends[0]: "", trace.uniform: " uniform", ends[1]: ""}
    bar.set_ticks(list(ticks), labels=[f"{tick:.2g}{word}" for tick, word in ticks.items()])
    return sheet.figure


def figure_routing_statistics(statistics: RoutingStatistics | RoutingTrace, *, title: str | None = None) -> Figure:
    """Entropy of the coupling and change of the logits at each iteration: mean over the images, and their middle 80 %.

    Args:
        statistics: From :func:`routing_statistics`; a :class:`RoutingTrace` has the same fields.
        title: Above the figure.
    """
    figure = new_figure(7.2, 3.0)
    if title:
        figure.suptitle(title, fontsize=TITLE)
    panels = (
        ("Entropy of the coupling", "share of its maximum", statistics.entropy),
        ("Change of the routing logits", "mean |⟨vote, output⟩|", statistics.logit_change),
    )
    for axes, colour, (name, unit, values) in zip(figure.subplots(1, 2), COLOURS, panels, strict=False):
        iterations = np.arange(1, len(values) + 1)
        low, high = np.quantile(values, (0.1, 0.9), axis=1)
        axes.fill_between(iterations, low, high, color=colour, alpha=0.2, linewidth=0, label="middle 80 % of images")
        axes.plot(iterations, values.mean(1), color=colour, marker="o", label=f"mean of {values.shape[1]:,} images")
        style_axes(axes, name, "iteration", unit)
        use_whole_numbers(axes)
        axes.legend(fontsize=SMALL, frameon=False, loc="lower left")
    entropy_axes, change_axes = figure.axes
    # a change of less than a percent is none to speak of, and looks like none
    lowest = min(float(statistics.entropy.min()), 0.99)
    entropy_axes.set_ylim(lowest - 0.1 * (1 - lowest), 1 + 0.1 * (1 - lowest))
    change_axes.set_ylim(bottom=0)
    return figure


def _follow(
    network: CapsNet, routing: DynamicRouting, images: Shaped[Tensor, "N C H W"], num_iterations: int, batch_size: int
) -> Iterator[tuple[Float[Tensor, "B C H W"], list[RoutingRound]]]:
    """Pixels and rounds, of no more images at a time than have votes that fit the working memory."""
    layer = network.class_capsules
    fitting = int(get_working_memory() * MIB / (4 * layer.in_capsules * layer.out_capsules * layer.out_dim))
    for batch, _ in in_batches(network, images, None, min(batch_size, max(fitting, 1))):
        rounds = routing_rounds(
            compute_votes(network.primary_poses(batch), layer.weight),
            num_iterations,
            softmax_over=routing.softmax_over,
            bias=layer.bias,
            prior=layer.prior,
            leaky=routing.leaky,
            eps=routing.eps,
        )
        yield batch, rounds


def _measure(rounds: list[RoutingRound], routing: DynamicRouting) -> tuple[Float[Tensor, "T B"], Float[Tensor, "T B"]]:
    """Entropy of the coupling, and change of the logits, of each iteration."""
    entropy = torch.stack([normalised_entropy(each.coupling, routing) for each in rounds])
    return entropy, torch.stack([each.agreement.abs().mean((1, 2)) for each in rounds])


def normalised_entropy(coupling: Float[Tensor, "B I J"], routing: DynamicRouting) -> Float[Tensor, "B"]:
    """Entropy over the competitors, averaged over what they compete for, as a share of its maximum."""
    axis = 2 if routing.softmax_over == "outputs" else 1
    entropy = torch.special.entr(coupling).sum(axis)
    if routing.leaky:
        entropy = entropy + torch.special.entr((1 - coupling.sum(axis)).clamp_min(0))
    competitors = coupling.shape[axis] + routing.leaky
    return entropy.mean(1) / math.log(competitors) if competitors > 1 else torch.zeros_like(entropy.mean(1))


def _check(model: Model, num_iterations: int | None) -> tuple[CapsNet, DynamicRouting, int]:
    """The network, its routing, and how many iterations to follow.

    Raises:
        InputError: There is nothing to follow.
    """
    network = require_capsules(model, "routing")
    routing = network.class_capsules.routing
    if not isinstance(routing, DynamicRouting):
        raise InputError(f"iterations of DynamicRouting can be followed, not those of {type(routing).__name__}")
    iterations = routing.num_iterations if num_iterations is None else num_iterations
    ITERATIONS.check("num_iterations", iterations)
    if iterations < 1:
        raise InputError(
            f"num_iterations must be at least 1 for routing to be followed, got {iterations}: without an iteration "
            "votes are summed and there is no coupling"
        )
    return network, routing, iterations


def _around(uniform: float, values: Float[np.ndarray, "..."]) -> TwoSlopeNorm:
    """A colour scale with uniform coupling in the middle, and room on both sides even where all is uniform."""
    from matplotlib.colors import TwoSlopeNorm

    reach = max(float(np.abs(values - uniform).max()), 0.02 * uniform)  # equal shades for equal distances
    return TwoSlopeNorm(uniform, uniform - reach, uniform + reach)
