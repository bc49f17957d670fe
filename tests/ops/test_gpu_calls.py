"""What a step asks of a GPU, without one: no wait for its results, and few calls.

Tensors on the meta device have no numbers, so that ``.item()``, ``bool(tensor)`` and all else that would wait for a GPU
is an error.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support import drawn_for, labels_for, small
from torchcaps import create_model, list_presets
from torchcaps.nn import DenseCapsules
from torchcaps.ops import contractions, memory
from torchcaps.ops.fused import layer

VIEWS = (
    "view",
    "transpose",
    "permute",
    "slice",
    "select",
    "expand",
    "empty",
    "detach",
    "alias",
    "unsqueeze",
    "squeeze",
)


class Calls(TorchDispatchMode):
    """Counts the operations that compute something, of which each is at least one kernel on a GPU."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = function.overloadpacket.__name__
        self.number += not any(view in name for view in VIEWS)
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("preset", list_presets())
def test_a_step_never_waits(preset: str) -> None:
    with torch.device("meta"):
        model = create_model(preset, (3, 20, 24), 7, **small(preset)).train()
        images = torch.empty(4, *model.in_shape)
        labels = labels_for(model, 4).to("meta")
        output = model(images, model.decoder_targets(labels))
        model.loss(output, drawn_for(model, images).to("meta"), labels).total.backward()
        assert all(each.grad is not None for each in model.parameters() if each.requires_grad)
        model.eval()(images)


def test_what_waits_is_an_error_on_the_meta_device() -> None:
    number = torch.empty(1, device="meta")
    for wait in (number.item, number.__bool__, number.tolist, number.nonzero):
        with pytest.raises((RuntimeError, NotImplementedError)):
            wait()


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "most"), [(128, 210), (512, 300)])
def test_a_gpu_gets_few_large_calls(batch: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks that suit a CPU's caches would be five times as many calls."""

    def calls() -> int:
        routed, poses = DenseCapsules(1152, 8, 10, 16), torch.randn(batch, 1152, 8, requires_grad=True)
        with Calls() as counted:
            routed(poses).poses.square().sum().backward()
        return counted.number

    gpu = torch.device("meta")  # it has the limits of a small GPU
    on_cpu = calls()
    limit = memory.block_bytes(gpu)
    for module in (layer, contractions):
        monkeypatch.setattr(module, "block_bytes", lambda _: limit)
        monkeypatch.setattr(module, "max_batch_slice", lambda images, _: memory.max_batch_slice(images, gpu))
    assert calls() <= most < on_cpu / 4
