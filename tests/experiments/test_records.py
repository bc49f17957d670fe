"""Figures in prose have a record, and the pages say what the records say."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = [json.loads(line) for line in (ROOT / "experiments/results/other.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["name"])
def test_a_page_says_what_its_record_says(record: dict[str, Any]) -> None:
    assert {"name", "page", "figures", "command", "machine", "date"} <= record.keys()
    page = (ROOT / record["page"]).read_text(encoding="utf-8")
    assert record["figures"]
    assert [figure for figure in record["figures"] if figure not in page] == []
