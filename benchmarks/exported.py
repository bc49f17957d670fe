"""The section ``export`` of speed.py: exported networks by onnxruntime beside PyTorch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from contenders import Row, Sizes, compare, expect

from torchcaps.export import Description, OnnxModel, export_onnx
from torchcaps.models import create_model


def export(sizes: Sizes) -> Iterator[Row]:
    """Lengths and reconstructions of exported networks by onnxruntime against PyTorch, random weights."""
    for preset in sizes.export_presets:
        torch.manual_seed(0)
        model = create_model(preset).eval()
        names = tuple(str(j) for j in range(model.num_classes))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            export_onnx(model, path, Description(in_shape=model.in_shape, class_names=names, preset=preset))
            exported = OnnxModel(path, torch.get_num_threads())
            for batch in (1, 32):
                images = torch.rand(batch, *model.in_shape)
                plain = torch.inference_mode()(partial(model, images))
                expect(f"{preset}, exported", torch.from_numpy(exported(images.numpy()).scores), plain().scores, 1e-4)
                works: dict[str, Callable[[], object]] = {
                    "torch": plain,
                    "onnxruntime": partial(exported, images.numpy()),
                }
                yield compare(
                    f"{preset}, {batch} image{'s' * (batch > 1)}: torch ÷ onnxruntime",
                    works,
                    sizes.rounds,
                    sizes.seconds,
                )
