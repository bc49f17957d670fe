"""Tables and figures of the routing of an image: coupling maps, entropy and agreement of each iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from torchcaps.analysis.figures import COLOURS, MUTED, SMALL, Caption, Cell, new_figure, style_axes, tiles
from torchcaps.analysis.inference import class_labels
from torchcaps.analysis.results import MAX_CLASSES, Result, Styled, Table, lower_first
from torchcaps.analysis.trace import PAIRS, Outputs, RoutingStatistics, RoutingTrace, compare_to_uniform
from torchcaps.models.output import SUPERLATIVES
from torchcaps.words import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PLURALS: dict[Outputs, str] = {"class": "classes", "capsule": "capsules", "type": "types"}


@dataclass(frozen=True, eq=False)
class RoutingReport(Result):
    """Routing of one image, and statistics of many images.

    Args:
        trace: Routing of the image.
        class_names: Name of each class; None: its number.
        image: Description of the image.
        inputs: Input capsules to print tables of; empty: no tables, and all capsules in JSON.
        statistics: Statistics of many images; None: only the one image is shown.
        many: Description of these images.
        network: Name of the network, for titles of figures.
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
        """Names of the outputs: of the classes (or their numbers), or kind and number, such as ``capsule 3``."""
        outputs, number = self.trace.outputs, self.trace.coupling.shape[3]
        return (
            class_labels(self.class_names, number) if outputs == "class" else [f"{outputs} {j}" for j in range(number)]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers of each iteration of the image; float32, as the shortest decimals that restore them."""
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
        most = f"{SUPERLATIVES[trace.score_name]} {'type' if trace.outputs == 'type' else 'capsule'}"
        columns = ("iteration", most, trace.score_name, "entropy of coupling", "mean agreement")
        tables = [Table(rows, columns, self.image), *map(self._input, self.inputs)]
        note = "Entropy: 1 is uniform coupling, 0 is all coupling to one output. Agreement: mean absolute value, which "
        notes: list[str | Styled] = [note + "dynamic routing adds to its logits."]
        if self.statistics is not None:
            means = zip(self.statistics.entropy.mean(1), self.statistics.mean_agreement.mean(1), strict=True)
            rows = [[str(t), f"{entropy:.3f}", f"{agreement:.4f}"] for t, (entropy, agreement) in enumerate(means, 1)]
            tables.append(Table(rows, ("iteration", "entropy of coupling", "mean agreement"), self.many))
            if dead := self.statistics.dead:
                share = f"{100 * dead:.1f} % of the output capsules never have a length or activation above 0.001."
                notes.insert(0, share)
        return [*tables, Table(note=notes)]

    def figures(self) -> dict[str, Figure]:
        figures = {"": self._coupling()}
        if self.statistics is not None:
            figures["-statistics"] = self._settling(self.statistics)
        return figures

    def _coupling(self) -> Figure:
        """Draw coupling maps: a row for each iteration, a column for each output, and the image beside them.

        A map is the coupling c on the grid of the input capsules, averaged over their types. It is white where c is
        uniform (u), red above and blue below. Colours are linear in ±√|c − u|, so that small differences are visible.
        The scale goes from 0 to 5·u, at most 1, and is the same in every figure of such a layer; larger coupling has
        the colour of the end. Beside the rows stands the largest coupling in the maps of the iteration. Below each map
        stands the length (or activation) of the output capsule after the iteration. Of more than ten outputs, the ten
        with the highest scores are shown.
        """
        trace, names, strongest = self.trace, self.names, self.trace.highest
        iterations, _, classes = trace.scores.shape
        shown = sorted(strongest)
        maps, uniform = trace.maps[:, 0].mean(2)[:, shown], trace.uniform  # maps (T, shown, H, W)

        def shades(coupling: np.ndarray) -> np.ndarray:
            return np.sign(coupling - uniform) * np.sqrt(np.abs(coupling - uniform))

        in_order = f"of the {trace.inputs} in the order of their index, not in space"
        places = f"on the grid of the {trace.inputs}" if trace.in_space else in_order
        subtitle = f"each {trace.outputs}'s coupling {places}, averaged over their types; below: its {trace.score_name}"
        if len(shown) < classes:
            subtitle = (
                f"the {len(shown)} {SUPERLATIVES[trace.score_name]} of {classes} {PLURALS[trace.outputs]}; {subtitle}"
            )
        rows: list[list[Cell]] = [[None, None, None, *(Caption(names[j], bold=j == strongest[0]) for j in shown)]]
        for t in range(iterations):
            beside = (trace.images[0], Caption("image", MUTED)) if t == 0 else (None, None)
            scores = [Caption(f"{trace.scores[t, 0, j]:.2f}", MUTED, j == strongest[0]) for j in shown]
            largest = f"largest {compare_to_uniform(float(maps[t].max()), uniform)}".split(", ")
            heading = [Caption(f"iteration {t + 1}"), *(Caption(line, MUTED) for line in largest)]
            rows += [[beside[0], None, heading, *shades(maps[t])], [beside[1], None, None, *scores], []]
        title, most = f"Routing in {self.network}: {lower_first(self.image)}", math.sqrt(trace.reach)
        figure = tiles(rows[:-1], title=title, subtitle=subtitle, room=1.2, cmap="RdBu_r", vmin=-most, vmax=most)
        (width, height), (axes,) = figure.get_size_inches(), figure.axes
        cax = figure.add_axes((1 - 1.2 / width, 0.4 / height, 0.13 / width, 1 - 1.6 / height))
        bar = figure.colorbar(axes.images[-1], cax=cax)
        cax.set_title("coupling", fontsize=SMALL, color=MUTED, loc="left", pad=8)
        bar.outline.set_visible(False)
        cax.tick_params(labelsize=SMALL)
        cax.set_ylim(-math.sqrt(uniform), most)  # coupling is at least 0, but the scale is symmetric
        ticks = sorted({0.0, uniform, 2 * uniform, uniform + trace.reach})
        bar.set_ticks(
            shades(np.array(ticks)).tolist(), labels=[f"{each:.2g}" + " uniform" * (each == uniform) for each in ticks]
        )
        return figure

    def _settling(self, statistics: RoutingStatistics) -> Figure:
        """Draw entropy of the coupling and mean agreement of each iteration: mean and middle 80 % of the images."""
        figure = new_figure(7.2, 3.4, f"Routing in {self.network}: {lower_first(self.many)}")
        panels = (
            ("Entropy of the coupling", "share of its maximum", statistics.entropy),
            ("Agreement of votes and outputs", "mean absolute value", statistics.mean_agreement),
        )
        for axes, colour, (name, unit, values) in zip(figure.subplots(1, 2), COLOURS, panels, strict=False):
            iterations, mean = np.arange(1, len(values) + 1), values.mean(1)
            low, high = np.quantile(values, (0.1, 0.9), axis=1)
            axes.bar(iterations, high - low, 0.1, low, color=colour, alpha=0.3, label="middle 80 % of images")
            axes.plot(iterations, mean, color=colour, marker="o", label=f"mean of {counted(values.shape[1], 'image')}")
            style_axes(axes, name, "iteration", unit)
            axes.locator_params(axis="x", integer=True)
            axes.legend(fontsize=SMALL, frameon=False, loc="best")
        entropy_axes, agreement_axes = figure.axes
        # the axis spans at least one percent, so that smaller changes look small
        lowest = min(float(statistics.entropy.min()), 0.99)
        entropy_axes.set_ylim(lowest - 0.1 * (1 - lowest), 1 + 0.1 * (1 - lowest))
        entropy_axes.set_ylabel(f"share of its maximum (axis from {entropy_axes.get_ylim()[0]:.3g}, not 0)")
        agreement_axes.set_ylim(0, 1.1 * max(float(np.quantile(statistics.mean_agreement, 0.9, axis=1).max()), 1e-9))
        return figure

    def _input(self, capsule: int) -> Table:
        """Return the numbers between an input capsule and each output capsule, iteration by iteration."""
        trace, names, place, fewer = self.trace, self.names, "", ""
        shown: Sequence[int] = range(len(names))
        if len(names) > MAX_CLASSES:
            shown = sorted(trace.highest)
            fewer = f" (the {len(shown)} {SUPERLATIVES[trace.score_name]} of {len(names)} {PLURALS[trace.outputs]})"
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
        return Table(rows, columns, f"Input capsule {capsule}{place}{fewer}", text_columns=2)
