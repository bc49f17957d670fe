"""The model card: it says where a network comes from and how good it is, and what it says runs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from own_parts import register
from support import small
from torchcaps import create_model, list_presets
from torchcaps.models import Recipe, SeedResult, TrainingRecord, get_preset
from torchcaps.models.card import model_card
from torchcaps.models.fields import replace


def subject(preset: str = "sabour2017", **values: Any) -> Any:
    """What a card asks of a network, and what it is told beside."""
    plain = {
        "config": get_preset(preset).model,
        "in_shape": (1, 28, 28),
        "num_classes": 3,
        "parameters": lambda: [torch.empty(1_234_567, device="meta")],
        "class_names": ("one", "two", "three"),
        "half": False,
    }
    return SimpleNamespace(**plain | values)


def card_of(network: Any, training: TrainingRecord | None = None, source: str | None = None) -> str:
    return model_card(network, training, source, class_names=network.class_names, half=network.half)


def training(**values: Any) -> TrainingRecord:
    plain = {
        "preset": "sabour2017",
        "data": "mnist",
        "data_title": "MNIST handwritten digits",
        "data_source": "LeCun, Cortes, Burges",
        "data_licence": "free",
        "images": {"train": 55_000, "validation": 5_000, "test": 10_000},
        "recipe": Recipe(epochs=12, schedule="one-cycle", learning_rate=0.003, max_shift=2),
        "precision": "bf16",
        "which": "best",
        "results": (SeedResult(seed=4, best_epoch=10, best_error=0.0035, last_error=0.0037),),
        "command": "torchcaps train sabour2017 --data mnist --seed 4 --epochs 12",
        "seconds": 1234.5,
        "hardware": "a processor (2 threads)",
        "versions": {"torchcaps": "0.1.0", "torch": "2.13.0"},
    }
    return TrainingRecord(**plain | values)


def test_a_card_says_how_images_of_drawings_are_made() -> None:
    plain, drawn = (card_of(subject(), training(preparation=words)) for words in (None, "light on dark"))
    assert "the same side light and dark (`--invert` turns it round)" in plain
    assert "in the form of those of MNIST handwritten digits: light on dark. `torchcaps predict` and" in drawn
    assert "--invert" not in drawn


def test_a_part_of_a_plugin_is_loaded_as_it_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)
    network = subject(config=replace(get_preset("sabour2017").model, {"routing": "cosine"}))
    command = "torchcaps train sabour2017 --plugin a.py --plugin 'my routings' --routing cosine"
    card = card_of(network, training(command=command))
    assert "routing cosine" in card
    assert 'torchcaps.load_plugin("a.py")\ntorchcaps.load_plugin("my routings")\nmodel =' in card
    assert "torchcaps predict --plugin a.py --plugin 'my routings' path" in card
    assert 'torchcaps.load_plugin("parts.py")\nmodel =' in card_of(network)
    assert "plugin" not in card_of(subject(), training())


def rows(card: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in card.splitlines() if line[:1] == "|"]


def test_one_run() -> None:
    card = card_of(subject(), training())
    assert "# sabour2017 on MNIST handwritten digits\n" in card
    assert rows(card) == [
        ["", "test error", "test accuracy", "epoch"],
        ["---"] * 4,
        ["epoch chosen on the validation images (the weights here)", "0.35 %", "99.65 %", "10"],
        ["last epoch", "0.37 %", "99.63 %", "12"],
    ]
    assert "trained on 55,000 images; the epoch was chosen on 5,000 validation images" in card
    assert "the 10,000 test images were looked at once, at the end. Seed 4." in card
    assert "One test image is 0.01 % of the test set, and this is the result of one seed" in card
    assert "1,234,567 parameters" in card
    assert "Classes: one, two, three." in card
    assert "Source: LeCun, Cortes, Burges. Terms: free." in card
    assert "1,235 s on a processor (2 threads); torchcaps 0.1.0, torch 2.13.0" in card
    assert "bfloat16 with routing in float32" in card
    assert training().command in card


def test_several_seeds() -> None:
    results = tuple(
        SeedResult(seed=seed, best_epoch=10, best_error=error, last_error=2 * error)
        for seed, error in ((4, 0.003), (0, 0.004), (1, 0.005))
    )
    card = card_of(subject(), training(results=results, which="last"))
    assert [row[4] for row in rows(card)] == [
        "test error, mean of 3 seeds",
        "---",
        "0.400 ± 0.100 %",
        "0.800 ± 0.200 %",
    ]
    assert rows(card)[3][:2] == ["last epoch (the weights here)", "0.60 %"]
    assert "Seed 4 is the one here; the mean and the sample standard deviation are over the seeds 4, 0, 1," in card
    assert "result of one seed" not in card


@pytest.mark.parametrize(("which", "accuracy"), [("best", 0.9965), ("last", 0.9963)])
def test_the_hub_reads_its_metadata(which: str, accuracy: float) -> None:
    data = ModelCard(card_of(subject(), training(which=which))).data
    assert (data.library_name, data.pipeline_tag, data.datasets) == ("torchcaps", "image-classification", "mnist")
    assert "capsule-network" in data.tags
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_split) == ("accuracy", accuracy, "test")
    assert result.dataset_name == "MNIST handwritten digits"
    stored = ModelCard(card_of(subject(), training(which=which, stored_error=0.0041))).data.eval_results
    assert stored[0].metric_value == 0.9959


def test_rounded_weights() -> None:
    card = card_of(subject(half=True), training(stored_error=0.0036))
    assert "stored in half precision (float16) and computed with in float32" in card
    assert "As stored, rounded to half precision, the weights have 0.36 % test error, measured after rounding." in card


def test_the_preset_is_described_within_a_sentence() -> None:
    notebook = get_preset("tf-notebook")
    card = card_of(subject(config=notebook.model), dataclasses.replace(training(), preset="tf-notebook"))
    assert f"({notebook.source}): ReLU on the primary convolution" in card
    assert "): the paper's network." in card_of(subject(), training())


def test_what_was_changed_of_the_preset() -> None:
    config = replace(get_preset("sabour2017").model, {"num_iterations": 2, "decoder_hidden": (), "leaky": True})
    card = card_of(subject(config=config), training())
    assert "Here changed: `num_iterations` 2, `leaky` on, `decoder_hidden` none." in card
    assert "Here changed" not in card_of(subject(), training())


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (Recipe(epochs=3), "- Recipe: `epochs` 3, `batch_size` 128, `learning_rate` 0.001, `schedule` constant."),
        (
            Recipe(schedule="decay-by-step", flip=True),
            "`decay` 0.96, `decay_steps` 2000, `min_learning_rate` 0, `flip` on",
        ),
        (
            Recipe(schedule="decay-by-epoch", crop=24),
            "`schedule` decay-by-epoch, `decay` 0.96, `min_learning_rate` 0, `crop` 24",
        ),
    ],
)
def test_the_recipe_in_few_words(recipe: Recipe, said: str) -> None:
    assert said in card_of(subject(), training(recipe=recipe))


def test_own_images_are_no_data_set_of_the_hub() -> None:
    data = ModelCard(card_of(subject(), training(data=None, data_title="own images"))).data
    assert data.datasets is None
    assert data.eval_results[0].dataset_type == "own-images"


def test_nothing_is_said_that_is_not_known() -> None:
    card = card_of(subject(class_names=None))
    assert "How it was trained and how good it is are not recorded here." in card
    assert "Classes:" not in card
    assert "## Results" not in card
    assert "## Training" not in card
    assert ModelCard(card).data.eval_results is None


def test_many_classes_are_not_listed() -> None:
    names = tuple(f"class-{n}" for n in range(100))
    assert "class-7" not in card_of(subject(class_names=names, num_classes=100), training())


def test_a_network_without_capsules() -> None:
    card = card_of(subject("baseline-cnn"))
    assert "# Convolutional network\n" in card
    assert "capsule-network" not in ModelCard(card).data.tags


def test_it_is_cited() -> None:
    card = card_of(subject())
    (bibtex,) = re.findall(r"```bibtex\n(.*?)```", card, re.DOTALL)
    assert bibtex.count("{") == bibtex.count("}")
    entries = re.findall(r"^@(\w+)\{(\S+),$", bibtex, re.MULTILINE)
    assert entries == [("software", "torchcaps"), ("inproceedings", "sabour2017dynamic")]
    assert "arxiv.org/abs/1710.09829" in bibtex


def test_a_card_for_the_hub_names_the_repository() -> None:
    card = card_of(subject(), source="someone/net")
    assert 'torchcaps.load_pretrained("someone/net")' in card
    assert "hf download someone/net --local-dir network\ntorchcaps predict network image.png" in card


def test_a_card_of_a_shipped_network_names_it() -> None:
    card = card_of(subject(), source="compact")
    assert 'torchcaps.load_pretrained("compact")' in card
    assert "```bash\ntorchcaps predict image.png\n```" in card


@pytest.mark.parametrize("preset", list_presets())
def test_every_preset_has_a_card_and_its_code_runs(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small_network = create_model(preset, **small(preset))
    small_network.save_pretrained("path/to/this/folder", training=training(preset=preset))
    card = Path("path/to/this/folder/README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["output"].lengths.shape == (1, small_network.num_classes)
    kind = "capsule" if small_network.config.has_capsules else "convolutional"
    assert f"\nA {kind} network for " in card
    assert f"Preset `{preset}` (" in card
