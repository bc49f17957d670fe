"""Stratified splits: complete, in proportion to the classes, and the same for a seed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import assert_raises
from torchcaps.datasets import stratified_split
from torchcaps.errors import InputError


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(1, 30), min_size=1, max_size=8), data=st.data())
def test_a_split_is_complete_stratified_and_ordered(counts: list[int], data: st.DataObject) -> None:
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))]
    leave_one = data.draw(st.booleans())
    most = len(labels) - leave_one * len(counts)
    if most < 1:
        return
    size = data.draw(st.integers(1, most))
    rest, held = stratified_split(labels, size, seed=3, leave_one=leave_one)
    assert len(held) == size
    assert torch.equal(torch.cat([rest, held]).sort().values, torch.arange(len(labels)))
    assert torch.equal(rest, rest.sort().values)
    assert torch.equal(held, held.sort().values)
    quotas = labels[held].bincount(minlength=len(counts))
    if leave_one:
        assert labels[rest].bincount(minlength=len(counts)).min() >= 1
    if size >= len(counts):
        assert all(q >= 1 for q, n in zip(quotas, counts, strict=True) if n > leave_one)
    if min(counts) * size >= len(labels) and not leave_one:
        assert ((quotas - size * torch.tensor(counts) / len(labels)).abs() < 1).all()


def test_a_split_is_the_same_for_ever() -> None:
    """Published results rest on these indices: whatever moves them is a break."""
    labels = torch.arange(30) % 3
    assert stratified_split(labels, 7, seed=0)[1].tolist() == [6, 8, 10, 11, 12, 16, 24]


@pytest.mark.parametrize("size", [0, -1, 8, 10])
def test_a_size_that_leaves_a_class_without_images_is_refused(size: int) -> None:
    said = f"{size} of 10 images cannot be held out and leave one of each of the 3 classes: 1 to 7 can"
    assert_raises(InputError, stratified_split, torch.arange(10) % 3, size, seed=0, say=said)


@pytest.mark.parametrize("size", [0, 11])
def test_without_that_condition_all_images_can_be_held_out(size: int) -> None:
    labels = torch.arange(10) % 3
    assert len(stratified_split(labels, 10, seed=0, leave_one=False)[0]) == 0
    said = f"{size} of 10 images cannot be held out: 1 to 10 can"
    assert_raises(InputError, stratified_split, labels, size, seed=0, leave_one=False, say=said)


def test_the_seed_alone_decides_which_images_are_held_out() -> None:
    labels = torch.arange(90) % 3
    first, again, other = (stratified_split(labels, 30, seed=seed)[1] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("counts", "size", "held"),
    [
        ((6, 3, 1), 5, (3, 2, 0)),  # the class of one image keeps it
        ((5, 5), 3, (2, 1)),  # the lower label gives one more
        ((100, 10, 10), 6, (4, 1, 1)),  # each class gives at least one
    ],
)
def test_a_class_gives_its_share_within_its_bounds(counts: tuple[int, ...], size: int, held: tuple[int, ...]) -> None:
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    assert tuple(labels[stratified_split(labels, size, seed=0)[1]].bincount(minlength=len(counts)).tolist()) == held
