"""A head of capsules: maps, tokens and vectors, its equations, and the ways in which others train."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

import processes
from support import assert_close, assert_gradients_reach, assert_raises
from torchcaps import margin_loss, route, squash
from torchcaps.errors import InputError
from torchcaps.nn import CapsuleHead


def test_maps_tokens_and_vectors_are_places_of_one_equation() -> None:
    head, maps = CapsuleHead(6, 3, side=2, primary_types=4, primary_dim=5, capsule_dim=7), torch.rand(2, 6, 4, 4)
    conv, (weight,) = head.primary.convs[0], head.classes.transform.parameters()
    capsules, places = head(maps), maps.unflatten(2, (2, 2)).unflatten(4, (2, 2)).mean((3, 5))
    types = torch.einsum("kc,bchw->bkhw", conv.weight[:, :, 0, 0], places) + conv.bias[:, None, None]
    poses = squash(types.reshape(2, 4, 5, 4).transpose(2, 3)).flatten(1, 2)
    assert_close(capsules.poses, route(poses, weight.permute(3, 0, 1, 2)).poses)
    assert_close(head(maps.flatten(2).transpose(1, 2)).poses, capsules.poses)
    assert_close(head(maps[:, :, 1, 2]).poses, head(maps[:, :, 1:2, 2:3].expand(-1, -1, 3, 5)).poses)


def test_what_does_not_fit_is_said() -> None:
    head = CapsuleHead(6, 3)
    for shape, said in (
        ((6,), "maps (B, C, H, W), tokens (B, N, C) or vectors (B, C), got (6,)"),
        ((2, 197, 6), "the number of tokens must be a square, without class tokens, got 197"),
        ((2, 5), "features must have shape (B, 6, H, W)"),
    ):
        assert_raises(InputError, head, torch.rand(shape), say=said)


@pytest.mark.parametrize("way", ["plain", "compiled", "autocast", "fabric"])
def test_it_learns_in_loops_of_others(way: str) -> None:
    features, labels = torch.rand(24, 6, 3, 3), torch.arange(24) % 3
    features[:, :3] += 2 * nn.functional.one_hot(labels, 3)[:, :, None, None]  # the first channels say the class
    head: Any = CapsuleHead(6, 3)
    model, optimizer = head, torch.optim.Adam(head.parameters(), 3e-3)
    backward: Callable[[Tensor], object] = Tensor.backward
    if way == "compiled":
        model = torch.compile(head, backend="aot_eager", fullgraph=True)
    if way == "fabric":
        fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        model, optimizer = fabric.setup(head, optimizer)
        backward = fabric.backward
    for _ in range(30):
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            loss = margin_loss(model(features).scores(), labels)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        assert loss.dtype == torch.float32
    margin_loss(head(features).scores(), labels).backward()
    assert_gradients_reach(head)
    assert (head(features).scores().argmax(1) == labels).all()


DDP = """
import sys, torch
from torch.nn.parallel import DistributedDataParallel
from torchcaps import margin_loss
from torchcaps.nn import CapsuleHead

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
torch.manual_seed(0)
head = DistributedDataParallel(CapsuleHead(6, 3))
features, labels = torch.load(f"{folder}/data")
margin_loss(head(features[rank::2]).scores(), labels[rank::2]).backward()
torch.save([parameter.grad for parameter in head.parameters()], f"{folder}/{rank}")
"""  # destroy_process_group would wait for a thread of gloo that in one of ten runs waits for the interpreter's lock


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32" or not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_two_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    features, labels = torch.rand(8, 6, 3, 3), torch.arange(8) % 3
    torch.save((features, labels), tmp_path / "data")
    both = [processes.start("-c", DDP, rank, tmp_path) for rank in (0, 1)]
    said = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    torch.manual_seed(0)
    head = CapsuleHead(6, 3)
    margin_loss(head(features).scores(), labels).backward()
    for rank in (0, 1):
        for ours, parameter in zip(torch.load(tmp_path / str(rank)), head.parameters(), strict=True):
            assert_close(ours, parameter.grad, 1e-5)
