"""The audit of public implementations: the lines of ``audit.jsonl`` as a table and as counts."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

#: Kinds of findings, and what each means in a few words.
KINDS: dict[str, str] = {
    "nan-at-zero": "NaN for zeros",
    "softmax-over-inputs": "softmax over the inputs",
    "squash-over-other-axis": "squash over a wrong axis",
    "mixes-images": "images of a batch mixed",
    "random-in-evaluation": "noise in evaluation",
    "agreement-not-summed": "agreement not summed",
    "no-routing": "agreement never used",
    "dead-capsules": "equal outputs",
    "padding-changes-result": "padding changes results",
}


#: Findings that change no result for ordinary inputs.
HARMLESS = {"nan-at-zero", "softmax-over-inputs"}


class Audit:
    """The audited repositories, one mapping each; see the README of the records."""

    def __init__(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self.lines = lines

    @property
    def number(self) -> int:
        return len(self.lines)

    @property
    def without(self) -> int:
        """Number of repositories without a finding."""
        return sum(not line["findings"] for line in self.lines)

    def count(self, kind: str) -> int:
        """Return the number of repositories with a finding."""
        return sum(kind in line["findings"] for line in self.lines)

    @property
    def counts(self) -> dict[str, int]:
        return {kind: self.count(kind) for kind in sorted(KINDS, key=self.count, reverse=True)}

    @property
    def faulty(self) -> list[Mapping[str, Any]]:
        """Lines with a finding that changes results for ordinary inputs."""
        return [line for line in self.lines if line["findings"].keys() - HARMLESS]

    @property
    def wrong(self) -> int:
        """Number of repositories with a finding that changes results for ordinary inputs."""
        return len(self.faulty)

    def rows(self) -> Iterator[str]:
        """Yield the rows of the table of faulty repositories."""
        for line in self.faulty:
            name = line["repository"]
            link = f"[{name.replace('/', '/<wbr>')}](https://github.com/{name}) {line['commit']}"
            place = _place(line).replace("`", "").replace("_", r"\_<wbr>")  # as code, a name breaks no line
            yield f"| {link} | {_findings(line)} | {place} |"

    def csv(self) -> str:
        """Return all repositories as CSV."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("repository", "commit", "field", "findings", "where"))
        for line in self.lines:
            cells = (_findings(line), _place(line))
            about = (line["repository"], line["commit"], line["field"])
            writer.writerow((*about, *(cell.replace("`", "") for cell in cells)))
        return text.getvalue()


def _findings(line: Mapping[str, Any]) -> str:
    return ", ".join(_finding(kind, each) for kind, each in line["findings"].items()) or "none"


def _finding(kind: str, found: Mapping[str, Any]) -> str:
    notes = [", ".join(map("{:.2f}".format, found.get("change", ())))]
    notes += ["gradients only"] * found.get("gradients_only", False) + [found.get("only", "")]
    words = "; ".join(filter(None, notes))
    return f"`{kind}`" + f" ({words})" * bool(words)


def _place(line: Mapping[str, Any]) -> str:
    """Format the file of the layer and the lines of its findings, then the places in other files."""
    places = [each["where"] for each in line["findings"].values()]
    lines = [place for place in places if ":" not in place]
    others = [place.split(":") for place in places if ":" in place]
    files = [(line["layer"], lines), *((file, [place]) for file, place in others)]
    return "; ".join(_file(file, dict.fromkeys(found)) for file, found in files)


def _file(path: str, lines: Iterable[str]) -> str:
    name, text = path.rpartition("/")[2], ", ".join(lines)
    if text[:1].isdigit():
        text = f"{'line' if text.isdigit() else 'lines'} {text}"
    return f"`{name}`" + f", {text}" * bool(text)
