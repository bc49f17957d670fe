"""The model card: what a reader must know of a network before using it, as the README.md beside its weights."""

from __future__ import annotations

import itertools
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torchcaps._version import __version__
from torchcaps.models.config import Recipe
from torchcaps.models.fields import as_text, flat, own_parts
from torchcaps.models.presets import get_preset

if TYPE_CHECKING:
    from torchcaps.models.network import Network

MOST_CLASSES = 30
"""Names of so many classes at most stand in a card."""

CITATION = f"""\
@software{{torchcaps,
  author  = {{The torchcaps authors}},
  title   = {{torchcaps: capsule networks with dynamic routing for PyTorch}},
  version = {{{__version__}}},
  year    = {{2026}}
}}

@inproceedings{{sabour2017dynamic,
  author    = {{Sabour, Sara and Frosst, Nicholas and Hinton, Geoffrey E.}},
  title     = {{Dynamic Routing Between Capsules}},
  booktitle = {{Advances in Neural Information Processing Systems}},
  volume    = {{30}},
  year      = {{2017}},
  url       = {{https://arxiv.org/abs/1710.09829}}
}}
"""


@dataclass(frozen=True, kw_only=True)
class SeedResult:
    """The result of one training run on the test images."""

    seed: int
    best_epoch: int
    """The epoch that the validation images chose."""
    best_error: float
    """Test error of that epoch, 0..1."""
    last_error: float
    """Test error of the last epoch, 0..1."""


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """What a card says of a network's training."""

    preset: str
    """The preset that the network and the recipe started from."""
    data: str | None
    """The data set as ``load_dataset`` knows it; None for somebody's own files."""
    data_title: str
    """Its name for people."""
    data_source: str
    """Where it is from."""
    data_licence: str
    """Its terms."""
    images: Mapping[str, int]
    """How many images there were: ``train``, ``validation``, ``test``."""
    recipe: Recipe
    """How it was trained."""
    precision: str
    """``"32"`` or ``"bf16"``."""
    which: Literal["best", "last"]
    """The epoch whose weights these are."""
    results: tuple[SeedResult, ...]
    """This network's own result first, then those of the same training from other seeds."""
    stored_error: float | None = None
    """Test error of the weights as they were stored, 0..1, where storing rounded them and it was measured."""
    command: str
    """What trains it again."""
    seconds: float
    """Time spent in training and validation."""
    hardware: str
    """What it was trained on."""
    versions: Mapping[str, str]
    """Of torchcaps, torch and Python."""
    preparation: str | None = None
    """How the images were made of drawings, in words; None for images of something else."""


def model_card(
    network: Network,
    training: TrainingRecord | None = None,
    source: str | None = None,
    *,
    class_names: Sequence[str] | None = None,
    half: bool = False,
) -> str:
    """A README.md with the metadata that the Hugging Face hub reads.

    Args:
        network: The network.
        training: What is known of its training; None where nothing is.
        source: What ``load_pretrained`` is given to load it: a repository of the hub with its owner, or the name of a
            network that comes with torchcaps; the card's own folder if None.
        class_names: The name of each class; None where the classes have numbers only.
        half: Whether the weights are stored in half precision.

    Returns:
        Markdown. Nothing in it depends on the time or the machine that writes it.
    """
    kind = "Capsule network" if network.config.has_capsules else "Convolutional network"
    name = kind if training is None else f"{training.preset} on {training.data_title}"
    parts = [
        _front_matter(network, training, name),
        f"# {name}",
        _network(network, kind),
        _preset(network, training) if training else "",
        f"Classes: {', '.join(class_names)}." if class_names and len(class_names) <= MOST_CLASSES else "",
        "The weights are stored in half precision (float16) and computed with in float32." if half else "",
        _usage(source, own_parts(network.config), _plugins(training)),
        _results(training) if training else "How it was trained and how good it is are not recorded here.",
        _training(training) if training else "",
        _limits(network.num_classes, training),
        f"## Citation\n\n```bibtex\n{CITATION}```",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _front_matter(network: Network, training: TrainingRecord | None, name: str) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    tags = ["torchcaps", "pytorch"]
    if network.config.has_capsules:
        tags += ["capsule-network", "dynamic-routing", "arxiv:1710.09829"]
    data = ModelCardData(library_name="torchcaps", pipeline_tag="image-classification", tags=tags)
    if training is not None:
        first = training.results[0]
        error = first.best_error if training.which == "best" else first.last_error
        data.model_name, data.datasets = name, training.data
        data.eval_results = [
            EvalResult(
                task_type="image-classification",
                dataset_type=training.data or "own-images",
                dataset_name=training.data_title,
                dataset_split="test",
                metric_type="accuracy",
                metric_value=round(1 - (error if training.stored_error is None else training.stored_error), 6),
            )
        ]
    return f"---\n{data.to_yaml()}\n---"


def _network(network: Network, kind: str) -> str:
    channels, height, width = network.in_shape
    number = network.config.objects
    objects = f", {number} of them in an image" if number > 1 else ""
    colour = {1: " grey", 3: " colour"}.get(channels, "")
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return (
        f"A {kind.lower()} for{colour} images of {channels}×{height}×{width} (channels × height × width, pixels 0 to "
        f"1) in {network.num_classes} classes{objects}; {parameters:,} parameters, made with torchcaps {__version__}."
    )


def _preset(network: Network, training: TrainingRecord) -> str:
    preset = get_preset(training.preset)
    own, published = flat(network.config), flat(preset.model)
    changed = ", ".join(f"`{name}` {as_text(value)}" for name, value in own.items() if value != published.get(name))
    words = preset.description
    first = words.partition(" ")[0]
    if first[1:] == first[1:].lower():  # words such as ReLU stay as they are
        words = words[0].lower() + words[1:]
    return f"Preset `{preset.name}` ({preset.source}): {words}" + (f" Here changed: {changed}." if changed else "")


def _plugins(training: TrainingRecord | None) -> list[str]:
    """The plugins that the training names; a file that is called parts.py, where it names none."""
    words = [] if training is None else shlex.split(training.command)
    return [name for option, name in itertools.pairwise(words) if option == "--plugin"] or ["parts.py"]


def _usage(source: str | None, own: Sequence[str], plugins: Sequence[str]) -> str:
    if source is None:
        source = "path/to/this/folder"
        predict = f"torchcaps predict {source} image.png"
    elif "/" in source:
        predict = f"hf download {source} --local-dir network\ntorchcaps predict network image.png"
    else:
        predict = "torchcaps predict image.png"
    note = plugin = ""
    if own:
        predict = predict.replace(
            "torchcaps predict", " --plugin ".join(["torchcaps predict", *map(shlex.quote, plugins)])
        )
        plugin = "".join(f'torchcaps.load_plugin("{name}")\n' for name in plugins)
        note = f"Parts that do not come with torchcaps: {', '.join(own)}. "
        note += f"They are in a plugin of the author's, here {' and '.join(plugins)}.\n"
    return f"""\
## Use

{note}```python
import torch
import torchcaps

{plugin}model = torchcaps.load_pretrained("{source}")
output = model(torch.rand(1, *model.in_shape))  # pixels 0..1
output.lengths  # (1, classes): the scores; output.reconstruction: what the decoder draws
```

```bash
{predict}
```"""


def _results(training: TrainingRecord) -> str:
    images, results = training.images, training.results
    several = len(results) > 1
    mean = f" test error, mean of {len(results)} seeds |" if several else ""
    header = f"| | test error | test accuracy | epoch |{mean}"
    lines = [header, "|" + "---|" * (header.count("|") - 1)]
    for which, name, errors, epoch in (
        ("best", "epoch chosen on the validation images", [each.best_error for each in results], results[0].best_epoch),
        ("last", "last epoch", [each.last_error for each in results], training.recipe.epochs),
    ):
        cells = [
            name + (" (the weights here)" if which == training.which else ""),
            _percent(errors[0]),
            _percent(1 - errors[0]),
            str(epoch),
        ]
        if several:
            cells.append(f"{100 * statistics.mean(errors):.3f} ± {100 * statistics.stdev(errors):.3f} %")
        lines.append(f"| {' | '.join(cells)} |")
    protocol = (
        f"Protocol: trained on {images['train']:,} images; the epoch was chosen on {images['validation']:,} validation "
        f"images that were not trained on; the {images['test']:,} test images were looked at once, at the end. "
        f"Seed {results[0].seed}"
    )
    if several:
        protocol += (
            f" is the one here; the mean and the sample standard deviation are over the seeds "
            f"{', '.join(str(each.seed) for each in results)}, each trained and tested in the same way"
        )
    paragraphs = ["## Results", "\n".join(lines), protocol + "."]
    if training.stored_error is not None:
        paragraphs.append(
            f"As stored, rounded to half precision, the weights have {_percent(training.stored_error)} test error, "
            "measured after rounding."
        )
    return "\n\n".join(paragraphs)


def _training(training: TrainingRecord) -> str:
    # what every training has, and what this one does beyond
    always, plain = {"epochs", "batch_size", "learning_rate", "schedule"}, Recipe().to_dict()
    if training.recipe.schedule.startswith("decay"):
        always |= {"decay", "min_learning_rate"}
    if training.recipe.schedule == "decay-by-step":
        always |= {"decay_steps"}
    said = {name: value for name, value in training.recipe.to_dict().items() if name in always or value != plain[name]}
    recipe = ", ".join(f"`{name}` {as_text(value)}" for name, value in said.items())
    versions = ", ".join(f"{name} {version}" for name, version in training.versions.items())
    precision = {"32": "float32", "bf16": "bfloat16 with routing in float32"}[training.precision]
    return f"""\
## Training

- Data: {training.data_title}. Source: {training.data_source}. Terms: {training.data_licence}.
- Recipe: {recipe}.
- Computed in {precision}, {math.ceil(training.seconds):,} s on {training.hardware}; {versions}.

```bash
{training.command}
```"""


def _limits(num_classes: int, training: TrainingRecord | None) -> str:
    trained_on = "those it was trained on" if training is None else f"those of {training.data_title}"
    form = (
        f"Images should look like {trained_on}: the same side light and dark (`--invert` turns it round), of about the "
        "same place and size in the frame. Nothing here is said of others, or of images changed to deceive it."
    )
    if training is not None and training.preparation is not None:
        form = (
            f"Images are single drawings in the form of {trained_on}: {training.preparation}. `torchcaps predict` and "
            "`torchcaps explore` bring photos of a drawing to that form. Nothing here is said of other images, or of "
            "images changed to deceive it."
        )
    limits = [
        f"It knows its {num_classes} classes only: an image of anything else is given one of them too. Lengths "
        "are scores, not calibrated probabilities.",
        form,
    ]
    if training is not None:
        limits.append(
            f"One test image is {100 / training.images['test']:.3g} % of the test set"
            + (", and this is the result of one seed" if len(training.results) == 1 else "")
            + ": small differences from other networks mean nothing."
        )
    return "## Limits\n\n" + "\n".join(f"- {limit}" for limit in limits)


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
