"""``RESULTS/TABLE/estimate.json``: how long runs would take that nobody has made, from a timed step of each row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchcaps.errors import InputError, shown
from torchcaps.files import COUNT, NAMED_TEXTS, NUMBER, TEXT, Kind, check_keys, read_json, write_json
from torchcaps.reproduce.table import Row, Table

ESTIMATE = "estimate.json"
_KEYS = {
    "seconds": NUMBER,
    "hardware.processor": TEXT,
    "hardware.threads": COUNT,
    "versions": NAMED_TEXTS,
    "settings": Kind("an object", lambda value: isinstance(value, dict)),
}


@dataclass(frozen=True)
class Timing:
    """How long a run of a row would take, and where the step was timed."""

    seconds: float
    """Of one run, extrapolated."""
    hardware: Mapping[str, Any]
    """As in the summary of a run."""
    versions: Mapping[str, str]
    """As in the summary of a run."""


def read_timings(results: Path, table: Table) -> dict[str, Timing]:
    """Those of a table's rows, by name, that were timed with the settings that they have now.

    Raises:
        InputError: A file that is damaged.
    """
    rows = {row.name: row for row in table.rows}
    return {
        name: Timing(float(each["seconds"]), each["hardware"], each["versions"])
        for name, each in _read(results, table).items()
        if name in rows and each["settings"] == _settings(rows[name])
    }


def write_timings(results: Path, table: Table, timings: Mapping[str, Timing]) -> Path:
    """Put timings of rows, by name, in the place of those that there were.

    Returns:
        The file.
    """
    rows = {row.name: row for row in table.rows}
    kept = {name: each for name, each in _read(results, table).items() if name in rows}
    new = {name: asdict(timing) | {"settings": _settings(rows[name])} for name, timing in timings.items()}
    merged = kept | new
    file = results / table.name / ESTIMATE
    write_json(file, {name: merged[name] for name in rows if name in merged})
    return file


def _read(results: Path, table: Table) -> dict[str, Any]:
    file = results / table.name / ESTIMATE
    if not file.exists():
        return {}
    found = read_json(file, "estimate")
    try:
        for name, each in found.items():
            check_keys(each, _KEYS, f"row {shown(name)}")
    except InputError as error:
        raise InputError(f"estimate {file}: {error}; remove the file, and --estimate writes it anew") from None
    return found


def _settings(row: Row) -> dict[str, Any]:
    """What a row's run is, as JSON has it."""
    return json.loads(json.dumps({"preset": row.preset, "data": row.data, **row.overrides}))
