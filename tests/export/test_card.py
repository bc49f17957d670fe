"""The model card: it says where a network comes from and how good it is, and what it says runs (test_presets.py)."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from own_parts import register
from support import small
from torchcaps import create_model
from torchcaps.export.card import model_card
from torchcaps.models import Network, SeedResult, TrainingRecord, get_preset


def network_of(preset: str = "sabour2017", num_classes: int = 3, **options: Any) -> Network:
    """A network without memory for its weights."""
    with torch.device("meta"):
        return create_model(preset, (1, 28, 28), num_classes, **options)


def training(**values: Any) -> TrainingRecord:
    plain = {
        "preset": get_preset("sabour2017"),
        "data": "mnist",
        "data_title": "MNIST handwritten digits",
        "data_source": "LeCun, Cortes, Burges",
        "data_licence": "free",
        "images": {"train": 55_000, "validation": 5_000, "test": 10_000},
        "recipe": {"epochs": 12, "learning_rate": 0.003, "schedule": "one-cycle", "flip": True, "crop": None},
        "last_epoch": 12,
        "precision": "bf16",
        "which": "best",
        "results": (SeedResult(seed=4, best_epoch=10, best_error=0.0035, last_error=0.0037),),
        "command": "torchcaps train sabour2017 --data mnist --seed 4 --epochs 12",
        "seconds": 1234.5,
        "hardware": "a processor (2 threads)",
        "versions": {"torchcaps": "0.1.0", "torch": "2.13.0"},
    }
    return TrainingRecord(**plain | values)


def rows(card: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in card.splitlines() if line[:1] == "|"]


def test_one_run() -> None:
    network = network_of()
    card = model_card(network, training(), class_names=("one", "two", "three"))
    assert rows(card)[2:] == [
        ["epoch chosen on the validation images (the weights here)", "0.35 %", "99.65 %", "10"],
        ["last epoch", "0.37 %", "99.63 %", "12"],
    ]
    for fact in (
        "# sabour2017 on MNIST handwritten digits\n",
        "55,000 images",
        "5,000 validation images",
        "10,000 test images",
        "Seed 4.",
        "One test image is 0.01 % of the test set",
        f"{sum(weights.numel() for weights in network.parameters()):,} parameters",
        "Classes: one, two, three.",
        "LeCun, Cortes, Burges",
        "1,235 s on a processor (2 threads); torchcaps 0.1.0, torch 2.13.0",
        "bfloat16",
        training().command,
        "`epochs` 12, `learning_rate` 0.003, `schedule` one-cycle, `flip` on, `crop` none.",
    ):
        assert fact in card, fact
    assert "Here changed" not in card
    unknown = model_card(network_of())
    for word in ("Classes:", "## Results", "## Training"):
        assert word in card
        assert word not in unknown
    assert ModelCard(unknown).data.eval_results is None


def test_several_seeds_and_the_last_epoch() -> None:
    errors = (4, 0.003), (0, 0.004), (1, 0.005)
    results = tuple(SeedResult(seed=n, best_epoch=10, best_error=e, last_error=2 * e) for n, e in errors)
    card = model_card(network_of(), training(results=results, which="last"))
    assert [row[4] for row in rows(card)][2:] == ["0.400 ± 0.100 %", "0.800 ± 0.200 %"]
    assert rows(card)[3][:2] == ["last epoch (the weights here)", "0.60 %"]
    assert "over the seeds 4, 0, 1," in card


def test_the_hub_reads_its_metadata() -> None:
    for values, accuracy in (
        ({"which": "best"}, 0.9965),
        ({"which": "last"}, 0.9963),
        ({"which": "last", "stored_error": 0.0041}, 0.9959),
    ):
        data = ModelCard(model_card(network_of(), training(**values))).data
        assert (data.library_name, data.pipeline_tag, data.datasets) == ("torchcaps", "image-classification", "mnist")
        assert "capsule-network" in data.tags
        (result,) = data.eval_results
        assert (result.metric_type, result.metric_value, result.dataset_split) == ("accuracy", accuracy, "test")
    own = ModelCard(model_card(network_of(), training(data=None, data_title="own images"))).data
    assert (own.datasets, own.eval_results[0].dataset_type) == (None, "own-images")
    assert "capsule-network" not in ModelCard(model_card(network_of("baseline-cnn"))).data.tags


def test_what_was_changed_rounded_or_prepared_is_said() -> None:
    card = model_card(network_of(num_iterations=2, decoder_hidden=(), leaky=True), training())
    assert "`num_iterations` 2, `leaky` on, `decoder_hidden` none." in card
    half = model_card(network_of(), training(stored_error=0.0036), half=True)
    assert "0.36 % test error, measured after rounding" in half
    drawn = model_card(network_of(), training(preparation="light on dark"))
    assert "light on dark" in drawn
    assert "--invert" not in drawn


def test_names_from_files_stay_names() -> None:
    names = ("<script>alert(1)</script>", "[a](http://b.c)", "x\n# y", "www.b.c_d_ *e* `f`\x1b[2J", "__init__")
    card = model_card(network_of(num_classes=5), training(hardware="<b>|</b>"), class_names=names)
    assert "<b>" not in card
    (line,) = [line for line in card.splitlines() if line.startswith("Classes: ")]
    assert line == (
        r"Classes: &lt;script&gt;alert(1)&lt;/script&gt;, \[a\](http\://b.c), x\\n# y, "
        r"www\.b.c_d\_ \*e\* \`f\`\\x1b\[2J, \_\_init\_\_."
    )


def test_a_part_of_a_plugin_is_loaded_as_it_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)
    network = network_of(routing="cosine")
    command = "torchcaps train sabour2017 --plugin a.py --plugin 'my routings' --routing cosine"
    card = model_card(network, training(command=command), source="someone/net")
    assert 'torchcaps.load_plugin("a.py")\ntorchcaps.load_plugin("my routings")\nmodel =' in card
    predict = "torchcaps predict --plugin a.py --plugin 'my routings' network image.png"
    assert f"hf download someone/net --local-dir network\n{predict}" in card
    assert 'torchcaps.load_plugin("parts.py")\nmodel =' in model_card(network)
    assert "```bash\ntorchcaps predict image.png\n```" in model_card(network_of(), source="compact")
    command = """torchcaps train sabour2017 --plugin 'a"b\n```.py' --routing cosine"""
    card = model_card(network, training(command=command))
    assert r'torchcaps.load_plugin("a\"b\n```.py")' in card
    assert len(re.findall("^```", card, re.MULTILINE)) % 2 == 0


@pytest.mark.parametrize("missing", ["jinja2", "huggingface_hub"])
def test_without_the_extra_a_network_is_saved_without_a_card(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = create_model("sabour2017", (1, 28, 28), 3, **small("sabour2017"))
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError):
        model_card(network)
    network.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
