"""What the layers ask of the tensors that they are given."""

from __future__ import annotations

from torch import Tensor


def check_tensor(caller: str, name: str, tensor: Tensor, shape: tuple[int | str, ...]) -> None:
    """Raise unless ``tensor`` is floating-point and of a shape.

    Args:
        caller: The layer or function to name in an error.
        name: The argument.
        tensor: Its value.
        shape: The sizes wanted; a letter stands for any size.

    Raises:
        TypeError: No tensor, or one that is not floating-point.
        ValueError: Another shape.
    """
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{caller}: {name} must be a floating-point tensor, got {got}")
    fits = tensor.ndim == len(shape) and all(
        isinstance(wanted, str) or size == wanted for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{caller}: {name} must have shape ({', '.join(map(str, shape))}), got {tuple(tensor.shape)}")
