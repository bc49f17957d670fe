"""Networks that answer each pixel: published sizes, their equations, any size of image, losses, and bad options."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support import assert_close, assert_finite, assert_raises, small
from torchcaps import create_model, load_pretrained
from torchcaps.errors import InputError
from torchcaps.models import ModelOutput
from torchcaps.models.segmentation import PixelNetwork, cut_to, pad_to_multiple
from torchcaps.nn.segmentation import InstanceNorm
from torchcaps.parts import PARTS, UnknownOption, describe
from torchcaps.training import TrainConfig

CONV, UP = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}, {2: F.conv_transpose2d, 3: F.conv_transpose3d}
FEW = {"layer_types": 3}
"""Options that make segcaps small."""
SMALL_UCAPS: dict[str, Any] = {"pixel_channels": (4, 5, 6), "up_channels": (7, 6, 5, 4, 3), "layer_types": 3}


def number(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def on_meta(*args: Any, **options: Any) -> PixelNetwork:
    with torch.device("meta"):
        model = create_model(*args, **options)
    assert isinstance(model, PixelNetwork)
    return model


# ---- sizes


def test_parameters_are_those_of_the_sources() -> None:
    assert number(on_meta("segcaps", (1, 64, 64), 2)) == 1_425_649
    assert number(on_meta("ucaps3d", (2, 32, 32, 32), 4)) == 3_368_362
    assert number(on_meta("ucaps3d", (2, 32, 32, 32), 4, transform="dense")) == 7_124_906


@pytest.mark.parametrize(
    ("preset", "in_shape", "classes"),
    [
        ("segcaps", (1, 64, 64), 2),
        ("segcaps", (3, 40, 40), 5),
        ("ucaps3d", (2, 32, 32, 32), 4),
        ("segcaps", (1, 90), 3),
    ],
)
def test_the_twin_has_as_many_parameters(preset: str, in_shape: tuple[int, ...], classes: int) -> None:
    wanted = number(on_meta(preset, in_shape, classes))
    twin: Any = on_meta("unet-twin", in_shape, classes, parameters_of=preset)
    assert abs(number(twin) - wanted) <= 0.03 * wanted
    assert twin._count(twin.widths) == number(twin)
    assert [round(b / a, 1) for a, b in zip(twin.widths, twin.widths[1:], strict=False)] == pytest.approx(
        [2] * 3, abs=0.1
    )


def test_parameters_do_not_depend_on_the_size_of_the_images() -> None:
    for preset in ("segcaps", "ucaps3d", "unet-twin"):
        assert number(on_meta(preset, (1, 8, 8), 3)) == number(on_meta(preset, (1, 57, 90), 3))


# ---- by their equations


def reference_routing(votes: Tensor, bias: Tensor, iterations: int, *, cosine: bool) -> Tensor:
    """Capsules (B, J, D, *S) of votes (B, T, J, D, *S), as both sources compute them."""
    logits = torch.zeros_like(votes[:, :, :, 0])
    for _ in range(iterations):
        total = (logits.softmax(2).unsqueeze(3) * votes).sum(1) + bias.view(*bias.shape, *[1] * (votes.ndim - 4))
        n = total.square().sum(2, keepdim=True)
        squashed = total / n.sqrt() * n / (1 + n)
        if cosine:
            logits = logits + F.cosine_similarity(total.unsqueeze(1), votes, dim=3)
        else:
            logits = logits + (squashed.unsqueeze(1) * votes).sum(3)
    return squashed


def reference_layer(layer: Any, maps: Tensor, *, cosine: bool) -> Tensor:
    """A layer with one kernel for all types; maps (B, T, K, *S)."""
    dims, kernel, stride = maps.ndim - 3, layer.layer_kernel, layer.layer_stride
    J, D, K = layer.layer_types, layer.capsule_dim, maps.shape[2]
    weight = layer.transform.matrices.view(J * D, K, *[kernel] * dims)
    bias = None if layer.bias is None else layer.bias.flatten()
    flat = maps.flatten(0, 1)
    if type(layer).__name__ == "DeconvCapsules":
        votes = UP[dims](flat, weight.transpose(0, 1), bias, stride, padding=1)  # of kernel 4 and stride 2: "same"
    elif layer.layer_padding == "same":
        zeros = [max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in flat.shape[2:]]
        votes = CONV[dims](
            F.pad(flat, [n for z in reversed(zeros) for n in (z // 2, z - z // 2)]), weight, bias, stride
        )
    else:
        votes = CONV[dims](flat, weight, bias, stride, layer.layer_padding)
    votes = votes.view(*maps.shape[:2], J, D, *votes.shape[2:])
    return reference_routing(votes, layer.routing.bias, layer.routing.num_iterations, cosine=cosine)


def drawn(model: nn.Module) -> Any:
    """The network in float64, with biases that differ."""
    model = model.double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("classes", [2, 3])
def test_segcaps_by_its_equations(classes: int) -> None:
    model = drawn(create_model("segcaps", (1, 24, 16), classes))
    images, masks = torch.rand(2, 1, 24, 16).double(), torch.randint(0, classes, (2, 24, 16), dtype=torch.uint8)
    first = F.conv2d(images, model.backbone[0].weight, model.backbone[0].bias, padding=2).relu().unsqueeze(1)
    at = lambda n, maps: reference_layer(model.layers[n], maps, cosine=False)  # noqa: E731
    second = at(1, at(0, first))
    third = at(3, at(2, second))
    maps = at(7, torch.cat([at(6, at(5, at(4, third))), third], 1))
    maps = at(9, torch.cat([at(8, maps), second], 1))
    maps = at(11, torch.cat([at(10, maps), first], 1))  # (B, 1, 16, H, W)
    output = model(images, masks)
    assert_close(output.capsules, maps, 1e-8)
    assert_close(output.scores, maps.square().sum(2).sqrt(), 1e-8)
    shown = maps if classes == 2 else maps[:, 1:]
    keep = torch.stack([masks == label for label in range(1, classes)], 1)
    x = (shown * keep.unsqueeze(2)).flatten(1, 2)
    for layer in model.decoder:
        x = F.conv2d(x, layer.weight, layer.bias) if isinstance(layer, nn.Conv2d) else layer(x)
    assert_close(output.reconstruction, x, 1e-8)
    answer = (output.scores[:, 0] > 0.5) if classes == 2 else output.scores.argmax(1)
    assert model(images).reconstruction.equal(model(images, answer.to(torch.uint8)).reconstruction)


def test_ucaps3d_by_its_equations() -> None:
    model = drawn(create_model("ucaps3d", (2, 16, 8, 8), 4, **SMALL_UCAPS))
    images = torch.rand(2, 2, 16, 8, 8).double()

    def normalised(x: Tensor) -> Tensor:
        mean, variance = x.mean((2, 3, 4), keepdim=True), x.var((2, 3, 4), keepdim=True, correction=0)
        return (x - mean) / (variance + 1e-5).sqrt()

    x, convolutions = images, [each for each in model.backbone if isinstance(each, nn.Conv3d)]
    for n, (conv, dilation) in enumerate(zip(convolutions, (1, 2, 2), strict=True)):
        x = normalised(F.conv3d(x, conv.weight, padding=2 * dilation, dilation=dilation))
        x = x.tanh() if n == 2 else torch.where(x > 0, x, 0.25 * x)
    maps, skips = x.unsqueeze(1), []
    for layer in model.layers:
        if layer.layer_stride == 2:
            skips.append(maps.flatten(1, 2))
        maps = reference_layer(layer, maps, cosine=True)
    capsules, x = maps, maps.flatten(1, 2)
    for n in range(3):
        if n:
            x = normalised(F.conv3d(x, model.join[n - 1][0].weight, padding=1))
            x = torch.where(x > 0, x, 0.25 * x)
        x = torch.cat([F.conv_transpose3d(x, model.up[n].weight, model.up[n].bias, 2), skips.pop()], 1)
    logits = F.conv3d(x, model.classify.weight, model.classify.bias)
    output = model(images)
    assert_close(output.capsules, capsules, 1e-8)
    assert_close(output.logits, logits, 1e-8)
    assert_close(output.scores, logits.softmax(1), 1e-8)
    assert_close(output.reconstruction, model.decoder(x), 1e-8)

    masks = torch.randint(0, 4, (2, 16, 8, 8), dtype=torch.uint8)
    losses = model.loss(output, images, masks)
    rows = F.one_hot(masks.long(), 4).movedim(-1, 1).double()
    coarse = F.interpolate(rows, scale_factor=0.125, mode="trilinear", align_corners=False)
    lengths = capsules.square().sum(2).sqrt()
    margin = 0.5 * coarse * F.relu(0.2 - (lengths - 0.5)) ** 2 + 0.25 * (1 - coarse) * F.relu(lengths - 0.5 + 0.2) ** 2
    shown = (masks > 0).unsqueeze(1)
    error = ((images - output.reconstruction) ** 2 * shown).sum((1, 2, 3, 4)) / shown.sum((1, 2, 3, 4))
    assert_close(losses.reconstruction, error.mean(), 1e-6)
    wanted = F.cross_entropy(logits, masks.long()) + 0.1 * margin.sum(1).mean()
    assert_close(losses.classification, wanted, 1e-5)  # lengths have 1e-7 under their root
    assert_close(losses.total, losses.classification + 0.1 * losses.reconstruction, 1e-6)


def test_unet_by_its_equations() -> None:
    model = drawn(create_model("unet-twin", (2, 12, 8), 3, channels=(4, 6), parameters_of=None))
    images = torch.rand(2, 2, 12, 8).double()

    def level(part: Any, x: Tensor) -> Tensor:
        for n in (0, 3):
            x = F.conv2d(x, part[n].weight, padding=1)
            x = F.instance_norm(x, weight=part[n + 1].weight, bias=part[n + 1].bias).relu()
        return x

    first = level(model.down[0], images)
    second = level(model.down[1], F.max_pool2d(first, 2))
    up = F.conv_transpose2d(second, model.up[0].weight, model.up[0].bias, 2)
    logits = F.conv2d(level(model.join[0], torch.cat([up, first], 1)), model.classify.weight, model.classify.bias)
    assert_close(model(images).logits, logits, 1e-8)
    assert_close(model(images).scores, logits.softmax(1), 1e-8)


# ---- any size, any number of axes

NETWORKS: dict[str, dict[str, Any]] = {
    "segcaps": FEW,
    "ucaps3d": SMALL_UCAPS,
    "unet-twin": {"channels": (4, 5, 6, 7), "parameters_of": None},
}


@pytest.mark.parametrize("preset", NETWORKS)
@pytest.mark.parametrize("sizes", [(19,), (9, 16), (7, 5, 9)])
def test_images_of_any_size_are_padded_and_cut(preset: str, sizes: tuple[int, ...]) -> None:
    model = create_model(preset, (2, *[8] * len(sizes)), 3, **NETWORKS[preset]).double().eval()
    images = torch.rand(2, 2, *sizes).double()
    wanted = [(0, -size % model.stride) for size in reversed(sizes)]
    whole = F.pad(images, [n for pair in wanted for n in pair], "replicate")
    assert pad_to_multiple(images, model.stride).equal(whole)
    scores, expected = model(images).scores, model(whole).scores
    assert scores.shape == (2, 3, *sizes)
    assert_close(scores, cut_to(expected, sizes), 1e-12)
    assert model(torch.rand(1, 2, *[1] * len(sizes)).double()).scores.shape == (1, 3, *[1] * len(sizes))


def test_a_map_of_one_position_is_normalised_to_zero() -> None:
    assert InstanceNorm(3)(torch.rand(1, 3, 1, 1)).abs().max() < 1e-4
    maps = torch.rand(2, 3, 5, 4).double()
    assert_close(InstanceNorm(3)(maps), F.instance_norm(maps), 1e-12)


ROUTINGS: dict[str, Any] = {name: name for name in PARTS["routing"]} | {
    "b2i": {"name": "b2i", "start_from": "queries"},
    "grouped": {"name": "grouped", "num_groups": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("routing", ROUTINGS)
def test_any_routing_learns(routing: str) -> None:
    torch.manual_seed(0)
    model = create_model(
        "segcaps", (1, 16, 16), 3, capsule_dim=4, layer_types=3, pixel_channels=(4,), routing=ROUTINGS[routing]
    )
    images, masks = torch.rand(3, 1, 16, 16), torch.randint(0, 3, (3, 16, 16), dtype=torch.uint8)
    output = model(images, model.decoder_targets(masks))
    losses = model.loss(output, images, masks)
    losses.total.backward()
    assert output.scores.shape == (3, 3, 16, 16)
    assert_finite([*output, *losses])
    assert all(each.grad is None or each.grad.isfinite().all() for each in model.parameters())


# ---- losses


@pytest.mark.parametrize("preset", NETWORKS)
def test_ignored_pixels_change_no_loss(preset: str) -> None:
    model = create_model(preset, (1, 16, 16), 3, **NETWORKS[preset]).double()
    images, masks = torch.rand(2, 1, 16, 16).double(), torch.randint(0, 3, (2, 16, 16), dtype=torch.uint8)
    masks[:, :8] = 255
    with torch.no_grad():
        output = model(images, model.decoder_targets(masks))
    changed = list(output)
    for field in ("scores", "reconstruction", "logits"):
        value = getattr(output, field)
        if value is not None:
            changed[output._fields.index(field)] = torch.cat([torch.rand_like(value[:, :, :8]), value[:, :, 8:]], 2)
    losses, others = model.loss(output, images, masks), model.loss(ModelOutput(*changed), images, masks)
    for ours, theirs in zip(losses, others, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or ours == pytest.approx(theirs.item(), rel=1e-12)


def test_an_image_without_foreground_has_finite_losses() -> None:
    for preset, options in NETWORKS.items():
        model = create_model(preset, (1, 16, 16), 3, **options)
        images = torch.rand(2, 1, 16, 16)
        for value in (0, 255):
            masks = torch.full((2, 16, 16), value, dtype=torch.uint8)
            losses = model.loss(model(images, model.decoder_targets(masks)), images, masks)
            losses.total.backward()
            assert_finite([*losses, *(each.grad for each in model.parameters())])


# ---- what is refused


def test_wrong_options_are_a_sentence() -> None:
    conv = {"name": "conv-types", "layer_padding": "same"}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("segcaps", {"layers": [{**conv, "layer_stride": 2}]}, "layers must return to the size of the image, but 1 of"),
        ("segcaps", {"layers": [{"name": "deconv"}]}, "a layer with a stride for each deconv layer"),
        ("segcaps", {"layers": []}, "layers must be at least one layer"),
        ("segcaps", {"layers": [{"name": "conv", "layer_padding": 1}]}, 'be deconv or conv-types, got'),
        ("segcaps", {"layers": [{**conv, "layer_stride": 2}, {"name": "deconv", "capsule_dim": 9}, conv]},
         "as many components, got 9 and 16"),
        ("segcaps", {"backbone": "conv"}, "ConvBackbone must keep the size of the image"),
        ("segcaps", {"coarse_loss": "margin"}, "coarse_loss needs up_channels"),
        ("segcaps", {"pixel_kernels": (5, 3)}, "pixel_kernels must be 1 number, one for each convolution, got 2"),
        ("ucaps3d", {"up_channels": (4, 4)}, "up_channels must be 5 numbers for 3 strides, got (4, 4)"),
        ("unet-twin", {"channels": ()}, "channels must be at least one number"),
        ("unet-twin", {"parameters_of": "unet-twin"}, "a preset that is not a U-Net itself, got unet-twin"),
        ("unet-twin", {"channels": (1,) * 95}, "no U-Net of 95 levels has the 1,425,649 parameters of"),
    ]  # fmt: skip
    for preset, options, says in cases:
        assert_raises(InputError, create_model, preset, (1, 16, 16), 2, **options, say=says)
    assert_raises(
        InputError, create_model, "segcaps", (1, 2, 3, 4, 5), 2, say="in_shape must be channels and 1 to 3 sizes"
    )
    assert_raises(InputError, create_model, "compact", (1, 28), 2, say="in_shape must be (channels, height, width)")


def test_wrong_images_are_a_sentence() -> None:
    model, masks = create_model("segcaps", (1, 16, 16), 2, **FEW), torch.zeros(2, 16, 16, dtype=torch.uint8)
    images = torch.rand(2, 1, 16, 16)
    says = "images must have shape (B, 1, height, width), the network's (channels, height, width), got (2, 3, 16, 16)"
    assert_raises(InputError, model, torch.rand(2, 3, 16, 16), say=says)
    assert_raises(InputError, model, torch.rand(2, 1, 16), say="images must have shape (B, 1, height, width)")
    assert_raises(
        InputError, model, images, masks[:, 1:], say="targets must be the class of each pixel, (2, 16, 16), got"
    )
    assert_raises(InputError, model, images, None, True, say="the coupling of networks for pixels cannot be returned")
    assert_raises(InputError, model.loss, model(images), images, masks + 2, say="masks must be in 0..1")


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["segcaps", "unet-twin"])
def test_a_network_is_one_graph(preset: str) -> None:
    """For sizes that need padding, too."""
    options: dict[str, Any] = {"layer_types": 2, "capsule_dim": 4, "pixel_channels": (4,)}
    model = create_model(preset, (1, 16, 16), 3, **(options if preset == "segcaps" else NETWORKS[preset])).eval()
    images = torch.rand(2, 1, 19, 16)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")(images)
        assert_close(compiled.scores, model(images).scores, 1e-6)


# ---- files of earlier versions


def with_voters(tree: Any) -> Any:
    """A tree as earlier versions stored it, where a layer had the option ``voters``."""
    if isinstance(tree, dict):
        if tree.get("name") == "conv-types":
            return with_voters(tree | {"name": "conv", "voters": "types", "compete_over": "types"})
        if tree.get("name") == "conv" and "compete_over" in tree and "voters" not in tree:
            return with_voters(tree | {"voters": "places", "vote_bias": False})
        return {name: with_voters(value) for name, value in tree.items()}
    return [with_voters(each) for each in tree] if isinstance(tree, list | tuple) else tree


@pytest.mark.parametrize(("preset", "in_shape"), [("segcaps", (1, 32, 32)), ("hinton2018-paper", (1, 28, 28))])
def test_files_with_the_option_voters_are_read(tmp_path: Path, preset: str, in_shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    network = create_model(preset, in_shape, 4, **small(preset)).eval()
    network.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    old = with_voters(json.loads(config.read_text()))
    assert '"voters"' in json.dumps(old)
    config.write_text(json.dumps(old))
    again = load_pretrained(tmp_path)
    images = torch.rand(2, *in_shape)
    assert again(images).scores.equal(network(images).scores)
    tree = {name: value for name, value in old.items() if name not in ("in_shape", "num_classes")}
    run = TrainConfig.from_dict({"preset": preset, "model": tree})
    assert json.loads(json.dumps(run.model)) == json.loads(json.dumps(describe(network)))


def test_the_option_voters_is_answered_with_the_layers() -> None:
    said = 'there is no option of layer "conv" "voters" any more: the layer "conv-types" has votes of types, and'
    layers = [{"name": "conv", "voters": "types", "layer_padding": "same"}]
    assert_raises(UnknownOption, create_model, "segcaps", (1, 32, 32), 4, layers=layers, say=said)
