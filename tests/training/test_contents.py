"""Whatever stands in a field of a run's files: the run goes on, or one sentence names the file, and nothing is lost."""

import copy
import csv
import io
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_runs import go_on, run, tiny_config, write_bars
from torchcaps.analysis import read_metrics
from torchcaps.errors import InputError
from torchcaps.export import describe_run, training_record
from torchcaps.training import load_run
from torchcaps.training.folder import read_summary
from torchcaps.training.state import ProgressState

WRONG: tuple[Any, ...] = ("x", None, [], math.nan, {}, [1], {"x": "x"}, -1, math.inf, True)
TENSOR = torch.full((2, 3), math.nan)
Place = tuple[Any, ...]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contents")
    config = tiny_config(write_bars(folder / "x.npz"), epochs=1, limit_train=32, validation_size=8, limit_test=8)
    run(config, folder / "run")
    return folder / "run"


def places(contents: Any, at: Place = ()) -> Iterator[Place]:
    """Where something stands in nested contents; of lists, of what has numbers and of long mappings the first."""
    if at:
        yield at
    if isinstance(contents, dict | list):
        keys = list(contents if isinstance(contents, dict) else range(len(contents)))
        named = isinstance(contents, dict) and len(keys) < 40 and all(isinstance(key, str) for key in keys)
        for key in keys if named else keys[:1]:
            yield from places(contents[key], (*at, key))


def changed(contents: Any, at: Place, value: Any) -> Any:
    """A copy with another value at a place; the place goes where the value is ``KeyError``."""
    new = copy.copy(contents)
    if len(at) > 1:
        new[at[0]] = changed(contents[at[0]], at[1:], value)
    elif value is KeyError:
        del new[at[0]]
    else:
        new[at[0]] = value
    return new


def in_turns(values: Sequence[Any], number: int, each: int) -> list[Any]:
    """``each`` of the values for place ``number``; neighbouring places get the others."""
    return [values[(each * number + n) % len(values)] for n in range(each)]


def files(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(read: Callable[[], object], files: tuple[str, ...], where: str) -> bool:
    """Whether a reader refuses by a sentence that names one of the files; any other error fails the test."""
    try:
        read()
    except InputError as error:
        assert any(name in str(error) for name in files), f"{where}: {error}"  # noqa: PT017
        return True
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    return False


def use(folder: Path) -> None:
    """What reads a run, except going on with it."""
    opened = load_run(folder)
    describe_run(opened)
    training_record(opened)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "summary.json", "best/classes.json", "best/config.json"])
def test_contents_of_json_files(name: str, trained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    whole = json.loads((folder / name).read_text(encoding="utf-8"))
    outcomes = []
    for place, at in enumerate(places(whole)):
        for value in in_turns((*WRONG, KeyError), place, 2):
            (folder / name).write_text(json.dumps(changed(whole, at, value)), encoding="utf-8")
            if name == "summary.json":
                outcomes.append(refused(lambda: read_summary(folder / name), (name,), f"{at} = {value}"))
                if outcomes[-1]:
                    continue
            outcomes.append(refused(lambda: use(folder), (name, "model.safetensors", "data set"), f"{at} = {value}"))
    assert any(outcomes)
    (folder / name).write_text(json.dumps(whole), encoding="utf-8")
    use(folder)


def test_contents_of_metrics(trained: Path, tmp_path: Path) -> None:
    rows = list(csv.DictReader((trained / "metrics.csv").read_text(encoding="utf-8").splitlines()))
    for column in rows[0]:
        for value in ("x", "", "nan", "[]", "-1", "inf", None):
            text = io.StringIO()
            kept = {name: each for name, each in rows[0].items() if (name, value) != (column, None)}
            writer = csv.DictWriter(text, list(kept), lineterminator="\n")
            writer.writeheader()
            writer.writerow(kept | ({} if value is None else {column: value}))
            (tmp_path / "metrics.csv").write_text(text.getvalue(), encoding="utf-8")
            refused(lambda: read_metrics(tmp_path), ("metrics.csv",), f"{column} = {value}")


@pytest.mark.slow
def test_contents_of_a_checkpoint(trained: Path, tmp_path: Path) -> None:
    """Each place is tried with whole runs; other values of the progress only if it takes them."""
    whole, folder = torch.load(trained / "last.ckpt", weights_only=True), tmp_path / "run"
    for place, at in enumerate(places(whole)):
        others = in_turns(("x", None, KeyError, TENSOR), place, 1)
        values = {"progress": (*WRONG, KeyError, TENSOR), "settings": ("x",), "data": ("x",)}
        for number, value in enumerate(values.get(at[0], others)):
            contents, where = changed(whole, at, value), f"{at} = {value}"
            read = partial(ProgressState.read, contents.get("progress"), has_validation=True)
            if at[0] == "progress" and number and refused(read, ("",), where):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(trained, folder)
            torch.save(contents, folder / "last.ckpt")
            before = files(folder)
            refused(lambda: load_run(folder, "last"), ("last.ckpt",), where)
            if refused(lambda: go_on(folder, epochs=2), ("last.ckpt", str(folder)), where):
                assert files(folder) == before, f"{where}: something was lost"
