from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from torchcaps.errors import InputError
from torchcaps.files import read_json, write_json
from torchcaps.reproduce import Measure, Row, Table, read_logs
from torchcaps.reproduce.logs import (
    ELSEWHERE,
    is_whole,
    publish,
    publish_divergence,
    same_run,
)
from torchcaps.training.config import override

RESULTS = Path("results")
AFFNIST = {"accuracy": 0.79, "images": 9, "source": "made"}
ROTATION = {"kind": "rotation", "strengths": [0.0], "accuracy": [0.9], "num_images": 10}


def plain(table: Table) -> Row:
    return table.rows[0]


def measuring(table: Table, *measures: Measure) -> Row:
    return dataclasses.replace(plain(table), measures=measures)


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
    folder = write_log(tiny, "plain", measures={"affnist": AFFNIST})
    assert is_whole(folder, plain(tiny))
    affnist, rotation = Measure(kind="affnist", images=9), Measure(kind="rotation")
    assert is_whole(folder, measuring(tiny, affnist))
    assert not is_whole(folder, measuring(tiny, affnist, rotation))
    assert is_whole(write_log(tiny, "measured", diverged="NaN"), tiny.rows[1])


@pytest.mark.parametrize(
    ("kind", "found", "asked", "is_enough"),
    [
        ("affnist", 9, 9, True),
        ("affnist", 9, 8, False),
        ("affnist", 9, 10, False),
        ("affnist", 9, None, False),
        ("affnist", 320_000, None, True),
        ("affnist", 320_000, 320_001, True),
        ("rotation", 10, 10, True),
        ("rotation", 10, 9, False),
        ("rotation", 10, 40, False),
        ("rotation", 10, None, False),
        ("rotation", 40, None, True),  # all the test images that the run had
        ("rotation", 40, 41, True),
        ("rotation", 40, 39, False),
    ],
)
def test_what_was_measured_on_other_images_is_not_whole(
    tiny: Table, write_log, kind: Any, found: int, asked: int | None, is_enough: bool
) -> None:
    measures = {"affnist": AFFNIST | {"images": found}, "rotation": ROTATION | {"num_images": found}}
    folder = write_log(tiny, "plain", measures={kind: measures[kind]})
    row = measuring(tiny, Measure(kind=kind, images=asked))
    assert is_whole(folder, row) == is_enough
    assert len(read_logs(RESULTS, tiny, row)) == is_enough


def test_a_divergence_is_read(tiny: Table, write_log) -> None:
    write_log(tiny, "plain", diverged="the loss became NaN")
    (log,) = read_logs(RESULTS, tiny, plain(tiny))
    assert (log.diverged, log.summary, log.metrics) == ("the loss became NaN", {}, {})


def changed(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy with another value, or without it where that is ``...``."""
    first, _, rest = key.partition(".")
    if rest:
        return values | {first: changed(values[first], rest, value)}
    return {name: each for name, each in values.items() if name != first} | ({} if value is ... else {first: value})


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        *(("summary", key, ...) for key in ("precision", "epochs", "parameters", "seconds", "peak_memory_mib")),
        *(("summary", key, ...) for key in ("images.test", "validation.best.accuracy", "versions")),
        *(("summary", key, ...) for key in ("test.last.error", "test.best.error")),
        *(("summary", key, ...) for key in ("hardware.processor", "hardware.threads")),
        ("summary", "test", 3),
        ("summary", "test.last.error", "2 %"),
        ("summary", "precision", "16"),
        ("summary", "seconds", None),
        ("summary", "peak_memory_mib", "much"),
        ("summary", "epochs", True),
        ("measures", "affnist.accuracy", ...),
        ("measures", "affnist.source", ...),
        ("measures", "rotation.strengths", ...),
        ("measures", "rotation.strengths", []),
        ("measures", "rotation.accuracy", [0.5, 0.6]),
        ("measures", "rotation.accuracy", [None]),
        ("measures", "rotation.num_images", None),
        ("measures", "rotation.kind", "spin"),
        ("measures", "rotation", []),
    ],
)
def test_a_damaged_log_is_named_with_its_key(tiny: Table, write_log, file: str, key: str, value: Any) -> None:
    folder = write_log(tiny, "plain", measures={"affnist": AFFNIST, "rotation": ROTATION})
    assert len(read_logs(RESULTS, tiny, plain(tiny))) == 1
    path = folder / f"{file}.json"
    write_json(path, changed(read_json(path, file), key, value))
    words = re.escape(key) if file == "summary" else key.partition(".")[2]
    with pytest.raises(InputError, match=f'{re.escape(str(path))}.*"{words}') as caught:
        read_logs(RESULTS, tiny, plain(tiny))
    assert "\n" not in str(caught.value)


def test_a_log_without_its_epochs_is_damaged(tiny: Table, write_log) -> None:
    metrics = write_log(tiny, "plain") / "metrics.csv"
    metrics.write_text("epoch\n1\n")
    with pytest.raises(InputError, match=r'metrics\.csv has no column "validation_accuracy"'):
        read_logs(RESULTS, tiny, plain(tiny))
    metrics.unlink()
    with pytest.raises(InputError, match=r"metrics\.csv does not exist; give a run folder"):
        read_logs(RESULTS, tiny, plain(tiny))


# which run it is


def test_where_a_run_is_computed_makes_no_difference_to_what_it_is(tiny: Table) -> None:
    config = plain(tiny).config(1)
    elsewhere = override(config, {"accelerator": "cpu", "data_dir": "there", "checkpoint_minutes": 1.0})
    assert same_run(elsewhere, plain(tiny), 1)
    for precision in ("32", "bf16"):
        assert same_run(override(config, {"precision": precision}), plain(tiny), 1)
    for changes in ({"learning_rate": 0.5}, {"num_iterations": 1}, {"epochs": 3}, {"stop_at": 0.9}, {"seed": 2}):
        assert not same_run(override(config, changes), plain(tiny), 1), changes


def test_what_may_differ_is_what_a_resumed_run_may_change() -> None:
    from torchcaps.training.loop import RESUMABLE

    assert set(ELSEWHERE) == set(RESUMABLE) - {"epochs", "stop_at"}


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
