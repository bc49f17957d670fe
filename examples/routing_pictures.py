"""Draw pictures of routing for the documentation: squash, rounds of dynamic routing, all algorithms side by side.

    python examples/routing_pictures.py --out docs/images

Twelve input capsules vote for two output capsules in the plane. The first six (blue) agree on output 0 and disagree on
output 1; the other six (orange) agree on output 1. Each dot is a vote, and its size shows its coupling. The arrow is
the output capsule, and the circle has radius 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import torchcaps
from torchcaps.nn import Routed

INPUTS, OUTPUTS = 12, 2
GROUP = torch.arange(INPUTS) < INPUTS // 2
COLOURS = ("tab:blue", "tab:orange")


def make_votes(seed: int = 0) -> Tensor:
    """Return votes (1, I, J, 2); each half of the input capsules agrees on one output."""
    random = torch.Generator().manual_seed(seed)
    votes = 0.8 * torch.randn(1, INPUTS, OUTPUTS, 2, generator=random)
    for output, centre in enumerate(([0.9, 0.5], [-0.6, 0.8])):
        agreeing = GROUP if output == 0 else ~GROUP
        votes[0, agreeing, output] = torch.tensor(centre) + votes[0, agreeing, output] / 8
    return votes


def route_by_all(votes: Tensor) -> dict[str, Routed]:
    """Route the votes with uniform coupling and with each algorithm; results by name."""
    active, zeros = torch.ones(1, INPUTS), torch.zeros(OUTPUTS)
    preferences = 1.5 * torch.stack([GROUP.float(), (~GROUP).float()], 1)[None]
    return {
        "uniform": torchcaps.dynamic_routing(votes, 1, return_coupling=True),
        "dynamic": torchcaps.dynamic_routing(votes, 3, return_coupling=True),
        "self-attention": torchcaps.self_attention_routing(votes, return_coupling=True),
        "inverted-attention": torchcaps.inverted_attention_routing(votes, 3, return_coupling=True),
        "self": torchcaps.self_routing(votes, active, preferences, return_coupling=True),
        "em": torchcaps.em_routing(votes, active, zeros, zeros, 3, final_lambda=0.01, return_coupling=True),
        "em-code": torchcaps.em_routing_code(votes, active, zeros, zeros, 3, final_beta=0.01, return_coupling=True),
        "vb": torchcaps.vb_routing(votes, active, zeros, zeros, 3, return_coupling=True),
    }


def draw(axes: Axes, votes: Tensor, routed: Routed, output: int) -> None:
    """Draw the votes for an output capsule, and the capsule."""
    assert routed.coupling is not None
    share = routed.coupling[0, :, output]
    for group, colour in zip((GROUP, ~GROUP), COLOURS, strict=True):
        x, y = votes[0, group, output].T.tolist()
        axes.scatter(x, y, s=(8 + 150 * share[group]).tolist(), color=colour, alpha=0.6, linewidths=0)
    x, y = routed.poses[0, output].tolist()
    axes.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "-|>", "color": "black", "linewidth": 2})
    axes.axhline(0, color="0.85", linewidth=0.8, zorder=0)
    axes.axvline(0, color="0.85", linewidth=0.8, zorder=0)
    axes.add_patch(plt.Circle((0, 0), 1, fill=False, color="0.7", linestyle=":", zorder=0))
    axes.set(xlim=(-2, 2), ylim=(-2, 2), xticks=[], yticks=[], aspect="equal")


def figure_routed(votes: Tensor, routed: Mapping[str, Routed], columns: int) -> Figure:
    """Draw each result: votes for output 0 above, votes for output 1 below."""
    blocks = -(-len(routed) // columns)
    size = (2.1 * columns, 4.4 * blocks)
    figure, grid = plt.subplots(OUTPUTS * blocks, columns, figsize=size, layout="constrained", squeeze=False)
    for n, (name, result) in enumerate(routed.items()):
        block, column = divmod(n, columns)
        grid[OUTPUTS * block, column].set_title(name, fontsize=11)
        for output in range(OUTPUTS):
            axes = grid[OUTPUTS * block + output, column]
            draw(axes, votes, result, output)
            if column == 0:
                axes.set_ylabel(f"votes for output {output}")
    return figure


def figure_squash() -> Figure:
    """Draw the length of a vector after each squash over its length before."""
    before = torch.linspace(0, 5, 201)
    vectors = torch.stack([before, torch.zeros_like(before)], 1)
    figure, axes = plt.subplots(figsize=(5.5, 2.6), layout="constrained")
    for squash, style in ((torchcaps.squash, "-"), (torchcaps.exponential_squash, "--")):
        axes.plot(before, squash(vectors).norm(dim=1), style, label=squash.__name__)
    axes.set(xlabel="length before", ylabel="length after", xlim=(0, 5), ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the three pictures, and print how strongly each algorithm couples the inputs that agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("pictures"), help="folder of the pictures (default: pictures)")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    votes = make_votes()
    rounds = {
        f"round {n}": Routed(each.capsules, None, each.coupling)
        for n, each in enumerate(torchcaps.routing_rounds(votes, 3), 1)
    }
    routed = route_by_all(votes)
    figures = {
        "squash": figure_squash(),
        "routing-rounds": figure_routed(votes, rounds, columns=3),
        "routings": figure_routed(votes, routed, columns=4),
    }
    for name, figure in figures.items():
        figure.savefig(given.out / f"{name}.png", dpi=110)
        plt.close(figure)
        print(f"wrote {given.out / f'{name}.png'}")
    for name, result in routed.items():
        assert result.coupling is not None
        coupling = result.coupling[0]
        agreeing = (coupling[GROUP, 0].mean() + coupling[~GROUP, 1].mean()) / 2
        print(f"{name:<20} coupling of the inputs that agree {agreeing:.2f}, of the other inputs {1 - agreeing:.2f}")


if __name__ == "__main__":
    main()
