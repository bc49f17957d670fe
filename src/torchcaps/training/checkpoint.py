"""Write, read and check ``last.ckpt``, from which a run resumes exactly."""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypedDict

import torch
from torch import Tensor, nn

from torchcaps.checks import check_contents
from torchcaps.datasets.reading import check_archive
from torchcaps.errors import InputError
from torchcaps.files import atomic_path, reading
from torchcaps.models.files.weights import FORMAT, check_format, difference
from torchcaps.parts import build
from torchcaps.ranges import Range

if TYPE_CHECKING:
    from torchcaps.training.recipe import Recipe


class Moments(TypedDict):
    """State of an optimizer for each parameter, by the parameter's number."""

    state: dict[int, dict[str, Any]]


class Checkpoint(TypedDict):
    """Contents of ``last.ckpt``; with averaged weights, ``model`` has the average, and ``trained`` the weights."""

    model: dict[str, Tensor]
    trained: NotRequired[list[Tensor]]
    optimizer: Moments
    progress: dict[str, Any]
    data: list[int]
    settings: dict[str, Any]
    format: NotRequired[Annotated[int, Range(1, 2**31, whole=True)]]


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write tensors and plain values. An OSError, such as a full disk, does not change an earlier checkpoint."""
    contents = io.BytesIO()  # torch's own writer hides the reason of the OSError
    torch.save(dict(state), contents)
    with atomic_path(path) as temporary:
        temporary.write_bytes(contents.getbuffer())


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read ``last.ckpt``. It holds tensors and plain values, and nothing in it is executed.

    Raises:
        InputError: The file is missing, damaged, or not a checkpoint of torchcaps.
    """
    with reading(path, "checkpoint"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings about damaged files do not help users
        with zipfile.ZipFile(path) as archive:  # torch does not check checksums
            check_archive(archive, archive.namelist())
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        _check_tensors("its", checkpoint)
        check_contents("it", checkpoint, Checkpoint)
    check_format(f"checkpoint {path}", checkpoint.get(FORMAT, 1))
    return {part: checkpoint[part] for part in Checkpoint.__annotations__ if part in checkpoint}


def _check_tensors(name: str, contents: Any) -> None:
    """Raise InputError if a tensor is no plain array of real numbers in memory, as all that were written are."""
    if isinstance(contents, Mapping | list | tuple):
        parts = contents.items() if isinstance(contents, Mapping) else enumerate(contents)
        for key, each in parts:
            _check_tensors(f"{name} {key}", each)
    elif isinstance(contents, Tensor):
        is_dense = contents.layout is torch.strided and not (contents.is_nested or contents.is_meta)
        if not is_dense or contents.is_quantized or contents.is_complex():
            form = "nested" if contents.is_nested else "meta" if contents.is_meta else None
            form = form or f"{contents.layout} {contents.dtype}".replace("torch.", "")
            raise InputError(f"{name} is a {form} tensor, but must be a dense one of real numbers")


def check_state(
    network: nn.Module, recipe: Recipe, model: dict[str, Tensor], moments: dict[int, dict[str, Any]]
) -> None:
    """Raise InputError if weights and moments of a checkpoint do not fit the network or are not finite."""
    if wrong := difference(network.state_dict(), model):
        raise InputError(f"its weights do not fit the network: {wrong}")
    expected = moments_after_a_step(recipe, list(network.parameters()))
    required = {f"{n} {key}": each for n in moments for key, each in expected.get(n, {}).items()}
    kept = {f"{n} {key}": each for n, of_one in moments.items() for key, each in of_one.items()}
    if wrong := difference(required, {name: each for name, each in kept.items() if name in required}):
        raise InputError(f"the state of its optimizer does not fit: that of parameter {wrong}")
    names = dict(network.named_parameters())
    numbers = {name: each for name, each in model.items() if name in names} | kept
    for name, each in numbers.items():
        if not torch.as_tensor(each if isinstance(each, Tensor | float) else 0).isfinite().all():
            raise InputError(f"{name} holds numbers that are NaN or infinite")


def check_trained(network: nn.Module, trained: list[Tensor] | None) -> list[Tensor]:
    """Return the trained weights beside an average; raise InputError if they do not fit the network."""
    weights = list(network.parameters())
    if trained is None or [each.shape for each in trained] != [each.shape for each in weights]:
        raise InputError("its trained weights do not fit the network")
    if not all(each.isfinite().all() for each in trained):
        raise InputError("its trained weights hold numbers that are NaN or infinite")
    return trained


def moments_after_a_step(recipe: Recipe, parameters: Sequence[Tensor]) -> dict[int, dict[str, Any]]:
    """Return the optimizer's state for each parameter, by its number, after a step with zero gradients."""
    copies = [nn.Parameter(torch.zeros_like(each)) for each in parameters]
    for each in copies:
        each.grad = torch.zeros_like(each)
    rate: float = recipe.learning_rate
    stepped = build("optimizer", recipe.optimizer, params=copies, learning_rate=rate)
    stepped.step()
    state: dict[int, dict[str, Any]] = stepped.state_dict()["state"]
    return state
