"""An exported network run by onnxruntime. Nothing here imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Shaped

from torchcaps.errors import InputError
from torchcaps.export.description import Description

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

INPUT, LENGTHS, RECONSTRUCTION = "images", "lengths", "reconstruction"
"""Names of the input and the outputs in an exported file."""
BATCH_SIZE = 32
"""Images at a time at most: an exported graph builds their votes."""


class OnnxModel:
    """A network in an ONNX file that ``torchcaps export`` wrote.

    Args:
        path: The file. Nothing in it is executed but ONNX's own operators.
        threads: How many compute; one a core if None.

    Raises:
        InputError: There is no such file, it is damaged, or not one of torchcaps; or onnxruntime is not installed.

    Example:
        >>> import numpy as np
        >>> from torchcaps import create_model
        >>> from torchcaps.export import Description, OnnxModel, export_onnx
        >>> about = Description(in_shape=(1, 28, 28), class_names=tuple("0123456789"))
        >>> agreement = export_onnx(create_model("compact"), "model.onnx", about)
        >>> lengths, reconstructions = OnnxModel("model.onnx")(np.zeros((2, 1, 28, 28), dtype=np.uint8))
        >>> lengths.shape, reconstructions.shape
        ((2, 10), (2, 1, 28, 28))
    """

    def __init__(self, path: str | Path, threads: int | None = None) -> None:
        self.path = Path(path)
        self._session = _open(self.path, threads)
        try:
            self.description = Description.from_metadata(self._session.get_modelmeta().custom_metadata_map)
        except InputError as error:
            raise InputError(f"{self.path} was not written by torchcaps export: {error}") from None
        self._check_graph()

    def __call__(
        self, images: Shaped[np.ndarray, "N C H W"]
    ) -> tuple[Float[np.ndarray, "N J"], Float[np.ndarray, "N C H W"] | Float[np.ndarray, "N P C H W"] | None]:
        """Classify images, and reconstruct them where the network has a decoder.

        Args:
            images: uint8 of 0..255, or floating-point of 0..1; N at least 1.

        Returns:
            Class scores ‖v_j‖, and the images decoded from the longest capsules or None.

        Raises:
            TypeError: Images of another dtype.
            InputError: Images of a shape the network was not built for, or none.
        """
        wanted = self.description.in_shape
        if images.ndim != 4 or images.shape[1:] != wanted or len(images) == 0:
            raise InputError(
                f"images must have shape (N, {', '.join(map(str, wanted))}) with N at least 1, got {images.shape}"
            )
        if images.dtype != np.uint8 and not np.issubdtype(images.dtype, np.floating):
            raise TypeError(f"images must be uint8 of 0..255 or floating-point of 0..1, got {images.dtype}")
        outputs = [
            self._session.run(None, {INPUT: _as_pixels(images[start : start + BATCH_SIZE])})
            for start in range(0, len(images), BATCH_SIZE)
        ]
        lengths, *others = (np.concatenate(parts) for parts in zip(*outputs, strict=True))
        return lengths, others[0] if others else None

    def _check_graph(self) -> None:
        """Raise InputError unless inputs and outputs are those that the description speaks of."""
        said = f"{self.path} was not written by torchcaps export"
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        given = [each.name for each in inputs], [each.name for each in outputs]
        if given[0] != [INPUT] or given[1] not in ([LENGTHS], [LENGTHS, RECONSTRUCTION]):
            raise InputError(f"{said}: it takes {given[0]} and gives {given[1]}")
        shapes = tuple(inputs[0].shape[1:]), tuple(outputs[0].shape[1:])
        described = self.description.in_shape, (len(self.description.class_names),)
        if shapes != described:
            raise InputError(
                f"{said}: by its description it takes images {described[0]} and gives lengths "
                f"{described[1]}, by its graph {shapes[0]} and {shapes[1]}"
            )


def _as_pixels(images: Shaped[np.ndarray, "N C H W"]) -> Float[np.ndarray, "N C H W"]:
    pixels = images.astype(np.float32)
    return pixels / 255 if images.dtype == np.uint8 else pixels


def _open(path: Path, threads: int | None) -> InferenceSession:
    try:
        import onnxruntime
    except ImportError:
        raise InputError(f'{path} needs the package onnxruntime: pip install "torchcaps[export]"') from None
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    options: Any = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what goes wrong comes as an exception too
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except OSError:
        raise
    except Exception as error:  # onnxruntime's exceptions have no common class of their own
        reason = str(error).partition("\n")[0]
        raise InputError(f"{path} is damaged or no ONNX file: {reason}") from None
