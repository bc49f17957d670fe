"""Several objects in an image: which classes are given, which of them match, when an image is correct."""

import itertools

import torch

from support import assert_close, assert_raises
from torchcaps.errors import InputError, WrongType
from torchcaps.ops.labels import is_correct, label_rows, match_labels, top_classes


def test_of_equally_long_capsules_the_first_class_comes_first() -> None:
    lengths = torch.tensor([[0.5, 0.9, 0.9, 0.1, 0.9], [0.2] * 5])  # topk gives 2, 4, 1 and 2, 4, 3
    assert top_classes(lengths, 3).tolist() == [[1, 2, 4], [0, 1, 2]]
    by_numpy = (-lengths.numpy()).argsort(axis=1, kind="stable")  # as predict orders them, without torch
    assert top_classes(lengths - 1, 5).tolist() == by_numpy.tolist(), "negative scores, too"
    assert top_classes(lengths[0], 2).tolist() == [1, 2]
    assert is_correct(lengths, torch.tensor([[2, 1], [1, 0]])).tolist() == [True, True]


def test_an_image_is_right_only_with_exactly_its_classes() -> None:
    lengths = torch.tensor([[0.1, 0.9, 0.3, 0.8]]).expand(4, 4)
    labels = torch.tensor([[1, 3], [3, 1], [1, 2], [0, 2]])
    assert is_correct(lengths, labels).tolist() == [True, True, False, False]
    assert is_correct(lengths, torch.tensor([1, 3, 1, 0])).tolist() == [True, False, True, False]


def test_a_class_of_both_stands_beside_itself_and_the_others_in_the_order_in_which_they_came() -> None:
    rows = list(itertools.permutations(range(5), 3))
    every_given, every_labels = zip(*itertools.product(rows, rows), strict=True)
    every_beside = match_labels(torch.tensor(every_given), torch.tensor(every_labels)).tolist()
    for given, labels, beside in zip(every_given, every_labels, every_beside, strict=True):
        others = iter([label for label in labels if label not in given])
        assert [labels[place] for place in beside] == [each if each in labels else next(others) for each in given]


def test_rows_of_zeros_and_ones() -> None:
    for dtype in (torch.int64, torch.int32, torch.uint8):
        labels = torch.tensor([[2, 0], [1, 2]], dtype=dtype)
        rows = label_rows(torch.rand(2, 4, dtype=torch.bfloat16), labels, 2)
        assert_close(rows, torch.tensor([[1.0, 0, 1, 0], [0, 1, 1, 0]]))
        assert rows.dtype == torch.float32
        assert label_rows(torch.rand(2, 4, dtype=torch.float64), labels, 2).dtype == torch.float64
        assert label_rows(torch.rand(0, 4), labels[:0], 2).shape == (0, 4)
    for wrong, kind, said in (
        ([[0, 1], [2, 2]], InputError, "the objects of an image must be of different classes, got [2, 2]"),
        ([[0, 1], [2, -1]], InputError, "labels must be in 0..3, got -1..2"),
        ([[0], [1]], InputError, "of shape (2, 2), got (2, 1)"),
        ([[False, True], [True, False]], WrongType, "must be a tensor of integers, got one of torch.bool"),
    ):
        assert_raises(kind, label_rows, torch.rand(2, 4), torch.tensor(wrong), 2, say=said)
