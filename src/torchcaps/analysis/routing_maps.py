"""What routing does, iteration by iteration: where the coupling goes, how decided it is, and whether it settles.

B images, I input capsules and J output capsules of a layer, T iterations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from torchcaps.analysis.figures import COLOURS, MUTED, SMALL, Caption, Cell, new_figure, style_axes, tiles
from torchcaps.analysis.inference import class_labels, over_batches, require_capsules
from torchcaps.analysis.results import MOST_CLASSES, MOST_SHOWN, Result, Scored, Styled, Table, lower_first
from torchcaps.checks import check
from torchcaps.errors import InputError
from torchcaps.machine import MIB
from torchcaps.models import CapsNet, Network
from torchcaps.models.output import HIGHEST, ScoreName, top_classes
from torchcaps.nn import CapsuleLayer, Capsules, ConvCapsules, DynamicRouting, PrimaryCapsules, Routing, RoutingRound
from torchcaps.nn.capsules import Grid
from torchcaps.nn.competition import MapCompetition, SoftmaxOver
from torchcaps.nn.map_votes import by_type
from torchcaps.nn.votes import Votes
from torchcaps.ops.memory import get_working_memory
from torchcaps.ranges import AtLeastOneIteration, Range

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Outputs = Literal["class", "capsule", "type"]
"""What the output capsules of a layer are."""
PLURALS: dict[Outputs, str] = {"class": "classes", "capsule": "capsules", "type": "types"}
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


@dataclass(frozen=True, eq=False)
class RoutingReport(Result):
    """The routing of one image, and of many beside it.

    Args:
        trace: Of the image.
        class_names: The name of each class; its number if None.
        image: What the image is, in words.
        inputs: The input capsules whose numbers are asked for; for programs all if there are none.
        statistics: Of many images; None where there is only the one.
        many: What those are, in words.
        network: What the network is called, for the titles of figures.
    """

    trace: RoutingTrace
    class_names: Sequence[str] | None = None
    image: str = "an image"
    inputs: Sequence[int] = ()
    statistics: RoutingStatistics | None = None
    many: str = "many images"
    network: str = "a network"

    @property
    def names(self) -> list[str]:
        """The names of the outputs: those of the classes (or their numbers), of others their kind and number."""
        outputs, number = self.trace.outputs, self.trace.coupling.shape[3]
        return (
            class_labels(self.class_names, number) if outputs == "class" else [f"{outputs} {j}" for j in range(number)]
        )

    def to_dict(self) -> dict[str, Any]:
        """Every number of each iteration of the image; float32 with as few digits as tell it from its neighbours."""
        trace = self.trace
        chosen = list(self.inputs) or list(range(trace.coupling.shape[2]))

        def numbers(values: np.ndarray) -> Any:
            return values.astype(str).astype(float).tolist()

        rounds = [
            {"round": t + 1}
            | {name: numbers(getattr(trace, name)[t, 0, chosen]) for name in PAIRS}
            | {name: numbers(getattr(trace, name)[t, 0]) for name in ("weighted_sum", "capsules", "lengths")}
            for t in range(len(trace.coupling))
        ]
        about = {name: getattr(trace, name) for name in ("softmax_over", "leaky", "layer", "in_space", "grid")}
        words = {"image": self.image, "class_names": tuple(self.names)}
        return words | about | {"input_capsules": chosen, "rounds": rounds}

    def tables(self) -> list[Table]:
        trace, rows = self.trace, []
        for t, scores in enumerate(trace.scores[:, 0]):
            highest = int(scores.argmax())
            settled = [f"{trace.entropy[t, 0]:.3f}", f"{trace.mean_agreement[t, 0]:.4f}"]
            rows.append([str(t + 1), self.names[highest], f"{scores[highest]:.3f}", *settled])
        most = f"{HIGHEST[trace.score_name]} {'type' if trace.outputs == 'type' else 'capsule'}"
        columns = ("iteration", most, trace.score_name, "entropy of coupling", "mean agreement")
        found = [Table(rows, columns, self.image), *map(self._input, self.inputs)]
        note = "Entropy: 1 is uniform coupling, 0 is all to one. Agreement: its mean size, by which dynamic routing "
        notes: list[str | Styled] = [note + "changes its logits."]
        if self.statistics is not None:
            means = zip(self.statistics.entropy.mean(1), self.statistics.mean_agreement.mean(1), strict=True)
            rows = [[str(t), f"{entropy:.3f}", f"{agreement:.4f}"] for t, (entropy, agreement) in enumerate(means, 1)]
            found.append(Table(rows, ("iteration", "entropy of coupling", "mean agreement"), self.many))
            if dead := self.statistics.dead:
                share = f"{100 * dead:.1f} % of the output capsules are never longer, or more active, than 0.001."
                notes.insert(0, share)
        return [*found, Table(note=notes)]

    def figures(self) -> dict[str, Figure]:
        figures = {"": self._coupling()}
        if self.statistics is not None:
            figures["-statistics"] = self._settling(self.statistics)
        return figures

    def _coupling(self) -> Figure:
        """Coupling maps: a row for each iteration, a column for each output, the image beside them.

        A map is the coupling c on the grid of the input capsules, averaged over their types: white where it is uniform
        (u), red above, blue below. Shades are equal for equal ±√|c − u|, so that small differences are seen. They are
        the same in every figure of such a layer: from 0 to 5·u, or to 1; what is above looks like the end. The length
        (or activation) of the output capsule after that iteration stands under its map. Of more than ten outputs, those
        of the highest scores are shown.
        """
        trace, names, strongest = self.trace, self.names, self.trace.highest
        iterations, _, classes = trace.scores.shape
        shown = sorted(strongest)
        maps, uniform = trace.maps[:, 0].mean(2)[:, shown], trace.uniform  # maps (T, shown, H, W)
        reach = min(4 * uniform, max(uniform, 1 - uniform))

        def shades(coupling: np.ndarray) -> np.ndarray:
            return np.sign(coupling - uniform) * np.sqrt(np.abs(coupling - uniform))

        in_order = f"of the {trace.inputs} in the order of their index, not in space"
        places = f"on the grid of the {trace.inputs}" if trace.in_space else in_order
        subtitle = f"each {trace.outputs}'s coupling {places}, averaged over their types; below: its {trace.score_name}"
        if len(shown) < classes:
            subtitle = f"the {len(shown)} {HIGHEST[trace.score_name]} of {classes} {PLURALS[trace.outputs]}; {subtitle}"
        rows: list[list[Cell]] = [[None, None, None, *(Caption(names[j], bold=j == strongest[0]) for j in shown)]]
        for t in range(iterations):
            beside = (trace.images[0], Caption("image", MUTED)) if t == 0 else (None, None)
            scores = [Caption(f"{trace.scores[t, 0, j]:.2f}", MUTED, j == strongest[0]) for j in shown]
            rows += [[beside[0], None, f"iteration {t + 1}", *shades(maps[t])], [beside[1], None, None, *scores], []]
        title, most = f"Routing in {self.network}: {lower_first(self.image)}", math.sqrt(reach)
        figure = tiles(rows[:-1], title=title, subtitle=subtitle, room=1.2, cmap="RdBu_r", vmin=-most, vmax=most)
        (width, height), (axes,) = figure.get_size_inches(), figure.axes
        cax = figure.add_axes((1 - 1.2 / width, 0.4 / height, 0.13 / width, 1 - 1.6 / height))
        bar = figure.colorbar(axes.images[-1], cax=cax)
        cax.set_title("coupling", fontsize=SMALL, color=MUTED, loc="left", pad=8)
        bar.outline.set_visible(False)
        cax.tick_params(labelsize=SMALL)
        cax.set_ylim(-math.sqrt(uniform), most)  # no coupling is below zero, though the scale goes on
        ticks = sorted({0.0, uniform, 2 * uniform, uniform + reach})
        bar.set_ticks(
            shades(np.array(ticks)).tolist(), labels=[f"{each:.2g}" + " uniform" * (each == uniform) for each in ticks]
        )
        return figure

    def _settling(self, statistics: RoutingStatistics) -> Figure:
        """Entropy of the coupling and mean agreement at each iteration: mean over the images, and their middle 80 %."""
        figure = new_figure(7.2, 3.4, f"Routing in {self.network}: {lower_first(self.many)}")
        panels = (
            ("Entropy of the coupling", "share of its maximum", statistics.entropy),
            ("Agreement of votes and outputs", "mean size", statistics.mean_agreement),
        )
        for axes, colour, (name, unit, values) in zip(figure.subplots(1, 2), COLOURS, panels, strict=False):
            iterations, mean = np.arange(1, len(values) + 1), values.mean(1)
            low, high = np.quantile(values, (0.1, 0.9), axis=1)
            axes.bar(iterations, high - low, 0.1, low, color=colour, alpha=0.3, label="middle 80 % of images")
            axes.plot(iterations, mean, color=colour, marker="o", label=f"mean of {values.shape[1]:,} images")
            style_axes(axes, name, "iteration", unit)
            axes.locator_params(axis="x", integer=True)
            axes.legend(fontsize=SMALL, frameon=False, loc="best")
        entropy_axes, agreement_axes = figure.axes
        # a change of less than a percent is none to speak of, and looks like none
        lowest = min(float(statistics.entropy.min()), 0.99)
        entropy_axes.set_ylim(lowest - 0.1 * (1 - lowest), 1 + 0.1 * (1 - lowest))
        agreement_axes.set_ylim(0, 1.1 * max(float(np.quantile(statistics.mean_agreement, 0.9, axis=1).max()), 1e-9))
        return figure

    def _input(self, capsule: int) -> Table:
        """What one input capsule and each output capsule make of each other, iteration by iteration."""
        trace, names, place, fewer = self.trace, self.names, "", ""
        shown: Sequence[int] = range(len(names))
        if len(names) > MOST_CLASSES:
            shown = sorted(trace.highest)
            fewer = f" (the {len(shown)} {HIGHEST[trace.score_name]} of {len(names)} {PLURALS[trace.outputs]})"
        rows: list[list[str]] = []
        for t in range(len(trace.coupling)):
            rows += [[]] if rows else []
            for j in shown:
                values = [getattr(trace, name)[t, 0, capsule, j] for name in PAIRS] + [trace.scores[t, 0, j]]
                iteration = str(t + 1) if j == shown[0] else ""
                rows.append([iteration, names[j], *(f"{value:z.4f}" for value in values)])
        _, height, width = trace.grid
        if trace.in_space:
            kind, rest = divmod(capsule, height * width)
            place = f": type {kind}, row {rest // width}, column {rest % width}"
        score = f"{trace.score_name} of the {trace.outputs} capsule" if trace.outputs != "capsule" else trace.score_name
        columns = ("iteration", trace.outputs, "logit", "coupling", "agreement", score)
        return Table(rows, columns, f"Input capsule {capsule}{place}{fewer}", left=2)


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
    names = (*STATISTICS, "images", "scores", *PER_ROUND)
    return RoutingTrace(**_follow(model, images, layer, num_iterations, names))


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
) -> dict[str, Any]:
    """The arrays of a trace that are named, and what else it says, of no more images at a time than fit the memory."""
    network = require_capsules(model, "routing")
    count = len(network.layers)
    number = count if layer is None else layer
    Range(1, count, whole=True).check("layer", number)
    chosen, before, after = network.layer(number), *network.flow[number - 1 : number + 1]
    routing, own, grid = chosen.routing, chosen.routing.num_iterations, _grid(network, number)
    if num_iterations is not None and not isinstance(routing, DynamicRouting):
        name = type(routing).__name__
        raise InputError(f"num_iterations must be left out for {name}: only DynamicRouting's iterations can be changed")
    iterations = own if num_iterations is None else num_iterations
    check("num_iterations", iterations, AtLeastOneIteration)
    score_name: list[ScoreName] = []

    def look(pixels: Tensor, _: object) -> list[Tensor]:
        votes, activations = chosen.votes(network.capsules(pixels)[number - 1])
        rounds = routing.rounds(votes, activations)
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
    routing.num_iterations = iterations
    try:
        found = over_batches(look, network, images, None, max(1, min(BATCH, fitting)))
    finally:
        routing.num_iterations = own
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
