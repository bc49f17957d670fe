"""Divide and conquer: the input capsules of each group are routed among themselves."""

from __future__ import annotations

import copy
from typing import Annotated, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.errors import InputError
from torchcaps.nn.capsules import Activations, LayerSize, Routed
from torchcaps.nn.routing.base import Routing
from torchcaps.nn.votes import BuiltVotes, DenseVotes, Votes
from torchcaps.nn.votes.competition import MapCompetition
from torchcaps.parts import Choice, Spec, build, register
from torchcaps.ranges import Width


@register("routing", "grouped")
class GroupedRouting(Routing):
    """Another routing for each group of input capsules, and the sum of the groups' output capsules.

        v_j = Σ_g routing(V_ij of the capsules i of group g)_j

    The groups are equal parts of the input capsules in their order. With one group for each type of a map, a group is
    a type, as in the source. Lengths reach G instead of one, so a loss needs other margins. Activations are the means
    of the groups' activations.

    Args:
        num_groups: Number of groups of input capsules (G), each routed separately.
        group_routing: The routing of each group, with separate parameters for each group.

    Source: "Divide and conquer" capsules, PLoS One 2025 (doi:10.1371/journal.pone.0329202), and its code: dynamic
    routing with a learned prior, initially zero.
    """

    def __init__(
        self,
        num_groups: Width = 2,
        *,
        group_routing: Annotated[Spec, Choice("routing")] = {"name": "dynamic", "learn_prior": True},  # noqa: B006
    ) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.group_routing: Routing = build("routing", group_routing)
        self.softmax_over, self.leaky = self.group_routing.softmax_over, self.group_routing.leaky
        self.by_row = self.group_routing.by_row
        self.groups = nn.ModuleList()

    def bind(self, size: LayerSize) -> None:
        """Make the routing of each group."""
        if (I := size.inputs(self)) % self.num_groups:
            raise InputError(f"num_groups must divide the number of input capsules, {I}, got {self.num_groups}")
        self.groups = nn.ModuleList(copy.deepcopy(self.group_routing) for _ in range(self.num_groups))
        for group in self.groups:
            cast(Routing, group).bind(self._of_group(size))

    def balanced_std(self, size: LayerSize) -> float:
        """Return the standard deviation for the routing of a group."""
        return self.group_routing.balanced_std(self._of_group(size))

    def _of_group(self, size: LayerSize) -> LayerSize:
        return size._replace(in_capsules=size.in_capsules // self.num_groups)

    def forward(self, votes: Votes, activations: Activations = None, *, return_coupling: bool = False) -> Routed:
        """Route; see :class:`Routing`. Dense votes are not built."""
        dense_or_built = votes if isinstance(votes, DenseVotes) else votes.build()
        size, results = votes.size.in_capsules // self.num_groups, []
        for n, group in enumerate(self.groups):
            part = slice(n * size, (n + 1) * size)
            active = None if activations is None else activations[:, part]
            results.append(group(_part_of(votes, dense_or_built, part), active, return_coupling=return_coupling))
        poses, actives, couplings = zip(*results, strict=True)
        routed = Routed(
            torch.stack(poses).sum(0),
            None if actives[0] is None else torch.stack(actives).mean(0),
            None if couplings[0] is None else torch.cat(couplings, 1),
        )
        return votes.finish(routed, coupling=return_coupling)


def _part_of(votes: Votes, dense_or_built: DenseVotes | Float[Tensor, "B I J D"], part: slice) -> Votes:
    """Return the votes of some input capsules, in full precision, so that the sum of the groups is rounded only once.

    Args:
        votes: Votes of all input capsules.
        dense_or_built: The same votes as dense votes or as a tensor.
        part: Input capsules of the group.
    """
    poses = votes.poses[:, part]
    if isinstance(dense_or_built, Tensor):
        some: Votes = BuiltVotes(dense_or_built[:, part], poses)
    else:
        some = DenseVotes(poses, dense_or_built.weight[part])
    if votes.competition is not None:
        some.competition = MapCompetition(votes.competition.children[:, part], votes.competition.number)
    return some.masked(None if votes.mask is None else votes.mask[:, part])
