"""The same votes, routed by every algorithm: a picture of what each of them couples.

    python examples/routing_pictures.py --out docs/images/routings

Twelve input capsules vote for two output capsules, in the plane. The first six agree on the first output and scatter
about the second; the other six agree on the second. A picture for each algorithm has a row for each output: its votes,
large where the coupling is strong, and the output capsule as an arrow, at uniform coupling and as the algorithm leaves
them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from torch import Tensor

import torchcaps
from torchcaps.nn import Routed

INPUTS, OUTPUTS = 12, 2
GROUP = torch.arange(INPUTS) < INPUTS // 2
COLOURS = ("tab:blue", "tab:orange")


def make_votes(seed: int = 0) -> Tensor:
    """Votes (1, I, J, 2): each half of the input capsules agrees on one output."""
    random = torch.Generator().manual_seed(seed)
    votes = 0.8 * torch.randn(1, INPUTS, OUTPUTS, 2, generator=random)
    for output, centre in enumerate(([0.9, 0.5], [-0.6, 0.8])):
        agreeing = GROUP if output == 0 else ~GROUP
        votes[0, agreeing, output] = torch.tensor(centre) + votes[0, agreeing, output] / 8
    return votes


def algorithms(votes: Tensor) -> dict[str, Callable[[bool], Routed]]:
    """Each algorithm by its name; called with whether the coupling is to stay uniform."""
    active, zeros = torch.ones(1, INPUTS), torch.zeros(OUTPUTS)
    preferences = 1.5 * torch.stack([GROUP.float(), (~GROUP).float()], 1)[None]  # as the inputs' own poses might say

    def self_attention(uniform: bool) -> Routed:
        if not uniform:
            return torchcaps.self_attention_routing(votes, return_coupling=True)
        coupling = torch.full((1, INPUTS, OUTPUTS), 1 / OUTPUTS)
        return Routed(torchcaps.exponential_squash(torch.einsum("bij,bijd->bjd", coupling, votes)), None, coupling)

    def mixture(route: Callable[..., Routed], **options: float) -> Callable[[bool], Routed]:
        return lambda uniform: route(votes, active, zeros, zeros, 1 if uniform else 3, return_coupling=True, **options)

    return {
        "dynamic": lambda uniform: torchcaps.dynamic_routing(votes, 1 if uniform else 3, return_coupling=True),
        "self-attention": self_attention,
        "inverted-attention": lambda uniform: torchcaps.inverted_attention_routing(
            votes, 1 if uniform else 3, return_coupling=True
        ),
        "self": lambda uniform: torchcaps.self_routing(
            votes, active, preferences * (not uniform), return_coupling=True
        ),
        "em": mixture(torchcaps.em_routing, final_lambda=0.01),
        "em-code": mixture(torchcaps.em_routing_code, final_beta=0.01),
        "vb": mixture(torchcaps.vb_routing),
    }


def draw(axes: Axes, votes: Tensor, routed: Routed, output: int) -> None:
    """The votes for an output capsule, and the capsule."""
    assert routed.coupling is not None
    share = routed.coupling[0, :, output]
    for group, colour in zip((GROUP, ~GROUP), COLOURS, strict=True):
        x, y = votes[0, group, output].T.tolist()
        axes.scatter(x, y, s=(10 + 240 * share[group]).tolist(), color=colour, alpha=0.6, linewidths=0)
    x, y = routed.poses[0, output].tolist()
    axes.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "-|>", "color": "black", "linewidth": 2})
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.set(xlim=(-2, 2), ylim=(-2, 2), xticks=[], yticks=[], aspect="equal")


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw, and print how much of each group the outputs get."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("routings"), help="folder of pictures (default: routings)")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    votes = make_votes()
    for name, route in algorithms(votes).items():
        columns = {"uniform coupling": route(True), "routed": route(False)}
        figure, grid = plt.subplots(OUTPUTS, 2, figsize=(5, 5), layout="constrained", squeeze=False)
        for column, (title, routed) in enumerate(columns.items()):
            grid[0, column].set_title(title, fontsize=11)
            for output in range(OUTPUTS):
                draw(grid[output, column], votes, routed, output)
                grid[output, 0].set_ylabel(f"votes for output {output + 1}")
        path = given.out / f"{name}.png"
        figure.savefig(path, dpi=110)
        plt.close(figure)
        assert columns["routed"].coupling is not None
        coupling = columns["routed"].coupling[0]
        own = (coupling[GROUP, 0].mean() + coupling[~GROUP, 1].mean()) / 2
        print(f"{name:<20} coupling of those that agree {own:.2f}, of the others {1 - own:.2f}; {path}")


if __name__ == "__main__":
    main()
