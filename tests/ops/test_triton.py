"""The Triton kernels against the float64 reference: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from support import assert_close, assert_finite, assert_raises, holds
from torchcaps.ops.dynamic_routing import triton as backend
from torchcaps.ops.dynamic_routing.options import Options
from torchcaps.ops.dynamic_routing.reference import compute_votes, route_votes
from torchcaps.ops.dynamic_routing.triton import is_available, route_triton, supports

NO_TRITON = "needs Triton: pip install triton"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HAS_TRITON = importlib.util.find_spec("triton") is not None

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)

if HAS_TRITON and DEVICE.type == "cpu":
    # whether kernels are interpreted is settled when Triton is imported
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from triton.runtime.interpreter import InterpretedFunction

        from torchcaps.ops.dynamic_routing import triton_kernels
    if not isinstance(triton_kernels.coupling_kernel, InterpretedFunction):
        pytest.skip(
            "Triton was imported before its interpreter was chosen: run this file alone", allow_module_level=True
        )


@pytest.fixture(autouse=True)
def _interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


class Layer(NamedTuple):
    """Inputs in float64, which both sides round to the dtype they compute in."""

    poses: Tensor
    weight: Tensor
    bias: Tensor | None
    prior: Tensor | None


def make(B: int, I: int, J: int, D: int, K: int, extras: bool = False) -> Layer:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    return Layer(
        randn(B, I, K), 0.5 * randn(I, J, D, K), randn(J, D) if extras else None, randn(I, J) if extras else None
    )


def iterated(number: int) -> Options:
    """The paper's options."""
    return Options(number, over_inputs=False, stop_gradient=False, leaky=False, eps=1e-7)


def results(
    layer: Layer,
    dtype: torch.dtype,
    use_triton: bool,
    num_iterations: int = 3,
    softmax_over: str = "outputs",
    stop_gradient: bool = False,
    leaky: bool = False,
) -> dict[str, Tensor | None]:
    """Capsules, coupling and all gradients, of a loss that takes both."""
    leaves = {
        name: None if tensor is None else tensor.to(DEVICE, dtype).detach().requires_grad_()
        for name, tensor in layer._asdict().items()
    }
    poses, weight, bias, prior = leaves.values()
    assert poses is not None
    assert weight is not None
    if use_triton:
        options = Options(num_iterations, softmax_over == "inputs", stop_gradient, leaky, 1e-7)
        capsules, coupling = route_triton(poses, weight, bias, prior, options, True)
    else:
        votes = compute_votes(poses, weight)
        capsules, coupling = route_votes(votes, num_iterations, softmax_over, stop_gradient, bias, prior, leaky, 1e-7)
    assert coupling is not None
    assert capsules.dtype == coupling.dtype == dtype
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros((), device=DEVICE)
    for output in (capsules, coupling):
        grad = torch.randn(output.shape, dtype=torch.float64, generator=generator).to(DEVICE, dtype)
        if output.requires_grad:
            loss = loss + (output * grad).sum()
    loss.backward()
    for leaf in leaves.values():
        assert leaf is None or leaf.grad is None or leaf.grad.dtype == dtype
    return {"capsules": capsules.detach(), "coupling": coupling.detach()} | {
        f"gradient of {name}": None if leaf is None else leaf.grad for name, leaf in leaves.items()
    }


def assert_as_exact(got: Tensor, plain: Tensor, exact: Tensor) -> None:
    """The error is at most twice that of plain PyTorch in the same precision, or three roundings."""
    scale = exact.double().norm()
    ours, theirs = ((x.double() - exact.double()).norm() for x in (got, plain))
    assert ours <= max(2 * theirs, 3 * torch.finfo(got.dtype).eps * scale), (ours / scale, theirs / scale)


def check(layer: Layer, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    rounded = Layer(*(None if tensor is None else tensor.to(dtype).double() for tensor in layer))
    got, plain = (results(layer, dtype, use_triton, **options) for use_triton in (True, False))
    exact = results(rounded, torch.float64, False, **options)
    for name, value in exact.items():
        if value is None:
            assert got[name] is None, f"there should be no {name}"
        else:
            ours, theirs = got[name], plain[name]
            assert ours is not None, name
            assert theirs is not None, name
            assert_as_exact(ours, theirs, value)


def test_exactness_helper_fails() -> None:
    exact = torch.ones(4, dtype=torch.float64)
    off = exact.float() + 1e-4
    assert holds(assert_as_exact, off, off, exact)
    assert holds(assert_as_exact, exact.float() + 1e-7, exact.float(), exact)
    assert not holds(assert_as_exact, off, exact.float(), exact)
    assert not holds(assert_as_exact, exact.float() + 3e-4, off, exact)
    assert not holds(assert_as_exact, exact.float() * float("nan"), off, exact)


@pytest.mark.parametrize("num_iterations", [1, 3])
@pytest.mark.parametrize("softmax_over", ["outputs", "inputs"])
@pytest.mark.parametrize("stop_gradient", [False, True])
@pytest.mark.parametrize(("leaky", "extras"), [(False, False), (True, False), (False, True), (True, True)])
def test_options(num_iterations: int, softmax_over: str, stop_gradient: bool, leaky: bool, extras: bool) -> None:
    check(
        make(2, 5, 2, 2, 2, extras),
        num_iterations=num_iterations,
        softmax_over=softmax_over,
        stop_gradient=stop_gradient,
        leaky=leaky,
    )


@pytest.mark.parametrize(
    "size",  # B, I, J, D, K
    [
        pytest.param((1, 1, 1, 1, 1), id="ones"),
        pytest.param((1, 63, 3, 5, 3), id="two tiles of input capsules, odd everything"),
        pytest.param((5, 33, 2, 3, 2), id="two tiles of images"),
        pytest.param((3, 4, 2, 16, 9), id="two pieces of an output capsule"),
        pytest.param((3, 4, 2, 11, 2), id="an output capsule of a prime size"),
        pytest.param((2, 3, 2, 2, 32), id="the longest input capsules"),
    ],
)
def test_sizes(size: tuple[int, int, int, int, int]) -> None:
    check(make(*size, extras=True), num_iterations=2)


@pytest.mark.parametrize("softmax_over", ["outputs", "inputs"])
@pytest.mark.parametrize("programs", [1, 8, 256])
def test_several_images_a_thread_and_tiles_a_split(
    monkeypatch: pytest.MonkeyPatch, softmax_over: str, programs: int
) -> None:
    blocks = backend._Blocks(warps=2, images=2, warps_of_sum=1, images_of_sum=4, components=2)
    monkeypatch.setattr(backend, "_choose_blocks", lambda *_: blocks)
    monkeypatch.setattr(backend, "PROGRAMS", programs)  # the 3 tiles of input capsules in 1, 2 and 3 splits
    check(make(5, 70, 2, 2, 1, extras=True), num_iterations=2, softmax_over=softmax_over)


@pytest.mark.parametrize("leaky", [False, True])
def test_long_rows_are_normalised_in_pieces(monkeypatch: pytest.MonkeyPatch, leaky: bool) -> None:
    monkeypatch.setattr(backend, "ROW_BLOCK", 16)
    check(make(1, 37, 2, 2, 1), num_iterations=2, softmax_over="inputs", leaky=leaky)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softmax_over", ["outputs", "inputs"])
def test_half_inputs(dtype: torch.dtype, softmax_over: str) -> None:
    check(make(2, 9, 3, 4, 2, extras=True), dtype, num_iterations=2, softmax_over=softmax_over)


def test_mixed_inputs_give_the_wider_type() -> None:
    layer = make(2, 5, 3, 2, 2)
    poses, weight = layer.poses.to(DEVICE, torch.bfloat16), layer.weight.to(DEVICE, torch.float32)
    poses.requires_grad_()
    capsules, _ = route_triton(poses, weight, None, None, iterated(2), False)
    wanted, _ = route_votes(compute_votes(poses.float(), weight), 2, "outputs", False, None, None, False, 1e-7)
    assert capsules.dtype == torch.float32
    assert_close(capsules, wanted, 1e-5)
    capsules.sum().backward()
    assert poses.grad is not None
    assert poses.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("return_coupling", [False, True])
def test_no_routing_is_the_sum_of_the_votes(return_coupling: bool) -> None:
    poses, weight, bias, prior = (tensor.to(DEVICE, torch.float32) for tensor in make(2, 5, 3, 2, 4, True))
    got, coupling = route_triton(poses, weight, bias, prior, iterated(0), return_coupling)
    wanted, ones = route_votes(compute_votes(poses, weight), 0, "outputs", False, bias, prior, False, 1e-7)
    assert_close(got, wanted, 1e-5)
    assert coupling is None if not return_coupling else torch.equal(coupling, ones)


@pytest.mark.parametrize("softmax_over", ["outputs", "inputs"])
def test_two_runs_give_the_same_bits(softmax_over: str) -> None:
    layer = make(3, 40, 2, 2, 2, extras=True)
    runs = (results(layer, torch.float32, True, num_iterations=2, softmax_over=softmax_over) for _ in range(2))
    first, second = runs
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("softmax_over", ["outputs", "inputs"])
def test_zero_poses_have_finite_gradients(softmax_over: str) -> None:
    layer = make(2, 5, 3, 2, 2)
    found = results(layer._replace(poses=torch.zeros_like(layer.poses)), torch.float32, True, softmax_over=softmax_over)
    assert_finite(found.values())
    assert not found["capsules"].any()


@pytest.mark.parametrize("softmax_over", ["outputs", "inputs"])
def test_large_logits_do_not_overflow(softmax_over: str) -> None:
    layer = make(2, 5, 3, 2, 2, extras=True)
    assert layer.prior is not None
    assert_finite(
        results(layer._replace(prior=300 * layer.prior), torch.float32, True, softmax_over=softmax_over).values()
    )


def test_memory_layouts() -> None:
    layer = make(2, 5, 2, 2, 2)
    poses, weight = layer.poses.to(DEVICE, torch.float32), layer.weight.to(DEVICE, torch.float32)
    packed_poses = poses.transpose(1, 2).contiguous().transpose(1, 2)
    packed_weight = weight.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
    inside = backend._Layer.of(packed_poses, packed_weight, None, iterated(3))
    assert inside.poses.data_ptr() == packed_poses.data_ptr(), "poses (B, K, I) are copied"
    assert inside.weight.data_ptr() == packed_weight.data_ptr(), "a weight (J, D, K, I) is copied"
    found = []
    every_second = [torch.stack([tensor, tensor], -1)[..., 0] for tensor in (poses, weight)]
    for u, w in ((poses, weight), (packed_poses, packed_weight), every_second):
        w = w.detach().requires_grad_()
        capsules, _ = route_triton(u, w, None, None, iterated(2), False)
        capsules.sum().backward()  # a gradient that is expanded, not contiguous
        found.append((capsules, w.grad))
    for capsules, grad in found[1:]:
        assert torch.equal(capsules, found[0][0])
        assert torch.equal(grad, found[0][1])
    packed_weight.requires_grad_()
    (grad,) = torch.autograd.grad(
        route_triton(poses, packed_weight, None, None, iterated(2), False)[0].sum(), packed_weight
    )
    assert grad.stride() == packed_weight.stride(), "an optimiser would have to copy the gradient"


@pytest.mark.parametrize("wanted", ["poses", "weight", "bias", "prior"])
def test_only_the_gradients_that_are_asked_for(wanted: str) -> None:
    leaves = {name: tensor.to(DEVICE, torch.float32) for name, tensor in make(2, 5, 3, 2, 2, True)._asdict().items()}
    leaves[wanted].requires_grad_()
    poses, weight, bias, prior = leaves.values()
    capsules, _ = route_triton(poses, weight, bias, prior, iterated(2), False)
    expected, _ = route_votes(compute_votes(poses, weight), 2, "outputs", False, bias, prior, False, 1e-7)
    grads = [torch.autograd.grad((x * x.detach()).sum(), leaves[wanted])[0] for x in (capsules, expected)]
    assert_close(grads[0], grads[1], 1e-4)


def test_a_second_derivative_is_refused() -> None:
    poses, weight, *_ = (
        None if x is None else x.to(DEVICE, torch.float32).requires_grad_() for x in make(2, 5, 3, 2, 2)
    )
    assert poses is not None
    assert weight is not None
    capsules, _ = route_triton(poses, weight, None, None, iterated(2), False)
    (grad,) = torch.autograd.grad(capsules.sum(), poses, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad.sum().backward()


def test_operators_keep_torchs_rules() -> None:
    layer = make(2, 5, 3, 2, 2, extras=True)
    poses, weight, bias, prior = (tensor.to(DEVICE, torch.float32).requires_grad_() for tensor in layer)
    torch.library.opcheck(backend._forward_op, (poses, weight, bias, prior, 2, False, False, False, 1e-7))
    torch.library.opcheck(backend._forward_op, (poses, weight, None, None, 1, True, True, True, 1e-7))


def test_compiles_without_breaking_the_graph() -> None:
    poses, weight = (x.to(DEVICE, torch.float32).requires_grad_() for x in make(2, 5, 3, 2, 2)[:2])

    def loss(poses: Tensor, weight: Tensor) -> Tensor:
        capsules, coupling = route_triton(2 * poses, weight, None, None, iterated(2), True)
        assert coupling is not None
        return capsules.square().sum() + coupling[:, 0].sum()

    wanted = torch.autograd.grad(loss(poses, weight), (poses, weight))
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(poses, weight), (poses, weight))
    for ours, theirs in zip(got, wanted, strict=True):
        assert_close(ours, theirs, 1e-6)


def test_supports() -> None:
    poses, weight = torch.empty(2, 5, 4, device=DEVICE), torch.empty(5, 3, 2, 4, device=DEVICE)
    assert supports(poses, weight, 3)
    assert not supports(poses.double(), weight.double(), 3)
    assert not supports(poses[:0], weight, 3)
    assert not supports(poses.to("meta"), weight, 3)
    assert not supports(poses.new_empty(2, 5, 33), weight.new_empty(5, 3, 2, 33), 3)
    assert not supports(poses, weight.new_empty(5, 1, 1025, 4), 3)
    # the coupling of a layer can be too large where its poses and weights are not
    shared_poses, shared_weight = poses.new_empty(1, 1, 1).expand(2**12, 2**10, 1), weight.new_empty(1, 1, 1, 1)
    assert supports(shared_poses, shared_weight.expand(2**10, 2**8, 1, 1), 1)
    assert not supports(shared_poses, shared_weight.expand(2**10, 2**8, 1, 1), 2)
    assert_raises(
        ValueError,
        route_triton,
        *(poses.double(), weight.double(), None, None, iterated(3), False),
        say="needs float32 or half-precision tensors",
    )


def test_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not is_available()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert is_available()
    monkeypatch.setattr(backend, "_HAS_TRITON", False)
    assert not is_available()
    poses, weight, *_ = make(1, 1, 1, 1, 1)
    assert_raises(ValueError, route_triton, poses, weight, None, None, iterated(1), False, say="pip install")


COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from torchcaps.ops.dynamic_routing import triton_kernels

def compile_for_hopper(name, **constants):
    kernel = getattr(triton_kernels, name)
    def type_of(argument):
        if argument in constants:
            return "constexpr"
        if argument in ("B", "J", "D", "rows", "splits", "tiles_a_split") or argument.endswith("stride_b"):
            return "i32"
        return "fp32" if argument == "eps" else "*fp32"
    signature = {argument: type_of(argument) for argument in kernel.arg_names}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): x for name, x in constants.items()})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": constants.get("WARPS", 4)})

sizes = {"I": 63, "J": 7, "D": 4, "K": 2, "WARPS": 4, "BLOCK_D": 2}
forward = {"prior": None, "grad_coupling": None, "OVER_OUTPUTS": True, "LEAKY": False}
large = [
    compile_for_hopper("coupling_kernel", **sizes, **forward, IMAGES=2),
    compile_for_hopper("weighted_sum_kernel", **sizes, IMAGES=2),
    compile_for_hopper("grad_poses_kernel", **sizes, IMAGES=2, T=2),
]
compile_for_hopper("grad_weight_kernel", **sizes, T=2)
compile_for_hopper("compete_over_inputs_kernel", I=63, LEAKY=True, BLOCK=64)
compile_for_hopper("capsules_kernel", capsules=None, BLOCK_ROWS=16, BLOCK_D=16)
compile_for_hopper("grad_sums_kernel", ACCUMULATE=True, BLOCK_ROWS=16, BLOCK_D=16)
for kernel in large:
    assert "convert_layout" not in kernel.asm["ttgir"], kernel.name + " moves numbers between threads"
    assert kernel.metadata.shared == 0, kernel.name + " needs shared memory"
"""


def test_kernels_compile_for_hopper_as_meant(tmp_path: Path) -> None:
    """Without a GPU: the interpreter does not see what the compiler refuses, nor the layouts it chooses."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


MNIST = (128, 1152, 10, 16, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("softmax_over", ["outputs", "inputs"])
@pytest.mark.parametrize("stop_gradient", [False, True])
def test_full_size(softmax_over: str, stop_gradient: bool) -> None:
    check(make(*MNIST, extras=True), softmax_over=softmax_over, stop_gradient=stop_gradient)


@pytest.mark.gpu
def test_full_size_twice_gives_the_same_bits() -> None:
    layer = make(*MNIST, extras=True)
    first, second = (results(layer, torch.float32, True) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    poses, weight = (x.to(DEVICE, torch.float32).requires_grad_() for x in make(*MNIST)[:2])

    def step() -> tuple[Tensor, ...]:
        capsules, _ = route_triton(poses, weight, None, None, iterated(3), False)
        return torch.autograd.grad(capsules.square().sum(), (poses, weight))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles the kernels
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        poses.copy_(torch.randn_like(poses))
    graph.replay()
    for ours, theirs in zip(captured, step(), strict=True):
        assert torch.equal(ours, theirs)
