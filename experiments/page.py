"""Write docs/results.md and its figures. The template ``results.md.jinja`` has the text and selects the rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from experiments.cells import NOTHING, Runs, difference, interval, markdown, number, percent, span
from experiments.store import RunLog, logs_of, read_curves, read_runs
from experiments.tables import SHIPPED
from experiments.zoo import HEADS
from torchcaps.analysis import Robustness, RobustnessCurve, save_figure
from torchcaps.analysis.figures import COLOURS, MUTED, SMALL, TEXT, draw_legend, new_figure, style_axes
from torchcaps.files import write_text

TEMPLATE = Path(__file__).with_name("results.md.jinja")
#: The four tests of the heads, by the prefix of their rows' names.
TESTS = {"azimuth": "novel azimuths", "elevation": "novel elevations", "affnist": "affNIST", "mnist": "MNIST"}
#: Tests and heads whose learning curves are drawn.
LEARNED = {"mnist": "MNIST", "affnist": "digits moved by up to 6 pixels"}
DRAWN = ("uniform", "dynamic", "self", "self-attention", "inverted-attention", "em", "vb", "average-pooling")
ATTACKED = {"compact-r3": "capsules", "cnn-twin": "CNN twin", "baseline-small": "the paper's CNN, smaller"}


def error(run: RunLog) -> float:
    """Return the main error of a row, percent: on affNIST if measured, else on the test images."""
    return 100 * run.measures["affnist"]["error"] if "affnist" in run.measures else run.error()


def dice(run: RunLog, measure: str = "") -> float:
    """Return the mean Dice score of a network for pixels on its test images, or that of a measure, percent."""
    if not measure:
        return 100 - run.error()
    found = run.measures[measure]
    return float(found["Dice"] if "Dice" in found else 100 * found["accuracy"])


#: Images of each test of the networks for pixels.
PIXEL_DATA = {"digits": "digits", "azimuth": "objects", "slices": "slices of one head", "blocks": "volumes of one head"}
#: Rows of the table of networks for pixels: title, test, measure.
PIXEL_TESTS = (
    ("digits", "digits", ""),
    ("digits, turned by up to 180°", "digits", "turned by ±180°"),
    ("objects, familiar sides", "azimuth", "familiar"),
    ("objects, new sides", "azimuth", ""),
    ("one head", "slices", ""),
    ("one head, turned by up to 180°", "slices", "turned by ±180°"),
    ("one head, volumes", "blocks", ""),
)
#: Columns of this table: the end of a row's name, and its title.
PIXEL_COLUMNS = {
    "unet": "U-Net",
    "unet-as-long": "U-Net, 7 × the steps",
    "dynamic": "dynamic routing",
    "uniform": "uniform coupling",
    "em": "EM routing",
}


class Page:
    """Data of the template: the runs of each row, named ``"TABLE/ROW"``, and their numbers as text."""

    def __init__(self, results: Path) -> None:
        runs = read_runs(results)
        tables = {table.name: logs_of(table, runs) for table in SHIPPED.values()}
        self.all = list(runs.values())
        self.rows = {f"{table}/{row}": logs for table, rows in tables.items() for row, logs in rows.items()}
        self.published = {f"{t.name}/{row.name}": row.published or NOTHING for t in SHIPPED.values() for row in t.rows}
        self.curves = read_curves(results)
        #: Names of the heads with runs on each test.
        self.heads = [name for name in HEADS if all(self.rows[f"zoo/{test}-{name}"] for test in TESTS)]

    def error(self, row: str) -> str:
        """Format the mean ± deviation of the error over seeds, percent."""
        return percent(list(map(error, self.rows[row]))).removesuffix(" %")

    def gap(self, row: str, other: str) -> tuple[float, float, float]:
        """Return the mean difference of two rows' errors and its interval."""
        return difference(self.rows[row], self.rows[other], error)

    def interval(self, row: str, other: str) -> str:
        """Format the difference and its interval."""
        return interval(*self.gap(row, other))

    def pixel_table(self) -> str:
        """Format the Dice scores of the networks for pixels, percent, and dynamic routing beside the U-Net."""
        lines = [["test images", *PIXEL_COLUMNS.values(), f"{PIXEL_COLUMNS['dynamic']} − {PIXEL_COLUMNS['unet']}"]]
        for title, test, measure in PIXEL_TESTS:
            runs = {network: self.rows[f"pixels/{test}-{network}"] for network in PIXEL_COLUMNS}
            scores = [percent([dice(run, measure) for run in each]).removesuffix(" %") for each in runs.values()]
            gap = difference(runs["dynamic"], runs["unet"], partial(dice, measure=measure))
            lines.append([title, *scores, interval(*gap)])
        return markdown(lines)

    def pixel_steps(self) -> str:
        """Format the numbers of training steps of the networks for pixels."""
        found = []
        for test, images in PIXEL_DATA.items():
            row = SHIPPED["pixels"][f"{test}-dynamic"]
            run = self.rows[f"pixels/{row.name}"][0].summary
            steps = int(run["epochs"]) * math.ceil(run["images"]["train"] / row.config(0).recipe.batch_size)
            found.append(f"{steps:,} on {images}")
        return ", ".join(found)

    def grades(self, row: str) -> str:
        """Format kappa, mean absolute error and accuracy of a row of grades, as cells of a table."""
        runs = [run.measures["grades"] for run in self.rows[row]]
        cells = [number([each[name] for each in runs]) for name in ("kappa", "mean_absolute_error", "accuracy")]
        return " | ".join([str(len(runs)), *cells])

    def length(self, row: str) -> str:
        """Format epochs × training images of a row."""
        runs: Runs = self.rows[row]
        return f"{span([run.summary['epochs'] for run in runs])} × {runs[0].summary['images']['train']:,}"

    def under_attack(self, row: str, strength: float) -> str:
        """Format mean ± deviation of the accuracy under PGD along the scores."""
        curves = [run.measures["pgd-scores"] for run in self.rows[row]]
        return percent([100 * each["accuracy"][each["strengths"].index(strength)] for each in curves])


def draw_differences(page: Page) -> Figure:
    """Draw the difference in error between each head and uniform coupling, with its 95 % interval."""
    figure = new_figure(9.5, 3.8)
    figure.supxlabel("error above that of uniform coupling, points", fontsize=TEXT)
    names = [name for name in page.heads if name != "uniform"]
    for panel, (test, title) in zip(figure.subplots(1, len(TESTS), sharey=True), TESTS.items(), strict=True):
        style_axes(panel, title, "", "")
        panel.axvline(0, color=MUTED, linewidth=1)
        for place, name in enumerate(names):
            mean, low, high = page.gap(f"zoo/{test}-{name}", f"zoo/{test}-uniform")
            colour = COLOURS[0] if high < 0 else COLOURS[1] if low > 0 else MUTED
            panel.errorbar(mean, place, xerr=high - mean, fmt="o", color=colour, markersize=4, capsize=2)
        panel.set_yticks(range(len(names)), [HEADS[name][0].partition(",")[0] for name in names], fontsize=SMALL)
        panel.set_ylim(len(names) - 0.5, -0.5)
    return figure


def draw_curves(page: Page) -> Figure:
    """Draw the validation error of each epoch, mean over seeds, a line for each head."""
    figure = new_figure(8.0, 4.0)
    for panel, (test, title) in zip(figure.subplots(1, len(LEARNED)), LEARNED.items(), strict=True):
        style_axes(panel, title, "epoch", "validation error, %")
        for name, colour in zip(DRAWN, COLOURS, strict=True):
            errors: dict[int, list[float]] = {}
            for run in page.rows[f"zoo/{test}-{name}"]:
                for line in page.curves[run.name]:
                    errors.setdefault(int(line["epoch"]), []).append(100 - 100 * float(line["validation_accuracy"]))
            label = HEADS[name][0].partition(",")[0] if test == "mnist" else None
            mean = list(map(statistics.mean, errors.values()))
            panel.plot(list(errors), mean, color=colour, marker="o", markersize=3, label=label)
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
        panel.yaxis.set_minor_locator(NullLocator())
        panel.set_xticks(list(errors))
    draw_legend(figure, columns=4)
    return figure


def draw_pgd(page: Page) -> Figure:
    """Draw the accuracy under PGD along the loss and along the scores: mean and deviation over seeds."""
    curves: dict[str, list[RobustnessCurve]] = {}
    for row, title in ATTACKED.items():
        measures = [run.measures[kind] for kind in ("pgd", "pgd-scores") for run in page.rows[f"robustness/{row}"]]
        curves[title] = [RobustnessCurve(**each) for each in measures]
    return Robustness(curves, {}).figures()[""]


FIGURES: dict[str, Callable[[Page], Figure]] = {"differences": draw_differences, "curves": draw_curves, "pgd": draw_pgd}


def write_page(results: Path, page: Path) -> list[Path]:
    """Write the page, and its figures into ``images`` beside it; return the paths."""
    data = Page(results)
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    template = jinja2.Template(TEMPLATE.read_text(encoding="utf-8"), undefined=jinja2.StrictUndefined, **options)
    write_text(
        page, template.render(page=data, heads={name: HEADS[name] for name in data.heads}, tests=TESTS, shipped=SHIPPED)
    )
    images = page.parent / "images"
    return [page, *(save_figure(draw(data), images / f"results-{name}.png") for name, draw in FIGURES.items())]
