"""Run an exported network with onnxruntime in a separate process. This module does not import torch."""

from __future__ import annotations

import importlib.util
import math
import operator
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
from torchcaps.datasets.scaling import as_floats, as_pixels
from torchcaps.errors import InputError, install
from torchcaps.export.description import Description
from torchcaps.export.onnx_worker import OUT_OF_MEMORY, receive, send
from torchcaps.files import as_path, require_file
from torchcaps.tasks import task_of
from torchcaps.words import counted

INPUT, LENGTHS, RECONSTRUCTION = "images", "lengths", "reconstruction"
"""Names of the input and the outputs in an exported file."""
MAX_BATCH = 32
"""Images in a batch: an exported graph builds all their votes."""
MAX_FILE_BYTES = 2 * 2**30
"""Largest ONNX file: the limit of protobuf."""
MAX_MEMORY_BYTES = 768 * 2**20
"""Memory for intermediate results, in addition to `MAX_WEIGHT_COPIES` times the size of the file."""
MAX_WEIGHT_COPIES = 6
"""Copies of the weights in memory while onnxruntime opens a file, including the bytes of the file."""
MAX_SECONDS = 60.0
"""Time to open a file or to run a batch."""
WORKER = Path(__file__).with_name("onnx_worker.py")


class OnnxModel:
    """A network in an ONNX file from ``torchcaps export``.

    A separate process opens and runs the file, with limits on its time and, on Linux, its memory, because even a small
    file can need any amount of both.

    Args:
        path: The file. Only ONNX's operators in it are executed.
        threads: Number of threads; None: one for each core.

    Raises:
        InputError: There is no such file; it is damaged, too large, or not written by torchcaps; it takes more than
            60 s or too much memory to open; or onnxruntime is not installed.

    Examples:
        >>> import numpy as np
        >>> from torchcaps import create_model
        >>> from torchcaps.export import Description, OnnxModel, export_onnx
        >>> about = Description(in_shape=(1, 28, 28), class_names=tuple("0123456789"))
        >>> agreement = export_onnx(create_model("compact"), "model.onnx", about)
        >>> prediction = OnnxModel("model.onnx")(np.zeros((2, 1, 28, 28), dtype=np.uint8))
        >>> prediction.lengths.shape, prediction.reconstruction.shape
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

    def __call__(self, images: Shaped[np.ndarray, "N C *S"]) -> Prediction:
        """Classify images, and reconstruct them if the network has a decoder.

        Args:
            images: uint8 of 0..255, floating-point of 0..1, or other integers, which are read by the range of the
                training images (``description.scale``); N at least 1. For a network of sequences floating-point
                (N, C, 1, l), any length l up to W, with NaN as padding. For a network for pixels (N, C, *S), any sizes.

        Returns:
            The result of :func:`torchcaps.analysis.predict` for the network, with the calibration in the file. For a
            network for pixels or with slots, the classes are masks (N, *S), and no answer is unsure.

        Raises:
            TypeError: The images have another dtype.
            InputError: The images have another shape than the network's, or there are none; or the graph fails, takes
                more than 60 s or too much memory for a single image, or returns scores that are not finite.
        """
        shape, per_pixel = self.description.in_shape, all(self._free[1:])  # a network for pixels takes any size
        smallest = [1 if name else size for size, name in zip(shape, self._free, strict=True)]
        largest = [math.inf if name and per_pixel else size for size, name in zip(shape, self._free, strict=True)]
        sizes = images.shape[1:]
        fits = (
            len(sizes) == len(shape)
            and all(map(operator.le, smallest, sizes))
            and all(map(operator.le, sizes, largest))
        )
        if not fits or len(images) == 0:
            words = [
                name if most == math.inf else str(most) if least == most else f"1 to {most}"
                for name, least, most in zip(self._free, smallest, largest, strict=True)
            ]
            raise InputError(f"images must have shape (N, {', '.join(words)}) with N at least 1, got {images.shape}")
        images = self._as_pixels(images)
        outputs = [self._run(part) for part in _batches(images, self._batch)]
        lengths, *others = (np.concatenate(parts) for parts in zip(*outputs, strict=True))
        task = task_of(self.description)
        classes, decoded = task.predict_classes(lengths), others[0] if others else None
        name = task.score_name or "length"
        return Prediction.of(images, classes, lengths, decoded, self.description.calibration, name, task)

    def _as_pixels(self, images: Shaped[np.ndarray, "N C *S"]) -> Float[np.ndarray, "N C *S"]:
        """Return images as float32; raise TypeError for a dtype that this network does not take."""
        if np.issubdtype(images.dtype, np.floating):
            return images.astype(np.float32)
        if images.dtype == np.uint8:
            return as_floats(images)
        if images.dtype.kind not in "iub" or self.description.in_shape[1:-1] == (1,):
            raise TypeError(f"images must be uint8 of 0..255 or floating-point of 0..1, got {images.dtype}")
        return as_floats(as_pixels(images, self.description.scale))

    def _run(self, images: Float[np.ndarray, "N C H W"]) -> list[np.ndarray]:
        """Return the outputs for a batch. After a batch that exceeds the limits, images are run one by one.

        Raises:
            InputError: The graph fails on a single image, or does not return scores and pixels.
        """
        if not self._worker.is_usable:
            self._worker = Worker(self.path, self._threads)
        try:
            outputs = self._worker.run(images)
        except LimitExceeded as error:
            if len(images) == 1:
                raise InputError(f"{self.path} cannot be run: an image {error}") from None
            self._batch = 1
            parts = [self._run(image) for image in _batches(images, 1)]
            return [np.concatenate(each) for each in zip(*parts, strict=True)]
        return self._checked(outputs, images.shape)

    def _checked(self, outputs: list[Any], batch_shape: tuple[int, ...]) -> list[np.ndarray]:
        """Return the outputs for images of a shape; raise InputError if they are not scores and reconstructions."""
        pixels, count, classes = self.description.in_shape, batch_shape[0], len(self.description.class_names)
        shapes: tuple[set[tuple[int, ...]], ...]
        shapes = {(classes,)}, {pixels, (self.description.objects, *pixels)}
        if self.description.wants_masks is not False:
            counts = {classes, 1 if classes == 2 else classes}  # two classes may have one score
            if self.description.wants_masks is None:  # there may be any number of slots
                counts = {*getattr(outputs[0], "shape", ())[1:2]}
            shapes = {(count, *batch_shape[2:]) for count in counts}, {batch_shape[1:]}
        for output, fitting, name in zip(outputs, shapes, (LENGTHS, RECONSTRUCTION), strict=False):
            is_array = isinstance(output, np.ndarray) and np.issubdtype(output.dtype, np.floating)
            if not (is_array and len(output) == count and output.shape[1:] in fitting and np.isfinite(output).all()):
                raise InputError(f"{self.path} cannot be used: its graph does not return finite {name} for each image")
        return outputs

    def _check_graph(self) -> None:
        """Raise InputError unless inputs and outputs have the names of an exported network."""
        inputs, outputs = self._worker.inputs, self._worker.outputs
        if [*inputs] != [INPUT] or outputs not in ([LENGTHS], [LENGTHS, RECONSTRUCTION]):
            raise InputError(f"it has the inputs {[*inputs]} and the outputs {outputs}")
        axes = inputs[INPUT][1:]
        if len(axes) != len(self.description.in_shape):
            raise InputError(
                f"its input has {counted(len(axes) + 1, 'axis')}, but its images have {len(self.description.in_shape)}"
            )
        self._free = [each if isinstance(each, str) else "" for each in axes]


class LimitExceeded(Exception):  # noqa: N818  the message ends a sentence
    """A file needs too much time or memory; the message is the end of a sentence."""


class Worker:
    """A process that opens one ONNX file and runs it.

    Raises:
        InputError: The file cannot be opened; see :class:`OnnxModel`.
    """

    metadata: dict[str, str]
    """Metadata of the file."""
    inputs: dict[str, list[int | str | None]]
    """Shape of each input by its name."""
    outputs: list[str]
    """Names of the outputs."""

    def __init__(self, path: Path, threads: int | None) -> None:
        if importlib.util.find_spec("onnxruntime") is None:
            raise InputError(f"{path} needs the package onnxruntime: {install('export')}")
        require_file(path)
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise InputError(f"{path} is no ONNX file: it has {size / 2**30:.1f} GiB, an ONNX file at most 2")
        with path.open("rb"):  # raises errors of the file system in this process
            pass
        self._path, self._lock, self._is_late, self._owner = path, threading.Lock(), False, os.getpid()
        limits = map(str, (threads or 0, MAX_MEMORY_BYTES + MAX_WEIGHT_COPIES * size, MAX_SECONDS))
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(path), *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        weakref.finalize(self, _end, self._process, self._owner)
        try:
            facts, _ = self._ask()
        except LimitExceeded as error:
            raise InputError(f"{path} cannot be opened: it {error}") from None
        if "error" in facts:
            raise InputError(f"{path} is damaged or no ONNX file: {facts['error']}")
        self.metadata, self.inputs, self.outputs = facts["metadata"], dict(facts["inputs"]), facts["outputs"]

    @property
    def is_usable(self) -> bool:
        """False if the process has ended, for example after a batch that took too long; or after a fork.

        The worker belongs to the process that started it, because answers to several processes would be mixed up.
        """
        return self._owner == os.getpid() and self._process.poll() is None

    def run(self, images: Float[np.ndarray, "N C H W"]) -> list[np.ndarray]:
        """Return the outputs for a batch.

        Raises:
            InputError: The graph fails.
            LimitExceeded: The graph takes too much time or memory.
        """
        facts, outputs = self._ask(images)
        if "error" in facts:
            raise InputError(f"{self._path} cannot be run: {facts['error']}")
        return outputs

    def _ask(self, *arrays: np.ndarray) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Send arrays, if any, and return the next answer of the process."""
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
            raise LimitExceeded(f"takes more than {MAX_SECONDS:g} s" if self._is_late else code)
        if answer[0].get("error") == OUT_OF_MEMORY:
            raise LimitExceeded(f"takes more than {MAX_MEMORY_BYTES // 2**20} MiB of memory")
        return answer

    def _stop(self) -> None:
        self._is_late = True
        self._process.kill()


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a process after its last request, in the process that started it."""
    if owner == os.getpid():
        process.kill()
        process.communicate()


def _batches(images: Shaped[np.ndarray, "N C *S"], size: int) -> list[np.ndarray]:
    return [images[start : start + size] for start in range(0, len(images), size)]
