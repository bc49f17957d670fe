"""Exported networks for pixels take images of other sizes than the patches of their training."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support import assert_close, assert_raises
from torchcaps import create_model
from torchcaps.errors import InputError
from torchcaps.export import Description, OnnxModel, export_onnx, export_program, graphs

for package in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(package, reason="the extra torchcaps[export] is not installed")

SHAPE, CLASSES = (2, 8, 12), ("ground", "disc", "square")
KINDS: dict[str, dict[str, Any]] = {
    "capsules": {
        "preset": "segcaps",
        "layers": [
            {"name": "conv-types", "layer_types": 2, "layer_stride": 2, "layer_padding": "same"},
            {"name": "deconv", "layer_types": 2},
            {"name": "conv-types", "layer_kernel": 1},
        ],
        "num_iterations": 1,
        "decoder_hidden": (4,),
    },
    "unet": {"preset": "unet-twin", "channels": (3, 4), "parameters_of": None},
}
DESCRIPTION = Description(in_shape=SHAPE, class_names=CLASSES, task="pixels")


SIZES = {(2, 8, 12): ((8, 12), (5, 7), (19, 3)), (2, 8, 6, 4): ((8, 6, 4), (5, 7, 3), (3, 4, 9))}
"""Patches on which a network is trained, and sizes of images; planes and volumes."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SIZES, ids=["planes", "volumes"])
def test_a_file_takes_images_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(graphs, "trace", functools.cache(graphs.trace))  # one trace for both files
    load, loaded = torch.export.load, []
    monkeypatch.setattr(torch.export, "load", lambda path: loaded.append(load(path)) or loaded[-1])
    torch.manual_seed(0)
    options, about = dict(KINDS[kind]), dataclasses.replace(DESCRIPTION, in_shape=shape)
    network = create_model(options.pop("preset"), shape, len(CLASSES), **options).eval()
    export_program(network, tmp_path / "model.pt2", about)
    program = loaded[0].module()  # of the file that was compared before it was kept
    agreement = export_onnx(network, tmp_path / "model.onnx", about)
    assert agreement.lengths < 1e-5
    model = OnnxModel(tmp_path / "model.onnx")
    for sizes in SIZES[shape]:
        images = torch.rand(3, 2, *sizes)
        with torch.no_grad():
            output = network(images)
        found = model(images.numpy())
        assert_close(torch.from_numpy(found.scores), output.scores, 1e-5)
        assert found.classes.shape == (3, *sizes)
        assert (found.classes == output.scores.argmax(1).numpy()).mean() > 0.99
        assert_close(program(images)[0], output.scores, 1e-5)
        if output.reconstruction is not None:
            assert found.reconstruction is not None
            assert found.reconstruction.shape == (3, 2, *sizes)
    axes = ", ".join(("depth", "height", "width")[-len(shape) + 1 :])
    wrong = np.zeros((1, 1, *shape[1:]), np.float32)
    says = f"images must have shape (N, 2, {axes}) with N at least 1, got {wrong.shape}"
    assert_raises(InputError, model, wrong, say=says)


def test_lines_have_no_file(tmp_path: Path) -> None:
    network = create_model("unet-twin", (1, 16), 2, channels=(3,), parameters_of=None)
    about = Description(in_shape=(1, 16), class_names=("a", "b"), task="pixels")
    assert_raises(InputError, export_onnx, network, tmp_path / "x.onnx", about, say="but this one takes lines")
