"""Photos of drawings brought to the form of the data that a network was trained on. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import numpy as np
from jaxtyping import Bool, Float32, UInt8
from PIL import Image

from torchcaps.errors import InputError, shown
from torchcaps.ranges import Range, image_shape

SIZE = 512
"""Pixels of a photo's longer side in which its drawing is looked for; larger photos are shrunk first."""
DARK = 32
"""The ground of an image that is light on dark, as the data are, is darker than this, of 255."""

_WIDEST = 0.3  # of the photo's shorter side: strokes are narrower, and what is wider is ground
_COARSE = 24  # pixels of the longer side of the map by which dark ink is told from light
_BLACK = 16.0  # of 255, added to the light: noise in black parts would count for much
_NOISES = 6.0  # ink differs from its ground by so many standard deviations of the noise at least
_FAINT = 0.05  # and by so large a share of the light
_PART = 0.4  # of the strongest ink: what is weaker belongs to the ground
_SOFT = 0.25, 0.75  # of the drawing's strength: pixels go from 0 to 1 between
_SMALLEST = 0.05  # of the photo's shorter side: if there is a part so large that lies inside it, that is the drawing
_NEAR = 0.25  # of the longer side of the largest part: parts that are nearer belong to the drawing
_SPECK = 0.02  # of the largest part's ink: a part with less is dirt
_PALE = 0.6  # of the largest part's strength: a weaker part belongs to the ground
_THIN, _STROKE = 1.5, 2.2  # pixels of the prepared image: strokes that are thinner become so wide
_UNEVEN = 1.25  # how many times as bright the ground is at its lightest as at its darkest
_MOVED = 1.25, 0.1  # times as large, and shares of the image's side off the middle: less is not worth a word
_ELSEWHERE = 0.2  # of the drawing's ink, left out: less is not worth a word

NOTHING = "no drawing found"
DARK_INK = "dark ink turned light"

Box = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """How the images of a data set were made of drawings: light on dark, the ink's box scaled, and centred.

    The digits of MNIST are 20 pixels high or wide, whichever is more, with their centre of mass in the middle of 28×28
    (LeCun, Bottou, Bengio, Haffner: Gradient-based learning applied to document recognition, 1998, section III).

    Raises:
        InputError: A value is out of its range.
    """

    box: float = 20.0
    """Pixels: the longer side of the ink's box, 1 to 1,024."""
    centre: Literal["mass", "box"] = "mass"
    """The point that lies in the middle of the image: the ink's centre of mass, or the middle of its box."""

    def __post_init__(self) -> None:
        Range(1, 1024).check("box", self.box)
        if self.centre not in ("mass", "box"):
            raise InputError(f'centre must be "mass" or "box", got {shown(self.centre)}')

    def __str__(self) -> str:
        middle = "centre of mass" if self.centre == "mass" else "box"
        return f"light on dark, the longer side of the ink's box {self.box:g} pixels, its {middle} in the middle"

    def scaled(self, factor: float) -> Self:
        """The same of images that were resized by a factor."""
        return replace(self, box=self.box * factor)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A photo of a drawing in the form of the data.

    Args:
        image: Pixels, 0 (no ink) to 255.
        changes: What was changed much, each in a few words such as ``"thin strokes widened"``; empty where nothing was.
        box: Where the ink is in the photo: top, left, bottom and right edge, pixels; None where no ink was found, and
            for an image that is returned as it is.
    """

    image: UInt8[np.ndarray, "1 H W"]
    changes: tuple[str, ...] = ()
    box: Box | None = None


def prepare_image(
    image: UInt8[np.ndarray, "C h w"], in_shape: Sequence[int], preparation: Preparation, *, light_ink: bool = False
) -> Prepared:
    """Find the drawing in a photo, and bring it to the form of the images that a network was trained on.

    The light of a place is what a morphological closing leaves of the photo, which fills everything dark that is
    narrower than 0.3 of the photo; for light ink it is an opening. Ink is what differs from the light by more than the
    noise does, in the one direction of colour in which it differs most; whichever of dark and light ink is less like
    most of the photo, and less like what surrounds it, is the drawing's. The part with the most ink, and those close
    to it, are cut out, scaled so that the longer side of their box has ``preparation.box`` pixels, and put in the
    middle as light ink on 0. Strokes thinner than 1.5 pixels are widened. An image that is as the data are (of the
    network's size, grey, light on dark) is returned as it is, and one that is so but for dark on light has that
    changed alone.

    Args:
        image: Pixels 0..255 of any size, C being 1 or 3.
        in_shape: (1, H, W), what the network takes.
        preparation: How its data were made.
        light_ink: Whether the ink is known to be lighter than its ground; where False, that is found out.

    Returns:
        The image in its new form; black where no ink was found.

    Raises:
        InputError: ``in_shape`` has not 1 channel, or the image neither 1 nor 3.
    """
    in_shape = image_shape(in_shape)
    if in_shape[0] != 1 or image.ndim != 3 or len(image) not in (1, 3):
        raise InputError(
            f"an image of 1 or 3 channels is prepared for a network that takes 1, got {image.shape} for {in_shape}"
        )
    if image.shape == in_shape:
        if _is_light_on_dark(image):
            return Prepared(image)
        if not light_ink and _is_light_on_dark(255 - image):
            return Prepared(255 - image, (DARK_INK,))
    _, height, width = image.shape
    scale = min(SIZE / max(height, width), 1)
    ink = _find_ink(resized(image, (max(round(height * scale), 1), max(round(width * scale), 1))), light_ink)
    if ink is None:
        return Prepared(np.zeros(in_shape, np.uint8), (NOTHING,))
    drawing = ink.drawing
    rows, columns = _extent(drawing > 0.5)
    edges = np.array([rows.start, columns.start, rows.stop, columns.stop]) / scale
    top, left, bottom, right = box = tuple(np.minimum(edges.round(), [height, width] * 2).astype(int).tolist())
    drawing, is_thin = _widened(drawing[rows, columns], preparation.box)
    # how large the drawing was, beside how large it becomes, and how far off the middle
    grown = max(bottom - top, right - left) / (preparation.box / in_shape[1] * min(height, width))
    off = max(abs((top + bottom) / height - 1), abs((left + right) / width - 1)) / 2
    changes = {
        DARK_INK: ink.is_dark,
        f"drawing of {bottom - top}×{right - left} pixels cut out of {height}×{width}": (
            not 1 / _MOVED[0] <= grown <= _MOVED[0] or off > _MOVED[1]
        ),
        f"uneven light flattened (1 to {ink.unevenness:.1f})": ink.unevenness > _UNEVEN,
        "thin strokes widened": is_thin,
        "other ink left out": ink.left_out > _ELSEWHERE,
    }
    placed = _placed(drawing, in_shape, preparation)
    return Prepared(placed, tuple(words for words, is_much in changes.items() if is_much), box)


def _is_light_on_dark(image: UInt8[np.ndarray, "1 H W"]) -> bool:
    """Whether the ground of an image, most of it and of its border, is dark."""
    border = np.concatenate([image[0, 0], image[0, -1], image[0, :, 0], image[0, :, -1]])
    return bool(np.median(border) < DARK and np.median(image) < DARK)


class _Ink(NamedTuple):
    """Ink in a photo, which may be a drawing."""

    amount: Float32[np.ndarray, "h w"]
    """How much ink is where, as a share of the light."""
    chosen: Bool[np.ndarray, "h w"]
    """Where there is ink of the drawing."""
    left_out: float
    """How much ink there is elsewhere, as a share of the drawing's."""
    unevenness: float
    """How many times as bright the ground is at its lightest as at its darkest."""
    is_dark: bool

    @property
    def drawing(self) -> Float32[np.ndarray, "h w"]:
        """Its pixels, 0..1."""
        from scipy import ndimage

        low, high = (share * np.percentile(self.amount[self.chosen], 75) for share in _SOFT)
        around = ndimage.binary_dilation(self.chosen, iterations=2)
        return np.where(around, ((self.amount - low) / (high - low)).clip(0, 1), 0).astype(np.float32)


def _find_ink(planes: Float32[np.ndarray, "C h w"], light_ink: bool) -> _Ink | None:
    """The ink of the drawing; None where nothing differs from its ground by more than the noise does."""
    found = [_ink_of(planes, is_dark) for is_dark in ([False] if light_ink else [True, False])]
    # holes of a drawing, and the ground between it and the photo's edge, are narrow too, but as most of the photo is;
    # the paper between a drawing and a dark desk is not, but as its own surroundings are
    common = _common(planes)

    def unlike(ink: _Ink) -> float:
        rows, columns = _extent(ink.chosen)
        away = max(rows.stop - rows.start, columns.stop - columns.start)
        near = [slice(max(part.start - away, 0), part.stop + away) for part in (rows, columns)]
        surroundings = np.median(planes[:, near[0], near[1]], (1, 2), keepdims=True)
        return min(
            float((np.abs(planes - ground).mean(0) / (ground.mean(0) + _BLACK))[ink.chosen].mean())
            for ground in (common, surroundings)
        )

    return max((ink for ink in found if ink is not None), key=unlike, default=None)


def _common(planes: Float32[np.ndarray, "C h w"]) -> Float32[np.ndarray, "C h w"]:
    """The colour of most of a photo: medians over windows as large as itself, its slopes continued beyond its edges."""
    from scipy import ndimage

    height, width = planes.shape[1:]
    scale = min(_COARSE / max(height, width), 1)
    small = resized(planes, (max(round(height * scale), 2), max(round(width * scale), 2)))
    radius = _COARSE // 2
    wide = np.pad(small, ((0, 0), (radius, radius), (radius, radius)), "reflect", reflect_type="odd")
    medians = ndimage.median_filter(wide, (1, 2 * radius + 1, 2 * radius + 1))[:, radius:-radius, radius:-radius]
    return resized(medians.clip(0, 255), (height, width))


def _ink_of(planes: Float32[np.ndarray, "C h w"], is_dark: bool) -> _Ink | None:
    """Ink that is darker, or lighter, than its ground; None where there is no more than noise."""
    from scipy import ndimage

    smooth = ndimage.gaussian_filter(planes, (0, 0.8, 0.8))
    window = max(round(_WIDEST * min(planes.shape[1:])), 3)
    fill = ndimage.grey_closing if is_dark else ndimage.grey_opening
    light = fill(smooth, (1, window, window))
    ground = light.mean(0) + _BLACK
    amount = _along_one_colour(np.abs(smooth - light) / ground)
    amount -= np.median(amount)  # the ground is that of the noise's peaks
    noise = 1.4826 * np.median(np.abs(amount))  # the standard deviation, were it normal
    strongest = ndimage.gaussian_filter(amount, 1.5).max()
    if strongest < max(_NOISES * noise, _FAINT):
        return None
    mask = amount > max(_PART * strongest, 3 * noise)
    darkest, lightest = np.percentile(ground, (1, 99))
    return _Ink(amount, *_largest_drawing(amount, mask), float(lightest / darkest), is_dark)


def _along_one_colour(different: Float32[np.ndarray, "C h w"]) -> Float32[np.ndarray, "h w"]:
    """How far pixels are from the ground, in the direction of colour in which those are that are furthest from it."""
    from scipy import ndimage

    size = np.linalg.norm(different, axis=0)
    strong = different[:, size >= 0.5 * ndimage.gaussian_filter(size, 1.5).max()]
    direction = np.abs(np.linalg.eigh(strong @ strong.T)[1][:, -1])  # all differences have one sign
    return np.tensordot(direction, different, 1)


def _largest_drawing(
    amount: Float32[np.ndarray, "h w"], mask: Bool[np.ndarray, "h w"]
) -> tuple[Bool[np.ndarray, "h w"], float]:
    """The part of a mask that has the most ink, with those close to it; and how much ink others have, by comparison."""
    from scipy import ndimage

    joined = ndimage.binary_dilation(mask, np.ones((3, 3)), iterations=max(round(max(mask.shape) / 200), 1))
    labels, count = ndimage.label(joined, np.ones((3, 3)))
    labels[~mask] = 0
    numbers = np.arange(1, count + 1)
    ink = ndimage.sum_labels(amount, labels, numbers)
    strength = ndimage.mean(amount, labels, numbers)
    boxes = np.array([[(part.start, part.stop) for part in box] for box in ndimage.find_objects(labels)])  # (n, 2, 2)
    at_edge = ((boxes[:, :, 0] == 0) | (boxes[:, :, 1] == mask.shape)).any(1)
    sides = np.ptp(boxes, axis=2).max(1)
    inside = ~at_edge & (sides >= _SMALLEST * min(mask.shape))  # the edge of a desk, or a finger, is not
    main = int(np.where(inside | ~inside.any(), ink, 0).argmax())
    side = sides[main]
    gaps = np.maximum(boxes[:, :, 0] - boxes[main, :, 1], boxes[main, :, 0] - boxes[:, :, 1]).max(1)
    near = (gaps < _NEAR * side) & (ink > _SPECK * ink[main]) & (strength > _PALE * strength[main]) & ~at_edge
    near[main] = True
    return np.isin(labels, numbers[near]), float(ink[~near].sum() / ink[near].sum())


def _widened(drawing: Float32[np.ndarray, "h w"], box: float) -> tuple[Float32[np.ndarray, "H W"], bool]:
    """A drawing with strokes wide enough once its longer side has ``box`` pixels; and whether they were widened."""
    from scipy import ndimage

    inside, scale = np.pad(drawing > 0.5, 1), box / max(drawing.shape)
    width = 4 * ndimage.distance_transform_edt(inside)[inside].mean() - 2  # a line's distances to its sides average so
    more = round((_STROKE / scale - width) / 2)
    if width * scale >= _THIN or more < 1:
        return drawing, False
    away = ndimage.distance_transform_edt(~np.pad(inside, more - 1))
    return (more + 0.5 - away).clip(0, 1).astype(np.float32), True


def _extent(mask: Bool[np.ndarray, "h w"]) -> tuple[slice, slice]:
    """Rows and columns of the box around what is set."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)


def _placed(
    drawing: Float32[np.ndarray, "h w"], in_shape: tuple[int, int, int], preparation: Preparation
) -> UInt8[np.ndarray, "1 H W"]:
    """A drawing that fills its frame, scaled and set in the middle of an image."""
    from scipy import ndimage

    scale = preparation.box / max(drawing.shape)
    inner = resized(drawing[None], (max(round(drawing.shape[0] * scale), 1), max(round(drawing.shape[1] * scale), 1)))
    inner = (inner[0] / inner.max()).clip(0, 1)
    middle = ndimage.center_of_mass(inner) if preparation.centre == "mass" else np.array(inner.shape) / 2
    image = np.zeros(in_shape, np.uint8)
    first = [round(side / 2 - centre) for side, centre in zip(in_shape[1:], middle, strict=True)]
    seen = [
        slice(max(at, 0), min(at + own, side)) for at, own, side in zip(first, inner.shape, in_shape[1:], strict=True)
    ]
    shown = tuple(slice(part.start - at, part.stop - at) for part, at in zip(seen, first, strict=True))
    image[0][seen[0], seen[1]] = (255 * inner[shown]).round()
    return image


def resized(
    planes: np.ndarray, size: tuple[int, int], how: Image.Resampling | None = None
) -> Float32[np.ndarray, "C H W"]:
    """Planes of uint8 or float32 brought to another size; where ``how`` is not said, by means where they shrink."""
    if how is None:
        how = Image.Resampling.BOX if size[0] <= planes.shape[1] else Image.Resampling.BICUBIC
    return np.stack([np.asarray(Image.fromarray(plane).resize(size[::-1], how), np.float32) for plane in planes])
