from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from torchcaps.errors import InputError
from torchcaps.files import read_json, write_json
from torchcaps.reproduce import Measure, Row, Table, read_logs
from torchcaps.reproduce.logs import ELSEWHERE, is_whole, publish, publish_divergence, same_run
from torchcaps.training.config import override

RESULTS = Path("results")


def plain(table: Table) -> Row:
    return table.rows[0]


def test_logs_come_by_seed_with_their_errors(tiny: Table, write_log) -> None:
    for seed in (10, 2):
        write_log(tiny, "plain", seed, last=2.0 + seed, best=1.0)
    first, second = read_logs(RESULTS, tiny, plain(tiny))
    assert (first.seed, second.seed) == (2, 10)
    assert (first.error("last"), first.error("best")) == pytest.approx((4.0, 1.0))
    assert list(first.metrics["validation_accuracy"]) == [0.91, 0.92]
    assert same_run(first.config, plain(tiny), 2)


def test_runs_that_are_not_over_are_left_out(tiny: Table, write_log) -> None:
    folder = write_log(tiny, "plain")
    (folder / "measures.json").unlink()
    assert read_logs(RESULTS, tiny, plain(tiny)) == []
    (folder.parent / "seed-x").mkdir()
    (folder.parent / "notes.txt").touch()
    assert read_logs(RESULTS, tiny, plain(tiny)) == []


def test_a_log_is_whole_with_all_that_its_row_measures(tiny: Table, write_log) -> None:
    folder = write_log(tiny, "plain", measures={"affnist": {}})
    assert is_whole(folder, plain(tiny))
    more = dataclasses.replace(plain(tiny), measures=(Measure(kind="affnist"), Measure(kind="rotation")))
    assert not is_whole(folder, more)
    assert is_whole(write_log(tiny, "measured", diverged="NaN"), tiny.rows[1])


def test_a_divergence_is_read(tiny: Table, write_log) -> None:
    write_log(tiny, "plain", diverged="the loss became NaN")
    (log,) = read_logs(RESULTS, tiny, plain(tiny))
    assert (log.diverged, log.summary, log.metrics) == ("the loss became NaN", {}, {})


def test_a_summary_without_test_errors_is_refused(tiny: Table, write_log) -> None:
    folder = write_log(tiny, "plain")
    write_json(folder / "summary.json", {"epochs": 2})
    with pytest.raises(InputError, match=r"summary.json.*test errors"):
        read_logs(RESULTS, tiny, plain(tiny))


# which run it is


def test_where_a_run_is_computed_makes_no_difference_to_what_it_is(tiny: Table) -> None:
    config = plain(tiny).config(1)
    elsewhere = override(config, {"accelerator": "cpu", "data_dir": "there", "checkpoint_minutes": 1.0})
    assert same_run(elsewhere, plain(tiny), 1)
    for changes in ({"learning_rate": 0.5}, {"num_iterations": 1}, {"precision": "bf16"}, {"epochs": 3}, {"seed": 2}):
        assert not same_run(override(config, changes), plain(tiny), 1), changes


def test_a_run_that_stops_by_itself_may_have_any_length(tiny: Table) -> None:
    stopping = dataclasses.replace(plain(tiny), stop_at=0.9)
    assert same_run(override(stopping.config(0), {"epochs": 1}), stopping, 0)
    assert not same_run(override(stopping.config(0), {"batch_size": 10}), stopping, 0)


def test_what_may_differ_is_what_a_resumed_run_may_change() -> None:
    from torchcaps.training.loop import RESUMABLE

    assert set(ELSEWHERE) == set(RESUMABLE) - {"epochs"}


# writing


@pytest.fixture
def run(tiny: Table, tmp_path: Path) -> Path:
    folder = tmp_path / "somewhere" / "run"
    config = override(plain(tiny).config(0), {"data_dir": "/home/me/data"})
    write_json(folder / "config.json", config.to_dict())
    (folder / "metrics.csv").write_text("epoch\n1\n")
    write_json(
        folder / "summary.json",
        {"out": str(folder), "seconds": 3, "command": f"train {folder}", "resumed_with": [f"train --resume {folder}"]},
    )
    (folder / "last.ckpt").write_bytes(b"weights")
    return folder


def test_a_log_holds_no_weights_and_no_places_on_this_machine(run: Path, tmp_path: Path) -> None:
    log = tmp_path / "results" / "tiny" / "plain" / "seed-0"
    publish(run, log, {"affnist": {"accuracy": 0.5}}, "the command")
    files = sorted(path.name for path in log.iterdir())
    assert files == ["config.json", "measures.json", "metrics.csv", "summary.json"]
    text = "".join(path.read_text() for path in log.iterdir())
    assert str(tmp_path) not in text
    assert "/home/me" not in text
    summary = read_json(log / "summary.json", "summary")
    assert summary == {
        "out": "runs/reproduce/tiny/plain/seed-0",
        "seconds": 3,
        "command": "the command",
        "resumed_with": ["the command"],
    }
    assert (log / "metrics.csv").read_text() == "epoch\n1\n"


def test_the_last_file_of_a_log_is_the_one_that_makes_it_whole(run: Path, tmp_path: Path, tiny: Table) -> None:
    (run / "summary.json").unlink()
    log = tmp_path / "log"
    with pytest.raises(InputError, match="summary"):
        publish(run, log, {}, "")
    assert not is_whole(log, plain(tiny))


def test_a_divergence_is_logged_even_before_the_first_epoch(run: Path, tmp_path: Path, tiny: Table) -> None:
    (run / "metrics.csv").unlink()
    log = tmp_path / "log"
    publish_divergence(run, log, "NaN at step 1")
    assert sorted(path.name for path in log.iterdir()) == ["config.json", "diverged.json"]
    assert json.loads((log / "diverged.json").read_text()) == {"reason": "NaN at step 1"}
    assert is_whole(log, plain(tiny))
