"""Results for labels and numbers."""

import numpy as np
import pytest

from torchcaps.analysis import TargetEvaluation

TARGETS = np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
SCORES = np.array([[0.9, 0.1], [0.6, 0.2], [0.8, 0.3], [0.1, 0.4]])


@pytest.fixture
def labels() -> TargetEvaluation:
    return TargetEvaluation("labels", TARGETS, SCORES, 0.25, 0.875, ("ant", "bee"))


def test_labels_have_images_and_rates_and_none_where_undefined(labels) -> None:
    ant, bee = labels.rows
    assert (ant["images"], ant["auroc"], ant["recall"]) == (2, 1.0, 1.0)
    assert ant["precision"] == pytest.approx(2 / 3)
    assert (bee["images"], bee["auroc"], bee["precision"]) == (0, None, None)
    assert labels.mean("auroc") == 1.0  # of the labels where it is defined
    assert (labels.error, labels.num_images, labels.warning) == (0.125, 4, None)


@pytest.mark.parametrize(
    ("off", "mae", "rmse", "r2"), [([0, 0, 0, 0], 0, 0, 1), ([1, -1, 1, -1], 1, 1, 0), ([2, 2, 2, 2], 2, 2, -3)]
)
def test_numbers_have_errors_in_their_own_unit(off, mae, rmse, r2) -> None:
    targets = np.array([[1.0], [3.0], [1.0], [3.0]])  # of variance 1
    result = TargetEvaluation("regression", targets, targets + np.array(off)[:, None], 0.0, 0.0, ("angle",))
    (row,) = result.rows
    assert [row["mae"], row["rmse"], row["r2"]] == pytest.approx([mae, rmse, r2])


def test_tables_and_json_have_a_row_for_each_output(labels) -> None:
    summary, rows = labels.tables()
    assert [row[0] for row in rows.rows] == ["ant", "bee"]
    assert "–" in rows.rows[1]
    assert any(row[1] == "0.2500" for row in summary.rows)
    assert [each["name"] for each in labels.to_dict()["targets"]] == ["ant", "bee"]
    assert labels.to_dict()["mean_auroc"] == 1.0
