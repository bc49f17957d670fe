"""What the figures show are the numbers of the logs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from torchcaps.reproduce import RunLog, Table, read_logs
from torchcaps.reproduce.figures import draw_affnist, draw_epochs, draw_errors, draw_iterations, draw_robustness


@pytest.fixture
def logs_of(tiny: Table, write_log):
    """Logs of rows with other fields than the plain one's, by name: fields, errors of the seeds."""

    def make(**rows: tuple[dict[str, object], list[float]]) -> dict[str, list[RunLog]]:
        plain = tiny.rows[0]
        table = dataclasses.replace(
            tiny,
            rows=tuple(
                dataclasses.replace(plain, name=name, overrides={**plain.overrides, **fields})
                for name, (fields, _) in rows.items()
            ),
        )
        for name, (_, errors) in rows.items():
            for seed, error in enumerate(errors):
                write_log(table, name, seed, last=error)
        return {row.name: read_logs(Path("results"), table, row) for row in table.rows}

    return make


def lines_of(axes) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axes.lines}


def test_each_run_is_a_dot_and_each_row_a_mean(logs_of) -> None:
    logs = logs_of(a=({}, [1.0, 3.0]), b=({}, [2.0]))
    axes = draw_errors(logs, {"b": 0.25}).axes[0]
    drawn = [(list(line.get_xdata()), list(line.get_ydata()), line.get_marker()) for line in axes.lines]
    assert drawn[:2] == [([1.0, 3.0], [0, 0], "o"), ([2.0], [0], "|")]
    assert ([0.25], [1], "D") in drawn
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert axes.yaxis_inverted()


def test_errors_against_iterations_have_a_line_an_axis_and_gradient(logs_of) -> None:
    logs = logs_of(
        none=({"num_iterations": 0}, [9.0]),
        uniform=({"num_iterations": 1}, [4.0, 6.0]),
        inputs=({"num_iterations": 1, "softmax_over": "inputs"}, [7.0]),
        two=({"num_iterations": 2}, [3.0]),
        stopped=({"num_iterations": 2, "stop_gradient": True}, [2.0]),
        wide=({"num_iterations": 2, "weight_std": 1.0}, [1.0]),
    )
    small, large = draw_iterations(logs, {}).axes
    through = "softmax over outputs, gradient through all iterations"
    stopped = "softmax over outputs, gradient stopped"
    lines = lines_of(small)
    np.testing.assert_allclose(lines[through], [(0, 9.0), (1, 5.0), (2, 3.0)])
    np.testing.assert_allclose(lines[stopped], [(0, 9.0), (1, 5.0), (2, 2.0)])
    np.testing.assert_allclose(lines["softmax over inputs, gradient stopped"], [(0, 9.0), (1, 7.0)])
    assert [len(line.get_ydata()) for line in large.lines] == [1, 0, 0, 0]
    assert small.get_title(loc="left") == "W of deviation 0.1"


def test_curves_are_means_over_seeds_epoch_by_epoch(logs_of) -> None:
    logs = logs_of(two=({"num_iterations": 2}, [1.0, 1.0]), none=({"num_iterations": 0}, [1.0]))
    outputs, inputs = draw_epochs(logs, {}).axes
    np.testing.assert_allclose(lines_of(outputs)["2 iterations"], [(1, 9.0), (2, 8.0)])
    assert list(lines_of(outputs)) == ["0 iterations", "2 iterations"]
    drawn = [len(line.get_xdata()) for line in inputs.lines]
    assert drawn == [2, 0], "without routing there is no axis, so that line stands in both"


def test_affnist_against_the_accuracy_reached(tiny: Table, write_log) -> None:
    write_log(tiny, "plain", 0, measures={"affnist": {"accuracy": 0.79, "images": 9, "source": "made"}})
    write_log(tiny, "plain", 1)
    logs = {"plain": read_logs(Path("results"), tiny, tiny.rows[0])}
    assert lines_of(draw_affnist(logs, {}).axes[0]) == {"plain": [(98.5, 79.0)]}


def test_robustness_is_that_of_the_measures(tiny: Table, write_log) -> None:
    curve = {"kind": "rotation", "strengths": [0.0, 30.0], "accuracy": [0.9, 0.5], "num_images": 10}
    write_log(
        tiny, "measured", 0, measures={"rotation": curve, "pgd-scores": curve | {"kind": "pgd-scores", "num_images": 5}}
    )
    logs = {"measured": read_logs(Path("results"), tiny, tiny.rows[1])}
    figure = draw_robustness(logs, {})
    assert figure is not None
    assert list(figure.axes[0].lines[0].get_ydata()) == [90.0, 50.0]
    assert draw_robustness({"measured": []}, {}) is None


def test_errors_that_differ_tenfold_have_a_logarithmic_scale(logs_of) -> None:
    wide = draw_errors(logs_of(a=({}, [0.5]), b=({}, [50.0])), {}).axes[0]
    assert wide.get_xscale() == "log"
    near = draw_errors(logs_of(c=({}, [0.5]), d=({}, [0.6])), {}).axes[0]
    assert near.get_xscale() == "linear"


def test_where_there_is_nothing_to_draw_there_is_no_figure(tiny: Table, write_log, logs_of) -> None:
    stopped = logs_of(stopped=({"num_iterations": 2, "stop_gradient": True}, [2.0]))
    assert draw_epochs(stopped, {}) is None
    assert draw_iterations(stopped, {}) is not None
    curves = {"rotation": ("rotation", 10), "pgd-scores": ("pgd-scores", 5)}
    measures = {
        name: {"kind": kind, "strengths": [0.0], "accuracy": [0.9], "num_images": number}
        for name, (kind, number) in curves.items()
    }
    write_log(tiny, "measured", measures=measures)
    cnn = {"measured": read_logs(Path("results"), tiny, tiny.rows[1])}
    assert draw_epochs(cnn, {}) is None
    assert draw_iterations(cnn, {}) is None
