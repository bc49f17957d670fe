"""The figures of docs/paper.md, its numbers that are not those of runs, and the BibTeX of all papers."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.audit import KINDS
from experiments.page import TESTS, Page, error
from experiments.zoo import HEADS
from torchcaps.analysis.figures import COLOURS, MUTED, SMALL, draw_legend, new_figure, style_axes

QUANTITIES = ("capsules", "lengths", "losses", "gradients")
#: Ratios of times that the figure shows: label, and the recorded name.
RATIOS = {
    "training step, full gradient": "step, full: naive ÷ torchcaps",
    "training step, stopped gradient": "step, stopped: naive ÷ torchcaps",
    "inference, 512 images": "512 images, inference: naive ÷ torchcaps",
    "class layer, forward": "routing, forward: naive ÷ torchcaps",
    "class layer, forward and backward": "routing, forward + backward, full: naive ÷ torchcaps",
}
COMPILED = "step, full: einsum (compiled) ÷ torchcaps", "step, full: naive (compiled) ÷ torchcaps"
#: Presets that ran beside the whole code of their sources.
EQUAL = ("sabour2017-code", "tf-notebook", "torch-tutorial")
ISAS = {"avx2": "AVX2", "avx512": "AVX-512"}


class Records:
    """The comparisons with sources, the measured ratios, and the errors of the heads."""

    def __init__(self, page: Page, sources: Sequence[Mapping[str, Any]], speed: Sequence[Mapping[str, Any]]) -> None:
        self.page, self.sources, self.speed = page, sources, speed

    def comparisons(self, *presets: str) -> int:
        """Return the number of comparisons of presets with their sources, in both precisions."""
        return sum(line["comparisons"] for line in self.sources if line["preset"] in presets)

    def largest(self, precision: str, but: str = "") -> str:
        """Format the largest difference from a source, without one preset."""
        lines = [line for line in self.sources if line["precision"] == precision and line["preset"] != but]
        return f"{max(line[name] for line in lines for name in QUANTITIES):.0e}".replace("e-0", "e-")

    def ratio(self, name: str, isa: str) -> float | None:
        """Return the newest ratio with an instruction set, or None."""
        found = [line["value"] for line in self.speed if line["ratio"] == name and line["isa"] == isa]
        return found[-1] if found else None

    def ratios(self, name: str) -> str:
        """Format the ratios of a name, one for each instruction set."""
        found = {title: self.ratio(RATIOS.get(name, name), isa) for isa, title in ISAS.items()}
        return ", ".join(f"{value:.1f} ({title})" for title, value in found.items() if value is not None)

    def compiled(self) -> str:
        """Format the best compiled formulation ÷ ours for each instruction set; empty if none is recorded."""
        best: dict[str, float] = {}
        for isa, title in ISAS.items():
            found = [value for name in COMPILED if (value := self.ratio(name, isa)) is not None]
            best |= {title: min(found)} if found else {}
        return ", ".join(f"{value:.1f} ({title})" for title, value in best.items())

    @property
    def memory(self) -> str:
        """Format the peak memory of a large layer, as a share of that of the common formulation."""
        found = [self.ratio("large layer, peak memory: torchcaps ÷ naive", isa) for isa in ISAS]
        return f"{100 * max(filter(None, found)):.0f} %"

    def error(self, test: str, head: str) -> str:
        return self.page.error(f"zoo/{test}-{head}")


def draw_audit(given: Mapping[str, Any]) -> Figure:
    """Draw the number of repositories with each finding."""
    audit = given["audit"]
    figure = new_figure(6.5, 2.8)
    axes = figure.subplots()
    style_axes(axes, "", f"repositories, of {audit.number}", "")
    counts = {kind: number for kind, number in audit.counts.items() if number}
    bars = axes.barh(range(len(counts)), list(counts.values()), color=COLOURS[0], height=0.7)
    axes.bar_label(bars, padding=3, fontsize=SMALL)
    axes.set_yticks(range(len(counts)), [KINDS[kind] for kind in counts], fontsize=SMALL)
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(False, axis="y")
    return figure


def draw_heads(given: Mapping[str, Any]) -> Figure:
    """Draw the error of each head on each test: mean and deviation over seeds, poolings in another colour."""
    page = given["page"]
    names = page.heads
    figure = new_figure(9.5, 3.6)
    groups = {"without capsules": ("o", COLOURS[1]), "capsules": ("s", COLOURS[0])}
    for panel, (test, title) in zip(figure.subplots(1, len(TESTS), sharey=True), TESTS.items(), strict=True):
        style_axes(panel, title, "test error, %", "")
        for place, name in enumerate(names):
            errors = [error(run) for run in page.rows[f"zoo/{test}-{name}"]]
            group = "without capsules" if "pooling" in HEADS[name][1] else "capsules"
            marker, colour = groups[group]
            style: Any = {"fmt": marker, "color": colour, "markersize": 4, "capsize": 2, "label": group}
            panel.errorbar(statistics.mean(errors), place, xerr=statistics.stdev(errors), **style)
        panel.set_yticks(range(len(names)), [HEADS[name][0].partition(",")[0] for name in names], fontsize=SMALL)
        panel.set_ylim(len(names) - 0.5, -0.5)
        panel.set_xlim(left=0)
    draw_legend(figure, columns=2)
    return figure


def draw_sources(given: Mapping[str, Any]) -> Figure:
    """Draw the largest difference of each preset from its source's code, in both precisions."""
    figure = new_figure(7.5, 2.8)
    axes = figure.subplots()
    style_axes(axes, "", "largest difference ÷ largest number", "")
    lines = given["records"].sources
    presets = list(dict.fromkeys(line["preset"] for line in lines))
    for precision, marker, colour in (("float32", "o", COLOURS[1]), ("float64", "s", COLOURS[0])):
        of = [line for line in lines if line["precision"] == precision]
        sizes = [line[name] for line in of for name in QUANTITIES]
        places = [presets.index(line["preset"]) for line in of for _ in QUANTITIES]
        axes.scatter(sizes, places, marker=marker, color=colour, s=18, label=precision)
    axes.set_xscale("log")
    axes.set_yticks(range(len(presets)), presets, fontsize=SMALL)
    axes.invert_yaxis()
    draw_legend(figure, columns=2)
    return figure


def draw_speed(given: Mapping[str, Any]) -> Figure:
    """Draw how many times faster routing without votes is than the common formulation."""
    records = given["records"]
    figure = new_figure(7.5, 3.0)
    axes = figure.subplots()
    style_axes(axes, "", "time of the common formulation ÷ time of torchcaps", "")
    for offset, (isa, title), colour in zip((-0.2, 0.2), ISAS.items(), COLOURS, strict=False):
        numbers = [records.ratio(name, isa) or 0.0 for name in RATIOS.values()]
        places = [place + offset for place in range(len(RATIOS))]
        bars = axes.barh(places, numbers, height=0.38, color=colour, label=title)
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=SMALL)
    axes.axvline(1, color=MUTED, linewidth=1)
    axes.set_yticks(range(len(RATIOS)), list(RATIOS), fontsize=SMALL)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    draw_legend(figure, columns=2)
    return figure


Draw = Callable[[Mapping[str, Any]], Figure]
FIGURES: dict[str, Draw] = {"audit": draw_audit, "heads": draw_heads, "sources": draw_sources, "speed": draw_speed}


def software(citation: Mapping[str, Any]) -> str:
    """Return the BibTeX of torchcaps."""
    lines = {
        "title": citation["title"],
        "author": f"{{{citation['authors'][0]['name']}}}",
        "year": 2026,
        "version": citation["version"],
        "url": citation["repository-code"],
    }
    return "\n".join(["@software{torchcaps,", *(f"  {key} = {{{value}}}," for key, value in lines.items()), "}"])


def bibliography(citation: Mapping[str, Any]) -> str:
    """Return the BibTeX of torchcaps and of each paper that CITATION.cff refers to."""
    papers = (
        f"% {each['notes']}\n" + "\n".join(_bibtex(each))
        for each in sorted(citation["references"], key=lambda each: int(each["year"]))
    )
    return "\n\n".join([software(citation), *papers]) + "\n"


def _bibtex(reference: Mapping[str, Any]) -> Iterator[str]:
    names = [f"{each['family-names']}, {each['given-names']}" for each in reference["authors"]]
    first, word = reference["authors"][0]["family-names"], reference["title"].split()[0]
    key = re.sub(r"\W", "", f"{first}{reference['year']}{word}").lower()
    yield f"@article{{{key},"
    yield f"  title = {{{reference['title']}}},"
    yield f"  author = {{{' and '.join(names)}}},"
    yield f"  year = {{{reference['year']}}},"
    yield from (f"  {field} = {{{reference[field]}}}," for field in ("journal", "doi", "url") if field in reference)
    yield "}"
