"""Answer the questions of the page; questions and answers are JSON.

    look      {network, pixels, iterations}  → View; decoded: as the answer of decode
    votes     the same, and {cell}       → agreement and coupling, see Explorer.votes
    decode    {network, classes, poses}  → whole: the decoded image, apart: each of several objects, in its colour
    pick      {index}                    → pixels: a test image, label: its label in words
    read      {name, data, prepare}      → pixels: the image of a file, changes: its preparation, in words

``network`` is the number of the network (default 0), ``iterations`` the number of its routing iterations (default 0:
its own number), and ``cell`` the row and column of a cell of the routing maps. Pixels are base64: the C·H·W bytes of an
image, channel after channel, or the H·W bytes of a coupling map. If a value is wrong, the answer is {error: sentence}.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float

from torchcaps.checks import check
from torchcaps.errors import InputError
from torchcaps.explorer.state import Explorer, View, check_side_by_side, to_bytes
from torchcaps.models.output import SUPERLATIVES
from torchcaps.ranges import Range
from torchcaps.words import counted

MAX_FILE_BYTES = 32 * 2**20
"""Largest uploaded image file."""
MAX_QUESTION_BYTES = 4 * MAX_FILE_BYTES // 3 + 2**20
"""Largest question: an image file as base64, and some text."""
OBJECT_COLOURS = ((255, 128, 0), (51, 153, 255))
"""Red, green, blue of the first object (orange) and the second (blue). People with any colour vision can tell them
apart, and their sum is white, so a pixel of both objects is white. Further objects repeat the two colours."""
SLOT_COLOURS = (*OBJECT_COLOURS, (0, 158, 115), (204, 121, 167), (170, 150, 0), (120, 120, 120))
"""Colours of the names of slots, the first two as for objects; further slots repeat them."""


class Questions:
    """Answers to the questions of the page.

    Args:
        explorers: One network, or two that take the same images; the first supplies test images and reads files.
    """

    NAMES = ("look", "votes", "decode", "pick", "read")

    def __init__(self, explorers: Sequence[Explorer]) -> None:
        check_side_by_side(explorers)
        self.explorers = explorers

    def about(self) -> str:
        """Return the facts that the page needs at its start, as JSON."""
        return json.dumps({"networks": [describe(explorer) for explorer in self.explorers]}, default=encode)

    def answer(self, name: str, question: Any) -> str:
        """Return the answer to a question, as JSON."""

        def value(name: str, hint: Any, default: Any = None) -> Any:
            answer = question.get(name, default) if isinstance(question, dict) else default
            check(name, answer, hint)
            return answer

        try:
            answer = self._answer(name, value)
        except InputError as error:
            sentence = str(error)
            answer = {"error": f"{sentence[0].upper()}{sentence[1:]}{'' if sentence.endswith('.') else '.'}"}
        return json.dumps(answer, default=encode, allow_nan=False)

    def _answer(self, name: str, value: Callable[..., Any]) -> dict[str, Any]:
        numbers = Range(0, len(self.explorers) - 1, whole=True)
        explorer = self.explorers[value("network", Annotated[int, numbers], 0)]
        if name in ("look", "votes"):
            data, shape = _bytes(value("pixels", str)), explorer.model.in_shape
            if len(data) != math.prod(shape):
                raise InputError(
                    f"the image has {counted(len(data), 'byte')}, but this network takes {'×'.join(map(str, shape))} = "
                    f"{math.prod(shape)} (channels × height × width); the link may be for another network"
                )
            image, iterations = np.frombuffer(data, np.uint8).reshape(shape).copy(), value("iterations", int, 0)
            if name == "look":
                return _as_answer(explorer.look(image, iterations), explorer)
            return explorer.votes(image, value("cell", tuple[int, int]), iterations)
        if name == "decode":
            classes = value("classes", tuple[int, ...])
            try:
                poses = np.array(value("poses", list), np.float64)
            except (ValueError, TypeError, OverflowError):
                raise InputError("poses must be rows of numbers, all of one length") from None
            return _pictures(explorer.decode(classes, poses), explorer)
        if name == "pick":
            pixels, label = explorer.pick(value("index", int))
            return {"pixels": pixels, "label": label}
        prepare = value("prepare", bool, False)
        prepared = explorer.read(value("name", str), _bytes(value("data", str)), prepare=prepare)
        return {"pixels": prepared.image, "changes": prepared.changes}


def describe(explorer: Explorer) -> dict[str, Any]:
    """Return the facts that the page needs about a network."""
    return {
        "name": explorer.name,
        "what": explorer.what,
        "classes": explorer.class_names,
        "shape": explorer.model.in_shape,
        "slots": explorer.model.has_slots,
        "objects": len(explorer.class_names) if explorer.model.has_slots else explorer.model.objects,
        "components": explorer.model.capsule_dim,
        "images": 0 if explorer.images is None else len(explorer.images),
        "imagesOf": explorer.images_of,
        "noImages": explorer.no_images,
        "prepares": explorer.preparation is not None,
        "noPose": explorer.no_pose,
        "noRouting": explorer.no_routing,
        "iterations": explorer.iterations,
        "patches": explorer.patches,
        "score": explorer.score_name,
        "highest": SUPERLATIVES[explorer.score_name],
        "maxFileBytes": MAX_FILE_BYTES,
        "colours": [f"rgb{colour}" for colour in (SLOT_COLOURS if explorer.model.has_slots else OBJECT_COLOURS)],
    }


def encode(value: Any) -> Any:
    """Return an array or a dataclass as values for JSON."""
    if not isinstance(value, np.ndarray):
        return vars(value)
    if value.dtype == np.uint8:
        return base64.b64encode(value.tobytes()).decode("ascii")
    return value.round(4).tolist()


def _as_answer(view: View, explorer: Explorer) -> dict[str, Any]:
    """Return a view for JSON; capsules keep the digits of float32, so that they decode to the same bytes."""
    capsules = None if view.capsules is None else view.capsules.astype(np.float64).round(8).tolist()
    decoded = None if view.decoded is None else _pictures(view.decoded, explorer)
    return vars(view) | {"capsules": capsules, "decoded": decoded}


def _pictures(images: Float[np.ndarray, "P C H W"], explorer: Explorer) -> dict[str, Any]:
    """Return the image of one object; or several objects, each in its colour, and the sum of their colours.

    Parts of slots keep their own colours, so their sum is the redrawn image.
    """
    if len(images) == 1:
        return {"whole": to_bytes(images[0]), "apart": []}
    if not explorer.model.has_slots:
        colours = np.resize(np.array(OBJECT_COLOURS, np.float32) / 255, (len(images), 3, 1, 1))
        images = images.mean(1, keepdims=True) * colours
    return {"whole": to_bytes(images.sum(0)), "apart": list(to_bytes(images))}


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise InputError("the image is not valid base64; a link may have been cut off") from None
