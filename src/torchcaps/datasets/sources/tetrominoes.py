"""Tetrominoes: scenes of three pieces of four cells, drawn here, with the piece of each pixel."""

from __future__ import annotations

import functools

import numpy as np
import torch
from jaxtyping import UInt8

from torchcaps.datasets.dataset import Splits
from torchcaps.datasets.image_set import ImageSet
from torchcaps.datasets.registry import DataRequest, register_dataset
from torchcaps.datasets.rng import FIXED_SEED, generator

SIDE, CELL, PIECES = 24, 3, 3
"""Pixels of a scene, pixels of a cell, and pieces in a scene."""
FREE = ("####", "##\n##", "###\n.#.", "###\n#..", "###\n..#", "##.\n.##", ".##\n##.")
"""The seven pieces, which appear in each of their rotations."""
COLOURS = np.array([(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1)], np.uint8) * 255
NUMBERS = tuple(map(str, range(PIECES + 1)))
"""Of the background and the pieces."""
TRAIN, TEST = 20_000, 1_000


@register_dataset(
    "tetrominoes",
    title="Tetrominoes: scenes of three pieces",
    source="drawn here, after Tetrominoes of Kabra et al. (2019), Multi-Object Datasets",
    licence="MIT",
    num_train=TRAIN,
    num_test=TEST,
    in_shape=(3, SIDE, SIDE),
    class_names=NUMBERS,
    validation_size=1_000,
)
def load_tetrominoes(request: DataRequest) -> Splits:
    """Draw scenes of three pieces on black, at any pixel, without overlap, for the task ``objects``.

    A piece has 4 cells of 3×3 pixels, one of 19 shapes (seven pieces in their rotations) and one of six colours. Shape
    and colour are drawn for each piece by itself, so two or three pieces have one colour in 44 % of the scenes, and
    colour alone does not separate them.
    """
    train, test = (scenes(number, part) for part, number in enumerate((TRAIN, TEST)))
    return Splits(train, test.take(request.limit_test), NUMBERS, task="objects", has_names=False)


@functools.cache
def shapes() -> tuple[UInt8[np.ndarray, "h w"], ...]:
    """Return the pixels of each shape, 1 where it has a cell."""
    pixels_of: dict[tuple[int, ...], np.ndarray] = {}
    for text in FREE:
        cells = np.array([[each == "#" for each in line] for line in text.split("\n")], np.uint8)
        for turn in range(4):
            turned = np.rot90(cells, turn)
            pixels_of.setdefault((*turned.shape, *turned.flat), turned)
    return tuple(np.kron(each, np.ones((CELL, CELL), np.uint8)) for each in pixels_of.values())


def scenes(number: int, part: int) -> ImageSet:
    """Draw scenes, the same in every call, with masks: 0 is the background, 1 to 3 the pieces."""
    random, drawn = generator(FIXED_SEED + part), shapes()
    masks = np.zeros((number, SIDE, SIDE), np.uint8)
    for mask in masks:
        piece = 1
        while piece <= PIECES:
            shape = drawn[random.randint(len(drawn))]
            top, left = (int(random.randint(SIDE - size + 1)) for size in shape.shape)
            place = mask[top : top + shape.shape[0], left : left + shape.shape[1]]
            if not (place[shape > 0]).any():  # else another shape at another place
                place[shape > 0] = piece
                piece += 1
    colours = np.zeros((number, PIECES + 1, 3), np.uint8)
    colours[:, 1:] = COLOURS[random.randint(len(COLOURS), size=(number, PIECES))]
    images = np.take_along_axis(colours, masks.reshape(number, -1, 1).astype(np.int64), 1)
    pixels = images.reshape(number, SIDE, SIDE, 3).transpose(0, 3, 1, 2)
    return ImageSet(torch.from_numpy(np.ascontiguousarray(pixels)), torch.from_numpy(masks))
