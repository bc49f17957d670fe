"""An exported network run by onnxruntime. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Shaped

from torchcaps.analysis.calibration import Prediction
from torchcaps.errors import InputError, install
from torchcaps.export.description import Description

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

INPUT, LENGTHS, RECONSTRUCTION = "images", "lengths", "reconstruction"
"""Names of the input and the outputs in an exported file."""
ANY_LENGTH = "length"
"""Name of the last axis of the input where it may have any size, as of sequences."""
BATCH_SIZE = 32
"""Images at a time at most: an exported graph builds their votes."""
LARGEST_FILE = 2 * 2**30
"""Bytes; no ONNX file has more."""
MEMORY = 768 * 2**20
"""Bytes that the network's intermediate results may take, and twice the file's size for its weights."""
ARENA = "BFCArena"
"""What onnxruntime names when that memory does not suffice."""
SECONDS = 60.0
"""How long a batch may take; a batch that takes longer, or more memory, is halved."""


class OnnxModel:
    """A network in an ONNX file that ``torchcaps export`` wrote.

    Args:
        path: The file. Nothing in it is executed but ONNX's own operators.
        threads: How many compute; one a core if None.

    Raises:
        InputError: There is no such file, it is damaged or too large, or not one of torchcaps; or onnxruntime is not
            installed.

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
        self.path = Path(path)
        self._session = _open(self.path, threads)
        try:
            self.description = Description.from_metadata(self._session.get_modelmeta().custom_metadata_map)
            self._check_graph()
        except UnicodeDecodeError:
            raise InputError(f"{self.path} was not written by torchcaps export: its texts are not UTF-8") from None
        except InputError as error:
            raise InputError(f"{self.path} was not written by torchcaps export: {error}") from None

    def __call__(self, images: Shaped[np.ndarray, "N C H W"]) -> Prediction:
        """Classify images, and reconstruct them where the network has a decoder.

        Args:
            images: uint8 of 0..255, or floating-point of 0..1; N at least 1. Of a network for sequences floating-point
                (N, C, 1, l) of any length l up to W, NaN after the end of a row.

        Returns:
            What :func:`torchcaps.analysis.predict` says of the network's images, by the calibration in the file.

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
        outputs = [self._run(images[start : start + BATCH_SIZE]) for start in range(0, len(images), BATCH_SIZE)]
        lengths, *others = (np.concatenate(parts) for parts in zip(*outputs, strict=True))
        # the order of torchcaps.models.output.top_classes, without torch
        highest = (-lengths).argsort(axis=1, kind="stable")[:, : self.description.objects]
        classes = highest[:, 0] if self.description.objects == 1 else highest
        decoded = others[0] if others else None
        return Prediction.of(_as_pixels(images), classes, lengths, decoded, self.description.calibration)

    def _run(self, images: Shaped[np.ndarray, "N C H W"]) -> list[np.ndarray]:
        """The outputs for a batch, or for its halves where it takes too long or too much memory.

        Raises:
            InputError: The graph fails on a single image, or gives something else than scores and pixels.
        """
        from onnxruntime import RunOptions

        options: Any = RunOptions()
        clock = threading.Timer(SECONDS, setattr, (options, "terminate", True))
        clock.start()
        try:
            outputs = self._session.run(None, {INPUT: _as_pixels(images)}, options)
        except Exception as error:  # onnxruntime's exceptions have no common class of their own
            if len(images) > 1:
                if options.terminate:
                    self._run(images[:1])  # a graph without end is found out now, not after each halving
                halves = [self._run(half) for half in np.array_split(images, 2)]
                return [np.concatenate(parts) for parts in zip(*halves, strict=True)]
            reason = _first_line(error)
            if options.terminate:
                reason = f"an image takes more than {SECONDS:g} s"
            elif ARENA in reason:
                reason = f"an image takes more than {MEMORY // 2**20} MiB of memory"
            raise InputError(f"{self.path} cannot be run: {reason}") from None
        finally:
            clock.cancel()
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
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        given = [each.name for each in inputs], [each.name for each in outputs]
        if given[0] != [INPUT] or given[1] not in ([LENGTHS], [LENGTHS, RECONSTRUCTION]):
            raise InputError(f"it takes {given[0]} and gives {given[1]}")
        self._takes_any_length = inputs[0].shape[-1:] == [ANY_LENGTH]


def _as_pixels(images: Shaped[np.ndarray, "N C H W"]) -> Float[np.ndarray, "N C H W"]:
    pixels = images.astype(np.float32)
    return pixels / 255 if images.dtype == np.uint8 else pixels


def _open(path: Path, threads: int | None) -> InferenceSession:
    try:
        import onnxruntime
    except ImportError:
        raise InputError(f"{path} needs the package onnxruntime: {install('export')}") from None
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    size = path.stat().st_size
    if size > LARGEST_FILE:
        raise InputError(f"{path} is no ONNX file: it has {size / 2**30:.1f} GiB, an ONNX file at most 2")
    onnxruntime.set_default_logger_severity(4)  # it would write to the terminal what its exceptions say as well
    options: Any = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what goes wrong comes as an exception too
    options.add_session_config_entry("session.use_env_allocators", "1")
    if threads is not None:
        options.intra_op_num_threads = threads
    _bound_memory(MEMORY + 2 * size)
    try:
        return onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
    except OSError:
        raise
    except Exception as error:  # onnxruntime's exceptions have no common class of their own
        raise InputError(f"{path} is damaged or no ONNX file: {_first_line(error)}") from None


def _bound_memory(limit: int) -> None:
    """Let a network that is opened next take so many bytes at most: a few bytes of a file can ask for any number."""
    from onnxruntime import OrtAllocatorType, OrtArenaCfg, OrtMemoryInfo, OrtMemType, create_and_register_allocator

    where = OrtMemoryInfo("Cpu", OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, OrtMemType.DEFAULT)
    as_requested, default = 1, -1  # growth by what is asked for, not by powers of two
    with contextlib.suppress(RuntimeError):  # older versions keep to the limit of the first network in a process
        create_and_register_allocator(where, OrtArenaCfg(limit, as_requested, default, default))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
