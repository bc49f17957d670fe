"""Train or resume a run from its configuration, and test its network once."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchcaps import analysis
from torchcaps.analysis.collector import TaskEvaluation
from torchcaps.checks import checked
from torchcaps.datasets import Dataset
from torchcaps.datasets.damaged import listed
from torchcaps.datasets.features import are_features
from torchcaps.errors import InputError
from torchcaps.files import check_path, real, remove_temporaries, write_json
from torchcaps.machine import MIB, free_memory_mib
from torchcaps.models import Network, build_network, load_pretrained
from torchcaps.models.files import CLASSES, CONFIG
from torchcaps.models.segmentation import PixelNetwork
from torchcaps.parts import flat
from torchcaps.ranges import as_text
from torchcaps.tasks import Task, task_of
from torchcaps.training import devices, small_data
from torchcaps.training.config import LOCATION_FIELDS, TrainConfig, override, read_config
from torchcaps.training.data import check_padding, check_patch, cropped, load_run_data, run_data
from torchcaps.training.folder import (
    BEST,
    CHECKPOINT,
    FIGURES,
    SUMMARY,
    check_settings,
    lock_folder,
    on_main_process,
)
from torchcaps.training.image_spec import ImageSpec
from torchcaps.training.load import load_initial_weights, preparation_of
from torchcaps.training.loop import Trainer
from torchcaps.training.progress import Progress, choose_progress
from torchcaps.training.rates import LearningRates, find_learning_rate
from torchcaps.training.recipe import Recipe
from torchcaps.training.state import VALIDATION_COLUMNS, column_of
from torchcaps.training.stops import Interrupted
from torchcaps.words import counted, first_of

if TYPE_CHECKING:
    from lightning_fabric import Fabric

PART_WORDS = {"train": "training", "validation": "validation", "test": "test"}
RUNS = Path("runs")
RECONSTRUCTED_IMAGES, ROUTED_IMAGES = 20, 100
"""Number of test images in the figure of reconstructions, and for the statistics of routing."""


# ---- train and resume


@checked
def train(
    config: TrainConfig,
    out: str | Path | None = None,
    *,
    progress: Progress | None = None,
    figures: bool = True,
    command: str | None = None,
) -> dict[str, Any]:
    """Train a network from its configuration and write a run folder.

    Args:
        config: The configuration, such as from :func:`torchcaps.training.make_config`.
        out: The run folder. None: ``runs/PRESET-DATA-N`` with the next free number N.
        progress: Display of the progress. None: a live display in a terminal, else plain lines.
        figures: Draw figures at the end.
        command: Command to record in the summary.

    Returns:
        The summary, as written to ``summary.json``.

    Raises:
        InputError: Data or settings do not fit, ``out`` already holds a run, or the folder was moved during the run.
        Diverged: The loss became NaN or infinite.
        Interrupted: Ctrl-C or SIGTERM stopped the run. Its checkpoint is written.
    """
    return _run(config, _new_folder(config, out), progress, figures, command)


@checked
def resume(
    out: str | Path,
    *,
    preset: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    figures: bool = True,
    command: str | None = None,
) -> dict[str, Any]:
    """Resume a run from its last checkpoint. The result is exactly the same as without the stop.

    A finished run resumes if it gets more epochs. Its summary is removed and written again at the end.

    Args:
        out: The run folder.
        preset: The run's preset, for a check. None: no check.
        overrides: Settings to change. Only settings in ``RESUMABLE`` and ``LOCATION_FIELDS`` may differ from the run's.
        progress: Display of the progress, as for :func:`train`.
        figures: Draw figures at the end.
        command: Command to record in the summary.

    Returns:
        The summary, as written to ``summary.json``.

    Raises:
        InputError: ``out`` holds no run, or a setting may not change.
        Diverged: As for :func:`train`.
        Interrupted: As for :func:`train`.
    """
    out, overrides = Path(out), dict(overrides or {})
    if not (out / CONFIG).exists():
        raise InputError(f"there is no run to resume in {out}: it holds no {CONFIG}")
    config = read_config(out / CONFIG)
    if preset is not None and preset != config.preset:
        raise InputError(f"the run in {out} trains {config.preset}, not {preset}; start a new run for another preset")
    if overrides.get("precision") == "auto":  # auto keeps the precision of the run
        overrides["precision"] = config.precision
    changed = override(config, overrides)
    check_settings(flat(config.fields), flat(changed.fields), out, LOCATION_FIELDS)
    return _run(changed, lock_folder(out, resumes=True), progress, figures, command)


@checked
def learning_rates(config: TrainConfig) -> LearningRates:
    """Run a learning-rate range test with the configuration of a run. It writes no files.

    The network has the same initial weights as in the run. The settings in
    :data:`~torchcaps.training.rates.UNUSED_SETTINGS` are not used.

    Raises:
        InputError: Data or settings do not fit.
    """
    fabric = devices.launch(config.accelerator, config.devices, config.precision)
    config, data, network = _prepare(config)
    if config.init_from is not None:
        load_initial_weights(network, config.init_from)
    batches = run_data(data, config.recipe, fabric, config.seed)
    return find_learning_rate(fabric, network, batches, config.recipe, config.seed)


@contextmanager
def _new_folder(config: TrainConfig, out: str | Path | None) -> Iterator[Path]:
    """Lock a folder without a run: ``out``, or the next free ``runs/PRESET-DATA-N``."""
    with lock_folder(_next_folder(config) if out is None else Path(out)) as folder:
        if (folder / CONFIG).exists() or (folder / CHECKPOINT).exists():
            raise InputError(
                f"there is a run in {folder} already; resume it with --resume {folder}, or choose another --out"
            )
        yield folder


def _next_folder(config: TrainConfig) -> Path:
    """Return the next free run folder. For folder:PATH, csv:PATH or npz:PATH its name contains the name of PATH."""
    kind, _, path = config.data.partition(":")
    check_path(path or kind)
    name = f"{config.preset}-{real(path).stem if path else kind}"
    folders = (RUNS / f"{name}-{number}" for number in itertools.count(1))
    return next(folder for folder in folders if not os.path.lexists(folder))


def _run(
    config: TrainConfig,
    folder: AbstractContextManager[Path],
    progress: Progress | None,
    figures: bool,
    command: str | None,
) -> dict[str, Any]:
    """Train, test and summarise. All checks come before the first file is written."""
    precision = devices.pick_precision(config.precision, devices.pick_device(config.accelerator))
    requested = dataclasses.replace(config, precision=precision)
    fabric = devices.launch(requested.accelerator, requested.devices, requested.precision)
    with on_main_process(fabric, folder) as out:
        assert out is not None
        start = _prepare(requested)
        if start.config.init_from is not None and not (out / CHECKPOINT).exists():
            load_initial_weights(start.network, start.config.init_from)
        check_training_memory(start.network, start.config.recipe, start.config.preset, fabric.device)
        _try(start.network)
        trainer = _trainer(start, fabric, out, progress or choose_progress())
        _fit(trainer, start, requested, out, command or f"torchcaps train --config {out / CONFIG}")
        try:
            return fabric.broadcast(_finish(trainer, start, out, figures) if fabric.is_global_zero else {})
        except KeyboardInterrupt:
            raise Interrupted(out, trainer.state.step, 128 + signal.SIGINT) from None


class Start(NamedTuple):
    """Configuration, data and network at the start of a run."""

    config: TrainConfig
    """The configuration, adapted to the images."""
    data: Dataset
    network: Network

    @property
    def images(self) -> ImageSpec:
        """Description of the images for the network's files."""
        return ImageSpec(
            in_shape=self.network.in_shape,
            class_names=self.data.class_names,
            has_names=self.data.has_names,
            objects=self.network.objects,
            fit="stretch" if self.config.data.startswith(("folder:", "csv:")) else "pad",
            preparation=preparation_of(self.config),
            task=self.network.task,
            scale=self.config.scale,
            pages=self.config.pages,
            window=self.config.window,
            stride=self.config.stride,
            pca=self.data.pca,
            are_pixels=self.data.train.can_be_augmented,
            spacing=self.config.spacing,
            channels=self.data.channels,
            colours=self.data.colours,
        )


def _prepare(config: TrainConfig) -> Start:
    """Load the images, adapt the configuration to them, and build the network."""
    data = load_run_data(config)
    in_shape = cropped(data, config.recipe).in_shape
    config = small_data.fit_network(config, in_shape)
    config = small_data.fit_recipe(config, data.train.labels, data.task, data.train.epoch_size)
    torch.manual_seed(config.seed)
    network = build_network(config.model, in_shape, data.num_classes)
    check_patch(network, config.recipe)
    check_padding(network, data.train)
    return Start(config, data, network)


def check_training_memory(network: Network, recipe: Recipe, preset: str, device: torch.device) -> None:
    """Raise InputError if a network for pixels needs more memory than there is, by an estimate."""
    if not isinstance(network, PixelNetwork):
        return
    free = torch.cuda.mem_get_info(device)[0] / MIB if device.type == "cuda" else free_memory_mib()
    needed = network.training_bytes(recipe.batch_size) / MIB
    if free is not None and needed > free:
        half = max(network.stride, max(network.in_shape[1:]) // 2 // network.stride * network.stride)
        raise InputError(
            f"{preset} at {'×'.join(map(str, network.in_shape[1:]))} with batch {recipe.batch_size} needs about "
            f"{needed / 1024:.1f} GiB of memory, but {free / 1024:.1f} GiB are left; set --patch {half}, or a smaller "
            "--batch-size"
        )


def _try(network: Network) -> None:
    """Call the network once, because a user's part may raise. Random numbers are not affected."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        network.eval()(torch.rand(2, *network.in_shape))


def _trainer(start: Start, fabric: Fabric, out: Path, progress: Progress) -> Trainer:
    """Return the trainer, restored from the checkpoint in ``out`` if it has one."""
    config, network = start.config, start.network
    trainer = Trainer(
        fabric,
        network,
        run_data(start.data, config.recipe, fabric, config.seed),
        config.recipe,
        out,
        partial(network.save_files, images=start.images.to_dict()),
        seed=config.seed,
        progress=progress,
        checkpoint_minutes=config.checkpoint_minutes,
    )
    trainer.restore()
    return trainer


def _fit(trainer: Trainer, start: Start, requested: TrainConfig, out: Path, command: str) -> None:
    """Write the configuration and train to the end; ``requested`` is the configuration before its adaptation."""
    config, fabric = start.config, trainer.fabric
    trainer.state.commands.append(command)
    trainer.state.commits.append(devices.source_commit())
    if fabric.is_global_zero:
        if not trainer.is_done:
            (out / SUMMARY).unlink(missing_ok=True)  # of the run before it got more epochs
        write_json(out / CONFIG, config.to_dict())
    if config.init_from is not None and trainer.state.step == 0:
        trainer.save_checkpoint()  # from now on the run does not need init_from
    for line in _first_lines(config, requested, start.data, start.network, fabric.device):
        trainer.progress.message(line)
    trainer.fit()


def _first_lines(
    config: TrainConfig, requested: TrainConfig, data: Dataset, network: Network, device: torch.device
) -> Iterator[str]:
    """Yield the messages before the first step; ``requested`` is the configuration before its adaptation."""
    yield f"Network: {config.preset}, {sum(p.numel() for p in network.parameters()):,} parameters"
    before = flat(requested.model)
    if changed := {name: value for name, value in flat(config.model).items() if value != before.get(name)}:
        options = " ".join(f"--{name.replace('_', '-')} {as_text(value)}" for name, value in changed.items())
        size = f"{network.in_shape[1]}×{network.in_shape[2]}"
        yield f"Chosen for {size} images: {options} (override on the command line)"
    yield f"Data: {config.data}"
    task = task_of(network)
    parts = ", ".join(f"{len(images):,} {PART_WORDS[part]}" for part, images in data.parts.items())
    yield f"Images: {parts}; {'×'.join(map(str, network.in_shape))}, {counted(network.num_outputs, task.output)}"
    if data.num_groups is not None:
        yield f"Groups: {', '.join(f'{n:,} {PART_WORDS[part]}' for part, n in data.num_groups.items())}"
    yield f"Device: {device}, {devices.PRECISION_WORDS[config.precision]}"
    if config.precision == "bf16" and device.type == "cpu":
        yield "Warning: on processors that emulate bfloat16, a step takes about 12 times as long as in float32"
    yield from small_data.fitting_message(
        config, requested.recipe, data.train.labels, data.train.epoch_size, task, network.in_shape
    )
    yield from small_data.imbalance_message(config, data.train.labels, data.class_names, task)
    yield from small_data.narrow_message(data)
    if data.skipped:
        yield listed(f"Left out {counted(len(data.skipped), 'image')}:", data.skipped)


def _finish(trainer: Trainer, start: Start, out: Path, figures: bool) -> dict[str, Any]:
    """Test once, and write the summary, the calibration and the figures."""
    trainer.check_folder()
    config, spec, dataset = start.config, start.images, cropped(start.data, start.config.recipe)
    network, last = load_pretrained(out / BEST).to(trainer.fabric.device), trainer.network
    assert isinstance(last, Network)
    evaluate = partial(analysis.evaluate, class_names=spec.class_names, colours=spec.colours)
    best = evaluate(network, dataset.test)
    # if the last epoch is the best one, both networks are the same
    tested = {"best": best, "last": best if trainer.is_best else evaluate(last, dataset.test)}
    if task_of(network).supports("calibrate"):
        calibration = analysis.calibrate(network, dataset.validation.images)
        certainty = analysis.fit_certainty(network, dataset.validation)
        spec = dataclasses.replace(spec, calibration=calibration, certainty=certainty)
    summary = _summary(trainer, config, spec, dataset, tested) | {"out": str(out)}
    trainer.check_folder()
    write_json(out / BEST / CLASSES, spec.to_dict())
    write_json(out / SUMMARY, summary)
    if figures:
        _draw_figures(out, network, dataset, best)
    return summary


def _known(value: float | None) -> float | None:
    """Return a value for a file; None for NaN, such as the metric of objects without masks."""
    return None if value is None or math.isnan(value) else value


def _summary(
    trainer: Trainer, config: TrainConfig, spec: ImageSpec, dataset: Dataset, tested: Mapping[str, TaskEvaluation]
) -> dict[str, Any]:
    """Return the contents of summary.json; ``tested`` are the results of the networks ``"best"`` and ``"last"``."""
    network, state, validation = trainer.network, trainer.state, dataset.validation
    task, device = task_of(network), trainer.fabric.device
    rows = {"best": state.best(config.recipe.select), "last": state.history[-1]}
    measure = "validation_accuracy" if config.recipe.select == "loss" else column_of(config.recipe.select)
    value = rows["best"][measure]
    warning = small_data.chance_warning(value, validation.labels, config, trainer.steps, task, dataset.in_shape)
    trainer.note_peak_memory()
    peak = state.peak_memory_mib
    return {
        "preset": config.preset,
        "data": config.data,
        "seed": config.seed,
        "precision": config.precision,
        "epochs": state.epoch,
        "best_epoch": rows["best"]["epoch"],
        "select": config.recipe.select,
        "parameters": sum(p.numel() for p in network.parameters()),
        "images": {part: len(images) for part, images in dataset.parts.items()},
        "in_shape": list(dataset.in_shape),
        "classes": dataset.num_classes,
        "objects": dataset.num_objects,
        "task": task.name,
        "validation": {
            which: {name.removeprefix("validation_"): row.get(name) for name in VALIDATION_COLUMNS}
            for which, row in rows.items()
        },
        "test": {
            which: {name: _known(getattr(each, name)) for name in ("accuracy", "balanced_accuracy", "error", "loss")}
            | {"images": each.num_images}
            for which, each in tested.items()
        },
        "skipped": list(dataset.skipped),
        "seconds": round(state.seconds, 1),
        "images_per_second": rows["last"]["images_per_second"],
        "peak_memory_mib": None if peak is None else round(peak, 1),
        "hardware": devices.hardware(device) | {"processes": trainer.fabric.world_size},
        "versions": devices.versions(device),
        "commit": state.commits[-1],
        "earlier_commits": state.commits[:-1],
        "command": state.commands[0],
        "resumed_with": state.commands[1:],
        "calibration": None if spec.calibration is None else dataclasses.asdict(spec.calibration),
        "warning": warning or tested["best"].warning,
    }


def analyses_of_decoder(task: Task, in_shape: Sequence[int]) -> list[str]:
    """Return the commands that draw what the decoder of a network for this task makes of its capsules."""
    return [each for each in ("reconstruct", "perturb") if task.supports(each) and not are_features(in_shape)]


def _draw_figures(run: Path, model: Network, dataset: Dataset, evaluation: TaskEvaluation) -> None:
    """Draw metrics, samples and results of the best network into the folder ``figures`` of a run."""
    names, test, of_test = dataset.class_names, dataset.test, f"test images of {dataset.name}"
    where = {run.name: f"trained on {dataset.name}"}
    curves = analysis.Curves({run.name: analysis.read_metrics(run)}, where, model.task)
    title = f"The first training images of {dataset.name}"
    evaluated = evaluation.titled(f"{run.name} on the {of_test}")
    figures = {
        "curves": curves.figures()[""],
    }
    if not are_features(dataset.in_shape):
        figures["samples"] = analysis.figure_samples(dataset.train, names, title=title, colours=dataset.colours)
    figures |= {f"{evaluated.figure_name}{what}": figure for what, figure in evaluated.figures().items()}
    decoding = analyses_of_decoder(task_of(model), model.in_shape) if model.decoder is not None else []
    if "reconstruct" in decoding:
        first = test.preview(RECONSTRUCTED_IMAGES)
        decoded = analysis.reconstruct(model, first.images, first.labels)
        decoded = dataclasses.replace(decoded, class_names=names, title=f"{run.name}: first {of_test}")
        figures["reconstructions"] = decoded.figures()[""]
    if "perturb" in decoding:
        changed = [analysis.perturb_capsule(model, test.images[0])]
        changes = analysis.Perturbations(changed, names, [f"image 0 of the {of_test}"], network=run.name)
        figures["perturbation"] = changes.figures()[""]
    for number in range(1, len(model.layers) + 1) if model.has_capsules else ():
        try:
            trace = analysis.trace_routing(model, test.images[:1], layer=number)
        except InputError:  # the layer has no coupling or no iteration
            continue
        statistics = analysis.routing_statistics(model, test.images[:ROUTED_IMAGES], layer=number)
        report = analysis.RoutingReport(
            trace,
            names,
            f"image 0 of the {of_test}",
            statistics=statistics,
            many=f"the {first_of(len(statistics.entropy[0]), of_test)}",
            network=run.name,
        )
        layer = "" if number == len(model.layers) else f"-layer-{number}"
        figures |= {f"routing{what}{layer}": figure for what, figure in report.figures().items()}
    for name, figure in figures.items():
        remove_temporaries(run / FIGURES / f"{name}.png")  # of a killed process
        analysis.save_figure(figure, run / FIGURES / f"{name}.png")
