"""The pictures of docs/commands.md, each drawn by the command under it.

In a clone, ``torchcaps train && python docs/gallery.py``: the network is that of runs/first-digits-1.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from pathlib import Path

from PIL import Image

from torchcaps.cli import main

DOCS = Path(__file__).parent
PICTURE = re.compile(r"\((images/gallery/[\w-]+\.webp)\)")
COMMAND = re.compile(r"^torchcaps (.+)$", re.MULTILINE)
WIDEST = 900
"""Pixels."""


def drawn() -> list[tuple[list[str], str]]:
    """The pictures of each section of the page, and the command that draws them."""
    page = (DOCS / "commands.md").read_text(encoding="utf-8").replace("\\\n", "")  # a command may have several lines
    sections = re.split(r"^### ", page, flags=re.MULTILINE)
    pairs = [(PICTURE.findall(each), COMMAND.search(each)) for each in sections]
    return [(names, command[1]) for names, command in pairs if names and command]


def draw(names: list[str], command: str) -> None:
    """Run a command, and write its figures small."""
    with tempfile.TemporaryDirectory() as folder:
        if code := main([*shlex.split(command, comments=True), "--figure", str(Path(folder, "x.png"))]):
            raise SystemExit(code)
        for name, file in zip(names, sorted(Path(folder).glob("*.png"), key=lambda each: each.stem), strict=True):
            with Image.open(file) as figure:
                figure.thumbnail((WIDEST, figure.height))
                figure.convert("RGB").save(DOCS / name, quality=80, method=6)


if __name__ == "__main__":
    (DOCS / "images" / "gallery").mkdir(exist_ok=True)
    for pictures, line in drawn():
        draw(pictures, line)
