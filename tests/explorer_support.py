"""What the explorer's tests share: small networks, the page served beside them, and whether there is a browser."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from torchcaps.models import Network, create_model

if TYPE_CHECKING:
    from torchcaps.explorer import Explorer, Learning

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def no_browser() -> str | None:
    """Why the page cannot be tried in a browser here; None where it can."""
    if importlib.util.find_spec("playwright") is None:
        return "needs playwright: pip install playwright"
    if not any(shutil.which(name) for name in BROWSERS):
        return f"needs a browser: none of {', '.join(BROWSERS)} is installed (apt-get install chromium)"
    return None


def browser_path() -> str:
    """The first browser that is installed."""
    return next(found for name in BROWSERS if (found := shutil.which(name)))


def small_network(
    preset: str = "sabour2017", num_classes: int = 4, in_shape: tuple[int, int, int] = (1, 18, 20), **fields: Any
) -> Network:
    """An untrained network, in evaluation mode, whose coupling differs from uniform."""
    torch.manual_seed(0)
    small: dict[str, Any] = {"channels": (2, 2), "hidden": (6,)}
    if preset != "baseline-cnn":
        small = {"conv_channels": 6, "primary_types": 3, "capsule_dim": 5}
        small |= {"decoder_hidden": (8,)} if fields.get("decoder", True) else {}
    model = create_model(preset, in_shape, num_classes, **(small | fields)).eval()
    if hasattr(model, "class_capsules"):
        with torch.no_grad():
            model.class_capsules.transform.weight.mul_(100)
    return model


@contextmanager
def served(*explorers: Explorer, learning: Learning | None = None) -> Iterator[str]:
    """The address of the page, served in a thread meanwhile."""
    from torchcaps.explorer import serving

    with serving(explorers, 0, learning) as address:
        yield f"{address}/"
