"""All networks and routings on a CUDA device, beside the CPU in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support import assert_as_exact, assert_finite, assert_same, drawn_for, labels_for, routings, small
from tiny_runs import rows, tiny_config, write_bars
from torchcaps import create_model, list_presets
from torchcaps.cli import main
from torchcaps.nn import Capsules, ConvCapsules, ConvTypeCapsules, DeconvCapsules, DenseCapsules
from torchcaps.training import Progress, load_run, resume, train

pytestmark = pytest.mark.gpu

ROUTINGS = routings(
    **{
        "dynamic, stopped": {"name": "dynamic", "stop_gradient": True},
        "dynamic, capsule bias": {"name": "dynamic", "capsule_bias": True},
    }
)
TYPES: dict[str, Any] = {"layer_kernel": 3, "layer_padding": "same"}
#: Layers by kind, with the sizes of their input and of its map.
LAYERS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], tuple[int, ...] | None]] = {
    "dense": (lambda routing: DenseCapsules(36, 8, 5, 16, routing=routing), (4, 36, 8), None),
    "map": (
        lambda routing: ConvCapsules(4, 16, 5, 16, transform="matrix", routing=routing),
        (2, 4 * 7 * 6, 16),
        (4, 7, 6),
    ),
    "plane": (
        lambda routing: ConvTypeCapsules(4, 8, 5, 8, dims=2, transform="shared", routing=routing, **TYPES),
        (2, 4 * 9 * 8, 8),
        (4, 9, 8),
    ),
    "plane, up": (
        lambda routing: DeconvCapsules(4, 8, 5, 8, dims=2, transform="dense", routing=routing),
        (2, 4 * 5 * 6, 8),
        (4, 5, 6),
    ),
    "volume": (
        lambda routing: ConvTypeCapsules(4, 8, 2, 8, dims=3, transform="dense", routing=routing, **TYPES),
        (1, 4 * 5 * 4 * 6, 8),
        (4, 5, 4, 6),
    ),
}


@pytest.fixture(autouse=True)
def _full_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def on_cpu(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.detach().cpu().double() for name, each in found.items()}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_layer_gives_what_the_cpu_gives(routing: str, kind: str) -> None:
    make, size, grid = LAYERS[kind]
    layer, poses, active = make(ROUTINGS[routing]).eval(), torch.randn(size), torch.rand(size[:2])

    def found(device: str, dtype: torch.dtype) -> dict[str, Tensor]:
        module = copy.deepcopy(layer).to(device, dtype)
        leaves = {"poses": poses, "active": active}
        leaves = {name: each.to(device, dtype).requires_grad_() for name, each in leaves.items()}
        leaves |= dict(module.named_parameters())
        out = module(Capsules(leaves["poses"], leaves["active"], grid))
        outputs = {"out": out.poses} | ({} if out.activations is None else {"activations": out.activations})
        learned = [each for each in outputs.values() if each.requires_grad]
        random = torch.Generator().manual_seed(1)
        cotangents = [torch.randn(each.shape, generator=random).to(device, dtype) for each in learned]
        grads = torch.autograd.grad(learned, list(leaves.values()), cotangents, materialize_grads=True)
        return on_cpu(outputs | {f"d {name}": grad for name, grad in zip(leaves, grads, strict=True)})

    exact = found("cpu", torch.float64)
    assert_same(found("cuda", torch.float64), exact, 1e-9)
    assert_as_exact(found("cuda", torch.float32), found("cpu", torch.float32), exact, 1e-4)


def loss_of(model: Any, device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Scores and loss of three images."""
    random = torch.Generator().manual_seed(0)
    images = torch.rand(3, *model.in_shape, generator=random).to(device, dtype)
    labels = labels_for(model, 3).to(device)
    output = model(images, model.decoder_targets(labels))
    return output.scores, model.loss(output, drawn_for(model, images), labels).total


@pytest.mark.parametrize("preset", list_presets())
def test_a_network_gives_what_the_cpu_gives(preset: str) -> None:
    network = create_model(preset, (3, 20, 24), 7, **small(preset)).eval()

    def found(device: str) -> dict[str, Tensor]:
        model = copy.deepcopy(network).to(device, torch.float64)
        scores, loss = loss_of(model, device, torch.float64)
        loss.backward()
        grads = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        with torch.no_grad():
            answer = loss_of(model, device, torch.float64)[0]
        return on_cpu({"scores": scores, "loss": loss, "answer": answer} | grads)

    assert_same(found("cuda"), found("cpu"), 1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("preset", list_presets())
def test_a_network_learns_in_half_precision(preset: str, dtype: torch.dtype) -> None:
    model = create_model(preset, (3, 20, 24), 7, **small(preset)).cuda().train()
    with torch.autocast("cuda", dtype):
        scores, loss = loss_of(model, "cuda")
    loss.backward()
    assert loss.dtype == torch.float32
    assert_finite([scores, loss, *(each.grad for each in model.parameters())])


@pytest.mark.parametrize("preset", ["sabour2017", "first"])
def test_a_run_is_resumed_evaluated_and_used_on_the_cpu(preset: str, tmp_path: Path) -> None:
    bars = write_bars(tmp_path / "bars.npz")
    options: dict[str, Any] = {"accelerator": "cuda", "schedule": "constant"}
    options |= {} if preset == "sabour2017" else small(preset)
    out, whole = tmp_path / "run", tmp_path / "whole"
    train(tiny_config(bars, preset, **options), whole, progress=Progress(), figures=False)
    train(tiny_config(bars, preset, epochs=1, **options), out, progress=Progress(), figures=False)
    resume(out, overrides={"epochs": 3}, progress=Progress(), figures=False)
    losses = [[float(row["train_loss"]) for row in rows(each)] for each in (out, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)  # half precision, and sums in any order
    assert main(["evaluate", str(out), "--accelerator", "cuda"]) == 0
    model = load_run(out, device="cpu").model
    assert next(model.parameters()).device.type == "cpu"
    assert_finite(model.parameters())
