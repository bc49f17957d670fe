from __future__ import annotations

import numpy as np
import pytest

from torchcaps.analysis import figure_curves, read_metrics
from torchcaps.errors import InputError

HEADER = (
    "epoch,step,seconds,images_per_second,learning_rate,train_loss,train_classification_loss,"
    "train_reconstruction_loss,train_accuracy,validation_loss,validation_accuracy"
)
ROWS = ["1,20,1.5,800,0.001,0.4,0.3,20,0.5,0.2,0.75", "2,40,3.1,800,0.001,0.1,0.08,,0.9,0.05,0.98"]


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


def test_a_line_that_is_still_being_written_is_left_out(tmp_path):
    path = write(tmp_path / "metrics.csv", HEADER, *ROWS, "3,60,4.", end="")
    np.testing.assert_array_equal(read_metrics(path)["epoch"], [1, 2])
    path = write(tmp_path / "metrics.csv", HEADER, *ROWS, ROWS[1][:-1], end="")  # whole, but 0.9 was to be 0.98
    np.testing.assert_array_equal(read_metrics(path)["epoch"], [1, 2])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([HEADER], "no rows yet"),
        ([""], "no rows yet"),
        (["a,b", "1,2"], "it has no 'epoch'"),
        ([HEADER, "1,2"], "NoneType|float"),
        ([HEADER, ROWS[0], ROWS[1].replace("0.1", "much")], "much"),
        ([HEADER, ROWS[0].replace("0.75", "7" * 200_000)], "field larger than field limit"),
    ],
)
def test_files_that_are_no_metrics(tmp_path, lines, message):
    with pytest.raises(InputError, match=message):
        read_metrics(write(tmp_path / "metrics.csv", *lines))


def test_missing_and_binary_files(tmp_path):
    with pytest.raises(InputError, match=r"metrics\.csv does not exist; give a run folder"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is damaged or no metrics"):
        read_metrics(tmp_path)


def test_errors_stay_short(tmp_path):
    with pytest.raises(InputError) as caught:
        read_metrics(write(tmp_path / "metrics.csv", "x" * 100_000, "1"))
    assert len(str(caught.value)) < 500


def run(errors, losses):
    epochs = np.arange(1, len(errors) + 1.0)
    accuracy = 1 - np.array(errors)
    loss = np.array(losses)
    return {
        "epoch": epochs,
        "train_loss": 2 * loss,
        "train_accuracy": accuracy - 0.01,
        "validation_loss": loss,
        "validation_accuracy": accuracy,
    }


def test_validation_and_training_of_each_run_are_drawn(words):
    figure = figure_curves({"one": run([0.5, 0.4], [1, 0.8]), "two": run([0.3, 0.2], [0.7, 0.6])}, title="Both")
    loss, error = figure.axes
    np.testing.assert_allclose(loss.lines[0].get_ydata(), [1, 0.8])
    np.testing.assert_allclose(loss.lines[1].get_ydata(), [2, 1.6])
    np.testing.assert_allclose(error.lines[2].get_ydata(), [30, 20])  # percent
    assert len({line.get_color() for line in error.lines}) == 2
    assert {"Both", "one", "two", "train", "validation", "epoch", "Loss", "Error"} <= set(words(figure))
    assert loss.get_yscale() == error.get_yscale() == "linear"


def test_wide_ranges_are_logarithmic_and_zeros_still_shown():
    figure = figure_curves({"a": run([0.5, 0.01], [1, 0.01])})
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "log"]
    figure = figure_curves({"a": run([0.5, 0.01, 0], [1, 0.9, 0.8])})
    assert [axes.get_yscale() for axes in figure.axes] == ["linear", "symlog"]
    assert figure.axes[1].get_ylim()[0] == 0


def test_a_run_of_one_epoch_and_one_without_validation_can_be_drawn(tmp_path):
    one = run([0.5], [1])
    without = run([0.5, 0.2], [1, 0.5])
    without["validation_loss"] = without["validation_accuracy"] = np.full(2, np.nan)
    figure = figure_curves({"one": one, "without": without})
    figure.savefig(tmp_path / "a.png")
    assert all(line.get_marker() not in ("", "None") for line in figure.axes[0].lines)  # one point is seen


def test_bad_figures():
    with pytest.raises(InputError, match="at least one run"):
        figure_curves({})
    with pytest.raises(InputError, match='bad have no column "train_loss"'):
        figure_curves({"bad": {"epoch": np.ones(1)}})
