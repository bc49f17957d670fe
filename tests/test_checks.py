"""Arguments are held to their annotations, and a sentence says which does not fit, where, and what would."""

import gc
import re
import weakref
from typing import Annotated, Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn

from support import assert_raises
from torchcaps.checks import check, check_classes, checked, with_article
from torchcaps.errors import InputError, WrongType
from torchcaps.ranges import MAX_ENTRIES, Range
from torchcaps.tracing import can_look

NAN, INF = float("nan"), float("inf")
Small = Annotated[int, Range(1, 9, whole=True)]


@checked
def function(
    poses: Float[Tensor, "B I K"],
    weight: Float[Tensor, "I J D K"] | Float[Tensor, "I J D"] | None = None,
    *,
    number: Small = 3,
    sizes: tuple[Small, ...] = (),
    pair: tuple[Small, Small] = (1, 2),
    module: nn.Module | str = "",
) -> None:
    pass


class Layer(nn.Module):
    """Whose sizes stand in its annotations."""

    @checked
    def __init__(self, channels: Small = 2) -> None:
        super().__init__()
        self.channels = channels

    @checked
    def forward(self, maps: Float[Tensor, "B {self.channels} ..."]) -> Tensor:
        return maps

    @checked
    def other(self, poses: Float[Tensor, "B {self.channels}"]) -> None:
        pass

    @checked
    def _inner(self, poses: Float[Tensor, "B {self.channels} 3"]) -> None:
        pass


class Special(Layer):
    """Which inherits all."""


POSES = torch.zeros(2, 3, 4)


#: What tests/test_arguments.py does not give to every function and part.
CASES: list[tuple[dict[str, Any], type[InputError], str]] = [
    # a letter stands for one size throughout the call
    ({"weight": torch.zeros(3, 5)}, InputError, "weight must have shape (3, J, D, 4) or (3, J, D), got (3, 5)"),
    ({"weight": torch.zeros(2, 5, 6, 4)}, InputError, "weight must have shape (3, J, D, 4) or (3, J, D), got (2, 5, "),
    ({"number": 10**5000}, InputError, "number must be 1 to 9, got a value of type int that is too long to show"),
    ({"sizes": "12"}, WrongType, "sizes must be a sequence, got '12'"),
    ({"sizes": [1] * (MAX_ENTRIES + 1)}, InputError, f"sizes must have at most {MAX_ENTRIES} entries, got 101"),
    ({"pair": (1, 2, 3)}, InputError, "pair must have 2 entries, got (1, 2, 3)"),
    ({"module": 3}, WrongType, "module must be a Module or a text, got 3"),
]


def test_what_does_not_fit_is_named() -> None:
    for given, error, said in CASES:
        with pytest.raises(error, match=f"^function: {re.escape(said)}") as caught:
            function(**({"poses": POSES} | given))
        assert caught.type is error
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, TypeError) == (error is WrongType)


def test_a_tensor_dies_with_its_last_name_after_a_call_that_tried_two_annotations() -> None:
    gc.disable()
    try:
        poses = torch.zeros(2, 3, 4)
        dead = weakref.ref(poses)
        function(poses, torch.zeros(3, 5, 6))  # does not fit the first of weight's annotations
        del poses
        assert dead() is None
    finally:
        gc.enable()


def test_methods_are_named_by_the_class_of_their_object() -> None:
    assert_raises(InputError, Layer, 0, say="Layer: channels must be 1 to 9, got 0")
    assert_raises(InputError, Special, channels=0, say="Special: channels must be 1 to 9, got 0")
    layer = Special(3)
    assert_raises(InputError, layer, torch.zeros(2), say="Special: maps must have shape (B, 3, ...), got (2,)")
    said = "Special.other: poses must have shape (B, 3), got (2, 2): channels is 3"
    assert_raises(InputError, layer.other, torch.zeros(2, 2), say=said)
    assert_raises(InputError, layer._inner, torch.zeros(2, 3, 4), say="Special: poses must have shape (B, 3, 3), got")
    layer._inner(torch.zeros(2, 3, 3))


def test_axes_of_any_number() -> None:
    @checked
    def images(x: Float[Tensor, "B *shape C"]) -> None:
        pass

    images(torch.zeros(2, 3))
    images(torch.zeros(2, 5, 6, 3))
    assert_raises(InputError, images, torch.zeros(2), say="images: x must have shape (B, *shape, C), got (2,)")


def test_nothing_is_checked_while_torch_compiles() -> None:
    @checked
    def traced(x: Float[Tensor, "B I"], n: Small = 1) -> Tensor:
        return x * n

    compiled = torch.compile(lambda x: traced(x, 100), backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [100, 100]
    assert_raises(InputError, traced, torch.ones(2), say="traced: x must have shape (B, I), got (2,)")
    assert_raises(InputError, torch.vmap(traced), torch.ones(2, 3), say="traced: x must have shape (B, I), got (3,)")
    torch.vmap(traced)(torch.ones(2, 3, 4))


def test_ranges() -> None:
    check("size", 3, float)
    for allowed, words, inside, outside in (
        (Range(1, 3), "1 to 3", (1, 2, 3), (0, 4, NAN)),
        (Range(0, 1, above=True), "above 0 and at most 1", (0.1, 1), (0, 1.1)),
        (Range(0, 1, below=True), "at least 0 and below 1", (0, 0.9), (-0.1, 1)),
        (Range(1, 9, odd=True), "an odd number from 1 to 9", (1, 9), (2, 11, -1)),
        (Range(0, 1e38), "0 to 1e+38", (0, 1e38), (-1, INF, 10**400)),
        (Range(1, 3, whole=True), "1 to 3", (1, 3), (0, 4)),
    ):
        assert str(allowed) == words
        hint = Annotated[float, allowed]
        for value in inside:
            check("size", value, hint)
        for value in outside:
            assert_raises(InputError, check, "size", value, hint, say=f"size must be {words}, got ")


def test_labels_that_can_be_looked_at_lie_among_the_classes() -> None:
    check_classes("labels", torch.tensor([0, 4]), 5)
    for wrong in ([-1, 2], [0, 5]):
        said = f"labels must be in 0..4, got {wrong[0] if wrong[0] < 0 else 0}..{wrong[1]}"
        assert_raises(InputError, check_classes, "labels", torch.tensor(wrong), 5, say=said)
    unseen: list[bool] = []
    torch.vmap(lambda x: unseen.append(can_look(x)) or x)(torch.zeros(2, 1))
    assert unseen == [False]
    assert not can_look(torch.zeros(2, device="meta"))
    assert not can_look(torch.zeros(0))
    check_classes("labels", torch.zeros(0).long(), 5)


def test_each_entry_of_a_tuple_has_its_own_annotation() -> None:
    pair = tuple[int, str]
    check("pair", (1, "a"), pair)
    for value, said in (((1, 2), "pair must be a text, got 2"), (("a", "b"), "pair must be an integer, got 'a'")):
        assert_raises(WrongType, check, "pair", value, pair, say=said)
    assert_raises(InputError, check, "pair", (1,), pair, say="pair must have 2 entries, got (1,)")
    check("numbers", (1, 2, 3), tuple[int, ...])


def test_articles_are_those_of_the_spoken_word() -> None:
    words = "UNet LSTM MLP Unflatten UninitializedBuffer Uniform User HVCRouting RNN VBRouting Adam Dense EMRouting U"
    articles = "a an an an an a a an an a an a an a"
    assert [with_article(word).split()[0] for word in words.split()] == articles.split()
