"""Every preset, found in the registry: it builds, learns, comes back from its files, and is what its source is.

Five sources are written once more in test_sources.py, to which their presets are held number by number.
"""

import copy
import json
import re
import subprocess
import sys
import typing
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
from torchcaps import create_model, list_presets
from torchcaps.errors import InputError
from torchcaps.models import CapsNet, Network, get_preset, register_preset, shapes
from torchcaps.models.presets import create
from torchcaps.parts import UnknownOption, build, complete, describe, find, flat, own_parts
from torchcaps.training.recipe import Recipe

IN_SHAPE, NUM_CLASSES = (3, 20, 24), 7  # no source has such images
KEPT = json.loads((Path(__file__).parent / "presets.json").read_text(encoding="utf-8"))
"""The network and the recipe of each preset, its parameters and its maps of capsules, as they must stay."""


def on_meta(name: str, *given: Any, **overrides: Any) -> Any:
    """A network of its full size, without memory for it."""
    with torch.device("meta"):
        return create_model(name, *given, **overrides)


# ---- all of them


@pytest.mark.slow
@pytest.mark.parametrize("name", list_presets())
def test_a_preset_keeps_the_contract(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = create_model(name, IN_SHAPE, NUM_CLASSES, **small(name))
    says_what_it_is(name)
    keeps_its_numbers(name)
    learns(name, model)
    survives_half_precision(model)
    comes_back_from_its_folder_and_its_card(name, model.eval(), tmp_path, monkeypatch)


def says_what_it_is(name: str) -> None:
    preset = get_preset(name)
    assert preset.name == name
    assert preset.description.endswith(".")
    assert len(re.split(r"[.;:](?: |$)", preset.description)[0]) <= 100, "it stands in the table of networks"
    assert preset.source
    recipe = Recipe().replace(preset.recipe)
    assert recipe.crop in (None, *preset.in_shape[1:])
    assert recipe.validation_size is None  # how many images are set apart is the data set's own affair
    assert not own_parts("network", preset.network)


def keeps_its_numbers(name: str) -> None:
    preset, written, model = get_preset(name), KEPT[name], on_meta(name)
    assert (model.in_shape, model.num_classes) == (preset.in_shape, preset.num_classes)
    assert complete("network", written["model"]) == preset.network == describe(model)
    assert Recipe().replace(written["recipe"]) == Recipe().replace(preset.recipe)
    assert sum(each.numel() for each in model.parameters()) == written["parameters"]
    grids = [each.grid for each in model.flow] if isinstance(model, CapsNet) else []
    assert json.loads(json.dumps(grids)) == written["grids"]


def learns(name: str, model: Network) -> None:
    images, labels = torch.rand(3, *IN_SHAPE), labels_for(model, 3)
    drawn = drawn_for(model, images)
    output = model(images, labels)
    losses = model.loss(output, drawn, labels)
    losses.total.backward()
    assert output.lengths.shape == scores_of(model, 3)
    assert (model.in_shape, model.num_classes) == (IN_SHAPE, NUM_CLASSES)
    assert all(loss is None or loss.shape == () for loss in losses)
    assert_finite([*output, *losses])
    if name == "hahn2019-smallnet":  # whose coupling starts uniform, so that at first only the logits learn
        for _ in range(2):
            torch.optim.Adam(model.parameters(), 1e-2).step()
            model.zero_grad()
            model.loss(model(images, labels), drawn, labels).total.backward()
    # a shift of all logits of a branch does not change the softmax; the source learns it nevertheless
    assert_gradients_reach(model, "classify.shift.bias" if name.startswith("hvc2021") else "")
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


@pytest.mark.parametrize("name", ["compact", "vb2020", "hvc2021-equal", "segcaps", "slots-small", "cnn-matched"])
def test_the_shapes_inside_a_network_are_inferred_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[type, bool]] = []
    run = shapes._run_on_meta

    def counted(module: nn.Module, *inputs: Any) -> tuple[Any, int]:
        calls.append((type(module), all(parameter.is_meta for parameter in module.parameters())))
        return run(module, *inputs)

    monkeypatch.setattr(shapes, "_run_on_meta", counted)
    create_model(name)
    assert calls
    assert all(is_planned for _, is_planned in calls)
    preset = get_preset(name)
    inferred = len(calls)
    build("network", preset.network, in_shape=preset.in_shape, num_classes=preset.num_classes)  # without a plan
    assert [kind for kind, _ in calls[inferred:]] == [kind for kind, _ in calls[:inferred]]


@pytest.mark.parametrize("name", list_presets())
def test_an_empty_batch_has_empty_outputs(name: str) -> None:
    """As the last batch of a filter or of one of several processes; it changes nothing."""
    model = create_model(name, IN_SHAPE, NUM_CLASSES, **small(name))
    one, none = torch.rand(1, *IN_SHAPE), torch.rand(0, *IN_SHAPE)
    for is_training in (True, False):
        model.train(is_training)
        before = {key: each.clone() for key, each in model.state_dict().items()}
        empty = model(none)
        counts_batches = "num_batches_tracked"  # torch's batch normalisation counts empty ones too
        assert all(key.endswith(counts_batches) or each.equal(before[key]) for key, each in model.state_dict().items())
        sum(each.sum() for each in empty if each is not None and each.is_floating_point()).backward()
        assert not any(each.grad.any() for each in model.parameters() if each.grad is not None)
        model.load_state_dict(before)
        for ours, theirs in zip(empty, model(one), strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or (ours.shape, ours.dtype) == ((0, *theirs.shape[1:]), theirs.dtype)


def scores_of(model: Network, batch: int) -> tuple[int, ...]:
    """The shape of its scores."""
    return batch, NUM_CLASSES, *(IN_SHAPE[1:] if model.per_pixel or model.has_slots else ())


def survives_half_precision(model: Network) -> None:
    """As a whole, and under autocast; and weights of zero, of which all capsules are zero."""
    images, labels = torch.rand(2, *IN_SHAPE), labels_for(model, 2)
    for dtype in (torch.bfloat16, torch.float16, None):
        changed = copy.deepcopy(model).train()
        if dtype is None:
            for parameter in changed.parameters():
                nn.init.zeros_(parameter)
        changed.to(dtype or torch.float32).zero_grad()
        given = images.to(dtype or torch.float32)
        output = changed(given, labels)
        losses = changed.loss(output, drawn_for(changed, given), labels)
        losses.total.backward()
        assert_finite([*output, *losses, *(parameter.grad for parameter in changed.parameters())])
        assert_finite(changed.eval()(given))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(images, labels)
        loss = model.loss(output, drawn_for(model, images), labels).total
    assert loss.dtype == torch.float32
    if isinstance(model, CapsNet):
        assert output.capsules.dtype == output.lengths.dtype == torch.float32


def comes_back_from_its_folder_and_its_card(
    name: str, model: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("path/to/this/folder")
    again = type(model).from_pretrained("path/to/this/folder")
    assert describe(again) == describe(model)
    assert (again.in_shape, again.num_classes, again.training) == (IN_SHAPE, NUM_CLASSES, False)
    for (key, ours), theirs in zip(again.named_parameters(), model.parameters(), strict=True):
        assert_close(ours, theirs, 0)
        assert ours.stride() == theirs.stride(), f"{key} has another memory layout"
    images = torch.rand(2, *IN_SHAPE)
    for ours, theirs in zip(again(images), model(images), strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    card = Path("path/to/this/folder/README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["output"].lengths.shape == scores_of(model, 1)


# ---- the registry


def test_names_are_taken_once_and_unknown_ones_get_the_nearest() -> None:
    assert set(KEPT) == set(list_presets())
    assert_raises(InputError, register_preset, "sabour2017", "Mine.", say='a preset "sabour2017" exists already')
    said = 'there is no preset "sabor2017"; did you mean "sabour2017"?'
    assert_raises(InputError, create_model, "sabor2017", say=said)
    assert_raises(InputError, register_preset, "mine", "Mine.", base="sabor2017", say=said)
    for name in (5, ["sabour2017"], None, {}):
        assert_raises(InputError, create_model, name, say='preset must be a name such as "sabour2017", got ')


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


NAMES_BY_CLASS = {"CapsNet": create.CapsNetName, "BaselineCNN": create.BaselineName}
NAMES_BY_CLASS |= {
    "PooledCNN": create.PooledCNNName,
    "PixelCapsules": create.PixelsName,
    "UNet": create.UNetName,
    "BranchedNetwork": create.HVCName,
    "SlotNetwork": create.SlotsName,
}


def test_type_checkers_know_the_class_of_each_preset() -> None:
    named = {name: kind for kind, names in NAMES_BY_CLASS.items() for name in typing.get_args(names)}
    assert named == {name: find("network", get_preset(name).network["name"]).__name__ for name in list_presets()}


@pytest.mark.slow
def test_a_type_checker_reads_the_classes(tmp_path: Path) -> None:
    file = tmp_path / "typed.py"
    lines = [f'reveal_type(create_model("{typing.get_args(names)[0]}"))' for names in NAMES_BY_CLASS.values()]
    lines += ['reveal_type(create_model("my own", (1, 8, 8), 3, decoder=False))']
    lines += ['reveal_type(create_model("compact")(torch.rand(1)).scores)']
    file.write_text("\n".join(["import torch", "from torchcaps import create_model", *lines]))
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--config-file", "pyproject.toml", str(file)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    revealed = [line.split('"')[1].split(".")[-1] for line in run.stdout.splitlines() if "Revealed type" in line]
    assert revealed == [*NAMES_BY_CLASS, "Network", "Tensor"], run.stdout


# ---- sizes


WITHOUT_DECODER = {
    "sabour2017": 6_804_224,
    "efficient-capsnet-mnist": 161_824,
    "aff-capsnet": (81 * 256 + 256) + (81 * 256 * 256 + 256) + 10 * 16 * 8,
}


def test_parameters_are_those_of_the_sources() -> None:
    for name, number in WITHOUT_DECODER.items():
        assert sum(each.numel() for each in on_meta(name, decoder=False).parameters()) == number, name
    for name in ("sabour2017-multimnist", "baseline-cnn-multimnist"):  # the papers' own counts
        assert re.search(r"(\S+) M ", get_preset(name).description)[1] == f"{KEPT[name]['parameters'] / 1e6:.2f}"
    recipe = Recipe().replace(get_preset("sabour2017-code").recipe)
    assert recipe.epochs * 55_000 / recipe.batch_size == pytest.approx(300_000, rel=0.1), "its 300,000 steps"


def test_networks_of_our_own_stay_small_where_images_are_large() -> None:
    for name in ("compact", "compact-shared", "compact-deep"):
        for side in (64, 65, 96, 128, 224, 256, 500):
            model = on_meta(name, (3, side, side), 4)
            assert model.flow[0].poses.shape[1] <= 8 * 28 * 28, (name, side)
            assert sum(each.numel() for each in model.parameters()) < 12e6, (name, side)
            same = {key: describe(model)[key] == get_preset(name).network[key] for key in ("backbone", "decoder")}
            assert same == dict.fromkeys(same, side == 64)
    for name in ("compact", "compact-shared", "compact-deep"):
        for sides in ((28, 100), (96, 512), (20, 740), (512, 96), (740, 20)):
            model = on_meta(name, (1, *sides), 4)
            assert model.flow[0].poses.shape[1] <= 8 * 28 * 28, (name, sides)
            assert min(model.flow[0].grid[1:]) >= 2, (name, sides)
            assert sum(each.numel() for each in model.parameters()) < 5e6, (name, sides)
            turned = on_meta(name, (1, *sides[::-1]), 4)
            assert turned.flow[0].grid[1:] == model.flow[0].grid[:0:-1], "each side for itself"
    long = {"stem_strides": (1, 1, 2), "stem_strides_across": (2, 1, 2)}
    assert flat(describe(on_meta("compact", (1, 28, 100)))).items() >= long.items()
    own = {"stem_strides": (2, 2, 2)}
    assert (
        flat(describe(on_meta("compact", (1, 64, 200), **own))).items() >= (own | {"stem_strides_across": ()}).items()
    )
    options = {"stem_strides": (1, 1, 2), "decoder_channels": ()}
    assert flat(describe(on_meta("compact", (3, 100, 70), 4, **options))).items() >= options.items()
    parts = {"backbone": {"stem_strides": (1, 3, 1)}, "decoder": {"decoder_channels": (3,)}}
    kept = flat(describe(on_meta("compact", (3, 100, 70), 4, **parts)))
    assert (kept["stem_strides"], kept["decoder_channels"]) == ((1, 3, 1), (3,))
    assert on_meta("sabour2017", (1, 99, 99)).flow[0].grid == (32, 42, 42), "as its source has it"


# ---- what is particular about some


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

    V = torch.einsum("ijdk,bik->bijd", model.class_capsules.transform.matrices, squashed(u))
    attention = torch.einsum("bijd,bkjd->bij", V, V) / 16**0.5
    coupling = attention.softmax(2) + model.class_capsules.routing.bias
    capsules = squashed((coupling[..., None] * V).sum(1))
    output = model(images, return_coupling=True)
    assert_close(output.capsules, capsules, 1e-5)
    assert_close(output.scores, (capsules.square().sum(-1) + 1e-7).sqrt(), 1e-5)
    assert_close(output.coupling, coupling, 1e-5)


def test_whose_capsule_is_decoded_at_inference() -> None:
    """In training: test_sources.py."""
    labels = torch.tensor([0, 1, 1])
    for name in ("sabour2017", "sabour2017-code", "tf-notebook", "torch-notebook", "torch-tutorial"):
        targets = create_model(name, **small(name)).eval().decoder_targets(labels)
        assert (targets is labels) == (name in ("sabour2017-code", "torch-notebook"))
    longest = create_model(name, **small(name, decoder_mask="longest"))
    assert longest.decoder_targets(labels) is None
