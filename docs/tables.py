"""The tables of commands and of networks in the documentation, written from the code.

    python docs/tables.py

Each table lies between the comments ``<!-- table: NAME -->`` and ``<!-- end -->``. A test compares it with the code.
"""

from __future__ import annotations

import re
from pathlib import Path

from torchcaps.cli.app import COMMANDS
from torchcaps.models import get_preset, list_presets, plan_network

DOCS = Path(__file__).parent
TABLE = re.compile(r"(?<=<!-- table: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
VARIANT = re.compile(r"-r\d|-outputs")
"""Rounds of routing and the other softmax axis, which sources compare."""


def commands() -> str:
    """A row for each command, with its line of help."""
    rows = [f"| `{name}` | {line.rstrip('.')} |" for name, (_, line) in COMMANDS.items()]
    return "\n".join(["| command | what it does |", "|---|---|", *rows])


def networks() -> str:
    """A row for each preset but the sources' own variants, with the first sentence of its description."""
    rows = ["| preset | what it is | parameters |", "|---|---|---|"]
    for preset in map(get_preset, [name for name in list_presets() if not VARIANT.search(name)]):
        what = re.split(r"[.;:](?: |$)", preset.description)[0]
        network = plan_network(preset.network, preset.in_shape, preset.num_classes)
        rows.append(f"| `{preset.name}` | {what} | {sum(each.numel() for each in network.parameters()):,} |")
    return "\n".join(rows)


TABLES = {"commands": commands, "networks": networks}


def with_tables(page: str) -> str:
    """The text of a page with its tables as the code has them now."""
    return TABLE.sub(lambda table: f"{table[1]}{table[2]}\n{TABLES[table[1]]()}\n\n", page)


if __name__ == "__main__":
    for name in TABLES:
        path = DOCS / f"{name}.md"
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
