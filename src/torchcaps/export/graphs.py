"""ONNX files and torch.export programs. Each is compared with the network before it is kept."""

from __future__ import annotations

import copy
import io
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from torchcaps.analysis.inference import as_pixels, inference
from torchcaps.checks import checked
from torchcaps.errors import InputError, install
from torchcaps.export.description import Description
from torchcaps.export.onnx_model import INPUT, LENGTHS, RECONSTRUCTION, OnnxModel
from torchcaps.export.record import random_images
from torchcaps.files import atomic_path, require_suffix
from torchcaps.models import Network
from torchcaps.models.segmentation import PixelNetwork
from torchcaps.nn import SequenceBackbone
from torchcaps.ops.labels import top_classes
from torchcaps.tasks import task_of
from torchcaps.words import AXES

OPSET = 18
"""Version of ONNX's operators: the oldest that torch's exporter writes, so that most runtimes can read it."""
TOLERANCE = 1e-4
"""Largest allowed difference between outputs of the file and the network; relative for numbers above 1."""
DESCRIPTION = "torchcaps.json"
"""Name of the description among the extra files of a torch.export program."""
MAX_ONNX_WEIGHT_BYTES = 2**31 - 2**20
"""Largest size of the weights in an ONNX file: protobuf's 2 GiB, less room for the graph."""

Outputs = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Agreement:
    """Largest differences between outputs of a file and of the network, for one image and for all images at once."""

    images: int
    """Number of compared images."""
    lengths: float
    """Largest difference of the class scores, ``lengths`` in the file."""
    reconstruction: float | None
    """Largest difference of the reconstructed pixels; None without a decoder."""

    def __str__(self) -> str:
        drawn = "" if self.reconstruction is None else f", of a reconstructed pixel {self.reconstruction:.1e}"
        return f"largest difference of a score {self.lengths:.1e}{drawn}, in batches of 1 and {self.images}"


@checked
def export_onnx(
    network: Network, path: str | Path, description: Description, images: Shaped[Tensor, "N C *S"] | None = None
) -> Agreement:
    """Write a network as an ONNX file for any batch size, and compare it with the network.

    - Input ``images`` (B, C, H, W): float32 pixels 0..1. For a network of sequences (B, C, 1, l), any length l up to W,
      with NaN as padding. For a network for pixels (B, C, *S), any sizes above
      the network's stride, such as 8 for segcaps.
    - Output ``lengths`` (B, J): the class scores; of each pixel (B, J, *S).
    - Output ``reconstruction`` (B, C, H, W), if there is a decoder: drawn from the capsule with the highest score. For
      P objects in an image (B, P, C, H, W); of a network for pixels (B, C, *S).

    The file contains all weights, and no names of files, paths or lines of source.

    Args:
        network: The network; its weights are written as float32.
        path: File to write; the name must end in ``.onnx``.
        description: Description of the network for the file.
        images: Images or sequences for the comparison, at least one; random ones if None.

    Raises:
        InputError: The file's output differs from the network's by more than 1e-4, and the file is removed; the network
            is too large for one file; the description is of another network; or a package of the extra ``export`` is
            not installed.
        OSError: The file cannot be written.
    """
    path = _checked(path, ".onnx", description, network)
    try:
        import onnx
        import onnxruntime  # noqa: F401  a missing package must be noticed before the work
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError(f"an ONNX file needs the package {error.name}: {install('export')}") from None
    size = sum(parameter.numel() * 4 for parameter in network.parameters())
    if size > MAX_ONNX_WEIGHT_BYTES:
        raise InputError(
            f"the weights take {size / 2**30:.1f} GiB, but an ONNX file holds 2 GiB; export a torch.export program"
        )
    program = trace(network)
    names = [LENGTHS, RECONSTRUCTION][: len(program.graph_signature.user_outputs)]
    model, free = to_onnx(program, [INPUT], names), free_axes(network)
    for each in (*model.graph.input, *(model.graph.output if network.per_pixel else ())):
        for axis, name in free.items():
            each.type.tensor_type.shape.dim[axis].dim_param = name
    for each in (*model.graph.input, *model.graph.output):
        each.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.helper.set_model_props(model, description.to_metadata())
    return _write(path, model.SerializeToString(), open_onnx, network, images)


@checked
def export_program(
    network: Network, path: str | Path, description: Description, images: Shaped[Tensor, "N C *S"] | None = None
) -> Agreement:
    """Write a network as a torch.export program for any batch size, and compare it with the network.

    ``torch.export.load(path).module()`` has the input of an ONNX file and returns ``(lengths, reconstruction)``, or
    ``(lengths,)`` without a decoder. It needs torch, but not torchcaps. ``torch.export.load`` unpickles, so a file can
    execute code: load files only from people you trust.

    See :func:`export_onnx` for arguments and errors. The differences: ``path`` must end in ``.pt2``, the description
    is JSON in the program's extra file ``torchcaps.json``, no further package is needed, and any size is allowed.
    """
    path = _checked(path, ".pt2", description, network)
    program = trace(network)
    contents = io.BytesIO()
    with quiet():
        torch.export.save(program, contents, extra_files={DESCRIPTION: json.dumps(description.to_dict())})
    return _write(path, contents.getvalue(), open_program, network, images)


class _Outputs(nn.Module):
    """A network for inference that takes only images and returns (scores, reconstruction), or (scores,)."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Float[Tensor, "B C *S"]) -> tuple[Tensor, ...]:
        output = self.network(in_full_length(self.network, images))
        return (output.scores,) if output.reconstruction is None else (output.scores, output.reconstruction)


def takes_sequences(network: Network) -> bool:
    """Return True if padding changes no result of a network, so that it accepts sequences of any length."""
    has_steps = network.in_shape[-1] > 1  # features have none
    return has_steps and isinstance(getattr(network, "backbone", None), SequenceBackbone)


def free_axes(network: Network) -> dict[int, str]:
    """Return the names of the input's axes that may have any size, besides the batch, by the number of the axis."""
    if network.per_pixel:
        return dict(enumerate(AXES[len(network.in_shape) - 1], 2))
    return {3: AXES[1][0]} if takes_sequences(network) else {}


def smallest_side(network: Network) -> int:
    """Return the smallest size along a free axis, pixels: in an exported graph, no map may have a single position."""
    return network.stride + 1 if isinstance(network, PixelNetwork) else 1


def in_full_length(network: Network, images: Float[Tensor, "B C H w"]) -> Float[Tensor, "B C H W"]:
    """Return sequences padded with NaN to the network's length; return images unchanged."""
    if not takes_sequences(network):
        return images
    return F.pad(images, (0, network.in_shape[2] - images.shape[3]), value=math.nan)


def trace(network: Network) -> ExportedProgram:
    """Return the torch.export program of a network for any number of images.

    Lines of source are removed, because they would show paths of this machine.
    """
    traced = _Outputs(copy.deepcopy(network).float().cpu()).eval()
    for module in traced.modules():
        if isinstance(module, nn.Conv3d) and module.bias is None:  # onnxscript would write one with two axes
            module.bias = nn.Parameter(torch.zeros(module.out_channels))
    shape = network.in_shape
    if network.per_pixel:  # maps of one position, or sizes that need no padding, would fix the sizes
        shape = shape[0], *(max(size, smallest_side(network)) + 1 for size in shape[1:])
    example = as_pixels(network, random_images(shape, 2))  # one image would fix the batch size at 1
    limits = {"max": network.in_shape[2]} if takes_sequences(network) else {"min": smallest_side(network)}
    axes = {0: Dim("batch")} | {axis: Dim(name, **limits) for axis, name in free_axes(network).items()}
    with torch.no_grad(), quiet():
        program = torch.export.export(traced, (example.float().cpu(),), dynamic_shapes=(axes,), strict=False)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def to_onnx(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """Return a program as an ONNX model, without the exporter's notes, which show paths of this machine."""
    with quiet():
        # no optimization: the optimizer treats 1e-9 as zero and removes it from sums
        written = torch.onnx.export(
            program, (), input_names=inputs, output_names=outputs, opset_version=OPSET,
            dynamo=True, external_data=False, verbose=False, optimize=False,
        )  # fmt: skip
    assert written is not None
    model = written.model_proto
    del model.graph.value_info[:]
    for part in (model, graph := model.graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    return model


def open_onnx(path: Path) -> Callable[[Tensor], Outputs]:
    """Open an ONNX file, and return the function from pixels to its outputs."""
    model = OnnxModel(path)

    def run(pixels: Tensor) -> Outputs:
        output = model(pixels.numpy())
        return (output.scores,) if output.reconstruction is None else (output.scores, output.reconstruction)

    return run


def open_program(path: Path) -> Callable[[Tensor], Outputs]:
    """Load a torch.export program, and return the function from pixels to its outputs."""
    with quiet():
        module = torch.export.load(path).module()

    def run(pixels: Tensor) -> Outputs:
        with torch.inference_mode():
            return tuple(output.numpy() for output in module(pixels))

    return run


def _write(
    path: Path,
    contents: bytes,
    open_file: Callable[[Path], Callable[[Tensor], Outputs]],
    network: Network,
    images: Shaped[Tensor, "N C *S"] | None,
) -> Agreement:
    """Write a file and keep it if its outputs differ from the network's by at most ``TOLERANCE``.

    The comparison uses one image, then all images. Where sizes are free, the first halves are compared too.
    """
    pixels = as_pixels(network, random_images(network.in_shape) if images is None else images)
    cases = [pixels[:1], pixels]
    if free := free_axes(network):
        least = smallest_side(network)
        halves = [slice(max(-(-size // 2), least) if axis in free else size) for axis, size in enumerate(pixels.shape)]
        cases.append(pixels[tuple(halves)])
    with atomic_path(path) as temporary:
        temporary.write_bytes(contents)
        try:
            answers = list(map(open_file(temporary), [batch.float().cpu() for batch in cases]))  # and closes the file
        except InputError as error:  # its message begins with the name of the temporary file
            raise InputError(f"{path} was not written: {str(error).partition(': ')[2]}") from error
        differences = [_differences(network, batch, got) for batch, got in zip(cases, answers, strict=True)]
        largest = np.max(differences, axis=0).tolist()  # NaN stays NaN
        for name, each in zip((LENGTHS, RECONSTRUCTION), largest, strict=False):
            if not each <= TOLERANCE:
                raise InputError(
                    f"{path} was not written: its {name} would differ by {each:.1e} from the network's, but at most "
                    f"{TOLERANCE:.0e} is allowed"
                )
    return Agreement(len(pixels), largest[0], largest[1] if len(largest) > 1 else None)


def _differences(network: Network, batch: Shaped[Tensor, "N C *S"], got: Outputs) -> list[float]:
    """Return the largest difference of each output of a file from the network's.

    The network decodes the capsules with the file's highest scores, because rounding decides between equal scores.
    """
    with inference(network):
        scores = torch.from_numpy(got[0])
        chosen = top_classes(scores, network.objects) if network.objects > 1 else None
        chosen = task_of(network).decoded_capsules(scores, None) if chosen is None else chosen
        output = network(in_full_length(network, batch), None if chosen is None else chosen.to(batch.device))
    expected = [output.scores] if output.reconstruction is None else [output.scores, output.reconstruction]
    return [difference(a, b.float().cpu().numpy()) for a, b in zip(got, expected, strict=True)]


def difference(got: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference, divided by the largest expected number if that is above 1."""
    if got.shape != expected.shape:
        return math.inf
    return float(np.abs(got - expected).max() / max(1.0, np.abs(expected).max()))


def _checked(path: str | Path, suffix: str, description: Description, network: Network) -> Path:
    """Check the name of a file and its description of the network; return the path."""
    path = Path(path)
    require_suffix(path, suffix)
    task_of(network).require(suffix, f"a {suffix} file (--format folder has all tasks)")
    if network.per_pixel and len(network.in_shape) == 2:
        raise InputError(f"a {suffix} file holds networks for images and volumes, but this one takes lines")
    described = (description.in_shape, len(description.class_names), description.objects)
    actual = (network.in_shape, network.num_classes, network.objects)
    if described != actual:
        raise InputError(
            "the description does not fit the network: its in_shape, number of class_names and objects are "
            f"{described}, but must be {actual}"
        )
    return path


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the messages of torch's exporters for their developers."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
