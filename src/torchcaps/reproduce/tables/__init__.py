"""The paper's tables, as typed data, a file each. A new one is a call of :func:`register_table`.

Nothing here imports torch.
"""

from __future__ import annotations

from torchcaps.registry import Registry
from torchcaps.reproduce.table import Table
from torchcaps.reproduce.tables import affnist, mnist, multimnist, robustness, routing, tutorials, zoo

_TABLES: Registry[Table] = Registry("table")


def register_table(table: Table) -> Table:
    """Add a table, so that it is listed, run and reported.

    Raises:
        InputError: The name is taken.
    """
    _TABLES.add(table.name, table)
    return table


def list_tables() -> list[str]:
    """Names of all tables, in the order of their registration."""
    return list(_TABLES)


def get_table(name: str) -> Table:
    """The table of that name.

    Raises:
        InputError: There is none (the nearest name is given).
    """
    return _TABLES[name]


for _each in (mnist, routing, multimnist, affnist, tutorials, robustness, zoo):
    register_table(_each.TABLE)
register_table(zoo.SEARCH)
