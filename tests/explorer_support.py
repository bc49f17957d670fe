"""What the explorer's tests share: networks, and the wait for the page."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from torchcaps.explorer import Explorer, open_explorer
from torchcaps.models import Network, create_model
from torchcaps.models.files import SHIPPED
from torchcaps.training import load_run

if TYPE_CHECKING:
    from playwright.sync_api import Page


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


def shipped() -> Explorer:
    """The network that comes with torchcaps."""
    return open_explorer(load_run(SHIPPED["compact"]))


def settle(page: Page) -> None:
    """Wait until nothing is asked or drawn any more."""
    page.locator('.explorer[aria-busy="false"] .verdict strong').wait_for()


def png(image: np.ndarray) -> bytes:
    """The contents of an image file."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()
