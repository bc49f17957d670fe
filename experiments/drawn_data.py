"""Data that are drawn: cells of patients, records of people, and a scene, in which images of one group are alike.

torchcaps train compact-shared --plugin experiments/drawn_data.py --data drawn:cells-0 --group patient

The pages of docs/ about medical images, signals and scenes show these functions. ``drawn:KIND-SEED`` is the file that
a page writes; ``drawn:new-KIND-SEED`` has other patients, people or fields, and more of them.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from torchcaps.datasets import DataRequest, Splits, register_dataset
from torchcaps.datasets.loading import find_dataset
from torchcaps.errors import InputError

Arrays = dict[str, Any]


def draw_cells(seed: int, patients: int = 24) -> dict[str, np.ndarray]:
    """Draw 16 cells of each patient. Every second patient is ill, which makes nuclei larger."""
    generator, patient = np.random.default_rng(seed), np.arange(patients).repeat(16)
    stains = generator.uniform(0.2, 1, (patients, 3))  # each patient has a colour
    rows, columns = np.indices((24, 24))
    x = np.zeros((len(patient), 24, 24, 3), np.uint8)
    for n, owner in enumerate(patient.tolist()):
        row, column, radius = generator.normal((12, 12, 6 + 2 * (owner % 2)), (1, 1, 1))
        is_nucleus = np.hypot(rows - row, columns - column) < radius
        light = generator.normal(1 - 0.5 * is_nucleus, 0.1)[..., None]
        x[n] = (255 * light * stains[owner]).clip(0, 255)
    return {"x": x, "y": patient % 2, "patient": patient}


def draw_records(seed: int, people: int = 24) -> dict[str, np.ndarray]:
    """Draw a record of 16 s for each person, two channels, 128 Hz. Every second person is tired: more slow waves."""
    generator, time = np.random.default_rng(seed), np.arange(2048) / 128
    x = generator.normal(size=(people, 2, 2048))
    for n in range(people):
        hertz = np.array([5, *generator.uniform(8, 30, 3)])  # slow waves, and three rhythms of this person
        waves = np.sin(2 * np.pi * (hertz[:, None] * time + generator.uniform(size=(4, 1))))
        sizes = generator.normal(size=(2, 4))
        sizes[:, 0] = generator.normal(1 + n % 2, 0.5)
        x[n] += sizes @ waves
    return {"x": x, "y": np.arange(people) % 2, "lengths": np.full(people, 2048)}


def draw_scene(seed: int, fields: int = 60) -> dict[str, np.ndarray]:
    """Draw fields of four crops in 16 bands. The soil of a field changes all its spectra."""
    generator, bands = np.random.default_rng(seed), np.linspace(0, 1, 16)
    middles = generator.uniform(0, 96, (fields, 2))
    place = np.indices((96, 96)).transpose(1, 2, 0)[:, :, None]
    field = np.linalg.norm(place - middles, axis=3).argmin(2)  # the nearest middle
    crop = generator.integers(1, 5, fields)
    soil = generator.normal(0, 0.1, (fields, 3)) @ bands ** np.arange(3)[:, None]
    spectra = 0.5 + 0.05 * np.sin(6 * bands + crop[:, None]) + soil
    cube = spectra[field] + generator.normal(0, 0.05, (96, 96, 16))
    labels = np.where(generator.random((96, 96)) < 0.2, crop[field], 0)
    return {"cube": cube, "labels": labels, "field": field}


def cut_windows(seed: int, people: int = 24) -> Arrays:
    """Return the windows of `draw_records` as images of their own, as if they were no parts of records."""
    drawn = draw_records(seed, people)
    x = drawn["x"].reshape(people, 2, 16, 128).swapaxes(1, 2).reshape(-1, 2, 128)
    return {"x": x, "y": drawn["y"].repeat(16), "lengths": np.full(len(x), 128)}


def cut_patches(seed: int, fields: int = 60) -> Arrays:
    """Return the patches of `draw_scene` as images of their own, as if they did not overlap."""
    drawn = draw_scene(seed, fields)
    padded = np.pad(drawn["cube"], ((2, 2), (2, 2), (0, 0)), "reflect").clip(0, 1)
    rows, columns = drawn["labels"].nonzero()
    patches = [padded[row : row + 5, column : column + 5] for row, column in zip(rows, columns, strict=True)]
    return {"x": np.array(patches, np.float32), "y": drawn["labels"][rows, columns] - 1, "channels": np.array("last")}


#: Kinds: the function that draws, and how many groups the new data have.
KINDS: dict[str, tuple[Callable[..., Arrays], int]] = {
    "cells": (draw_cells, 100),
    "records": (draw_records, 100),
    "windows": (cut_windows, 100),
    "scene": (draw_scene, 60),
    "patches": (cut_patches, 60),
}
FIRST_NEW = 1000
"""Seeds of new data are seeds of data plus this."""
INFO = {"source": "drawn here", "licence": "MIT, as torchcaps", "takes_path": True}


@register_dataset(
    "drawn",
    title="drawn images or sequences, as KIND-SEED or new-KIND-SEED",
    options=("scale", "window", "stride"),
    **INFO,
)
@register_dataset(
    "drawn-scene", title="a drawn scene, as scene-SEED or new-scene-SEED", options=("scale", "pca"), **INFO
)
def load_drawn(request: DataRequest) -> Splits:
    """Draw the arrays of KIND-SEED, write them to a file, and read it as ``npz:`` or ``scene:``."""
    name = re.fullmatch(r"(new-)?([a-z]+)-(\d{1,3})", str(request.path))
    if name is None or name[2] not in KINDS:
        raise InputError(f"drawn data are KIND-SEED or new-KIND-SEED with {', '.join(KINDS)}, got {request.path}")
    is_new, (draw, new_groups), seed = bool(name[1]), KINDS[name[2]], int(name[3])
    arrays: Arrays = draw(FIRST_NEW + seed, new_groups) if is_new else draw(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "drawn.npz")
        np.savez(path, **arrays)
        info = find_dataset("scene:x" if "cube" in arrays else "npz:x")[0]
        return info.load(replace(request, path=path))
