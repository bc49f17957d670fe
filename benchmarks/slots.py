"""The section ``slots`` of speed.py: slot attention beside torch's plain modules, and the decoder of slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from contenders import Row, Sizes, compare, expect
from measuring import Work
from torch import Tensor, nn

from torchcaps.nn import BroadcastDecoder, Capsules, SlotAttention

SHAPES = ((32, 64, 4, 64), (16, 1024, 7, 64), (128, 32, 10, 32))
"""Images, input capsules (I), slots (J) and components (D) of the compared layers."""


class PlainSlots(nn.Module):
    """The equations of slot attention by torch's modules: LayerNorm, Linear, GRUCell. Initial slots are learned."""

    def __init__(self, layer: SlotAttention) -> None:
        super().__init__()
        dim = layer.out_dim
        self.iterations, self.eps, self.scale = layer.num_iterations, layer.eps, dim**-0.5
        self.norm_inputs, self.norm_slots, self.norm_mlp = (
            nn.LayerNorm(layer.in_dim),
            nn.LayerNorm(dim),
            nn.LayerNorm(dim),
        )
        self.key, self.value = (nn.Linear(layer.in_dim, dim, bias=False) for _ in range(2))
        self.query, self.gru = nn.Linear(dim, dim, bias=False), nn.GRUCell(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, layer.mlp_width), nn.ReLU(), nn.Linear(layer.mlp_width, dim))
        self.queries = nn.Parameter(torch.empty(layer.out_capsules, dim))
        self.load_state_dict(layer.state_dict())

    def forward(self, poses: Tensor) -> Tensor:
        inputs = self.norm_inputs(poses)
        keys, values = self.key(inputs), self.value(inputs)
        slots = self.queries.expand(len(poses), -1, -1)
        for _ in range(self.iterations):
            queries = self.query(self.norm_slots(slots))
            attention = (keys @ queries.transpose(1, 2) * self.scale).softmax(2) + self.eps
            updates = (attention / attention.sum(1, keepdim=True)).transpose(1, 2) @ values
            slots = self.gru(updates.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
            slots = slots + self.mlp(self.norm_mlp(slots))
        return slots


def drawn_from_copies(decoder: BroadcastDecoder, slots: Tensor) -> Tensor:
    """The image of a decoder whose first layer is a convolution of copies of the slots, as in usual code."""
    maps = slots.flatten(0, 1)[:, :, None, None].expand(-1, -1, *decoder.map_size)
    drawn = decoder.layers(decoder.positions(maps)).unflatten(0, slots.shape[:2])
    return (drawn[:, :, -1:].softmax(1) * drawn[:, :, :-1]).sum(1)


def slots(sizes: Sizes) -> Iterator[Row]:
    """Forward and backward passes of slot attention and of the decoder."""
    for images, inputs, count, dim in SHAPES:
        layer = SlotAttention(inputs, dim, count, dim, start_from="queries")
        nn.init.normal_(layer.queries)
        poses = torch.randn(min(images, sizes.batch), inputs, dim, requires_grad=True)
        plain = PlainSlots(layer)
        expect("slots", layer(poses).poses, plain(poses), 1e-4)
        works: dict[str, Work] = {
            "torchcaps": partial(_step, layer, poses),
            "plain modules": partial(_step, plain, poses),
        }
        what = f"slots, {images} × {inputs} → {count} of {dim}, forward + backward: torchcaps ÷ plain modules"
        yield compare(what, works, 5 * sizes.rounds, sizes.seconds)
    decoder = BroadcastDecoder(64, (3, 24, 24), broadcast_kernels=(3, 3, 3))
    poses = torch.randn(min(32, sizes.batch), 4, 64, requires_grad=True)
    expect("images of slots", decoder(poses)[0], drawn_from_copies(decoder, poses), 1e-4)
    works = {
        "copies": partial(_step, partial(drawn_from_copies, decoder), poses),
        "torchcaps": partial(_step, decoder, poses),
    }
    yield compare("decoder of slots, forward + backward: copies ÷ torchcaps", works, 5 * sizes.rounds, sizes.seconds)


def _step(compute: Callable[[Tensor], Any], poses: Tensor) -> None:
    """A forward and a backward pass, of slots or of images."""
    output = compute(poses)
    output = output.poses if isinstance(output, Capsules) else output[0] if isinstance(output, tuple) else output
    output.square().sum().backward()
