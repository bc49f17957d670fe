"""ONNX files and torch.export programs, compared with the network before they are left behind."""

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

from torchcaps.analysis.inference import as_pixels, classes_of, inference
from torchcaps.checks import checked
from torchcaps.errors import InputError, install
from torchcaps.export.description import Description
from torchcaps.export.onnx_model import ANY_LENGTH, INPUT, LENGTHS, RECONSTRUCTION, OnnxModel
from torchcaps.export.record import random_images
from torchcaps.files import atomic_path
from torchcaps.models import Network
from torchcaps.nn import SequenceBackbone
from torchcaps.tasks import task_of

OPSET = 18
"""ONNX's version of operators: the oldest that torch's exporter writes, for the most runtimes."""
TOLERANCE = 1e-4
"""The largest difference from the network's own output that a file may have; of numbers above 1, relative to them."""
DESCRIPTION = "torchcaps.json"
"""Where a torch.export program keeps its description."""
ONNX_LIMIT = 2**31 - 2**20
"""Bytes of weights that an ONNX file holds, less room for the graph: protobuf takes no more than 2 GiB."""

Outputs = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Agreement:
    """How far a file's output is from the network's, of one image and of all together."""

    images: int
    """How many images were compared."""
    lengths: float
    """Largest difference of the class scores, the file's ``lengths``."""
    reconstruction: float | None
    """Largest difference of the reconstructed pixels; None without a decoder."""

    def __str__(self) -> str:
        drawn = "" if self.reconstruction is None else f", of a reconstructed pixel {self.reconstruction:.1e}"
        return f"largest difference of a score {self.lengths:.1e}{drawn}, in batches of 1 and {self.images}"


@checked
def export_onnx(
    network: Network, path: str | Path, description: Description, images: Shaped[Tensor, "N C H W"] | None = None
) -> Agreement:
    """Write a network as an ONNX file for any batch size, and compare it with the network.

    The file takes ``images`` (B, C, H, W), float32 pixels 0..1, and gives ``lengths`` (B, J), the class scores, and,
    with a decoder, ``reconstruction`` (B, C, H, W), or (B, P, C, H, W) of P objects in an image, from the capsules of
    the highest scores. Of a network for sequences it takes (B, C, 1, l), of any length l up to W, NaN after the end of
    a row. All weights are in it; it names no file, no path and no line of source.

    Args:
        network: Its weights are written as float32.
        path: Where to; it must end in ``.onnx``.
        description: What the file says of the network.
        images: Images or sequences to compare on, at least one; random ones if None.

    Raises:
        InputError: The file's output differs from the network's by more than 1e-4, and is not left behind; the
            network is too large for one file; the description is not of this network; or a package of the extra
            ``export`` is not installed.
        OSError: The file cannot be written.
    """
    path = _checked(path, ".onnx", description, network)
    try:
        import onnx
        import onnxruntime  # noqa: F401  found missing before the work, not after it
        import onnxscript  # noqa: F401  likewise
    except ImportError as error:
        raise InputError(f"an ONNX file needs the package {error.name}: {install('export')}") from None
    size = sum(parameter.numel() * 4 for parameter in network.parameters())
    if size > ONNX_LIMIT:
        raise InputError(f"the weights take {size / 2**30:.1f} GiB, an ONNX file holds 2 GiB; take a torch program")
    program = trace(network)
    names = [LENGTHS, RECONSTRUCTION][: len(program.graph_signature.user_outputs)]
    model = to_onnx(program, [INPUT], names)
    if takes_sequences(network):
        model.graph.input[0].type.tensor_type.shape.dim[3].dim_param = ANY_LENGTH
    for each in (*model.graph.input, *model.graph.output):
        each.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.helper.set_model_props(model, description.to_metadata())
    return _write(path, model.SerializeToString(), run_onnx, network, images)


@checked
def export_program(
    network: Network, path: str | Path, description: Description, images: Shaped[Tensor, "N C H W"] | None = None
) -> Agreement:
    """Write a network as a torch.export program for any batch size, and compare it with the network.

    ``torch.export.load(path).module()`` takes what an ONNX file takes, and gives the tuple ``(lengths,
    reconstruction)``, or ``(lengths,)`` without a decoder. It needs torch, but not torchcaps. It also
    unpickles, so a file made for it can execute code: load one only from people you trust.

    Arguments and errors are those of :func:`export_onnx`, but ``path`` must end in ``.pt2``, the description is JSON in
    the program's extra file ``torchcaps.json``, no other package is needed, and no size is too large.
    """
    path = _checked(path, ".pt2", description, network)
    program = trace(network)
    contents = io.BytesIO()
    with quiet():
        torch.export.save(program, contents, extra_files={DESCRIPTION: json.dumps(description.to_dict())})
    return _write(path, contents.getvalue(), run_program, network, images)


class _Outputs(nn.Module):
    """A network that takes images alone and gives what it has of (scores, reconstruction), for inference."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Float[Tensor, "B C H W"]) -> tuple[Tensor, ...]:
        output = self.network(in_full_length(self.network, images))
        return (output.scores,) if output.reconstruction is None else (output.scores, output.reconstruction)


def takes_sequences(network: Network) -> bool:
    """Whether padding changes no result of a network, so that it can take rows of any length."""
    return isinstance(getattr(network, "backbone", None), SequenceBackbone)


def in_full_length(network: Network, images: Float[Tensor, "B C H w"]) -> Float[Tensor, "B C H W"]:
    """Images as they are; sequences padded with NaN to the length that their network was built for."""
    if not takes_sequences(network):
        return images
    return F.pad(images, (0, network.in_shape[2] - images.shape[3]), value=math.nan)


def trace(network: Network) -> ExportedProgram:
    """The network as torch.export sees it, made of torch's own operations, for any number of images.

    Lines of source, which would name paths of this machine, are left out.
    """
    traced = _Outputs(copy.deepcopy(network).float().cpu()).eval()
    example = as_pixels(network, random_images(network.in_shape, 2))  # a single image would fix the batch size
    axes = {0: Dim("batch")} | ({3: Dim(ANY_LENGTH, max=network.in_shape[2])} if takes_sequences(network) else {})
    with torch.no_grad(), quiet():
        program = torch.export.export(traced, (example.float().cpu(),), dynamic_shapes=(axes,), strict=False)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def to_onnx(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """A program in ONNX, without the exporter's notes, among them paths of this machine."""
    with quiet():
        # its optimizer takes 1e-9 for zero, and leaves it out of sums
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


def run_onnx(path: Path, pixels: Tensor) -> Outputs:
    """The outputs of an ONNX file."""
    said = OnnxModel(path)(pixels.numpy())
    return (said.scores,) if said.reconstruction is None else (said.scores, said.reconstruction)


def run_program(path: Path, pixels: Tensor) -> Outputs:
    """The outputs of a torch.export program."""
    with quiet():
        module = torch.export.load(path).module()
    with torch.inference_mode():
        return tuple(output.numpy() for output in module(pixels))


def _write(
    path: Path,
    contents: bytes,
    run: Callable[[Path, Tensor], Outputs],
    network: Network,
    images: Shaped[Tensor, "N C H W"] | None,
) -> Agreement:
    """Write a file, if its outputs, one at a time and all at once, are the network's up to ``TOLERANCE``.

    The network decodes the capsules whose scores the file found highest: where two are equal, rounding may choose
    either. Sequences are also compared without their second half.
    """
    pixels = as_pixels(network, random_images(network.in_shape) if images is None else images)
    cases, differences = [pixels[:1], pixels], []
    if takes_sequences(network):
        cases.append(pixels[..., : -(-pixels.shape[3] // 2)])
    with atomic_path(path) as temporary:
        temporary.write_bytes(contents)
        for given in cases:
            try:
                got = run(temporary, given.float().cpu())
            except InputError as error:  # it names a temporary file
                raise InputError(f"{path} was not written: {str(error).partition(': ')[2]}") from error
            with inference(network):
                chosen = classes_of(torch.from_numpy(got[0]), network.objects)
                output = network(in_full_length(network, given), chosen.to(pixels.device))
            wanted = [output.scores] if output.reconstruction is None else [output.scores, output.reconstruction]
            differences.append([difference(a, b.float().cpu().numpy()) for a, b in zip(got, wanted, strict=True)])
        largest = np.max(differences, axis=0).tolist()  # NaN stays NaN
        for name, each in zip((LENGTHS, RECONSTRUCTION), largest, strict=False):
            if not each <= TOLERANCE:
                raise InputError(
                    f"{path} was not written: its {name} would differ by {each:.1e} from the network's; "
                    f"{TOLERANCE:.0e} is allowed"
                )
    return Agreement(len(pixels), largest[0], largest[1] if len(largest) > 1 else None)


def difference(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference; of numbers above 1, in relation to the largest of them."""
    if got.shape != wanted.shape:
        return math.inf
    return float(np.abs(got - wanted).max() / max(1.0, np.abs(wanted).max()))


def _checked(path: str | Path, suffix: str, description: Description, network: Network) -> Path:
    """Where a file is written to, if its name ends as it must and what it is to say is true of the network."""
    path = Path(path)
    if path.suffix.lower() != suffix:
        raise InputError(f"the file must end in {suffix}, got {path}")
    task_of(network).require(suffix, f"a {suffix} file (--format folder has all tasks)")
    said = (description.in_shape, len(description.class_names), description.objects)
    wanted = (network.in_shape, network.num_classes, network.objects)
    if said != wanted:
        raise InputError(
            "the description must be of the network: its in_shape, number of class_names and objects are "
            f"{said}, the network's {wanted}"
        )
    return path


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch's exporters say to their developers."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
