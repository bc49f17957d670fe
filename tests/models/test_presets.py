"""Every preset, found in the registry: it builds, learns, and is what its source is.

Five sources are written once more in test_sources.py, to which their presets are held number by number.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support import (
    assert_batch_independent,
    assert_close,
    assert_finite,
    assert_gradients_reach,
    assert_raises,
    drawn_for,
    labels_for,
    registered_for_now,
    small,
)
from torchcaps import create_model, list_presets, margin_loss, reconstruction_loss, safe_norm, squash
from torchcaps.errors import InputError
from torchcaps.models import BaselineCNN, CapsNet, build_network, get_preset, register_preset
from torchcaps.models.network import present_names
from torchcaps.nn import ChannelNorm, EMCodeRouting, Matrix
from torchcaps.parts import UnknownOption, complete, describe, flat, override
from torchcaps.training.recipe import Recipe

IN_SHAPE, NUM_CLASSES = (3, 20, 24), 7  # no source has such images
LABELS = torch.tensor([0, 1, 1])
OF_02 = json.loads((Path(__file__).parent / "presets-of-0.2.json").read_text(encoding="utf-8"))
"""What version 0.2 wrote of each preset into the config.json of a run: its network and its recipe."""

every_preset = pytest.mark.parametrize("name", list_presets())


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def options_of(name: str) -> dict[str, Any]:
    """Every option of a preset's network by its name."""
    return flat(get_preset(name).network)


# ---- all of them


@every_preset
def test_builds_and_learns_at_any_size(name: str) -> None:
    model = create_model(name, IN_SHAPE, NUM_CLASSES, **small(name))
    images, labels = torch.rand(3, *IN_SHAPE), labels_for(model, 3)
    drawn = drawn_for(model, images)
    output = model(images, labels)
    losses = model.loss(output, drawn, labels)
    losses.total.backward()

    assert output.lengths.shape == (3, NUM_CLASSES)
    assert (model.in_shape, model.num_classes) == (IN_SHAPE, NUM_CLASSES)
    assert all(loss is None or loss.shape == () for loss in losses)
    assert_finite([*output, *losses])
    if name == "hahn2019-smallnet":  # whose coupling starts uniform, so that at first only the logits learn
        for _ in range(2):
            torch.optim.Adam(model.parameters(), 1e-2).step()
            model.zero_grad()
            model.loss(model(images, labels), drawn, labels).total.backward()
    assert_gradients_reach(model)
    if isinstance(model, CapsNet):
        assert output.capsules.shape == (3, NUM_CLASSES, model.capsule_dim)
        assert [each.poses.shape[1:] for each in model.capsules(images)] == [e.poses.shape[1:] for e in model.flow[:-1]]
        if model.decoder is not None:
            assert output.reconstruction.shape == drawn.shape
            assert 0 <= output.reconstruction.min() <= output.reconstruction.max() <= 1
        else:
            assert output.reconstruction is losses.reconstruction is None
        coupling = model(images, return_coupling=True).coupling
        assert coupling.shape == (3, model.flow[-2].poses.shape[1], NUM_CLASSES)
    model.eval()
    for field in ("lengths", "reconstruction"):
        if getattr(output, field) is not None:
            assert_batch_independent(lambda batch, field=field: getattr(model(batch), field), images)


FAMILIES = (
    "sabour2017 keras-tutorial torch-notebook compact-deep compact-shared efficient-capsnet-mnist hinton2018-paper "
    "hinton2018-code vb2020 hahn2019-smallnet sabour2017-multimnist baseline-cnn"
)


@pytest.mark.parametrize("name", FAMILIES.split())
def test_a_few_steps_lower_the_loss(name: str) -> None:
    model = create_model(name, (1, 20, 20), 3, **small(name))
    images, labels = torch.rand(8, 1, 20, 20) * 0.2, labels_for(model, 8)
    for kind in range(3):  # a bright band at the top, in the middle, or at the bottom
        images[torch.arange(8) % 3 == kind, :, 7 * kind : 7 * kind + 6] += 0.7
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(25):
        loss = model.loss(model(images, labels), drawn_for(model, images), labels).classification
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    slow = name == "hinton2018-code"  # its activations, of 0.15 at the start, move by hundredths
    jumps = name in ("vb2020", "hinton2018-paper")  # by the statistics of 8 images, by the few that a class wins
    after = min(losses) if jumps else losses[-1]
    assert after < (0.98 if slow else 0.9) * losses[0], losses


@every_preset
def test_says_what_it_is_and_builds_for_its_source_unless_told(name: str) -> None:
    preset = get_preset(name)
    assert preset.name == name
    assert preset.description.endswith(".")
    assert preset.source
    recipe = Recipe().replace(preset.recipe)
    assert recipe.crop in (None, *preset.in_shape[1:])
    assert recipe.validation_size is None  # how many images are set apart is the data set's own affair
    with torch.device("meta"):
        model, other = create_model(name), create_model(name, (2, 40, 41), 4)
    assert (model.in_shape, model.num_classes) == (preset.in_shape, preset.num_classes)
    assert (other.in_shape, other.num_classes) == ((2, 40, 41), 4)
    assert {key: describe(model)[key] for key in preset.network} == preset.network


def test_what_version_02_wrote_is_read_as_it_was() -> None:
    """Fewer parts had names then; options, weights and recipe are the same. It also holds presets to their numbers."""
    assert set(OF_02) == set(list_presets())
    for name, written in OF_02.items():
        preset = get_preset(name)
        tree = complete("network", present_names(written["model"]))
        assert tree == preset.network, name
        assert Recipe().replace(written["recipe"]) == Recipe().replace(preset.recipe), name
        torch.manual_seed(0)
        then = build_network(override("network", tree, small(name)), (1, 28, 28), 4).state_dict()
        torch.manual_seed(0)
        now = create_model(name, (1, 28, 28), 4, **small(name)).state_dict()
        assert list(now) == list(then)
        assert all(torch.equal(now[key], then[key]) for key in now), name


def test_names_are_taken_once_and_unknown_ones_get_the_nearest() -> None:
    assert len(set(list_presets())) == len(list_presets())
    assert_raises(InputError, register_preset, "sabour2017", "Mine.", say='there is a preset "sabour2017" already')
    said = 'there is no preset "sabor2017"; did you mean "sabour2017"?'
    assert_raises(InputError, create_model, "sabor2017", say=said)
    assert_raises(InputError, register_preset, "mine", "Mine.", base="sabor2017", say=said)
    assert_raises(InputError, get_preset, "zzz", say='there is no preset "zzz"; known: aff-capsnet, ')
    for name in (5, ["sabour2017"], None, {}):
        said = f'preset must be a name such as "sabour2017", got {name!r}'
        assert_raises(InputError, get_preset, name, say=said)
        assert_raises(InputError, create_model, name, say=said)


def test_a_new_preset_is_listed() -> None:
    with registered_for_now():
        register_preset("mine", "Mine.", network={"conv_channels": 4})
        register_preset("other", "Mine, too.", base="mine", network={"decoder": False}, num_classes=3)
        assert list_presets()[-2:] == ["mine", "other"]
        assert create_model("mine").backbone.conv.out_channels == create_model("other").backbone.conv.out_channels == 4
        assert create_model("other").num_classes == 3
        said = 'there is no option of third "conv_chanels"; did you mean "conv_channels"?'
        assert_raises(UnknownOption, register_preset, "third", "Mine.", network={"conv_chanels": 4}, say=said)
    assert "mine" not in list_presets()


@pytest.mark.parametrize("name", ["compact-shared", "vb2020", "hahn2019-smallnet"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_whole_network_in_half_precision(name: str, dtype: torch.dtype) -> None:
    model = create_model(name).to(dtype)
    images, labels = torch.rand(2, *model.in_shape).to(dtype), labels_for(model, 2)
    output = model(images, labels)
    losses = model.loss(output, images, labels)
    losses.total.backward()
    assert_finite([*output, *losses, *(parameter.grad for parameter in model.parameters())])
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {dtype}
    assert_finite(model.eval()(images))


# ---- sizes


# convolutions (weights, biases) + transformation matrices + decoder (weights and biases of three layers)
MULTIMNIST = (
    (81 * 256 + 256) + (81 * 256 * 256 + 256) + (32 * 10 * 10) * 8 * 160 + (161 * 512 + 513 * 1024 + 1025 * 1296)
)
CIFAR10 = (243 * 256 + 256) + (81 * 256 * 512 + 512) + (64 * 4 * 4) * 8 * 160 + (161 * 512 + 513 * 1024 + 1025 * 1728)
SMALLNORB = (162 * 256 + 256) + (81 * 256 * 256 + 256) + (32 * 8 * 8) * 8 * 80 + (81 * 512 + 513 * 1024 + 1025 * 2048)
SVHN = (243 * 64 + 64) + (81 * 64 * 96 + 96) + (16 * 8 * 8) * 6 * 80 + (81 * 512 + 513 * 1024 + 1025 * 3072)
# four convolutions without bias, a scale and a shift for each of their channels, and the primary one
COMPACT = 9 * (32 + 32 * 32 + 32 * 64 + 64 * 64) + 2 * (32 + 32 + 64 + 64) + (16 * 64 * 64 + 64)
COMPACT += (8 * 6 * 6) * 8 * 160 + (161 * 256 + 257 * 512 + 513 * 784)
# two cameras; poses of 8·16 and activations of 8; two layers on maps and the class capsules, 4×4 a pair, and two β each
EM = (50 * 64 + 64) + 65 * 8 * 17 + (9 * 8 * 16 + 9 * 16 * 16 + 16 * 5) * 16 + 2 * (16 + 16 + 5)
# convolutions without bias, scales and shifts; a layer on a map with its logits; class capsules that have only logits
HAHN = 2 * 49 * 256 + 512 + 25 * 256 * 16 * 17 + 2 * 16 * 17
HAHN += 9 * 16 * 16 * (16 * 16 + 16 + 1) + 2 * 256 + (16 * 36) * 5 * (16 + 1)
# maps of 36×36, pooled twice, are 9×9
BASELINE_MULTIMNIST = (81 * 512 + 512) + (25 * 512 * 256 + 256) + (9 * 9 * 256 + 1) * 1024 + 1025 * 10
# maps of 28×28, pooled three times, are 4×4 (14, 7, and 3.5 rounded up)
MATCHED = (25 * 64 + 64) + (25 * 64 * 128 + 128) + (25 * 128 * 256 + 256) + (4 * 4 * 256 + 1) * 1750 + 1751 * 10


@pytest.mark.parametrize(
    ("name", "overrides", "number"),
    [
        ("sabour2017", {}, 8_215_568),
        ("sabour2017", {"decoder": False}, 6_804_224),
        ("sabour2017-r1", {}, 6_804_224),
        ("sabour2017-r1-recon", {}, 8_215_568),
        ("sabour2017-r3", {}, 6_804_224),
        # in place of the primary convolution's 256 biases those of 32·8 components; another 160 of the class capsules
        ("sabour2017-code", {}, 8_215_568 - 256 + 256 + 160),
        ("tf-notebook", {}, 8_215_568),
        ("keras-tutorial", {}, 6_804_224),
        ("torch-notebook", {}, 8_215_568),
        ("torch-tutorial", {}, 8_215_568),
        ("compact", {}, COMPACT),
        ("efficient-capsnet-mnist", {"decoder": False}, 161_824),
        ("hinton2018-paper", {}, EM),
        ("hinton2018-code", {}, EM),
        ("vb2020", {}, EM - 64 + 128 - 136 + 2 * 136),  # scales and shifts in place of biases
        ("hahn2019-smallnet", {}, HAHN),
        ("aff-capsnet", {"decoder": False}, (81 * 256 + 256) + (81 * 256 * 256 + 256) + 10 * 16 * 8),
        ("sabour2017-multimnist", {}, MULTIMNIST),
        ("sabour2017-cifar10", {}, CIFAR10),
        ("sabour2017-smallnorb", {}, SMALLNORB),
        ("sabour2017-svhn", {}, SVHN),
        ("baseline-cnn", {}, 35_445_522),
        ("baseline-cnn-multimnist", {}, BASELINE_MULTIMNIST),
        ("cnn-matched", {}, MATCHED),
        ("cnn-pooled", {}, 131_690),
        ("compact-shared", {}, 744_177),
        ("compact-shared", {"decoder": False}, 169_185),
    ],
)
def test_parameters_on_the_images_of_the_source(name: str, overrides: dict[str, Any], number: int) -> None:
    with torch.device("meta"):
        assert parameters(create_model(name, **overrides)) == number


def test_the_papers_own_counts() -> None:
    """35.4 M, 11.36 M and 24.56 M: the last only if the convolutions keep the size."""
    assert round(MULTIMNIST / 1e6, 2) == 11.36
    assert round(BASELINE_MULTIMNIST / 1e6, 2) == 24.56
    for name in ("sabour2017-multimnist", "baseline-cnn-multimnist"):
        assert re.search(r"(\S+) M ", get_preset(name).description)[1] in ("11.36", "24.56")


def test_the_matched_cnn_has_as_many_parameters_as_the_capsules() -> None:
    assert pytest.approx(8_215_568, rel=0.0003) == MATCHED


def test_compact_is_compact() -> None:
    assert COMPACT <= 1_500_000
    assert options_of("compact")["num_iterations"] >= 2


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("sabour2017", (32, 6, 6)),
        ("compact", (8, 6, 6)),
        ("compact-deep", (8, 6, 6)),
        ("sabour2017-multimnist", (32, 10, 10)),
        ("sabour2017-cifar10", (64, 4, 4)),
        ("sabour2017-smallnorb", (32, 8, 8)),
        ("sabour2017-svhn", (16, 8, 8)),
        ("aff-capsnet", (32, 12, 12)),
    ],
)
def test_primary_capsules(name: str, grid: tuple[int, int, int]) -> None:
    with torch.device("meta"):
        assert create_model(name).flow[0].grid == grid


# ---- what is particular about each


@pytest.fixture
def images() -> Tensor:
    return torch.rand(3, 1, 28, 28)


def network(name: str, **overrides: Any) -> CapsNet:
    """A preset's network, smaller and without dropout, for images of 28×28 in ten classes."""
    model = create_model(name, (1, 28, 28), 10, **small(name, **{"conv_dropout": 0.0} | overrides))
    assert isinstance(model, CapsNet)
    return model


def test_five_small_convolutions_of_compact() -> None:
    with torch.device("meta"):
        model = create_model("compact")
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert [conv.out_channels for conv in convs] == [32, 32, 64, 64, 64]
    assert [conv.kernel_size[0] for conv in convs] == [3, 3, 3, 3, 4]
    assert [conv.stride[0] for conv in convs] == [1, 1, 2, 1, 1]
    assert sum(isinstance(module, ChannelNorm) for module in model.modules()) == 4


@pytest.mark.parametrize(
    ("name", "std", "cut"),
    [
        ("sabour2017", 0.1 * 0.88, 0.2),
        ("sabour2017-multimnist", 0.1 * 0.88, 0.2),
        ("sabour2017-cifar10", 0.1 * 0.88, 0.2),
        ("sabour2017-smallnorb", 0.1 * 0.88, 0.2),
        ("sabour2017-svhn", 0.1 * 0.88, 0.2),
        ("compact", 0.1 * 0.88, 0.2),
        ("sabour2017-code", 0.1 * 0.88, 0.2),
        ("tf-notebook", 0.1, None),
        ("keras-tutorial", (2 / (72 * 8)) ** 0.5, None),  # 2 types x 36 locations here
        ("torch-notebook", 1.0, None),
        ("torch-tutorial", 0.01, None),
    ],
)
def test_initial_transformation_matrices(name: str, std: float, cut: float | None) -> None:
    weight = network(name).class_capsules.transform.weight
    assert weight.std().item() == pytest.approx(std, rel=0.02)
    assert cut is None or weight.abs().max() <= cut
    assert cut is not None or weight.abs().max() > 3 * std


ROUTING = {  # iterations, softmax over; five more are in test_sources.py
    "sabour2017": (3, "outputs"),
    "keras-tutorial-r0": (0, "inputs"),
    "keras-tutorial-r1": (1, "inputs"),
    "keras-tutorial-outputs": (4, "outputs"),
    "sabour2017-cifar10": (3, "outputs"),
    "compact": (3, "outputs"),
    "aff-capsnet": (1, "outputs"),
}


@pytest.mark.parametrize("name", ROUTING)
def test_routing(name: str, images: Tensor) -> None:
    iterations, axis = ROUTING[name]
    model = network(name)
    layer = model.class_capsules
    weight = layer.transform.weight
    nn.init.normal_(weight)  # votes that are long enough for the coupling, and its gradient, to matter
    pairs = "jdk,bik->bijd" if name == "aff-capsnet" else "ijdk,bik->bijd"
    votes = torch.einsum(pairs, weight, model.capsules(images)[-1].poses)
    b = votes.new_zeros(votes.shape[:3])
    v = votes.sum(1)
    leaky = name == "sabour2017-cifar10"
    for _ in range(iterations):
        competing = torch.cat([b, b.new_zeros(*b.shape[:2], 1)], 2) if leaky else b  # "none of the above"
        c = competing.softmax(2 if axis == "outputs" else 1)[..., :10]
        v = squash((c[..., None] * votes).sum(1))
        b = b + (votes * v[:, None]).sum(-1)
    output = model(images)
    assert_close(output.capsules, v, 1e-4)
    assert_close(output.lengths, safe_norm(v), 1e-4)
    weights = torch.randn_like(v)
    got, wanted = (torch.autograd.grad((x * weights).sum(), weight)[0] for x in (output.capsules, v))
    assert_close(got / wanted.abs().max(), wanted / wanted.abs().max(), 1e-4)
    assert layer.routing.leaky == leaky


@pytest.mark.parametrize("name", ["sabour2017", "sabour2017-code", "torch-tutorial"])
def test_capsules_of_length_zero_have_finite_gradients(name: str, images: Tensor) -> None:
    model = network(name)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    output = model(images)
    assert_close(output.lengths, options_of(name)["length_eps"] ** 0.5, 1e-6)
    model.loss(output, images, LABELS[: len(images)]).total.backward()
    assert_finite([output.lengths, *(parameter.grad for parameter in model.parameters())])


#: Of a decoder layer of so many inputs and outputs: the bound of its weights, their deviation, and the bias.
DECODER_STARTS = {
    "tf-notebook": (lambda i, o: (6 / (i + o)) ** 0.5, lambda i, o: (2 / (i + o)) ** 0.5, 0.0),
    "sabour2017-code": (lambda i, o: 0.2, lambda i, o: 0.088, 0.1),  # 0.1, cut at two deviations
    "torch-tutorial": (lambda i, o: i**-0.5, lambda i, o: (3 * i) ** -0.5, None),
    "torch-notebook": (lambda i, o: i**-0.5, lambda i, o: (3 * i) ** -0.5, None),
    "sabour2017": (lambda i, o: i**-0.5, lambda i, o: (3 * i) ** -0.5, None),
}


@pytest.mark.parametrize("name", DECODER_STARTS)
def test_decoders_start_as_their_sources_do(name: str) -> None:
    bound, deviation, bias = DECODER_STARTS[name]
    model = create_model(name)
    assert model.decoder is not None
    layers = [layer for layer in model.decoder.layers if isinstance(layer, nn.Linear)]
    assert [layer.in_features for layer in layers] == [160, 512, 1024]
    for layer in layers:
        sizes = layer.in_features, layer.out_features
        assert 0.99 * bound(*sizes) < float(layer.weight.detach().abs().max()) <= bound(*sizes) * (1 + 1e-6)
        assert float(layer.weight.detach().std()) == pytest.approx(deviation(*sizes), rel=0.01)
        if bias is None:
            assert float(layer.bias.detach().abs().max()) == pytest.approx(bound(*sizes), rel=0.05)
        else:
            assert_close(layer.bias, bias, 0)


@pytest.mark.parametrize("name", ["hinton2018-paper", "hinton2018-code", "vb2020"])
def test_matrix_capsules(name: str) -> None:
    with torch.device("meta"):
        model = create_model(name)
    assert [capsules.grid for capsules in model.flow] == [(8, 14, 14), (16, 6, 6), (16, 4, 4), None]
    assert all(layer.compete_over == "types-and-positions" for layer in model.layers[:-1])
    assert all(isinstance(layer.transform, Matrix) for layer in model.layers)
    assert model.class_capsules.transform.weight.shape == (16, 5, 4, 4)
    betas = [layer.routing.final_beta for layer in model.layers if isinstance(layer.routing, EMCodeRouting)]
    assert betas in ([], [0.01, 0.01, 0.0025])  # the code's class layer has a quarter


def test_compact_shared_is_a_sum_of_votes_of_shared_matrices(images: Tensor) -> None:
    model = create_model("compact-shared").eval()
    layer = model.class_capsules
    assert layer.transform.weight.shape == (10, 16, 16)
    primary = model.primary(images).poses
    assert primary.shape[1:] == (8 * 4 * 4, 16)
    votes = torch.einsum("jdk,bik->bijd", layer.transform.weight, primary)
    assert_close(model(images).capsules, squash(votes.sum(1) / 10), 1e-5)


def test_efficient_capsnet_by_its_equations() -> None:
    """The network again in PyTorch's own operations, from its paper and code, with the same parameters."""
    model = create_model("efficient-capsnet-mnist").eval()
    state = model.state_dict()
    for name, tensor in state.items():
        if name.startswith("backbone") and tensor.is_floating_point():  # statistics too
            tensor.copy_(torch.rand_like(tensor) * 0.2 + (0.9 if "running_var" in name else -0.1))
    nn.init.normal_(model.class_capsules.routing.bias, std=0.1)
    images = torch.rand(2, 1, 28, 28)
    x = images * 255 / 256
    for n, stride in zip((0, 2, 4, 6), (1, 1, 1, 2), strict=True):
        x = F.conv2d(x, state[f"backbone.{n}.weight"], state[f"backbone.{n}.bias"], stride).relu()
        norm = {key: state[f"backbone.{n + 1}.{key}"] for key in ("running_mean", "running_var", "weight", "bias")}
        x = F.batch_norm(x, *norm.values(), eps=1e-3)
    assert x.shape == (2, 128, 9, 9)
    kernel, bias = (state[f"primary_capsules.each_channel.{key}"] for key in ("weight", "bias"))  # (128, 1, 9, 9)
    u = ((x * kernel[:, 0]).sum((2, 3)) + bias).view(2, 16, 8)

    def squashed(s: Tensor) -> Tensor:
        n = s.norm(dim=-1, keepdim=True)
        return (1 - torch.exp(-n)) * s / n

    V = torch.einsum("ijdk,bik->bijd", model.class_capsules.transform.weight, squashed(u))
    attention = torch.einsum("bijd,bkjd->bij", V, V) / 16**0.5
    coupling = attention.softmax(2) + model.class_capsules.routing.bias
    capsules = squashed((coupling[..., None] * V).sum(1))
    output = model(images, return_coupling=True)
    assert_close(output.capsules, capsules, 1e-5)
    assert_close(output.scores, (capsules.square().sum(-1) + 1e-7).sqrt(), 1e-5)
    assert_close(output.coupling, coupling, 1e-5)


def test_loss(images: Tensor) -> None:
    model = network("sabour2017")
    output = model(images, LABELS)
    wanted = margin_loss(output.lengths, LABELS) + 0.0005 * reconstruction_loss(output.reconstruction, images)
    assert_close(model.loss(output, images, LABELS).total, wanted, 1e-5)


def test_the_tutorials_squash_differs_by_what_its_description_says() -> None:
    preset = get_preset("torch-tutorial")
    said = re.search(r"longer by (\S+) at most \(at ‖s‖ = 1\)", preset.description)
    assert said
    r = torch.cat([torch.logspace(-12, 4, 2001, dtype=torch.float64), torch.ones(1, dtype=torch.float64)])
    longer = squash(r[:, None], eps=options_of("torch-tutorial")["squash_eps"])[:, 0] - r**2 / (1 + r**2) * r / (
        r + 1e-8
    )
    assert longer.max() == pytest.approx(float(said[1]), rel=1e-3)
    assert r[longer.argmax()] == pytest.approx(1, abs=0.1)
    assert longer.min() > -1e-15


def test_keras_without_routing_is_not_squashed(images: Tensor) -> None:
    assert (network("keras-tutorial-r0", weight_init="normal", weight_std=1.0)(images).lengths > 1).any()
    assert (network("keras-tutorial-r1", weight_init="normal", weight_std=1.0)(images).lengths < 1).all()


def test_initial_convolutions() -> None:
    code = create_model("sabour2017-code", conv_channels=64, primary_types=8, decoder=False)
    assert code.backbone.conv.weight.abs().max() <= 0.1
    assert code.backbone.conv.weight.std().item() == pytest.approx(0.05 * 0.88, rel=0.05)
    assert code.primary_capsules.convs[0].weight.abs().max() <= 0.2
    assert code.primary_capsules.convs[0].weight.std().item() == pytest.approx(0.1 * 0.88, rel=0.05)
    for bias in (code.backbone.conv.bias, code.primary_capsules.bias, code.class_capsules.routing.bias):
        assert_close(bias, 0.1)
    keras = create_model("keras-tutorial", conv_channels=64, primary_types=8)
    for conv in (keras.backbone.conv, keras.primary_capsules.convs[0]):
        assert_close(conv.bias, 0.0)
        limit = (6 / (81 * (conv.in_channels + conv.out_channels))) ** 0.5  # Glorot
        assert 0.95 * limit < conv.weight.abs().max() <= limit


def test_matrix_capsules_start_as_in_their_code() -> None:
    code = create_model("hinton2018-code", decoder=False)
    poses, activity = code.primary_capsules.convs[0], code.primary_capsules.activity[0]
    assert poses.weight.std().item() == pytest.approx(0.5 * 0.88, rel=0.05)
    assert activity.weight.std().item() == pytest.approx(3 * 0.88, rel=0.1)
    assert poses.weight.abs().max() <= 1
    assert activity.weight.abs().max() <= 6
    assert_close(poses.bias, 0.0)
    assert_close(activity.bias, -1.0)
    for layer, std in zip(code.layers, (0.3, 0.3, 0.01), strict=True):
        assert layer.transform.weight.std().item() == pytest.approx(std * 0.88, rel=0.05)


@pytest.mark.parametrize(
    ("name", "in_training", "at_inference"),
    [
        ("sabour2017", True, False),
        ("sabour2017-code", True, True),
        ("tf-notebook", True, False),
        ("torch-notebook", True, True),
        ("torch-tutorial", True, False),
    ],
)
def test_whose_capsule_is_decoded(name: str, in_training: bool, at_inference: bool) -> None:
    model = network(name)
    assert (model.decoder_targets(LABELS) is LABELS) == in_training
    assert (model.eval().decoder_targets(LABELS) is LABELS) == at_inference
    assert network(name, decoder_mask="longest").decoder_targets(LABELS) is None


def test_the_codes_epochs_are_its_300_000_steps() -> None:
    recipe = Recipe().replace(get_preset("sabour2017-code").recipe)
    assert recipe.epochs * 55_000 / recipe.batch_size == pytest.approx(300_000, rel=0.1)


def test_baselines_are_cnns() -> None:
    for name in ("baseline-cnn", "baseline-cnn-multimnist", "cnn-matched"):
        assert isinstance(create_model(name, **small(name)), BaselineCNN)


def test_the_papers_layers_for_multimnist() -> None:
    with torch.device("meta"):
        model = create_model("baseline-cnn-multimnist")
    assert [tuple(conv.weight.shape) for conv in model.convs] == [(512, 1, 9, 9), (256, 512, 5, 5)]
    assert [layer.out_features for layer in (*model.dense, model.classify)] == [1024, 10]
    assert model.max_pool.kernel_size == model.max_pool.stride == 2
    assert model.objects == create_model("sabour2017-multimnist").objects == 2
