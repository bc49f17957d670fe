"""Networks of torchcaps in the hands of other libraries: what these do with parameters, and with whole networks."""

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

from support import small
from torchcaps import CapsNet, create_model, list_presets
from torchcaps.nn import DenseCapsules
from torchcaps.nn.transforms import WeightTransform
from torchcaps.parts import PARTS

TRANSFORMS = sorted(name for name, made in PARTS["transform"].items() if issubclass(made, WeightTransform))


def network(transform: str = "dense", **options: Any) -> CapsNet:
    torch.manual_seed(0)
    return create_model("sabour2017", (1, 28, 28), 5, **small("sabour2017"), transform=transform, **options)


def loss_of(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    total: Tensor = model.loss(model(images, model.decoder_targets(labels)), images, labels).total
    return total


@pytest.mark.parametrize("preset", list_presets())
def test_parameters_and_buffers_are_contiguous(preset: str) -> None:
    model = create_model(preset, (3, 20, 24), 7, **small(preset))
    for name, value in model.state_dict(keep_vars=True).items():
        assert value.is_contiguous(), name


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_step_leaves_parameters_and_gradients_contiguous(transform: str) -> None:
    layer = DenseCapsules(12, 9, 4, 9, transform=transform)
    layer(torch.randn(2, 12, 9)).poses.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.is_contiguous(), name
        assert parameter.grad is not None, name
        assert parameter.grad.is_contiguous(), name


@pytest.mark.parametrize("preset", list_presets())
def test_the_state_dict_s_names_are_those_of_parameters_and_buffers(preset: str) -> None:
    model = create_model(preset, (3, 20, 24), 7, **small(preset)).eval()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    assert model.state_dict().keys() == tensors.keys()
    images = torch.rand(2, *model.in_shape)
    with torch.no_grad():
        found = torch.func.functional_call(model, model.state_dict(), (images,), strict=True)
        assert found.scores.equal(model(images).scores)


def test_parameters_as_one_vector() -> None:
    model = network()
    vector = parameters_to_vector(model.parameters())
    assert vector.numel() == sum(each.numel() for each in model.parameters())
    other = network("dense")
    with torch.no_grad():
        for each in other.parameters():
            each.zero_()
    vector_to_parameters(vector, other.parameters())
    images = torch.rand(2, 1, 28, 28)
    assert other.eval()(images).scores.equal(model.eval()(images).scores)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_lbfgs_lowers_the_loss(transform: str) -> None:
    options = {"primary_dim": 16} if transform in ("matrix", "elementwise") else {}
    model, images, labels = network(transform, **options), torch.rand(6, 1, 28, 28), torch.arange(6) % 5
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, images, labels)
        loss.backward()
        return loss

    before = optimizer.step(closure)
    assert loss_of(model, images, labels) < before


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_pruned_weights_stay_zero(transform: str) -> None:
    options = {"primary_dim": 16} if transform in ("matrix", "elementwise") else {}
    model = network(transform, **options)
    of_capsules: Any = model.class_capsules.transform
    prune.l1_unstructured(of_capsules, "weight", 0.5)
    prune.random_unstructured(model.primary_capsules.convs[0], "weight", 0.25)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_of(model, torch.rand(4, 1, 28, 28), torch.arange(4)).backward()
    optimizer.step()
    model(torch.rand(2, 1, 28, 28))
    zeros = (of_capsules.weight == 0).float().mean().item()
    assert zeros == pytest.approx(0.5, abs=0.01)
    prune.remove(of_capsules, "weight")
    assert (of_capsules.weight == 0).float().mean().item() == pytest.approx(0.5, abs=0.01)
    whole = [(each, "weight") for each in network(transform, **options).modules() if hasattr(each, "weight")]
    prune.global_unstructured(whole, prune.L1Unstructured, amount=0.3)


def test_safetensors_saves_a_state_dict(tmp_path: Path) -> None:
    model = network()
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    other = network("dense")
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert all(map(torch.equal, other.parameters(), model.parameters()))


# ---- the page's snippets

PAGE = (Path(__file__).parent.parent / "docs" / "other-tools.md").read_text(encoding="utf-8")
COMMON = "".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
SNIPPETS = dict(re.findall(r'^```python title="(\w+)"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("package", SNIPPETS)
@pytest.mark.filterwarnings("ignore")
def test_a_snippet_of_the_page(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        importlib.metadata.version(package)  # an import of "datasets" would find this folder's
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    exec(compile(COMMON + SNIPPETS[package], f"docs/other-tools.md, {package}", "exec"), {})


def test_scores_only_is_the_network_s_scores() -> None:
    model = network().eval()
    images = torch.rand(3, 1, 28, 28)
    only = model.scores_only()
    assert not only.training
    assert only(images).equal(model(images).scores)
    assert {id(each) for each in only.parameters()} == {id(each) for each in model.parameters()}
    traced = torch.jit.trace(only, images)
    assert torch.allclose(traced(images[:2]), model(images[:2]).scores, atol=1e-6)


class WithLoss(torch.nn.Module):
    """A network that returns its loss, as transformers' Trainer asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.network(pixel_values, self.network.decoder_targets(labels))
        return {"loss": self.network.loss(output, pixel_values, labels).total, "logits": output.scores}


def test_the_trainer_of_transformers_writes_a_checkpoint_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(
        "transformers.trainer.is_datasets_available", lambda: False
    )  # it mistakes tests/datasets for one
    data = [{"pixel_values": torch.rand(1, 28, 28), "labels": number % 5} for number in range(8)]
    options = {"per_device_train_batch_size": 4, "save_steps": 1, "report_to": [], "use_cpu": True}
    for steps in (1, 2):
        arguments = transformers.TrainingArguments(str(tmp_path), max_steps=steps, **options)
        trainer = transformers.Trainer(WithLoss(), arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=steps > 1)
    assert trainer.state.global_step == 2
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()
