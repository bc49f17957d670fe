"""The numbers of routing, iteration by iteration: where the coupling goes, how decided it is, and whether it settles.

B images, I input capsules and J output capsules of a layer, T iterations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from torchcaps.analysis.inference import over_batches, require_capsules
from torchcaps.analysis.results import MOST_SHOWN, Scored
from torchcaps.checks import check, checked
from torchcaps.errors import InputError
from torchcaps.machine import MIB
from torchcaps.models import CapsNet, Network
from torchcaps.models.output import ScoreName
from torchcaps.nn import CapsuleLayer, Capsules, ConvCapsules, DynamicRouting, PrimaryCapsules, Routing, RoutingRound
from torchcaps.nn.capsules import Grid
from torchcaps.nn.competition import MapCompetition, SoftmaxOver
from torchcaps.nn.map_votes import by_type
from torchcaps.nn.votes import Votes
from torchcaps.ops.labels import top_classes
from torchcaps.ops.memory import get_working_memory
from torchcaps.ranges import AtLeastOneIteration, Range

if TYPE_CHECKING:
    pass


Outputs = Literal["class", "capsule", "type"]
"""What the output capsules of a layer are."""
DEAD = 1e-3
"""A capsule whose length or activation is never more says nothing."""
BATCH = 64
"""Images that are followed at a time; fewer where their votes would not fit the working memory."""
ALL = torch.ones(())
"""Every capsule is there."""
PAIRS = ("logits", "coupling", "agreement")
"""The numbers that each input capsule has with each output capsule."""
PER_ROUND = (*PAIRS, "weighted_sum", "capsules")
STATISTICS = ("entropy", "mean_agreement", "longest")
TRACED = (*STATISTICS, "images", "scores", *PER_ROUND)


@dataclass(frozen=True, eq=False)
class RoutingStatistics:
    """How decided the coupling is after each iteration, and how far votes and outputs agree; a column for each image.

    Args:
        entropy: Mean entropy of the coupling over the axis on which capsules compete (with "none of the above" where
            it competes), divided by its maximum: 1 is uniform coupling, 0 all to one.
        mean_agreement: Mean size of the agreements of iteration t, |⟨û_j|i, v_j⟩| in dynamic routing, which adds them
            to its logits: so much they change.
        longest: The largest length, or activation, that each output capsule has on any of the images; on a map, those
            of all types and positions.
    """

    entropy: Float[np.ndarray, "T B"]
    mean_agreement: Float[np.ndarray, "T B"]
    longest: Float[np.ndarray, "J"]

    @property
    def dead(self) -> float:
        """The share of output capsules that are never longer, or more active, than 1e-3."""
        return float((self.longest <= DEAD).mean())


@dataclass(frozen=True, eq=False)
class RoutingTrace(RoutingStatistics, Scored):
    """Every number of each routing iteration of some images; of iteration t, ``logits[t - 1]`` and so on.

    Of a layer on a map, J are the types, and sums and capsules are those of all types and positions; scores are means
    over the positions. Logits, coupling and agreement of an input capsule are means over the windows that hold it; but
    where the positions compete for it, its coupling is the sum over them.

    Args:
        images: Pixels 0..1.
        logits: b_ij at the beginning of the iteration.
        coupling: c_ij, the softmax of the logits.
        weighted_sum: s_j = Σ_i c_ij û_j|i, and the bias where the network has one.
        capsules: v_j = squash(s_j).
        agreement: ⟨û_j|i, v_j⟩; the next iteration begins with ``logits + agreement``.
        scores: Of the output capsules after each iteration: ‖v_j‖, or their activations where the routing gives them.
        grid: Types, height and width of the input capsules; I is their product.
        in_space: Whether they stand on a map; if not, the grid shows them in the order of their index.
        layer: The capsule layer, from 1.
        softmax_over: The axis on which capsules compete, ``"outputs"`` (j) or ``"inputs"`` (i); None if they do not.
        leaky: Whether a "none of the above" competes too.
        score_name: What the scores are.
        outputs: What the J are: classes, capsules of another layer, or types of capsules on a map.
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
        """The coupling on the grid of the input capsules: capsule i = (type·H + y)·W + x.

        Primary capsules of ``grouping="raster"`` are runs of K neighbouring values of one flattened channel and have no
        single location: the grid then shows the capsules in the order of their index only, not in space.
        """
        iterations, images, _, classes = self.coupling.shape
        return self.coupling.swapaxes(2, 3).reshape(iterations, images, classes, *self.grid)

    @property
    def inputs(self) -> str:
        """What the input capsules are, in words."""
        return "primary capsules" if self.layer == 1 else f"capsules of layer {self.layer - 1}"

    @property
    def uniform(self) -> float:
        """The coupling of iteration 1 without a prior: 1 / (number of competitors); 1 where nothing competes."""
        if self.softmax_over is None:
            return 1.0
        competitors = self.coupling.shape[3 if self.softmax_over == "outputs" else 2]
        return 1 / (competitors + self.leaky)

    @property
    def highest(self) -> list[int]:
        """The outputs of the ten highest scores, the highest first, of the first image at the end of routing."""
        return top_classes(torch.from_numpy(self.scores[-1, 0]), min(MOST_SHOWN, self.scores.shape[2])).tolist()


@checked
def trace_routing(
    model: Network, images: Shaped[Tensor, "B C H W"], *, layer: int | None = None, num_iterations: int | None = None
) -> RoutingTrace:
    """Follow the routing of images from iteration to iteration, in one capsule layer.

    :func:`torchcaps.routing_rounds` does it for votes of your own.

    Args:
        model: A capsule network.
        images: uint8 of 0..255 or floating-point of 0..1. All numbers of their routing, 3·T·B·I·J + 2·T·B·J·D, are
            kept in memory: for large sets there is :func:`routing_statistics`.
        layer: Which capsule layer, from 1; the last one, of the class capsules, if None.
        num_iterations: T, 1 to 1,000, of dynamic routing; the network's own if None.

    Raises:
        InputError: A network without capsules, or a layer that is not there or has no coupling or no iteration.

    Examples:
        >>> from torchcaps import create_model
        >>> from torchcaps.analysis import trace_routing
        >>> from torchcaps.datasets import load_dataset
        >>> trace = trace_routing(create_model("sabour2017"), load_dataset("digits").test.images[:4])
        >>> trace.agreement[0, 3].shape  # iteration 1 of the fourth image: input capsules, classes
        (1152, 10)
        >>> trace.maps[-1].mean(2).shape  # last iteration, averaged over capsule types: images, classes, places
        (4, 10, 6, 6)
    """
    return RoutingTrace(**_follow(model, images, layer, num_iterations, TRACED))


def trace_class_capsules(model: Network, image: Shaped[Tensor, "1 C H W"], capsules: Capsules) -> RoutingTrace:
    """Follow the routing of one image in the last layer, from the capsules that go into that layer.

    Errors are those of :func:`trace_routing`, which computes the capsules from the image.
    """
    return RoutingTrace(**_follow(model, image, None, None, TRACED, capsules))


@checked
def routing_statistics(
    model: Network, images: Shaped[Tensor, "N C H W"], *, layer: int | None = None, num_iterations: int | None = None
) -> RoutingStatistics:
    """Entropy of the coupling, mean agreement and scores in one capsule layer, for any number of images.

    Arguments and errors are those of :func:`trace_routing`.
    """
    found = _follow(model, images, layer, num_iterations, STATISTICS)
    return RoutingStatistics(**{name: found[name] for name in STATISTICS})


def _follow(
    model: Network,
    images: Shaped[Tensor, "N C H W"],
    layer: int | None,
    num_iterations: int | None,
    names: Sequence[str],
    inputs: Capsules | None = None,
) -> dict[str, Any]:
    """The arrays of a trace that are named, and what else it says, of no more images at a time than fit the memory."""
    network = require_capsules(model, "routing", "routing")
    count = len(network.layers)
    number = count if layer is None else layer
    Range(1, count, whole=True).check("layer", number)
    chosen, before, after = network.layer(number), *network.flow[number - 1 : number + 1]
    routing, grid = chosen.routing, _grid(network, number)
    follow = routing.rounds
    if num_iterations is not None:
        if not isinstance(routing, DynamicRouting):
            name = type(routing).__name__
            raise InputError(
                f"num_iterations must be left out for {name}: only DynamicRouting's iterations can be changed"
            )
        follow = partial(routing.rounds, num_iterations=num_iterations)
    check("num_iterations", routing.num_iterations if num_iterations is None else num_iterations, AtLeastOneIteration)
    score_name: list[ScoreName] = []

    def look(pixels: Tensor, _: object) -> list[Tensor]:
        votes, activations = chosen.votes(network.capsules(pixels)[number - 1] if inputs is None else inputs)
        rounds = follow(votes, activations)
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
    found = over_batches(look, network, images, None, max(1, min(BATCH, fitting)))
    arrays = {name: rows.numpy() for name, rows in zip(names, found, strict=True)}
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
    """A round of a layer on a map, image by image.

    Logits, coupling and agreement of an input capsule are averaged over the windows that hold it: (B, N, J); where the
    positions compete for it, its coupling is summed, so that what it gives to the types sums to one. Sums, capsules and
    activations stand at all positions: (B, J·L, D).
    """
    if not isinstance(layer, ConvCapsules):
        return each
    windows = MapCompetition(layer.window_capsules(grid, each.coupling.device), math.prod(grid) + 1)
    links = windows.links.clamp_min(1)[1:, None]

    def total(given: Float[Tensor, "BL I J"]) -> Float[Tensor, "B N J"]:
        return torch.stack([windows.sum(type_)[:, 1:] for type_ in given.unbind(2)], 2)

    logits, coupling, weighted_sum, capsules, agreement, activations = each
    positions = len(windows.children)
    sums, poses = (by_type(tensor, positions) for tensor in (weighted_sum, capsules))
    active = None if activations is None else by_type(activations, positions)
    shared = layer.compete_over == "types-and-positions" and layer.routing.softmax_over == "outputs"
    shares = total(coupling) if shared else total(coupling) / links
    return RoutingRound(total(logits) / links, shares, sums, poses, total(agreement) / links, active)


def _measure(
    rounds: list[RoutingRound], layer: CapsuleLayer, votes: Votes, grid: Grid, images: int
) -> list[Float[Tensor, "B T"]]:
    """Entropy of the coupling, and mean agreement, of each image and iteration.

    Of a layer on a map, the rounds are those of its windows: B·L in place of B.
    """
    there = ALL
    if isinstance(layer, ConvCapsules) and layer.layer_padding:
        there = (layer.window_capsules(grid, votes.poses.device) > 0).repeat(images, 1)
    entropy = [normalised_entropy(each.coupling, layer.routing, votes.competition, there) for each in rounds]
    agreement = [_mean(each.agreement.abs().mean(2), there) for each in rounds]
    return [torch.stack(each, 1).unflatten(0, (images, -1)).mean(1) for each in (entropy, agreement)]


def _mean(numbers: Float[Tensor, "B I"], there: Shaped[Tensor, "..."]) -> Float[Tensor, "B"]:
    """The mean over the capsules that are there."""
    weights = there.to(numbers).expand_as(numbers)
    return (numbers * weights).sum(1) / weights.sum(1)


def normalised_entropy(
    coupling: Float[Tensor, "B I J"],
    routing: Routing,
    competition: MapCompetition | None = None,
    there: Shaped[Tensor, "..."] = ALL,
) -> Float[Tensor, "B"]:
    """Entropy over the competitors, averaged over what they compete for, as a share of its maximum.

    Where the output capsules of overlapping windows compete, the entropy of an input capsule is over all of them. Where
    nothing competes, or something is added to what the softmax gives, it is that of the shares of an input capsule's
    coupling that go to the output capsules; negative coupling is no share. Input capsules that are not ``there``,
    beyond the edge of a map, have no entropy of their own.
    """
    axis = 1 if routing.softmax_over == "inputs" else 2
    coupling = coupling.clamp_min(0)
    if routing.softmax_over is None or (competition is None and not routing.leaky):
        coupling = coupling / coupling.sum(axis, keepdim=True).clamp_min(1e-30)
    entropy, given, windows = torch.special.entr(coupling).sum(axis), coupling.sum(axis), 1
    competitors = torch.tensor(coupling.shape[axis])
    if axis == 1:
        there = ALL
    elif competition is not None and routing.softmax_over == "outputs":  # 0 is beyond the edge
        entropy, given = competition.sum(entropy)[:, 1:], competition.sum(given)[:, 1:]  # (B, N)
        competitors, windows = coupling.shape[2] * competition.links[1:], competition.rows_per_image
        there = competitors > 0
    if routing.leaky:
        entropy = entropy + torch.special.entr((1 - given).clamp_min(0))
    competitors = (competitors + routing.leaky).to(entropy)
    share = torch.where(competitors > 1, entropy / competitors.clamp_min(2).log(), 0.0)
    return _mean(share, there).repeat_interleave(windows)


def _grid(network: CapsNet, number: int) -> Grid:
    """Types, height and width of a layer's input capsules; one row where they stand on no map.

    Primary capsules that stand on none have that of the map which they are made of.
    """
    capsules, primary = network.flow[number - 1], network.primary_capsules
    if capsules.grid is None and number == 1 and isinstance(primary, PrimaryCapsules):
        around = 2 * primary.primary_padding - primary.primary_kernel
        height, width = ((side + around) // primary.primary_stride + 1 for side in network.map_shape[1:])
        return primary.primary_types, height, width
    return capsules.grid or (1, 1, capsules.poses.shape[1])
