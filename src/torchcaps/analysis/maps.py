"""Maps of scenes: the class of each pixel, drawn beside the labels, or written to a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int, Shaped

from torchcaps.analysis.answers import AnswerOptions, Classifier
from torchcaps.analysis.figures import COLOURS, MUTED, Caption, Cell, tiles
from torchcaps.analysis.mask_answers import MaskAnswers, Seen, answer_each, files_below, write_mask
from torchcaps.datasets.scaling import rescaled
from torchcaps.datasets.sources.scene import patches_of
from torchcaps.errors import InputError
from torchcaps.files import atomic_path
from torchcaps.ranges import Pages

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE = 3.0
"""Longer side of a map, inches."""
_EMPTY, _RIGHT, _WRONG = (1.0, 1.0, 1.0), (0.85, 0.85, 0.85), (0.757, 0.153, 0.176)


UNUSED_OPTIONS = (
    ("group", "prepare", "invert", "fit", "max_megapixels", "coverage", "coverage_over", "poses"),
    "is for networks that give one answer for each image, but these files are scenes",
)
"""Options of ``torchcaps predict`` that do nothing for scenes, and why."""
MAP_SUFFIXES = (".npy", ".png")
MAX_NUMBERS = 254
"""Classes of a map in a .png file."""


def output_files(out: Path, names: Mapping[Path, Path], pages: Pages | None = None) -> dict[Path, Path]:  # noqa: ARG001
    """Return the file of the map of each scene: ``out`` of a single one, else an .npy file in the folder ``out``.

    Raises:
        InputError: Several scenes, or two of one name, would have one map.
    """
    if out.suffix.lower() in MAP_SUFFIXES and len(names) == 1:
        return dict.fromkeys(names, out)
    if out.suffix:
        raise InputError(f"--out must be an .npy or .png file for one scene, or a folder for several, got {out}")
    return files_below(out, {path: name.with_suffix(".npy") for path, name in names.items()})


def answer_files(
    classifier: Classifier, paths: Sequence[Path], options: AnswerOptions
) -> tuple[MaskAnswers | None, list[str]]:
    """Predict the class of each pixel of scenes, as `answer_each`; a map has the numbers of labels, from 1."""
    about = classifier.description

    def look(path: Path) -> Seen:
        patches, middle = patches_of(path, about), about.in_shape[1] // 2
        rows = (classifier.classify(patches[:, n].transpose(0, 1).numpy()).classes for n in range(patches.shape[1]))
        seen, brightness = np.stack([*rows]), patches[..., middle, middle].mean(0, keepdim=True).numpy()
        drawn = rescaled(brightness, float(brightness.min()), float(brightness.max())), seen.astype(np.uint8)
        return Seen(seen, len(about.class_names), drawn, partial(_write_map, seen + 1, new=not options.overwrite))

    return answer_each(look, paths, options, about)


def _write_map(seen: Shaped[np.ndarray, "H W"], path: Path, *, new: bool) -> None:
    """Write a map as an array, or as a picture with a palette."""
    if path.suffix.lower() == ".png":
        if seen.max() > MAX_NUMBERS:
            raise InputError(f"a .png file holds {MAX_NUMBERS} classes at most; name an .npy file with --out")
        return write_mask(seen.astype(np.uint8), path, new=new)
    with atomic_path(path, new=new) as temporary, temporary.open("wb") as file:
        np.save(file, seen.astype(np.uint8 if seen.max() <= MAX_NUMBERS else np.uint16))
    return None


def figure_map(
    labels: Int[np.ndarray, "N"],
    predictions: Int[np.ndarray, "N"],
    places: Int[np.ndarray, "N 2"],
    class_names: Sequence[str],
    title: str,
) -> Figure:
    """Draw the classes of pixels, the answers, and wrong answers (red) at their places; other pixels are white.

    Args:
        labels: Class of each pixel.
        predictions: Predicted class of each pixel.
        places: Row and column of each pixel.
        class_names: Name of each class.
        title: Title of the figure.
    """
    from matplotlib import colormaps
    from matplotlib.colors import to_hex, to_rgb

    palette = np.array([to_rgb(each) for each in COLOURS])
    if len(class_names) > len(palette):
        palette = colormaps["tab20"](np.arange(20))[:, :3]
    colours = palette[np.arange(len(class_names)) % len(palette)]
    size = places.max(0) + 1
    maps = np.full((3, *size, 3), _EMPTY)
    right = np.where((labels == predictions)[:, None], _RIGHT, _WRONG)
    for drawn, values in zip(maps, (colours[labels], colours[predictions], right), strict=True):
        drawn[tuple(places.T)] = values
    legend = [Caption(f"■ {name}", to_hex(colour)) for name, colour in zip(class_names, colours, strict=True)]
    rows: list[list[Cell]] = [[Caption(each, MUTED) for each in ("classes", "answers", "wrong answers")]]
    rows.append([*maps.transpose(0, 3, 1, 2), legend])
    return tiles(rows, title=title, side=SIDE)
