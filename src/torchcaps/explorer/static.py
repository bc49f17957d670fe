"""Write the page as a folder of static files; the network then runs in the visitor's browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from torchcaps.analysis.calibration import MIN_RUNNER_UP_RATIO
from torchcaps.checks import checked
from torchcaps.datasets.scaling import as_bytes
from torchcaps.errors import InputError
from torchcaps.explorer.questions import describe, encode
from torchcaps.explorer.server import ABOUT, PAGE
from torchcaps.explorer.state import Explorer
from torchcaps.files import atomic_folder, require_new_folder
from torchcaps.models import CapsNet
from torchcaps.nn import ChannelNorm, ConvBackbone, Convolution
from torchcaps.parts import describe as describe_part
from torchcaps.tasks import task_of

MAX_IMAGES = 100
"""Images to pick from."""
STATIC_NAMES = {"page.html": "index.html", "browser.js": "ask.js"}
"""Files of the page that have another name on a page without a server."""
UNPREPARED = "Photos are only resized here, not prepared: use a photo of light ink on black."
SUPPORTED: dict[str, Any] = {
    "name": "capsules",
    "objects": 1,
    "pixel_scale": 1.0,
    "standardise": False,
    "backbone": {"name": "conv", "stem_strides_across": ()},
    "primary_capsules": {
        "name": "conv",
        "primary_padding": 0,
        "primary_activation": "none",
        "primary_separate_convs": False,
        "grouping": "channels",
        "primary_output": "squash",
        "primary_norm": "none",
        "primary_activations": False,
        "primary_depthwise": False,
    },
    "layers": {
        "name": "dense",
        "transform": {"name": "dense"},
        "routing": {
            "name": "dynamic",
            "softmax_over": "outputs",
            "leaky": False,
            "capsule_bias": False,
            "learn_prior": False,
        },
        "coordinates": "none",
    },
    "decoder": {"name": "dense", "decoder_channels": ()},
}
"""Settings of the networks that ``page/browser.js`` computes, such as sabour2017 and compact."""


@checked
def write_page(explorer: Explorer, folder: Path) -> None:
    """Write the explorer's page for any web server; the network is computed in the browser.

    Args:
        explorer: A network; its first hundred images are written, too.
        folder: New or empty folder, for ``index.html`` and the other files.

    Raises:
        InputError: The folder is not empty, or the network has parts that the page cannot compute.
    """
    require_new_folder(folder)
    network = describe_network(explorer)
    about = describe(explorer) | {"prepares": False, "images": len(network["pixels"])}
    if explorer.preparation is not None:
        about["unprepared"] = UNPREPARED
    weights = {name: value.detach().float().cpu().contiguous() for name, value in explorer.model.named_parameters()}
    halves = {name: value.half() for name, value in weights.items()}
    fits = all(
        torch.equal(halves[name].float(), value) for name, value in weights.items()
    )  # true of the shipped network
    written = save(halves if fits else weights)
    network["bytes"] = len(written)
    facts = json.dumps({"networks": [about], "browser": network}, default=encode)
    with atomic_folder(folder) as page:
        for file in PAGE.iterdir():
            if file.name != "ask.js":
                shutil.copyfile(file, page / STATIC_NAMES.get(file.name, file.name))
        (page / "about.js").write_text(f"{ABOUT}{facts};", encoding="utf-8")
        (page / "weights.safetensors").write_bytes(written)


def describe_network(explorer: Explorer) -> dict[str, Any]:
    """Return the facts that ``page/browser.js`` needs to compute the network, and the images to pick from."""
    model, calibration, images = explorer.model, explorer.calibration, explorer.images
    config = describe_part(model)
    for name, value, supported in differences(config | {"layers": config.get("layers", [{}])[-1]}, SUPPORTED):
        raise InputError(
            f"a page without a server computes networks with {name} {supported!r}, but this one has {value!r}"
        )
    assert isinstance(model, CapsNet)
    assert isinstance(model.backbone, ConvBackbone)
    assert model.decoder is not None
    if len(model.layers) != 1:
        raise InputError(f"a page without a server computes networks with one capsule layer, got {len(model.layers)}")
    primary, routing = config["primary_capsules"], config["layers"][0]["routing"]
    is_ordinal = task_of(model).score_name == "score"
    pixels = [] if images is None else list(as_bytes(images.images[:MAX_IMAGES].numpy()))
    return {
        "backbone": list(steps(model.backbone, "backbone")),
        "primary": {
            "name": "primary_capsules.convs.0",
            "dim": primary["primary_dim"],
            "stride": primary["primary_stride"],
            "eps": primary["squash_eps"],
        },
        "routing": {
            "name": "layers.0.transform.weight",
            "iterations": routing["num_iterations"],
            "eps": routing["squash_eps"],
        },
        "decoder": [f"decoder.{name}" for name, each in model.decoder.named_modules() if isinstance(each, nn.Linear)],
        "lengthEps": config["length_eps"],
        "isOrdinal": is_ordinal,
        "calibration": vars(calibration),
        "near": MIN_RUNNER_UP_RATIO,
        "fit": explorer.fit,
        "scale": explorer.scale,
        "pixels": pixels,
        "labels": [explorer.pick(index)[1] for index in range(len(pixels))],
    }


def differences(config: Any, supported: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each setting of a network that differs from ``supported``: name, value, supported value."""
    for name, expected in supported.items():
        value = config.get(name) if isinstance(config, dict) else None
        if isinstance(expected, dict):
            yield from differences(value, expected, f"{prefix}{name}.")
        elif value != expected:
            yield prefix + name, value, expected


def steps(backbone: ConvBackbone, prefix: str) -> Iterator[dict[str, Any]]:
    """Yield the layers of a backbone in order, in the form that ``page/browser.js`` reads."""
    for name, module in backbone.named_modules(prefix=prefix):
        if isinstance(module, Convolution):
            yield {"kind": "convolution", "name": name, "stride": module.stride[0]}
        elif isinstance(module, ChannelNorm):
            yield {"kind": "norm", "name": name, "eps": module.eps}
        if isinstance(module, nn.ReLU) or (module is backbone.conv and backbone.joins_relu):
            yield {"kind": "relu"}
