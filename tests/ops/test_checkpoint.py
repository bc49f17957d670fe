"""Work on some images at a time."""

import pytest
import torch
from torch import Tensor

from support import assert_close
from torchcaps.kernels import memory
from torchcaps.kernels.memory import blocks, in_blocks
from torchcaps.ops.memory import set_working_memory

CPU = torch.device("cpu")


def test_a_block_holds_no_more_votes_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    def lengths(*given: object, **more: int) -> list[int]:
        return [each.stop - each.start for each in blocks(*given, **more)]  # type: ignore[arg-type]

    monkeypatch.setattr(memory, "MAX_PLAIN_BLOCK_MIB", 3 * 80 / 2**20)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert lengths(8, 80, CPU) == [3, 3, 2]
    assert lengths(8, 80, CPU, multiple=2) == [2, 2, 2, 2]
    assert lengths(8, 1000, CPU, multiple=4) == [4, 4], "one multiple at least"
    assert blocks(0, 80, CPU) == [slice(0, 0)]
    assert lengths(8, 80, torch.device("meta")) == [8], "as on a GPU, which has other caches"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # each has caches of its own
    assert lengths(8, 80, CPU) == [4, 4]
    set_working_memory(2 * 80 / 2**20)
    with torch.no_grad():
        assert lengths(8, 80, CPU) == [2] * 4
    assert lengths(8, 5, CPU) == [2] * 4, "of each vote, a gradient needs sixteen tensors"
    seen: list[list[int]] = []
    torch.compile(lambda x: seen.append(lengths(8, 80, CPU)) or x + 1, backend="eager")(torch.ones(1))
    torch.vmap(lambda x: seen.append(lengths(8, 80, CPU)) or x)(torch.ones(1))
    assert seen == [[8], [8]], "a graph is of all of them at once"


def test_results_and_gradients_of_all_orders_are_those_of_one_piece() -> None:
    given, factor = torch.randn(8, 3).double().requires_grad_(), torch.randn(3).double().requires_grad_()
    calls: list[int] = []

    def work(rows: slice) -> tuple[Tensor, Tensor]:
        calls.append(rows.stop - rows.start)
        return given[rows].sin() * factor, given[rows].sum(1)

    def results(items: list[slice]) -> list[Tensor]:
        found = in_blocks(work, items)
        total = (found[0] * found[0].cos()).sum() + found[1].square().sum()
        first = torch.autograd.grad(total, (given, factor), create_graph=True)
        second = torch.autograd.grad(sum((each**2).sum() for each in first), (given, factor))
        return [*found, *first, *second]

    whole = results([slice(0, 8)])
    assert calls == [8], "one piece is kept as it is"
    for mine, theirs in zip(results([slice(0, 3), slice(3, 6), slice(6, 8)]), whole, strict=True):
        assert_close(mine, theirs, 1e-12)
    assert calls[1:4] == [3, 3, 2]
    assert len(calls) > 4, "the middle is computed again"
    calls.clear()
    with torch.no_grad():
        assert_close(in_blocks(work, [slice(0, 3), slice(3, 8)])[0], whole[0], 1e-12)
    assert calls == [3, 5]
