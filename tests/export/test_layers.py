"""A capsule layer alone, as a torch.export program and in ONNX: any batch and number of input capsules, with a mask."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support import assert_close
from torchcaps.errors import InputError
from torchcaps.export.graphs import quiet, to_onnx
from torchcaps.nn import Capsules, DenseCapsules
from torchcaps.parts import PARTS, build, options

for package in ("onnx", "onnxscript", "onnxruntime"):
    onnxruntime = pytest.importorskip(package, reason="the extra torchcaps[export] is not installed")

J, D = 3, 4
OURS = [
    {"name": name} | ({"num_iterations": 2} if "num_iterations" in options(part) else {})  # a smaller graph
    for name, part in PARTS["routing"].items()
    if part.__module__.startswith("torchcaps.") and name != "em"
]
LAYERS: list[tuple[str, Any]] = [
    *(("shared", each) for each in OURS),
    ("shared", {"name": "em", "num_iterations": 2, "cost_scale": 1.0}),
    ("identity", "dynamic"),
    ("common", "b2i"),
    ("common", {"name": "b2i", "start_from": "queries"}),
    ("shared", {"name": "dynamic", "softmax_over": "inputs"}),
    *((layer, {"num_iterations": 2}) for layer in ("slots", "slot-mixture")),
    ("slots", {"num_iterations": 1, "start_from": "queries"}),
]


def layer_of(in_capsules: int | None, transform: str, routing: Any) -> nn.Module:
    """A dense layer, or a layer of slots with these options."""
    if transform in PARTS["layer"]:
        layer: nn.Module = build(
            "layer", {"name": transform} | routing, in_capsules=in_capsules, in_dim=D, out_capsules=J
        )
        return layer
    return DenseCapsules(in_capsules, D, J, D, transform=transform, routing=routing)


class Plain(nn.Module):
    """A layer that takes tensors, and gives one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, poses: Tensor, mask: Tensor) -> Tensor:
        poses, activations, *_ = self.layer(Capsules(poses, mask=mask))
        return poses if activations is None else torch.cat([poses, activations.unsqueeze(2)], 2)


@pytest.mark.slow
@pytest.mark.parametrize(("transform", "routing"), LAYERS, ids=str)
def test_a_row_is_what_its_own_capsules_alone_give(transform: str, routing: Any) -> None:
    sizes = [(1, 1), (3, 2), (4, 11)]
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("number")}
    try:
        layer = layer_of(None, transform, routing)
    except InputError:  # it has weights for each input capsule
        layer, axes = layer_of(8, transform, routing), {0: axes[0]}
        sizes = [(1, 8), (4, 8)]
    module = Plain(layer).eval()
    example = torch.rand(2, 8, D), torch.ones(2, 8, dtype=torch.bool)
    with torch.no_grad(), quiet():
        program = torch.export.export(module, example, dynamic_shapes=(axes, axes), strict=False)
    exported = program.module()
    session = onnxruntime.InferenceSession(to_onnx(program, ["poses", "mask"], ["capsules"]).SerializeToString())
    random = torch.Generator().manual_seed(0)
    for batch, number in sizes:
        mask = torch.rand(batch, number, generator=random) > 0.4
        mask[:, 0] = True
        poses = torch.randn(batch, number, D, generator=random).where(mask.unsqueeze(2), torch.nan)
        if 1 in axes:
            alone = [module(row[there][None], there[there][None]) for row, there in zip(poses, mask, strict=True)]
            wanted = torch.cat(alone).detach()
        else:
            wanted = module(poses, mask).detach()
        (got,) = session.run(None, {"poses": poses.numpy(), "mask": mask.numpy()})
        # variances of narrow slots magnify the rounding of float32
        assert_close(torch.from_numpy(got), wanted, 5e-5 if transform == "slot-mixture" else 1e-5)
        assert_close(exported(poses, mask), wanted, 1e-5)
