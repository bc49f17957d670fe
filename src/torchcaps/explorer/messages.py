"""Questions from the browser and answers to it: plain values that JSON takes, pixels as base64.

An image goes over the line as its C·H·W bytes, channel after channel, a coupling map as H·W bytes. Wrong input is
answered by ``{"error": sentence}``.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8

from torchcaps.errors import InputError
from torchcaps.explorer.learning import Learning
from torchcaps.explorer.state import OBJECT_COLOURS, Explorer, Routing, colour_apart, overlay, to_bytes
from torchcaps.models.output import HIGHEST

Answer = dict[str, Any]
LARGEST_FILE = 32 * 2**20
"""Bytes of an uploaded image at most."""
LARGEST_COMPONENT = 1000
"""Of a capsule to decode. Those of a network are below one; decoded images stay finite."""


def describe_page(explorers: Sequence[Explorer], learning: Learning | None = None) -> Answer:
    """What the page has to know before there is an image."""
    about = None
    if learning is not None:
        about = {"images": [_encode(image) for image in learning.images.numpy()], "labels": learning.labels}
    return {"networks": [describe(explorer) for explorer in explorers], "learning": about}


def describe(explorer: Explorer) -> Answer:
    """What it has to know of one network."""
    return {
        "name": explorer.name,
        "what": explorer.what,
        "classes": explorer.class_names,
        "shape": list(explorer.model.in_shape),
        "objects": explorer.num_objects,
        "components": explorer.model.capsule_dim,
        "images": 0 if explorer.images is None else len(explorer.images),
        "imagesOf": explorer.images_of,
        "noImages": explorer.no_images,
        "prepares": explorer.preparation is not None,
        "noPose": explorer.no_pose,
        "noRouting": explorer.no_routing,
        "score": explorer.score_name,
        "highest": HIGHEST[explorer.score_name],
        "largestFile": LARGEST_FILE,
        "colours": [f"rgb({', '.join(str(round(255 * part)) for part in colour)})" for colour in OBJECT_COLOURS],
    }


def largest_question(explorer: Explorer, name: str) -> int:
    """Bytes of a question at most: an image of the network's, or an image file, as base64, and some words."""
    image = LARGEST_FILE if name == "read" else math.prod(explorer.model.in_shape)
    return 4 * math.ceil(image / 3) + 2**20


def answers(explorers: Sequence[Explorer], learning: Learning | None = None) -> list[Callable[[Any], Answer]]:
    """The questions that the page may ask, as functions of one JSON object named as the page calls them.

    Of several networks, ``network`` is the number of the one that is asked, the first if none is given; all see the
    images of the first.
    """
    first = explorers[0]

    def asked(question: Any) -> Explorer:
        number = question.get("network", 0) if isinstance(question, Mapping) else 0
        if not 0 <= _whole(number) < len(explorers):
            raise InputError(f"networks go from 0 to {len(explorers) - 1}, got {number}")
        return explorers[number]

    def look(question: Any) -> Answer:
        """``{network, pixels}`` → scores, the classes of the highest, why it is unsure, capsules, coupling maps."""
        explorer = asked(question)
        view = explorer.look(_image(question, explorer.model.in_shape))
        return {
            "scores": view.scores.round(4).tolist(),
            "present": view.present,
            "doubts": view.doubts,
            "capsules": None if view.capsules is None else view.capsules.round(4).tolist(),
            "routing": None if view.routing is None else _routing(view.routing),
        }

    def decode(question: Any) -> Answer:
        """``{network, classes, poses}`` → the decoded image; of several, each in its colour, and all overlaid."""
        explorer = asked(question)
        classes, poses = _get(question, "classes", list), _get(question, "poses", list)
        decoded = explorer.decode([_whole(j) for j in classes], _matrix(poses))
        if len(decoded) == 1:
            return {"whole": _encode(to_bytes(decoded[0])), "apart": []}
        coloured = colour_apart(decoded)
        return {"whole": _encode(to_bytes(overlay(coloured))), "apart": [_encode(to_bytes(one)) for one in coloured]}

    def pick(question: Any) -> Answer:
        """``{index}`` → the image, and its label in words."""
        pixels, label = first.pick(_whole(_get(question, "index", int)))
        return {"pixels": _encode(pixels), "label": label}

    def read(question: Any) -> Answer:
        """``{name, data, prepare}``, an image file → the image, and what was changed much to prepare it."""
        name, data = _get(question, "name", str), _bytes_of(_get(question, "data", str))
        if len(data) > LARGEST_FILE:
            raise InputError(f"“{name}” is larger than {LARGEST_FILE // 2**20} MiB; choose a smaller image")
        pixels, changes = first.read(name, data, prepare=bool(question.get("prepare", False)))
        return {"pixels": _encode(pixels), "changes": list(changes)}

    def progress(question: Any) -> Answer:  # noqa: ARG001  it is a question without parts
        """``{}`` → how far the network has learnt, and what it makes of the images that are watched."""
        if learning is None:
            raise InputError("no network learns here; start the explorer with --train")
        return _progress(learning)

    return [_in_words(function) for function in (look, decode, pick, read, progress)]


def _progress(learning: Learning) -> Answer:
    pupils = learning.look()
    return {
        **learning.numbers(),
        "scores": pupils.scores.round(4).tolist(),
        "seen": [learning.explorer.class_names[j] for j in pupils.seen],
        "right": pupils.right.tolist(),
        "decoded": None if pupils.decoded is None else [_encode(to_bytes(image)) for image in pupils.decoded],
    }


def _in_words(function: Callable[[Any], Answer]) -> Callable[[Any], Answer]:
    """The function with wrong input answered by a sentence."""

    def answer(question: Any) -> Answer:
        try:
            return function(question)
        except InputError as error:
            sentence = str(error)
            return {"error": f"{sentence[0].upper()}{sentence[1:]}{'' if sentence.endswith('.') else '.'}"}

    answer.__name__, answer.__doc__ = function.__name__, function.__doc__
    return answer


def _routing(routing: Routing) -> Answer:
    height, width = routing.maps.shape[2:]
    return {
        "classes": routing.classes,
        "size": [height, width],
        "maps": [[_encode(one) for one in row] for row in routing.levels()],
        "means": routing.maps.mean((2, 3)).round(4).tolist(),
        "scores": routing.scores.round(4).tolist(),
        "uniform": round(routing.uniform, 4),
        "reach": routing.reach,
        "range": [round(float(end), 4) for end in (routing.maps.min(), routing.maps.max())],
        "inSpace": routing.in_space,
        "inputs": routing.inputs,
    }


def _get(question: Any, name: str, kind: type) -> Any:
    value = question.get(name) if isinstance(question, Mapping) else None
    if not isinstance(value, kind):
        raise InputError(f"the question must have {name!r} of type {kind.__name__}, got {type(value).__name__}")
    return value


def _whole(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise InputError(f"a whole number was expected, got {number!r}")
    return number


def _matrix(rows: list[Any]) -> np.ndarray:
    """Rows of finite numbers, all of one length, as float32."""
    lengths = {len(row) if isinstance(row, list) else -1 for row in rows}
    numbers = [number for row in rows if isinstance(row, list) for number in row]
    if len(lengths) > 1 or -1 in lengths or not all(_is_small(number) for number in numbers):
        raise InputError(f"capsules must be rows of numbers of at most ±{LARGEST_COMPONENT}, all of one length")
    return np.array(rows, dtype=np.float32).reshape(len(rows), max(lengths, default=0))


def _is_small(number: Any) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool) and abs(number) <= LARGEST_COMPONENT


def _image(question: Any, shape: tuple[int, int, int]) -> UInt8[np.ndarray, "C H W"]:
    data = _bytes_of(_get(question, "pixels", str))
    if len(data) != math.prod(shape):
        raise InputError(
            f"the image has {len(data)} bytes, but this network takes {'×'.join(map(str, shape))} "
            f"= {math.prod(shape)} (channels × height × width); it may be from a link for another network"
        )
    return np.frombuffer(data, np.uint8).reshape(shape).copy()


def _encode(pixels: UInt8[np.ndarray, "..."]) -> str:
    return base64.b64encode(pixels.tobytes()).decode("ascii")


def _bytes_of(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InputError("the image is not valid base64; it may be from a link that was cut") from None
