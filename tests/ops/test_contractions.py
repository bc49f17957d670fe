"""The sums over votes, without votes, against einsum over the votes that are built."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from support import assert_batch_independent, assert_close, assert_raises
from torchcaps.errors import InputError, WrongType
from torchcaps.ops.contractions import agreement, compute_votes, weighted_sum
from torchcaps.ops.memory import WORKING_MEMORY, set_working_memory

SIZES = [(3, 5, 4, 2, 3), (1, 1, 1, 1, 1), (2, 63, 7, 5, 3), (130, 4, 3, 2, 2), (2, 3, 5, 7, 1)]
each_size = pytest.mark.parametrize("sizes", SIZES, ids=str)


def tensors(sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Poses, weight, coupling and parents that ask for gradients."""
    B, I, J, D, K = sizes
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, I, K), (I, J, D, K), (B, I, J), (B, J, D)]
    poses, weight, coupling, parents = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return tuple(tensor.requires_grad_() for tensor in (poses, weight, coupling, parents))  # type: ignore[return-value]


def scaled(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with vectors in place of matrices, so that K is D."""
    B, I, J, D, _ = sizes
    poses, weight, coupling, parents = tensors((B, I, J, D, D))
    return poses, weight.detach()[..., 0].clone().requires_grad_(), coupling, parents


def by_votes(poses: Tensor, weight: Tensor, coupling: Tensor | None, parents: Tensor) -> tuple[Tensor, Tensor]:
    votes = compute_votes(poses, weight) if weight.ndim == 4 else weight * poses[:, :, None]
    sums = votes.sum(1) if coupling is None else torch.einsum("bij,bijd->bjd", coupling, votes)
    return sums, torch.einsum("bijd,bjd->bij", votes, parents)


@pytest.fixture(params=[WORKING_MEMORY, 1e-4], ids=["one block", "many blocks"])
def blocks(request: pytest.FixtureRequest) -> None:
    set_working_memory(request.param)


@each_size
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("kind", ["matrices", "vectors"])
@pytest.mark.usefixtures("blocks")
def test_they_are_the_sums_over_votes(sizes: tuple[int, ...], weighted: bool, kind: str) -> None:
    poses, weight, coupling, parents = tensors(sizes) if kind == "matrices" else scaled(sizes)
    c = coupling if weighted else None
    got = weighted_sum(poses, weight, c), agreement(poses, weight, parents)
    wanted = by_votes(poses, weight, c, parents)
    factors = [poses, weight, coupling, parents]
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other, 1e-12)
        seed = torch.randn_like(one)
        for a, b in zip(
            torch.autograd.grad((one * seed).sum(), factors, allow_unused=True, retain_graph=True),
            torch.autograd.grad((other * seed).sum(), factors, allow_unused=True, retain_graph=True),
            strict=True,
        ):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert_close(a, b, 1e-11)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("make", [tensors, scaled])
@pytest.mark.usefixtures("blocks")
def test_first_and_second_derivatives_by_finite_differences(
    weighted: bool, make: Callable[[tuple[int, ...]], tuple[Tensor, ...]]
) -> None:
    poses, weight, coupling, parents = make((2, 3, 2, 2, 2))
    summed = (poses, weight, coupling) if weighted else (poses, weight)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(weighted_sum, summed)
        assert check(agreement, (poses, weight, parents))


def test_forward_mode() -> None:
    poses, weight, coupling, parents = tensors((2, 3, 2, 2, 2))
    assert torch.autograd.gradcheck(weighted_sum, (poses, weight, coupling), check_forward_ad=True)
    assert torch.autograd.gradcheck(agreement, (poses, weight, parents), check_forward_ad=True)


def test_gradients_of_each_image_by_vmap() -> None:
    poses, weight, coupling, parents = (tensor.detach() for tensor in tensors((3, 5, 4, 2, 3)))

    def loss(weight: Tensor, pose: Tensor, coupling: Tensor, parent: Tensor) -> Tensor:
        sums = weighted_sum(pose[None], weight, coupling[None])
        return (sums.square().sum() * agreement(pose[None], weight, parent[None])).sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))(weight, poses, coupling, parents)
    for n in range(3):
        one = torch.func.grad(loss)(weight, poses[n], coupling[n], parents[n])
        assert_close(each[n], one, 1e-10)


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_dtypes(dtype: torch.dtype, tol: float) -> None:
    exact = tensors((3, 40, 4, 5, 6))
    rounded = [tensor.detach().to(dtype) for tensor in exact]
    poses, weight, coupling, parents = rounded
    wide = [tensor.double() for tensor in rounded]
    sums, agreed = weighted_sum(poses, weight, coupling), agreement(poses, weight, parents)
    assert sums.dtype == agreed.dtype == dtype
    wanted = by_votes(wide[0], wide[1], wide[2], wide[3])
    for got, other in zip((sums, agreed), wanted, strict=True):
        assert_close(got.double() / other.abs().max(), other / other.abs().max(), tol)
    # the widest of the arguments decides
    assert weighted_sum(poses, weight, coupling.double()).dtype == torch.float64


def test_autocast_does_not_round() -> None:
    poses, weight, coupling, parents = (tensor.detach() for tensor in tensors((3, 40, 4, 5, 6), torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        got = weighted_sum(poses, weight, coupling), agreement(poses, weight, parents)
    for one, other in zip(got, by_votes(poses, weight, coupling, parents), strict=True):
        assert one.dtype == torch.float32
        assert_close(one, other, 1e-4)


def test_any_order_of_memory() -> None:
    poses, weight, coupling, parents = (tensor.detach() for tensor in tensors((3, 5, 4, 2, 3)))
    wanted = weighted_sum(poses, weight, coupling), agreement(poses, weight, parents)
    for order in itertools.permutations(range(4)):
        back = [order.index(axis) for axis in range(4)]
        other = weight.permute(order).contiguous().permute(back)
        assert_close(weighted_sum(poses.mT.contiguous().mT, other, coupling.mT.contiguous().mT), wanted[0], 1e-12)
        assert_close(agreement(poses.mT.contiguous().mT, other, parents.mT.contiguous().mT), wanted[1], 1e-12)


def test_images_do_not_see_each_other() -> None:
    poses, weight, coupling, parents = (tensor.detach() for tensor in tensors((4, 5, 3, 2, 3)))
    assert_batch_independent(lambda u: weighted_sum(u, weight), poses)
    assert_batch_independent(lambda c: weighted_sum(poses[:1].expand(len(c), -1, -1), weight, c), coupling)
    assert_batch_independent(lambda x: agreement(poses[:1].expand(len(x), -1, -1), weight, x), parents)


def test_no_images() -> None:
    weight = torch.rand(3, 2, 4, 5)
    none = torch.empty(0, 3, 5)
    assert weighted_sum(none, weight).shape == weighted_sum(none, weight, torch.empty(0, 3, 2)).shape == (0, 2, 4)
    assert agreement(none, weight, torch.empty(0, 2, 4)).shape == (0, 3, 2)


def test_what_does_not_fit() -> None:
    poses, weight = torch.rand(2, 3, 5), torch.rand(3, 4, 6, 5)
    coupling, parents = torch.rand(2, 3, 4), torch.rand(2, 4, 6)
    for kind, function, args, said in (
        (InputError, weighted_sum, (poses, weight, coupling.mT), "coupling must have shape (2, 3, 4)"),
        (InputError, agreement, (poses, weight, parents.mT), "parents must have shape (2, 4, 6)"),
        (InputError, agreement, (poses[0], weight, parents), "poses must have shape (B, I, K)"),
        (InputError, compute_votes, (poses, weight[..., :4]), "weight must have shape (3, J, D, 5) or (3, J, D), got"),
        (WrongType, weighted_sum, (poses, weight, coupling.long()), "coupling must be a floating-point tensor"),
        (WrongType, agreement, (poses, weight, None), "parents must be a floating-point tensor"),
    ):
        assert_raises(kind, function, *args, say=f"{function.__name__}: {said}")
    for function, more in ((weighted_sum, ()), (agreement, (parents,)), (compute_votes, ())):
        assert_raises(InputError, function, poses, weight[..., 0], *more, say="as many components as poses, 5, got 6")


def test_a_compiled_graph_is_one_and_has_gradients() -> None:
    poses, weight, _, parents = tensors((3, 5, 2, 3, 4))

    def loss(poses: Tensor, weight: Tensor, parents: Tensor) -> Tensor:
        return weighted_sum(poses, weight, agreement(poses, weight, parents)).square().sum()

    leaves = poses, weight, parents
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for got, wanted in zip(*(torch.autograd.grad(f(*leaves), leaves) for f in (compiled, loss)), strict=True):
        assert_close(got, wanted, 1e-10)


@pytest.mark.parametrize("make", [tensors, scaled])
def test_exported_graphs_are_of_torch_s_own_operations(make: Callable[[tuple[int, ...]], tuple[Tensor, ...]]) -> None:
    class Sums(torch.nn.Module):
        def forward(self, poses: Tensor, weight: Tensor, coupling: Tensor, parents: Tensor) -> tuple[Tensor, ...]:
            given = poses, weight
            return weighted_sum(*given, coupling), weighted_sum(*given), agreement(*given, parents)

    given = tuple(tensor.detach() for tensor in make((2, 3, 2, 4, 5)))
    exported = torch.export.export(Sums(), given)
    assert not [node for node in exported.graph.nodes if "torchcaps" in str(node.target)]
    for got, wanted in zip(exported.module()(*given), Sums()(*given), strict=True):
        assert_close(got, wanted, 1e-12)
