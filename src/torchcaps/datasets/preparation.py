"""Preprocess photos of drawings like a network's training images. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import numpy as np
from jaxtyping import Bool, Float32, UInt8
from PIL import Image

from torchcaps.errors import InputError, shown
from torchcaps.ranges import Range, image_shape

MAX_SIDE = 512
"""Pixels of a photo's longer side; larger photos are shrunk before the drawing is detected."""
MAX_BLACK = 32
"""Darker pixels (of 255) count as a black background."""

# shares of the photo's shorter side
_MAX_STROKE = 0.3  # wider structures are background
_MIN_DRAWING = 0.05  # a part of this size that does not touch the edge is preferred as the drawing

# thresholds of ink; its strength is its contrast relative to the brightness of the background
_COARSE_SIDE = 24  # pixels: longer side of the map that decides between dark and light ink
_MIN_BRIGHTNESS = 16.0  # of 255, added to the background, so that noise in black parts counts little
_MIN_NOISE_RATIO = 6.0  # standard deviations of the noise
_MIN_STRENGTH = 0.05
_MIN_RELATIVE_STRENGTH = 0.4  # of the strongest ink
_SOFT_EDGE = 0.25, 0.75  # of the drawing's strength: pixels rise from 0 to 1 between these

# a part near the largest one belongs to the drawing, beside the largest part
_MAX_GAP = 0.25  # of its longer side
_MIN_PART_INK = 0.02  # of its ink; less is dirt
_MIN_PART_STRENGTH = 0.6  # of its strength; less is background

_MIN_STROKE, _WIDENED_STROKE = 1.5, 2.2  # pixels of the prepared image: thinner strokes are widened to the second

# smaller changes are not reported
_MIN_UNEVENNESS = 1.25  # largest brightness of the background, divided by the smallest
_MIN_SCALING, _MIN_SHIFT = 1.25, 0.1  # factor; share of the image's side
_MIN_LEFT_OUT = 0.2  # ink left out, as a share of the drawing's ink

NOTHING = "no drawing found"
DARK_INK = "dark ink turned light"

Box = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Preprocessing that turned drawings into a data set: light on dark, the ink's box scaled, and centred.

    The longer side of MNIST's digits is 20 pixels, and their centre of mass lies in the middle of 28×28 pixels
    (LeCun, Bottou, Bengio, Haffner: Gradient-based learning applied to document recognition, 1998, section III).

    Raises:
        InputError: A value is out of range.
    """

    box: float = 20.0
    """Longer side of the ink's box, 1 to 1,024 pixels."""
    centre: Literal["mass", "box"] = "mass"
    """Point placed in the middle of the image: the ink's centre of mass, or the middle of its box."""

    def __post_init__(self) -> None:
        Range(1, 1024).check("box", self.box)
        if self.centre not in ("mass", "box"):
            raise InputError(f'centre must be "mass" or "box", got {shown(self.centre)}')

    def __str__(self) -> str:
        middle = "centre of mass" if self.centre == "mass" else "box"
        return f"light on dark, the longer side of the ink's box {self.box:g} pixels, its {middle} in the middle"

    def scaled(self, factor: float) -> Self:
        """Return the preparation of images that were resized by a factor."""
        return replace(self, box=self.box * factor)


@dataclass(frozen=True, eq=False)
class Prepared:
    """Photo of a drawing, preprocessed like the training images.

    Args:
        image: Pixels, 0 (no ink) to 255.
        changes: Large changes in a few words each, such as ``"thin strokes widened"``.
        box: Box of the ink in the photo: top, left, bottom and right edge, pixels; None if no ink was found, and for an
            unchanged image.
    """

    image: UInt8[np.ndarray, "1 H W"]
    changes: tuple[str, ...] = ()
    box: Box | None = None


def prepare_image(
    image: UInt8[np.ndarray, "C h w"], in_shape: Sequence[int], preparation: Preparation, *, light_ink: bool = False
) -> Prepared:
    """Find the drawing in a photo, and preprocess it like the images that a network was trained on.

    1. Estimate the brightness of the background. A morphological closing fills dark structures narrower than 0.3 of the
       photo; for light ink it is an opening.
    2. Find ink: pixels that differ from the background by more than the noise, along the colour direction of the
       largest difference.
    3. Choose dark or light ink: the one that differs more from the common colour of the photo and from its
       surroundings.
    4. Cut out the part with the most ink and the parts near it. Scale the longer side of their box to
       ``preparation.box`` pixels, widen strokes thinner than 1.5 pixels, and centre the drawing as light ink on 0.

    An image with the network's size, grey and light on dark, is returned unchanged. If it is dark on light, it is only
    inverted.

    Args:
        image: Pixels 0..255 of any size; C is 1 or 3.
        in_shape: Input shape of the network, (1, H, W).
        preparation: Preprocessing of the training images.
        light_ink: True if the ink is lighter than the background; False: detect it.

    Returns:
        The preprocessed image; black if no ink was found.

    Raises:
        InputError: ``in_shape`` has not 1 channel, or the image has neither 1 nor 3.
    """
    in_shape = image_shape(in_shape)
    if in_shape[0] != 1 or image.ndim != 3 or len(image) not in (1, 3):
        raise InputError(
            f"only images of 1 or 3 channels are prepared, for networks of 1 channel, got {image.shape} for {in_shape}"
        )
    if image.shape == in_shape:
        if _is_light_on_dark(image):
            return Prepared(image)
        if not light_ink and _is_light_on_dark(255 - image):
            return Prepared(255 - image, (DARK_INK,))
    _, height, width = image.shape
    scale = min(MAX_SIDE / max(height, width), 1)
    ink = _find_ink(resized(image, (max(round(height * scale), 1), max(round(width * scale), 1))), light_ink)
    if ink is None:
        return Prepared(np.zeros(in_shape, np.uint8), (NOTHING,))
    drawing = ink.drawing
    rows, columns = _extent(drawing > 0.5)
    edges = np.array([rows.start, columns.start, rows.stop, columns.stop]) / scale
    top, left, bottom, right = box = tuple(np.minimum(edges.round(), [height, width] * 2).astype(int).tolist())
    drawing, is_thin = _widened(drawing[rows, columns], preparation.box)
    # size of the drawing relative to its size in the prepared image, and its distance from the middle
    grown = max(bottom - top, right - left) / (preparation.box / in_shape[1] * min(height, width))
    off = max(abs((top + bottom) / height - 1), abs((left + right) / width - 1)) / 2
    changes = {
        DARK_INK: ink.is_dark,
        f"drawing of {bottom - top}×{right - left} pixels cut out of {height}×{width}": (
            not 1 / _MIN_SCALING <= grown <= _MIN_SCALING or off > _MIN_SHIFT
        ),
        f"uneven light flattened (1 to {ink.unevenness:.1f})": ink.unevenness > _MIN_UNEVENNESS,
        "thin strokes widened": is_thin,
        "other ink left out": ink.left_out > _MIN_LEFT_OUT,
    }
    placed = _placed(drawing, in_shape, preparation)
    return Prepared(placed, tuple(words for words, is_much in changes.items() if is_much), box)


def _is_light_on_dark(image: UInt8[np.ndarray, "1 H W"]) -> bool:
    """Return True if most pixels of an image, and most of its border, are dark."""
    border = np.concatenate([image[0, 0], image[0, -1], image[0, :, 0], image[0, :, -1]])
    return bool(np.median(border) < MAX_BLACK and np.median(image) < MAX_BLACK)


class _Ink(NamedTuple):
    """Ink found in a photo, a candidate for the drawing."""

    amount: Float32[np.ndarray, "h w"]
    """Strength of the ink at each pixel, relative to the brightness of the background."""
    chosen: Bool[np.ndarray, "h w"]
    """Mask of the drawing's ink."""
    left_out: float
    """Ink outside the drawing, as a share of the drawing's ink."""
    unevenness: float
    """Largest brightness of the background, divided by the smallest."""
    is_dark: bool

    @property
    def drawing(self) -> Float32[np.ndarray, "h w"]:
        """Pixels of the drawing, 0..1."""
        from scipy import ndimage

        low, high = (share * np.percentile(self.amount[self.chosen], 75) for share in _SOFT_EDGE)
        around = ndimage.binary_dilation(self.chosen, iterations=2)
        return np.where(around, ((self.amount - low) / (high - low)).clip(0, 1), 0).astype(np.float32)


def _find_ink(planes: Float32[np.ndarray, "C h w"], light_ink: bool) -> _Ink | None:
    """Return the ink of the drawing; None if no pixel differs from the background by more than the noise."""
    candidates = [_ink_of(planes, is_dark) for is_dark in ([False] if light_ink else [True, False])]
    # holes of a drawing are narrow like ink, but have the common colour of the photo; the strip of paper between a
    # drawing and a dark desk has the colour of its surroundings
    common = _common(planes)

    def unlike(ink: _Ink) -> float:
        rows, columns = _extent(ink.chosen)
        away = max(rows.stop - rows.start, columns.stop - columns.start)
        near = [slice(max(part.start - away, 0), part.stop + away) for part in (rows, columns)]
        surroundings = np.median(planes[:, near[0], near[1]], (1, 2), keepdims=True)
        return min(
            float((np.abs(planes - ground).mean(0) / (ground.mean(0) + _MIN_BRIGHTNESS))[ink.chosen].mean())
            for ground in (common, surroundings)
        )

    return max((ink for ink in candidates if ink is not None), key=unlike, default=None)


def _common(planes: Float32[np.ndarray, "C h w"]) -> Float32[np.ndarray, "C h w"]:
    """Return the common colour of a photo: medians over windows of its size, with slopes extended beyond the edges."""
    from scipy import ndimage

    height, width = planes.shape[1:]
    scale = min(_COARSE_SIDE / max(height, width), 1)
    small = resized(planes, (max(round(height * scale), 2), max(round(width * scale), 2)))
    radius = _COARSE_SIDE // 2
    wide = np.pad(small, ((0, 0), (radius, radius), (radius, radius)), "reflect", reflect_type="odd")
    medians = ndimage.median_filter(wide, (1, 2 * radius + 1, 2 * radius + 1))[:, radius:-radius, radius:-radius]
    return resized(medians.clip(0, 255), (height, width))


def _ink_of(planes: Float32[np.ndarray, "C h w"], is_dark: bool) -> _Ink | None:
    """Return ink that is darker (or lighter) than the background; None if it is not above the noise."""
    from scipy import ndimage

    smooth = ndimage.gaussian_filter(planes, (0, 0.8, 0.8))
    window = max(round(_MAX_STROKE * min(planes.shape[1:])), 3)
    fill = ndimage.grey_closing if is_dark else ndimage.grey_opening
    light = fill(smooth, (1, window, window))
    ground = light.mean(0) + _MIN_BRIGHTNESS
    amount = _along_one_colour(np.abs(smooth - light) / ground)
    amount -= np.median(amount)  # closing and opening follow the peaks of the noise
    noise = 1.4826 * np.median(np.abs(amount))  # standard deviation of normal noise
    strongest = ndimage.gaussian_filter(amount, 1.5).max()
    if strongest < max(_MIN_NOISE_RATIO * noise, _MIN_STRENGTH):
        return None
    mask = amount > max(_MIN_RELATIVE_STRENGTH * strongest, 3 * noise)
    darkest, lightest = np.percentile(ground, (1, 99))
    return _Ink(amount, *_largest_drawing(amount, mask), float(lightest / darkest), is_dark)


def _along_one_colour(different: Float32[np.ndarray, "C h w"]) -> Float32[np.ndarray, "h w"]:
    """Return the difference of pixels from the background, along the colour direction of the strongest ones."""
    from scipy import ndimage

    size = np.linalg.norm(different, axis=0)
    strong = different[:, size >= 0.5 * ndimage.gaussian_filter(size, 1.5).max()]
    direction = np.abs(np.linalg.eigh(strong @ strong.T)[1][:, -1])  # all differences have the same sign
    return np.tensordot(direction, different, 1)


def _largest_drawing(
    amount: Float32[np.ndarray, "h w"], mask: Bool[np.ndarray, "h w"]
) -> tuple[Bool[np.ndarray, "h w"], float]:
    """Return the part of a mask with the most ink and the parts near it, and the relative ink of all further parts."""
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
    inside = ~at_edge & (sides >= _MIN_DRAWING * min(mask.shape))  # excludes the edge of a desk, or a finger
    main = int(np.where(inside | ~inside.any(), ink, 0).argmax())
    side = sides[main]
    gaps = np.maximum(boxes[:, :, 0] - boxes[main, :, 1], boxes[main, :, 0] - boxes[:, :, 1]).max(1)
    near = (
        (gaps < _MAX_GAP * side)
        & (ink > _MIN_PART_INK * ink[main])
        & (strength > _MIN_PART_STRENGTH * strength[main])
        & ~at_edge
    )
    near[main] = True
    return np.isin(labels, numbers[near]), float(ink[~near].sum() / ink[near].sum())


def _widened(drawing: Float32[np.ndarray, "h w"], box: float) -> tuple[Float32[np.ndarray, "H W"], bool]:
    """Widen strokes that would be too thin at ``box`` pixels; return the drawing and True if it was changed."""
    from scipy import ndimage

    inside, scale = np.pad(drawing > 0.5, 1), box / max(drawing.shape)
    # the mean distance of a line's pixels to its sides, solved for the width
    width = 4 * ndimage.distance_transform_edt(inside)[inside].mean() - 2
    more = round((_WIDENED_STROKE / scale - width) / 2)
    if width * scale >= _MIN_STROKE or more < 1:
        return drawing, False
    away = ndimage.distance_transform_edt(~np.pad(inside, more - 1))
    return (more + 0.5 - away).clip(0, 1).astype(np.float32), True


def _extent(mask: Bool[np.ndarray, "h w"]) -> tuple[slice, slice]:
    """Return the rows and columns of the box around the True pixels."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)


def _placed(
    drawing: Float32[np.ndarray, "h w"], in_shape: tuple[int, int, int], preparation: Preparation
) -> UInt8[np.ndarray, "1 H W"]:
    """Scale a drawing that fills its frame, and place it in the middle of an image."""
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
    """Resize planes of uint8 or float32. Default of ``how``: means if they shrink, else bicubic."""
    if how is None:
        how = Image.Resampling.BOX if size[0] <= planes.shape[1] else Image.Resampling.BICUBIC
    return np.stack([np.asarray(Image.fromarray(plane).resize(size[::-1], how), np.float32) for plane in planes])
