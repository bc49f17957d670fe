from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from torchcaps.datasets import Augmentation, BatchLoader, ImageSet, center_crop, fixed_pairs
from torchcaps.datasets.affine import inverse_maps, warp
from torchcaps.datasets.augmentation import Changes
from torchcaps.errors import InputError

MakeSet = Callable[..., ImageSet]
KEY = (3, 1, 4)


def drawn(n: int = 4000, **options: float) -> Changes:
    return Augmentation(**options).draw((1, 9, 7), n, KEY)  # type: ignore[arg-type]


def test_without_anything_asked_for_nothing_is_drawn() -> None:
    assert drawn().corners.count_nonzero() == 0
    assert drawn()[1:] == (None,) * 4


@pytest.mark.parametrize(
    ("options", "field", "least", "most"),
    [
        ({"brightness": 0.25}, "brightness", -0.25, 0.25),
        ({"contrast": 0.8}, "contrast", 0.2, 1.8),
    ],
)
def test_numbers_are_uniform_in_their_range(options: dict[str, float], field: str, least: float, most: float) -> None:
    values = getattr(drawn(**options), field)
    tenths = ((values - least) / (most - least) * 10).long()
    assert values.min() >= least
    assert values.max() <= most
    counts = tenths.bincount()
    assert len(counts) == 10
    assert counts.min() > 300  # 400 expected, 19 a standard deviation
    assert counts.max() < 500


def test_angles_and_factors_are_uniform_in_their_range() -> None:
    linear = drawn(max_rotation=20.0, max_scaling=0.3).linear
    assert linear is not None
    angles = torch.atan2(linear[:, 0, 1], linear[:, 0, 0]).rad2deg()
    factors = linear.det().sqrt()
    for values, middle, most in ((angles, 0, 20), (factors, 1, 0.3)):
        tenths = ((values - middle) / most * 5 + 5).long().bincount()
        assert len(tenths) == 10
        assert tenths.min() > 300
        assert tenths.max() < 500
    assert torch.corrcoef(torch.stack([angles, factors]))[0, 1].abs() < 0.06


@pytest.mark.parametrize(("option", "kept"), [("max_rotation", "scaling"), ("max_scaling", "rotation")])
def test_either_of_turning_and_scaling_alone(option: str, kept: str) -> None:
    linear = drawn(**{option: 0.5}).linear
    assert linear is not None
    if kept == "scaling":
        assert (linear.det() - 1).abs().max() < 1e-6
        assert (linear[:, 0, 1] != 0).all()
    else:
        assert linear[:, 0, 1].count_nonzero() == 0
        assert (linear[:, 0, 0] - linear[:, 1, 1]).abs().max() == 0


def test_half_of_the_images_are_mirrored() -> None:
    flips = drawn(flip=True).flips
    assert flips is not None
    assert set(flips.tolist()) == {0, 1}
    assert 1850 < int(flips.sum()) < 2150


def test_crops_are_uniform_over_all_places() -> None:
    corners = drawn(crop=5).corners  # of 9×7: 5 by 3 places
    counts = (corners[:, 0] * 3 + corners[:, 1]).bincount()
    assert len(counts) == 15
    assert counts.min() > 190  # 267 expected, 16 a standard deviation
    assert counts.max() < 345


def test_each_change_is_the_same_whatever_else_is_done() -> None:
    alone, together = (
        drawn(brightness=0.2),
        drawn(brightness=0.2, contrast=0.5, max_shift=2, flip=True, max_rotation=9.0),
    )
    assert torch.equal(alone.brightness, together.brightness)  # type: ignore[arg-type]
    assert torch.equal(drawn(max_shift=2).corners, together.corners)
    # and none is another one in disguise
    assert torch.corrcoef(torch.stack([together.brightness, together.contrast]))[0, 1].abs() < 0.06  # type: ignore[list-item]


def recoloured(pixels: torch.Tensor, changes: Changes) -> torch.Tensor:
    return Augmentation().apply(pixels, changes)


def test_recoloured_by_hand() -> None:
    pixels = torch.tensor([[[[0, 102], [204, 102]]]]).byte().repeat(3, 1, 1, 1)  # 0, 0.4 and 0.8; the mean is 0.4
    changes = Changes(
        torch.zeros(3, 2).long(), brightness=torch.tensor([0.1, 0.0, -0.3]), contrast=torch.tensor([1.0, 0.5, 2.0])
    )
    got = recoloured(pixels, changes)[:, 0]
    wanted = torch.tensor([[[0.1, 0.5], [0.9, 0.5]], [[0.2, 0.4], [0.6, 0.4]], [[0.0, 0.1], [0.9, 0.1]]])
    assert (got - wanted).abs().max() < 1e-6  # the last one clipped at 0: 0.4 - 0.8 - 0.3
    bright = recoloured(
        torch.full((1, 1, 2, 2), 255).byte(), Changes(torch.zeros(1, 2).long(), brightness=torch.ones(1))
    )
    assert (bright == 1).all()


def test_contrast_is_about_the_mean_of_each_channel() -> None:
    """As TensorFlow's, which the authors' code for CIFAR-10 uses: a change of contrast moves no channel's mean."""
    pixels = torch.tensor([[[[0, 40]], [[100, 200]]]]).byte()  # means of 20 and 150
    got = recoloured(pixels, Changes(torch.zeros(1, 2).long(), contrast=torch.tensor([0.5])))
    wanted = torch.tensor([[[[10.0, 30.0]], [[125.0, 175.0]]]]) / 255
    assert (got - wanted).abs().max() < 1e-6


def test_turned_without_a_turn_is_the_window(make_set: MakeSet) -> None:
    """The interpolated way agrees with the other one: shifts and crops of odd and even sizes."""
    images = make_set(8, (2, 9, 6))
    for options in (
        {},
        {"max_shift": 3},
        {"max_shift": 5, "fill": "edge"},
        {"crop": 4},
        {"crop": 5, "max_shift": 2},
        {"crop": 6, "max_shift": 5},
        {"crop": 6, "max_shift": 5, "fill": "edge"},
    ):
        plain = Augmentation(**options)  # type: ignore[arg-type]
        changes = plain.draw(images.in_shape, 8, KEY)
        still = torch.eye(2, dtype=torch.float64).repeat(8, 1, 1)
        warped = plain.apply(images.images, changes._replace(linear=still))
        assert (warped - plain.apply(images.images, changes)).abs().max() < 1e-5


def test_images_of_one_colour_stay_as_they_are_with_their_edge(make_set: MakeSet) -> None:
    images = dataclasses.replace(make_set(8, (3, 9, 7)), images=torch.full((8, 3, 9, 7), 200, dtype=torch.uint8))
    options = {"max_shift": 4, "max_rotation": 45.0, "max_scaling": 0.5}
    for fill, changed in (("edge", False), ("zeros", True)):
        augmentation = Augmentation(fill=fill, **options)  # type: ignore[arg-type]
        (batch,) = BatchLoader(images, 8, shuffle=True, augmentation=augmentation).batches(0)
        assert bool((batch.images < 200 / 255 - 1e-5).any()) == changed


def test_images_are_turned_about_their_own_middle_before_they_are_moved_and_cropped(make_set: MakeSet) -> None:
    images = make_set(8, (1, 9, 9))
    options = {"max_shift": 2, "crop": 5, "max_rotation": 30.0, "max_scaling": 0.2}
    loader = BatchLoader(images, 8, shuffle=True, augmentation=Augmentation(**options))  # type: ignore[arg-type]
    (batch,) = loader.batches(0)
    changes = loader.changes(0, 0)
    assert changes.linear is not None
    whole = warp(
        images.images[loader.order(0)],
        inverse_maps(changes.linear, torch.zeros(8, 2)),
        (13, 13),  # as wide as a shift by 2 can lead
    )
    for i in range(8):
        y, x = changes.corners[i].tolist()
        wanted = whole[i, :, y : y + 5, x : x + 5] / 255
        assert (batch.images[i] - wanted).abs().max() < 1e-5


def test_mirrored_and_cropped_batches(make_set: MakeSet) -> None:
    images = make_set(30, (3, 6, 7))
    loader = BatchLoader(images, 10, shuffle=True, augmentation=Augmentation(crop=4, flip=True), seed=2)
    for number, batch in enumerate(loader.batches(1)):
        changes = loader.changes(1, number)
        assert changes.flips is not None
        for place, i in enumerate(loader.order(1)[number * 10 : (number + 1) * 10]):
            y, x = changes.corners[place].tolist()
            wanted = images.images[i, :, y : y + 4, x : x + 4]
            wanted = wanted.flip(-1) if changes.flips[place] else wanted
            assert torch.equal(batch.images[place], wanted / 255)


def test_brightness_and_contrast_in_batches(make_set: MakeSet) -> None:
    images = make_set(20, (3, 6, 7))
    loader = BatchLoader(images, 10, shuffle=True, augmentation=Augmentation(brightness=0.3, contrast=0.8))
    for number, batch in enumerate(loader.batches(0)):
        changes = loader.changes(0, number)
        assert changes.brightness is not None
        assert changes.contrast is not None
        plain = images.images[loader.order(0)[number * 10 : (number + 1) * 10]].double() / 255
        mean = plain.mean((2, 3), keepdim=True)
        factor, added = (each.double()[:, None, None, None] for each in (changes.contrast, changes.brightness))
        wanted = ((plain - mean) * factor + mean + added).clamp(0, 1)
        assert (batch.images - wanted).abs().max() < 1e-6
        assert batch.images.dtype == torch.float32


ALL = {"max_shift": 1, "crop": 4, "flip": True, "brightness": 0.2, "contrast": 0.5}


@pytest.mark.parametrize("options", [ALL, ALL | {"max_rotation": 20.0, "max_scaling": 0.1}])
def test_shares_epochs_and_resumed_batches_agree_with_everything_on(
    make_set: MakeSet, options: dict[str, float]
) -> None:
    images = make_set(40, (2, 6, 6))

    def load(**more: int) -> BatchLoader:
        return BatchLoader(images, 12, shuffle=True, seed=7, augmentation=Augmentation(**options), **more)  # type: ignore[arg-type]

    whole = list(load().batches(2))
    shares = [list(load(rank=rank, world_size=3).batches(2)) for rank in range(3)]
    for number, batch in enumerate(whole):
        parts = [share[number] for share in shares]
        assert torch.equal(torch.cat([part.images for part in parts]), batch.images)
        assert torch.equal(torch.cat([part.labels for part in parts]), batch.labels)
    for resumed, batch in zip(load().batches(2, start=2), whole[2:], strict=True):
        assert torch.equal(resumed.images, batch.images)
    (other,) = (next(iter(load().batches(3))),)
    assert not torch.equal(other.images, whole[0].images)


def test_shares_of_a_small_last_batch_may_be_empty(make_set: MakeSet) -> None:
    augmentation = Augmentation(max_rotation=5.0, max_shift=1)
    loaders = [
        BatchLoader(make_set(7), 3, shuffle=True, augmentation=augmentation, rank=rank, world_size=3)
        for rank in range(3)
    ]
    assert [list(loader.batches(0))[-1].images.shape for loader in loaders] == [(0, 1, 6, 5)] * 2 + [(1, 1, 6, 5)]


def test_parts_go_where_their_image_goes(make_set: MakeSet) -> None:
    pairs = fixed_pairs(make_set(12, (2, 6, 6)), max_shift=1)
    assert pairs.parts is not None
    for options in ({"max_shift": 1, "crop": 5, "flip": True}, {"max_rotation": 90.0}):
        (batch,) = BatchLoader(pairs, 12, shuffle=True, augmentation=Augmentation(**options)).batches(0)  # type: ignore[arg-type]
        assert batch.parts is not None
        assert batch.parts.shape == (12, 2, *batch.images.shape[1:])
        if "crop" in options:  # interpolated after the clipping, an image is not the sum of its parts any more
            assert (batch.images - batch.parts.sum(1).clamp(max=1)).abs().max() < 1e-6
        alone = [ImageSet(pairs.parts[:, i], pairs.labels[:, i]) for i in range(2)]
        for i, part in enumerate(alone):
            (only,) = BatchLoader(part, 12, shuffle=True, augmentation=Augmentation(**options)).batches(0)  # type: ignore[arg-type]
            assert torch.equal(batch.parts[:, i], only.images)


def test_evaluation_gives_parts(make_set: MakeSet) -> None:
    pairs = fixed_pairs(make_set(6, (1, 6, 5)), max_shift=1)
    assert pairs.parts is not None
    batches = list(BatchLoader(pairs, 4, shuffle=False).batches(0))
    assert torch.equal(torch.cat([batch.parts for batch in batches]), pairs.parts / 255)  # type: ignore[misc]
    assert torch.equal(torch.cat([batch.labels for batch in batches]), pairs.labels)
    middle = center_crop(pairs, 4)
    assert middle.parts is not None
    assert middle.parts.shape == (6, 2, 1, 4, 4)


def test_center_crop_by_hand() -> None:
    images = ImageSet(torch.arange(20, dtype=torch.uint8).view(1, 1, 4, 5), torch.tensor([1]))
    assert center_crop(images, 2).images.tolist() == [[[[6, 7], [11, 12]]]]  # of two middle columns the left one
    assert center_crop(images, 3).images.tolist() == [[[[1, 2, 3], [6, 7, 8], [11, 12, 13]]]]
    assert center_crop(images, 4).images[0, 0, 0].tolist() == [0, 1, 2, 3]
    assert center_crop(images, 4).images.data_ptr() == images.images.data_ptr()
    assert torch.equal(center_crop(images, 2).labels, images.labels)
    for size in (0, 5):
        with pytest.raises(InputError, match=f"crop is {size} pixels, but squares of 1 to 4"):
            center_crop(images, size)


@pytest.mark.parametrize(
    ("shuffle", "options", "words"),
    [
        (True, {"crop": 6}, "crop is 6 pixels, but squares of 1 to 5 can be cut out"),
        (True, {"crop": 0}, "crop is 0 pixels"),
        (True, {"brightness": -0.1}, "brightness must be 0 to 1, got -0.1"),
        (True, {"brightness": float("nan")}, "brightness must be 0 to 1, got nan"),
        (True, {"contrast": 1.5}, "contrast must be 0 to 1, got 1.5"),
        (True, {"max_rotation": 181.0}, "max_rotation must be 0 to 180, got 181"),
        (True, {"fill": "mean"}, "fill must be one of zeros, edge, got 'mean'"),
        (True, {"max_scaling": 1.0}, "max_scaling must be at least 0 and below 1, got 1.0"),
        (
            False,
            {"flip": True},
            r"only training images \(shuffle=True\) are changed at random; crop others by",
        ),
        (False, {"crop": 4}, "only training images"),
    ],
)
def test_changes_that_cannot_be(make_set: MakeSet, shuffle: bool, options: dict[str, float], words: str) -> None:
    with pytest.raises(InputError, match=words):
        BatchLoader(make_set(12), 4, shuffle=shuffle, augmentation=Augmentation(**options))  # type: ignore[arg-type]


def test_images_may_be_made_very_small(make_set: MakeSet) -> None:
    augmentation = Augmentation(max_scaling=0.99999999, max_shift=20)
    for batch in BatchLoader(make_set(40, (1, 28, 28)), 40, shuffle=True, augmentation=augmentation).batches(0):
        assert ((batch.images >= 0) & (batch.images <= 1)).all()


@pytest.mark.parametrize("option", ["brightness", "contrast"])
def test_the_colours_of_several_objects_stay(make_set: MakeSet, option: str) -> None:
    with pytest.raises(InputError, match="brightness and contrast are for images of one object, got 2 an image"):
        BatchLoader(fixed_pairs(make_set(12)), 4, shuffle=True, augmentation=Augmentation(**{option: 0.1}))  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [ALL, ALL | {"max_rotation": 20.0, "max_scaling": 0.1}])
def test_the_same_changes_on_the_gpu(make_set: MakeSet, options: dict[str, float]) -> None:
    images = make_set(40, (3, 8, 8))
    cpu, gpu = (
        BatchLoader(images, 8, shuffle=True, device=device, augmentation=Augmentation(**options))  # type: ignore[arg-type]
        for device in ("cpu", "cuda")
    )
    for a, b in zip(cpu.batches(1), gpu.batches(1), strict=True):
        torch.testing.assert_close(b.images.cpu(), a.images, rtol=0, atol=1e-6)
