"""Record the numbers of routing in each iteration: coupling, agreement, entropy, output capsules.

Shapes have B images, I input capsules and J output capsules of a layer, and T iterations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from torchcaps.analysis.inference import over_batches, require_capsules
from torchcaps.analysis.results import MAX_SHOWN, Scored
from torchcaps.checks import check, checked
from torchcaps.errors import InputError
from torchcaps.machine import MIB
from torchcaps.models import CapsNet, Network
from torchcaps.models.output import ScoreName
from torchcaps.nn import CapsuleLayer, Capsules, ConvCapsules, DynamicRouting, PrimaryCapsules, Routing, RoutingRound
from torchcaps.nn.capsules import Grid
from torchcaps.nn.layers import TypesLayer
from torchcaps.nn.votes.base import Votes
from torchcaps.nn.votes.competition import MapCompetition, SoftmaxOver
from torchcaps.nn.votes.positions import by_type
from torchcaps.ops.labels import top_classes
from torchcaps.ops.memory import get_working_memory
from torchcaps.ranges import AtLeastOneIteration, Range

Outputs = Literal["class", "capsule", "type"]
"""Kind of the output capsules of a layer."""
MAX_DEAD_SCORE = 1e-3
"""A capsule is dead if its length or activation never exceeds this."""
MAX_BATCH = 64
"""Images in a batch; fewer if their votes would not fit the working memory."""
ALL_PRESENT = torch.ones(())
"""Mask without masked capsules, to be broadcast."""
PAIRS = ("logits", "coupling", "agreement")
"""Numbers of each pair of an input capsule and an output capsule."""
PER_ROUND = (*PAIRS, "weighted_sum", "capsules")
STATISTICS = ("entropy", "mean_agreement", "longest")
TRACED = (*STATISTICS, "images", "scores", *PER_ROUND)


@dataclass(frozen=True, eq=False)
class RoutingStatistics:
    """Entropy of the coupling and mean agreement of each iteration (row) and image (column).

    Args:
        entropy: Mean entropy of the coupling over the axis on which capsules compete (including "none of the above"
            for leaky routing), divided by its maximum: 1 is uniform coupling, 0 is all coupling to one output.
        mean_agreement: Mean absolute agreement |⟨û_j|i, v_j⟩| of iteration t, which dynamic routing adds to its logits.
        longest: Largest length or activation of each output capsule on any of the images; on a map, of all types and
            positions.
    """

    entropy: Float[np.ndarray, "T B"]
    mean_agreement: Float[np.ndarray, "T B"]
    longest: Float[np.ndarray, "J"]

    @property
    def dead(self) -> float:
        """Share of output capsules whose length or activation never exceeds 1e-3."""
        return float((self.longest <= MAX_DEAD_SCORE).mean())


@dataclass(frozen=True, eq=False)
class RoutingTrace(RoutingStatistics, Scored):
    """All numbers of each routing iteration; index ``t - 1`` holds iteration t.

    For a layer on a map, J counts the types. Sums and capsules cover all types and positions, and scores are
    means over the positions. Logits, coupling and agreement of an input capsule are means over the windows that contain
    it. If the positions compete for an input capsule, its coupling is summed over them instead.

    Args:
        images: Pixels 0..1.
        logits: Logits at the beginning of the iteration (b_ij).
        coupling: Softmax of the logits (c_ij).
        weighted_sum: Weighted sum of the votes, plus a bias if the network has one (s_j = Σ_i c_ij û_j|i).
        capsules: Output capsules (v_j = squash(s_j)).
        agreement: Agreement of votes and outputs (⟨û_j|i, v_j⟩); the next iteration begins with ``logits + agreement``.
        scores: Lengths ‖v_j‖ of the output capsules after each iteration, or activations if the routing computes them.
        grid: Types, height and width of the input capsules; I is their product.
        in_space: True if the input capsules have positions on a map; else the grid shows them in the order of their
            index.
        layer: Number of the capsule layer, from 1.
        softmax_over: Axis on which capsules compete, ``"outputs"`` (j) or ``"inputs"`` (i); None if they do not.
        leaky: True if "none of the above" competes too.
        score_name: Kind of the scores.
        outputs: Kind of the output capsules: classes, capsules of a hidden layer, or capsule types on a map.
    """

    images: Float[np.ndarray, "B C H W"]
    logits: Float[np.ndarray, "T B I J"]
    coupling: Float[np.ndarray, "T B I J"]
    weighted_sum: Float[np.ndarray, "T B J D"]
    capsules: Float[np.ndarray, "T B J D"]
    agreement: Float[np.ndarray, "T B I J"]
    scores: Float[np.ndarray, "T B J"]
    grid: Grid
    in_space: bool
    layer: int
    softmax_over: SoftmaxOver | None
    leaky: bool
    score_name: ScoreName = "length"
    outputs: Outputs = "class"

    @property
    def maps(self) -> Float[np.ndarray, "T B J types H W"]:
        """Coupling on the grid of the input capsules: capsule i = (type·H + y)·W + x.

        Primary capsules with ``grouping="raster"`` are runs of K neighbouring values of a flattened channel, so they
        have no single position. The grid then shows the capsules in the order of their index, not in space.
        """
        iterations, images, _, classes = self.coupling.shape
        return self.coupling.swapaxes(2, 3).reshape(iterations, images, classes, *self.grid)

    @property
    def inputs(self) -> str:
        """Description of the input capsules."""
        return "primary capsules" if self.layer == 1 else f"capsules of layer {self.layer - 1}"

    @property
    def uniform(self) -> float:
        """Uniform coupling, 1 / (number of competitors); 1 without competition."""
        if self.softmax_over is None:
            return 1.0
        competitors = self.coupling.shape[3 if self.softmax_over == "outputs" else 2]
        return 1 / (competitors + self.leaky)

    @property
    def reach(self) -> float:
        """Largest difference from uniform coupling on the colour scale: 4 times uniform, but coupling is at most 1.

        It depends on the layer alone, so the maps of all images have one scale.
        """
        return min(4 * self.uniform, max(self.uniform, 1 - self.uniform))

    @property
    def highest(self) -> list[int]:
        """The ten outputs with the highest scores after the last iteration of the first image, the highest first."""
        return top_classes(torch.from_numpy(self.scores[-1, 0]), min(MAX_SHOWN, self.scores.shape[2])).tolist()


def compare_to_uniform(coupling: float, uniform: float) -> str:
    """Return a coupling and its relation to uniform coupling in words, such as ``0.110, 10 % above uniform``."""
    ratio = coupling / uniform
    if abs(ratio - 1) < 0.005:
        return f"{coupling:.3f}, uniform"
    if ratio >= 1.995:
        return f"{coupling:.3f}, {ratio:.1f} times uniform"
    return f"{coupling:.3f}, {100 * abs(ratio - 1):.0f} % {'above' if ratio > 1 else 'below'} uniform"


@checked
def trace_routing(
    model: Network, images: Shaped[Tensor, "B C H W"], *, layer: int | None = None, num_iterations: int | None = None
) -> RoutingTrace:
    """Record all numbers of each routing iteration in one capsule layer.

    For your own votes, use :func:`torchcaps.routing_rounds`.

    Args:
        model: A capsule network.
        images: uint8 of 0..255 or floating-point of 0..1. All 3·T·B·I·J + 2·T·B·J·D numbers are kept in memory, so
            use :func:`routing_statistics` for large sets.
        layer: Number of the capsule layer, from 1; None: the last one, with the class capsules.
        num_iterations: Number of iterations of dynamic routing (T), 1 to 1,000; None: as in the network.

    Raises:
        InputError: The network has no capsules, or no such layer, or the layer has no coupling or no iterations.

    Examples:
        >>> from torchcaps import create_model
        >>> from torchcaps.analysis import trace_routing
        >>> from torchcaps.datasets import load_dataset
        >>> trace = trace_routing(create_model("sabour2017"), load_dataset("digits").test.images[:4])
        >>> trace.agreement[0, 3].shape  # iteration 1 of the fourth image: input capsules, classes
        (1152, 10)
        >>> trace.maps[-1].mean(2).shape  # last iteration, mean over capsule types: images, classes, grid
        (4, 10, 6, 6)
    """
    return RoutingTrace(**_record(model, images, layer, num_iterations, TRACED))


def trace_class_capsules(model: Network, image: Shaped[Tensor, "1 C H W"], capsules: Capsules) -> RoutingTrace:
    """Record the routing of one image in the last layer, given the input capsules of that layer.

    Raises the same errors as :func:`trace_routing`, which computes the capsules from the image.
    """
    return RoutingTrace(**_record(model, image, None, None, TRACED, capsules))


@checked
def routing_statistics(
    model: Network, images: Shaped[Tensor, "N C H W"], *, layer: int | None = None, num_iterations: int | None = None
) -> RoutingStatistics:
    """Measure entropy of the coupling, mean agreement and lengths in one capsule layer, for any number of images.

    Takes the same arguments and raises the same errors as :func:`trace_routing`.
    """
    arrays = _record(model, images, layer, num_iterations, STATISTICS)
    return RoutingStatistics(**{name: arrays[name] for name in STATISTICS})


def _record(
    model: Network,
    images: Shaped[Tensor, "N C H W"],
    layer: int | None,
    num_iterations: int | None,
    names: Sequence[str],
    inputs: Capsules | None = None,
) -> dict[str, Any]:
    """Return the named arrays of a trace and its other fields; batches are chosen to fit the working memory."""
    network = require_capsules(model, "routing", "routing")
    count = len(network.layers)
    number = count if layer is None else layer
    Range(1, count, whole=True).check("layer", number)
    chosen, before, after = network.layer(number), *network.flow[number - 1 : number + 1]
    routing, grid = chosen.routing, _grid(network, number)
    compute_rounds = routing.rounds
    if num_iterations is not None:
        if not isinstance(routing, DynamicRouting):
            name = type(routing).__name__
            raise InputError(
                f"num_iterations must be left out for {name}: only DynamicRouting's iterations can be changed"
            )
        compute_rounds = partial(routing.rounds, num_iterations=num_iterations)
    check("num_iterations", routing.num_iterations if num_iterations is None else num_iterations, AtLeastOneIteration)
    score_name: list[ScoreName] = []

    def look(pixels: Tensor, _: object) -> list[Tensor]:
        votes, activations = chosen.votes(network.capsules(pixels)[number - 1] if inputs is None else inputs)
        rounds = compute_rounds(votes, activations)
        by_image = [_by_image(each, chosen, grid) for each in rounds]
        capsules = [Capsules(each.capsules, each.activations) for each in by_image]
        score_name[:] = ["length" if rounds[-1].activations is None else "activation"]
        entropy, agreement = _measure(rounds, chosen, votes, grid, len(pixels))
        scores = torch.stack([each.scores(network.length_eps) for each in capsules], 1)  # (B, T, J·L)
        numbers = {name: torch.stack([getattr(each, name) for each in by_image], 1) for name in PER_ROUND}
        numbers |= {"images": pixels, "entropy": entropy, "mean_agreement": agreement}
        numbers |= {"longest": capsules[-1].scores(1e-24)}
        numbers |= {"scores": scores.unflatten(2, (rounds[0].coupling.shape[2], -1)).float().mean(3)}
        return [numbers[name].float() for name in names]

    fitting = int(get_working_memory() * MIB / (4 * before.poses.shape[1] * after.poses.shape[1] * chosen.out_dim))
    results = over_batches(look, network, images, None, max(1, min(MAX_BATCH, fitting)))
    arrays = {name: rows.numpy() for name, rows in zip(names, results, strict=True)}
    by_iteration = {name: rows if name == "images" else rows.swapaxes(0, 1) for name, rows in arrays.items()}
    outputs: Outputs = "capsule" if after.grid is None else "type"
    return by_iteration | {
        "longest": arrays["longest"].max(0),
        "grid": grid,
        "in_space": before.grid is not None,
        "layer": number,
        "softmax_over": routing.softmax_over,
        "leaky": routing.leaky,
        "score_name": score_name[0],
        "outputs": "class" if number == count else outputs,
    }


def _by_image(each: RoutingRound, layer: CapsuleLayer, grid: Grid) -> RoutingRound:
    """Rearrange a round of a layer on a map by image.

    Logits, coupling and agreement of an input capsule are averaged over the windows that contain it: (B, N, J). If the
    positions compete for it, its coupling is summed over them, so that it sums to one over the types. Sums, capsules
    and activations cover all positions: (B, J·L, D).
    """
    if isinstance(layer, TypesLayer):
        return _by_image_of_types(each, layer, grid)
    if not isinstance(layer, ConvCapsules):
        return each
    windows = MapCompetition(layer.window_capsules(grid, each.coupling.device), math.prod(grid) + 1)
    links = windows.links.clamp_min(1)[1:, None]

    def total(values: Float[Tensor, "BL I J"]) -> Float[Tensor, "B N J"]:
        return torch.stack([windows.sum(type_)[:, 1:] for type_ in values.unbind(2)], 2)

    logits, coupling, weighted_sum, capsules, agreement, activations = each
    positions = len(windows.children)
    sums, poses = (by_type(tensor, positions) for tensor in (weighted_sum, capsules))
    active = None if activations is None else by_type(activations, positions)
    shared = layer.compete_over == "types-and-positions" and layer.routing.softmax_over == "outputs"
    shares = total(coupling) if shared else total(coupling) / links
    return RoutingRound(total(logits) / links, shares, sums, poses, total(agreement) / links, active)


def _by_image_of_types(each: RoutingRound, layer: TypesLayer, grid: Grid) -> RoutingRound:
    """Rearrange a round of a layer whose types vote by image.

    An input capsule has the mean over the output positions that see it. A position that sees the copies of a repeated
    capsule counts once for each copy.
    """
    sizes = layer.out_grid(grid)[1:]

    def total(values: Float[Tensor, "BL T J"]) -> Float[Tensor, "B N J"]:
        maps = values.unflatten(0, (-1, *sizes)).movedim((-1, -2), (1, 2))  # (B, J, T, *S')
        # the gradient of a sum over a window is a sum over the outputs that see a capsule
        with torch.inference_mode(False), torch.enable_grad():  # before torch 2.11, torch.func is zero in inference
            zeros = maps.new_zeros(math.prod(maps.shape[:2]), *grid).requires_grad_()
            (sums,) = torch.autograd.grad(layer.window_sums(zeros), zeros, maps.flatten(0, 1))
        return sums.unflatten(0, maps.shape[:2]).flatten(2).transpose(1, 2)

    logits, coupling, weighted_sum, capsules, agreement, activations = each
    links, positions = total(torch.ones_like(coupling)).clamp_min(1), math.prod(sizes)
    sums, poses = (by_type(tensor, positions) for tensor in (weighted_sum, capsules))
    active = None if activations is None else by_type(activations, positions)
    means = [total(values) / links for values in (logits, coupling, agreement)]
    return RoutingRound(means[0], means[1], sums, poses, means[2], active)


def _measure(
    rounds: list[RoutingRound], layer: CapsuleLayer, votes: Votes, grid: Grid, images: int
) -> list[Float[Tensor, "B T"]]:
    """Return the entropy of the coupling and the mean agreement of each image and iteration.

    For a layer on a map, the rounds have one row for each window: B·L in place of B.
    """
    present = ALL_PRESENT
    if isinstance(layer, ConvCapsules) and layer.layer_padding:
        present = (layer.window_capsules(grid, votes.like.device) > 0).repeat(images, 1)
    entropy = [normalised_entropy(each.coupling, layer.routing, votes.competition, present) for each in rounds]
    agreement = [_mean(each.agreement.abs().mean(2), present) for each in rounds]
    return [torch.stack(each, 1).unflatten(0, (images, -1)).mean(1) for each in (entropy, agreement)]


def _mean(numbers: Float[Tensor, "B I"], present: Shaped[Tensor, "..."]) -> Float[Tensor, "B"]:
    """Return the mean over the present capsules."""
    weights = present.to(numbers).expand_as(numbers)
    return (numbers * weights).sum(1) / weights.sum(1)


def normalised_entropy(
    coupling: Float[Tensor, "B I J"],
    routing: Routing,
    competition: MapCompetition | None = None,
    present: Shaped[Tensor, "..."] = ALL_PRESENT,
) -> Float[Tensor, "B"]:
    """Return the entropy of the coupling over the competitors as a share of its maximum, averaged over the other axis.

    If the output capsules of overlapping windows compete, the entropy of an input capsule is over all of them. If
    nothing competes, or the routing adds something to the softmax, the coupling is first divided by its sum; negative
    coupling counts as 0. Input capsules that are not ``present``, beyond the edge of a map, are left out of the mean.
    """
    axis = 1 if routing.softmax_over == "inputs" else 2
    coupling = coupling.clamp_min(0)
    if routing.softmax_over is None or (competition is None and not routing.leaky):
        coupling = coupling / coupling.sum(axis, keepdim=True).clamp_min(1e-30)
    entropy, total, windows = torch.special.entr(coupling).sum(axis), coupling.sum(axis), 1
    competitors = torch.tensor(coupling.shape[axis])
    if axis == 1:
        present = ALL_PRESENT
    elif competition is not None and routing.softmax_over == "outputs":  # 0 is beyond the edge
        entropy, total = competition.sum(entropy)[:, 1:], competition.sum(total)[:, 1:]  # (B, N)
        competitors, windows = coupling.shape[2] * competition.links[1:], competition.rows_per_image
        present = competitors > 0
    if routing.leaky:
        entropy = entropy + torch.special.entr((1 - total).clamp_min(0))
    competitors = (competitors + routing.leaky).to(entropy)
    share = torch.where(competitors > 1, entropy / competitors.clamp_min(2).log(), 0.0)
    return _mean(share, present).repeat_interleave(windows)


def _grid(network: CapsNet, number: int) -> Grid:
    """Return types, height and width of a layer's input capsules; a single row if they have no positions on a map.

    Primary capsules without positions get the grid of the map that they are computed from.
    """
    capsules, primary = network.flow[number - 1], network.primary_capsules
    if capsules.grid is None and number == 1 and isinstance(primary, PrimaryCapsules):
        around = 2 * primary.primary_padding - primary.primary_kernel
        height, width = ((side + around) // primary.primary_stride + 1 for side in network.map_shape[1:])
        return primary.primary_types, height, width
    return capsules.grid or (1, 1, capsules.poses.shape[1])
