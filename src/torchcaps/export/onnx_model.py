"""An exported network run by onnxruntime, in a process of its own. Nothing here imports torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from torchcaps.analysis.calibration import Prediction
from torchcaps.errors import InputError, install
from torchcaps.export.description import Description
from torchcaps.export.onnx_worker import OUT_OF_MEMORY, receive, send
from torchcaps.files import as_path, require_file

INPUT, LENGTHS, RECONSTRUCTION = "images", "lengths", "reconstruction"
"""Names of the input and the outputs in an exported file."""
ANY_LENGTH = "length"
"""Name of the last axis of the input where it may have any size, as of sequences."""
MAX_BATCH = 32
"""Images at a time: an exported graph builds their votes."""
MAX_FILE_BYTES = 2 * 2**30
"""No ONNX file has more."""
MAX_MEMORY = 768 * 2**20
"""Bytes for a network's intermediate results, beside `COPIES` times the file's size for its weights."""
COPIES = 6
"""Copies of the weights that onnxruntime makes at most while it opens a file, the file's bytes included."""
MAX_SECONDS = 60.0
"""How long opening a file or running a batch may take."""
WORKER = Path(__file__).with_name("onnx_worker.py")


class OnnxModel:
    """A network in an ONNX file that ``torchcaps export`` wrote.

    The file is opened and run in a process of its own with limits on its time and, on Linux, its memory: a small file
    can ask for any amount of both, already while it is opened.

    Args:
        path: The file. Nothing in it is executed but ONNX's own operators.
        threads: How many threads compute; None: one for each core.

    Raises:
        InputError: There is no such file, it is damaged or too large, or not one of torchcaps; it takes more than 60 s
            or too much memory to open; or onnxruntime is not installed.

    Examples:
        >>> import numpy as np
        >>> from torchcaps import create_model
        >>> from torchcaps.export import Description, OnnxModel, export_onnx
        >>> about = Description(in_shape=(1, 28, 28), class_names=tuple("0123456789"))
        >>> agreement = export_onnx(create_model("compact"), "model.onnx", about)
        >>> said = OnnxModel("model.onnx")(np.zeros((2, 1, 28, 28), dtype=np.uint8))
        >>> said.lengths.shape, said.reconstruction.shape
        ((2, 10), (2, 1, 28, 28))
    """

    def __init__(self, path: str | Path, threads: int | None = None) -> None:
        self.path, self._threads, self._batch = as_path("OnnxModel: path", path), threads, MAX_BATCH
        self._worker = Worker(self.path, threads)
        try:
            self.description = Description.from_metadata(self._worker.metadata)
            self._check_graph()
        except InputError as error:
            raise InputError(f"{self.path} was not written by torchcaps export: {error}") from None

    def __call__(self, images: Shaped[np.ndarray, "N C H W"]) -> Prediction:
        """Classify images, and reconstruct them where the network has a decoder.

        Args:
            images: uint8 of 0..255, or floating-point of 0..1; N at least 1. Of a network for sequences floating-point
                (N, C, 1, l) of any length l up to W, NaN after the end of a row.

        Returns:
            The same as :func:`torchcaps.analysis.predict` of the network, by the calibration in the file.

        Raises:
            TypeError: Images of another dtype.
            InputError: Images of a shape the network was not built for, or none; or the file's graph fails, takes more
                than 60 s or too much memory for a single image, or gives something else than finite scores.
        """
        *wanted, longest = self.description.in_shape
        shortest = 1 if self._takes_any_length else longest
        fits = images.ndim == 4 and [*images.shape[1:3]] == wanted and shortest <= images.shape[3] <= longest
        if not fits or len(images) == 0:
            sizes = ", ".join(map(str, wanted)) + (f", 1 to {longest}" if shortest < longest else f", {longest}")
            raise InputError(f"images must have shape (N, {sizes}) with N at least 1, got {images.shape}")
        if images.dtype != np.uint8 and not np.issubdtype(images.dtype, np.floating):
            raise TypeError(f"images must be uint8 of 0..255 or floating-point of 0..1, got {images.dtype}")
        outputs = [self._run(part) for part in _batches(_as_pixels(images), self._batch)]
        lengths, *others = (np.concatenate(parts) for parts in zip(*outputs, strict=True))
        # the order of torchcaps.models.output.top_classes, without torch
        highest = (-lengths).argsort(axis=1, kind="stable")[:, : self.description.objects]
        classes = highest[:, 0] if self.description.objects == 1 else highest
        decoded = others[0] if others else None
        return Prediction.of(_as_pixels(images), classes, lengths, decoded, self.description.calibration)

    def _run(self, images: Float[np.ndarray, "N C H W"]) -> list[np.ndarray]:
        """The outputs for a batch; once a batch is too much for the limits, all images are run one by one.

        Raises:
            InputError: The graph fails on a single image, or gives something else than scores and pixels.
        """
        if self._worker.has_ended:
            self._worker = Worker(self.path, self._threads)
        try:
            outputs = self._worker.run(images)
        except TooMuch as error:
            if len(images) == 1:
                raise InputError(f"{self.path} cannot be run: an image {error}") from None
            self._batch = 1
            parts = [self._run(image) for image in _batches(images, 1)]
            return [np.concatenate(each) for each in zip(*parts, strict=True)]
        return self._checked(outputs, len(images))

    def _checked(self, outputs: list[Any], count: int) -> list[np.ndarray]:
        """The outputs for so many images, if they are what an exported network gives."""
        pixels = self.description.in_shape
        shapes: tuple[set[tuple[int, ...]], ...]
        shapes = {(len(self.description.class_names),)}, {pixels, (self.description.objects, *pixels)}
        for output, fitting, name in zip(outputs, shapes, (LENGTHS, RECONSTRUCTION), strict=False):
            is_array = isinstance(output, np.ndarray) and np.issubdtype(output.dtype, np.floating)
            if not (is_array and len(output) == count and output.shape[1:] in fitting and np.isfinite(output).all()):
                raise InputError(f"{self.path} cannot be used: its graph does not give finite {name} for each image")
        return outputs

    def _check_graph(self) -> None:
        """Raise InputError unless inputs and outputs have the names of an exported network's."""
        inputs, outputs = self._worker.inputs, self._worker.outputs
        if [*inputs] != [INPUT] or outputs not in ([LENGTHS], [LENGTHS, RECONSTRUCTION]):
            raise InputError(f"it takes {[*inputs]} and gives {outputs}")
        self._takes_any_length = inputs[INPUT][-1:] == [ANY_LENGTH]


class TooMuch(Exception):  # noqa: N818  it completes a sentence
    """More time or memory than a file may take, as the end of a sentence."""


class Worker:
    """A process that holds one ONNX file open and runs it.

    Raises:
        InputError: As :class:`OnnxModel` says of a file.
    """

    metadata: dict[str, str]
    """Entries of the file."""
    inputs: dict[str, list[int | str | None]]
    """The shape of each input by its name."""
    outputs: list[str]
    """Names of the outputs."""

    def __init__(self, path: Path, threads: int | None) -> None:
        if importlib.util.find_spec("onnxruntime") is None:
            raise InputError(f"{path} needs the package onnxruntime: {install('export')}")
        require_file(path)
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise InputError(f"{path} is no ONNX file: it has {size / 2**30:.1f} GiB, an ONNX file at most 2")
        with path.open("rb"):  # an error of the file system is raised here
            pass
        self._path, self._lock, self._is_late = path, threading.Lock(), False
        limits = map(str, (threads or 0, MAX_MEMORY + COPIES * size, MAX_SECONDS))
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(path), *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        weakref.finalize(self, _end, self._process)
        try:
            facts, _ = self._ask()
        except TooMuch as error:
            raise InputError(f"{path} cannot be opened: it {error}") from None
        if "error" in facts:
            raise InputError(f"{path} is damaged or no ONNX file: {facts['error']}")
        self.metadata, self.inputs, self.outputs = facts["metadata"], dict(facts["inputs"]), facts["outputs"]

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone, as after a batch that took too long."""
        return self._process.poll() is not None

    def run(self, images: Float[np.ndarray, "N C H W"]) -> list[np.ndarray]:
        """The outputs for a batch.

        Raises:
            InputError: The graph fails.
            TooMuch: It takes too long or too much memory.
        """
        facts, outputs = self._ask(images)
        if "error" in facts:
            raise InputError(f"{self._path} cannot be run: {facts['error']}")
        return outputs

    def _ask(self, *arrays: np.ndarray) -> tuple[dict[str, Any], list[np.ndarray]]:
        """The next answer of the process, to arrays if there are any."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            clock = threading.Timer(MAX_SECONDS, self._stop)
            clock.start()
            try:
                if arrays:
                    send(self._process.stdin, *arrays)
                answer = receive(self._process.stdout)
            except BrokenPipeError:
                answer = None
            finally:
                clock.cancel()
        if answer is None:
            self._process.wait()
            code = f"ends onnxruntime without an answer (exit code {self._process.returncode})"
            raise TooMuch(f"takes more than {MAX_SECONDS:g} s" if self._is_late else code)
        if answer[0].get("error") == OUT_OF_MEMORY:
            raise TooMuch(f"takes more than {MAX_MEMORY // 2**20} MiB of memory")
        return answer

    def _stop(self) -> None:
        self._is_late = True
        self._process.kill()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that nobody asks any more."""
    process.kill()
    process.communicate()


def _batches(images: Shaped[np.ndarray, "N C H W"], size: int) -> list[np.ndarray]:
    return [images[start : start + size] for start in range(0, len(images), size)]


def _as_pixels(images: Shaped[np.ndarray, "N C H W"]) -> Float[np.ndarray, "N C H W"]:
    pixels = images.astype(np.float32)
    return pixels / 255 if images.dtype == np.uint8 else pixels
