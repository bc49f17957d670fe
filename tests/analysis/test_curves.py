"""Learning curves of runs."""

import numpy as np
import pytest

from torchcaps.analysis import Curves, read_metrics, save_figure
from torchcaps.errors import InputError

HEADER = "epoch,step,train_loss,train_reconstruction_loss,train_accuracy,validation_loss,validation_accuracy"
ROWS = ["1,20,0.4,20,0.5,0.2,0.75", "2,40,0.1,,0.9,0.05,0.98"]


def write(path, *lines, end="\n"):
    path.write_text("\n".join(lines) + end)
    return path


def test_columns_come_by_name_and_empty_cells_are_nan(tmp_path):
    path = write(tmp_path / "metrics.csv", HEADER, *ROWS)
    for place in (path, tmp_path, str(path)):
        metrics = read_metrics(place)
        assert list(metrics) == HEADER.split(",")
        np.testing.assert_array_equal(metrics["epoch"], [1, 2])
        np.testing.assert_array_equal(metrics["train_reconstruction_loss"], [20, np.nan])
        np.testing.assert_array_equal(metrics["validation_accuracy"], [0.75, 0.98])
    write(path, HEADER, *ROWS, ROWS[1][:-1], end="")  # it looks whole, but 0.9 was to be 0.98
    np.testing.assert_array_equal(read_metrics(path)["epoch"], [1, 2])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([HEADER], "no rows yet"),
        (["epoch,b", "1,2"], "it has no 'validation_loss'"),
        ([HEADER, "1,2"], "is damaged or no metrics"),
        ([HEADER, ROWS[1].replace("0.1", "much")], "much"),
    ],
)
def test_damaged_metrics_are_refused(tmp_path, lines, message):
    write(tmp_path / "metrics.csv", *lines)
    with pytest.raises(InputError, match=message):
        read_metrics(tmp_path)


def test_missing_metrics_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"metrics\.csv"):
        read_metrics(tmp_path)


def test_numbers_for_programs_have_none_for_empty_cells(tmp_path):
    write(tmp_path / "metrics.csv", HEADER, *ROWS)
    curves = Curves({"a": read_metrics(tmp_path)}, {}).to_dict()["a"]
    assert curves["train_reconstruction_loss"] == [20, None]
    assert curves["validation_accuracy"] == [0.75, 0.98]


def run(errors, losses):
    accuracy, loss = 1 - np.array(errors), np.array(losses)
    found = {"epoch": np.arange(1.0, len(loss) + 1), "train_loss": 2 * loss, "train_accuracy": accuracy - 0.01}
    return found | {"validation_loss": loss, "validation_accuracy": accuracy}


def test_validation_and_training_of_each_run_are_drawn(words):
    runs = {"$one$": run([0.5, 0.4], [1, 0.8]), "two": run([0.3, 0.2], [0.7, 0.6])}
    figure = Curves(runs, dict.fromkeys(runs, "Both")).figures()[""]
    loss, error = figure.axes
    for line, wanted in ((loss.lines[0], [1, 0.8]), (loss.lines[1], [2, 1.6]), (error.lines[2], [30, 20])):
        np.testing.assert_allclose(line.get_ydata(), wanted)  # errors in percent
    assert len({line.get_color() for line in error.lines}) == 2
    assert {"Both", "$one$", "two", "train", "validation", "epoch", "Loss", "Error"} <= set(words(figure))
    assert loss.get_yscale() == error.get_yscale() == "linear"


@pytest.mark.parametrize(("task", "name"), [("classes", "Error"), ("pixels", "1 − Dice")])
def test_names_keep_their_capitals(words, task, name):
    assert name in words(Curves({"one": run([0.5, 0.4], [1, 0.8])}, {}, task=task).figures()[""])


def test_wide_ranges_are_logarithmic_and_zeros_and_single_points_still_shown(tmp_path):
    for losses, scale in (([1, 0.01], "symlog"), ([1, 0.8], "linear"), ([1, 0.01, 0], "symlog")):
        axes = Curves({"a": run(losses, losses)}, {}).figures()[""].axes[1]  # the error, in percent
        assert (axes.get_yscale(), axes.get_ylim()[0] == 0) == (scale, 0 in losses)
    without = run([0.5, 0.2], [1, 0.5])
    without["validation_loss"] = without["validation_accuracy"] = np.full(2, np.nan)
    figure = Curves({"one": run([0.5], [1]), "without": without}, {}).figures()[""]
    save_figure(figure, tmp_path / "a.png")
    assert all(line.get_marker() not in ("", "None") for line in figure.axes[0].lines)  # one point is seen


@pytest.mark.parametrize("lowest", [0.0016, 0.0023, 0.0099, 1e-9])
def test_ticks_do_not_touch_where_an_epoch_has_no_error(lowest, touching):
    figure = Curves({"a": run([0.35, 0.1, 0.01, lowest, 0.0], [1, 0.5, 0.2, 0.1, 0.05])}, {}).figures()[""]
    assert not touching(figure)
