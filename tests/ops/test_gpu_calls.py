"""What a step asks of a GPU, without one: no wait for its results, and few calls.

Tensors on the meta device have no numbers, so that ``.item()``, ``bool(tensor)`` and all else that would wait for a GPU
is an error.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support import drawn_for, labels_for, small
from torchcaps import create_model, list_presets
from torchcaps.kernels import dense, memory
from torchcaps.nn.routing import dynamic

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

    def __init__(self) -> None:
        super().__init__()
        self.number, self.names = 0, list[str]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = function.overloadpacket.__name__
        self.names.append(str(function))
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


STEPS = {"sabour2017": (128, 260), "hinton2018-paper": (128, 970), "vb2020": (32, 1400), "compact": (128, 290)}
"""Images of a step, and the most calls that it may make."""


@pytest.fixture
def large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the meta device have the memory of a large GPU."""
    monkeypatch.setattr(memory, "gpu_memory_mib", lambda _: 128 * 1024.0)


@pytest.mark.slow
@pytest.mark.usefixtures("large_gpu")
@pytest.mark.parametrize("preset", STEPS)
def test_a_gpu_gets_as_few_calls_as_from_plain_code(preset: str) -> None:
    batch, most = STEPS[preset]
    with torch.device("meta"):
        model = create_model(preset).train()
        images, labels = torch.empty(batch, *model.in_shape), torch.zeros(batch, dtype=torch.long)
        with Calls() as counted:
            output = model(images, model.decoder_targets(labels))
            model.loss(output, images, labels).total.backward()
    assert counted.number <= most
    assert not any(name.startswith("torchcaps::") for name in counted.names)


@pytest.mark.slow
@pytest.mark.usefixtures("large_gpu")
@pytest.mark.parametrize("preset", [*STEPS, "segcaps"])
def test_a_compiled_graph_on_a_gpu_has_operations_of_pytorch_only(preset: str) -> None:
    names: set[str] = set()

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        names.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    with torch.device("meta"):
        model = create_model(preset, (1, 32, 32) if preset == "segcaps" else None).train()
    images, labels = torch.empty(2, *model.in_shape, device="meta"), labels_for(model, 2).to("meta")
    torch.compile(model, backend=backend, fullgraph=True)(images, model.decoder_targets(labels))
    assert names
    assert not any("torchcaps" in name for name in names)


@pytest.mark.parametrize("call", ["auto", "recompute", "reference", "auto, little memory"])
def test_where_the_kernel_runs(call: str) -> None:
    """On a device other than the CPU, only on request, or if the votes exceed a memory set by hand."""
    backend, _, little = call.partition(", ")
    memory.set_working_memory(1e-3 if little else None)
    tensors = dense.Tensors(torch.empty(4, 6, 3, device="meta"), torch.empty(6, 5, 4, 3, device="meta"), None)
    options = dense.Options(3, False, False, False, 1e-7)
    runs = dynamic._route.runs_kernel(tensors, options, backend)  # type: ignore[arg-type]  # a backend
    assert runs == (backend == "recompute" or bool(little))
    on_cpu = dense.Tensors(torch.empty(4, 6, 3), torch.empty(6, 5, 4, 3), None)
    assert dynamic._route.runs_kernel(on_cpu, options, backend) == (backend != "reference")  # type: ignore[arg-type]
