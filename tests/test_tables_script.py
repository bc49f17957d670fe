"""Tables of the documentation site in a real browser: a click on a heading sorts them by the numbers that they show."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ASSETS = Path(__file__).parents[1] / "docs" / "assets"
CELLS = (
    ("`b`", "0.850 ± 0.075 %", "1,072,444", "2 min 45 s"),
    ("`a`", "12.5 ± 0.1 %", "499,424", "1 h 05 min"),
    ("`d`", "–", "–", "29 s"),
    ("`c`", "0.9 %", "8,215,568", "2 min 08 s"),
)


@pytest.mark.browser
def test_a_click_on_a_heading_sorts(browser: Browser) -> None:
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for cells in CELLS)
    heads = "".join(f"<th>{name}</th>" for name in ("row", "error", "parameters", "time"))
    page = browser.new_page()
    page.set_content(f"<article><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></article>")
    for script in ("tablesort/tablesort.min.js", "tables.js"):
        page.add_script_tag(path=ASSETS / script)
    found = []
    for column in (0, 1, 1, 2, 3):
        page.locator("th").nth(column).click()
        found.append("".join(name.strip("`") for name in page.locator("td:first-child").all_inner_texts()))
    assert found == ["abcd", "bcad", "dacb", "abcd", "dcba"]  # a second click turns the order round
    assert page.locator("td.number").count() == 10
