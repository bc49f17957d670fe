"""A run from its configuration: start it or go on with it, test its network once, and write summary and pictures."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchcaps import analysis
from torchcaps.analysis import Evaluation
from torchcaps.datasets import BatchLoader, Dataset, ImageSet
from torchcaps.errors import InputError
from torchcaps.files import read_json, real, remove_temporaries, write_json
from torchcaps.image_spec import ImageSpec
from torchcaps.models import Network, build_network, load_pretrained
from torchcaps.models.pretrained import CLASSES, CONFIG
from torchcaps.parts import flat
from torchcaps.training import devices
from torchcaps.training.checkpoint import CHECKPOINT, LOCK, check_settings, lock_folder, lock_on_main_process
from torchcaps.training.config import ELSEWHERE, TrainConfig, override, read_config
from torchcaps.training.data import (
    EVALUATION_BATCH,
    FEW,
    FOR_FEW,
    chance,
    cropped,
    fit_recipe,
    load_run_data,
    run_data,
    warning_of_chance,
)
from torchcaps.training.loop import Interrupted, Trainer
from torchcaps.training.progress import Progress, choose_progress, find_logger
from torchcaps.training.run import BEST, FIGURES, SUMMARY, fit_of, preparation_of, remove_leftovers, start_from

#: Damaged images that are named one by one.
MOST_NAMED = 20
#: Test images in the sheet of reconstructions, and behind the mean figures of routing.
SHOWN, MEASURED = 20, 100


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
        config: The run; see :func:`torchcaps.training.make_config`.
        out: The run folder; ``runs/PRESET-DATA-N`` with the next free N if None.
        progress: Shows the progress; a live display or plain lines if None.
        figures: Whether to draw the pictures at the end.
        command: The command to note in the summary.

    Returns:
        The summary, as written to ``summary.json``.

    Raises:
        InputError: Data or settings do not fit, there is a run in ``out`` already, or the folder was moved meanwhile.
        Diverged: The loss became NaN or infinite.
        Interrupted: Ctrl-C or SIGTERM; the checkpoint is written.
    """
    if out is not None:
        if (Path(out) / LOCK).exists():
            with lock_folder(Path(out)):  # what a killed process left is removed
                pass
        _check_new(Path(out))
    run = _prepare(config, progress, begin=True)
    with lock_on_main_process(run.trainer.fabric, _new_folder(config, out)) as folder:
        return _run(run, folder, figures, command)


def resume(
    out: str | Path,
    *,
    preset: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    figures: bool = True,
    command: str | None = None,
) -> dict[str, Any]:
    """Go on with a run from its last checkpoint, exactly as if it had not stopped.

    With more epochs than it had, a finished run goes on too; its summary is removed until there is a new one.

    Args:
        out: The run folder.
        preset: The run's preset, or None.
        overrides: Settings, of which only those in ``RESUMABLE`` and ``ELSEWHERE`` may differ from the run's.
        progress: As for :func:`train`, as the next two.
        figures: The same.
        command: The same.

    Returns:
        The summary, as written to ``summary.json``.

    Raises:
        InputError: There is no run in ``out``, its checkpoint is damaged, or settings differ from the run's.
        Diverged: The loss became NaN or infinite.
        Interrupted: Ctrl-C or SIGTERM; the checkpoint is written.
    """
    out = Path(out)
    config = _resumed_config(out, preset, overrides or {})
    run = _prepare(config, progress, begin=not (out / CHECKPOINT).exists())
    with lock_on_main_process(run.trainer.fabric, lock_folder(out)):
        return _run(run, out, figures, command)


class _Prepared(NamedTuple):
    """A run before anything is written."""

    config: TrainConfig
    """Fitted to machine and data."""
    dataset: Dataset
    """As the network sees it."""
    trainer: Trainer
    words: list[str]
    """The lines that are printed first."""


def _prepare(config: TrainConfig, progress: Progress | None, *, begin: bool) -> _Prepared:
    """Check everything that can be checked before anything is written, and start the processes.

    A run that begins here takes the weights that it starts from.
    """
    devices.check_devices(config.accelerator, config.devices, config.num_nodes)
    device = devices.pick_device(config.accelerator)
    config = dataclasses.replace(config, precision=devices.pick_precision(config.precision, device))
    if config.recipe.logger is not None:
        find_logger(config.recipe.logger)
    data, asked = load_run_data(config), config.recipe
    config = fit_recipe(config, len(data.train))
    seen, recipe = cropped(data, config.recipe), config.recipe
    torch.manual_seed(config.seed)
    network = build_network(config.model, seen.in_shape, data.num_classes)
    if begin and config.init_from is not None:
        start_from(network, config.init_from)
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # a part of one's own may raise
        network.eval()(torch.rand(2, *network.in_shape))
    shape = "×".join(map(str, seen.in_shape))
    words = [
        f"Network: {config.preset}, {sum(p.numel() for p in network.parameters()):,} parameters",
        f"Data: {config.data}",
        f"Images: {len(data.train):,} to train on, {len(data.validation):,} to validate, {len(data.test):,} to test; "
        f"{shape}, {data.num_classes} classes",
        f"Device: {device}, {devices.PRECISION_WORDS[config.precision]}",
    ]
    if (warning := devices.emulation_warning(config.precision, device)) is not None:
        words.append(f"Warning: {warning}")
    if recipe != asked:
        steps = recipe.epochs * (len(data.train) // recipe.batch_size)
        words.append(
            f"Recipe: for {len(data.train):,} training images {recipe.epochs} epoch{'s' * (recipe.epochs != 1)} in "
            f"batches of {recipe.batch_size}, {steps:,} steps, to a learning rate of {recipe.learning_rate:.2g}, in "
            f"place of {asked.epochs} in batches of {asked.batch_size} to {asked.learning_rate:.2g}; --epochs, "
            "--batch-size and --learning-rate choose others"
        )
        if len(data.train) < FEW * data.num_classes and config.preset != FOR_FEW:
            words.append(f"With fewer than {FEW} training images of a class {FOR_FEW} learns better")
    if data.skipped:
        named = [*data.skipped[:MOST_NAMED], *["…"] * (len(data.skipped) > MOST_NAMED)]
        words.append("\n  ".join([f"Left out {len(data.skipped)} damaged images:", *named]))
    spec = ImageSpec(
        in_shape=network.in_shape,
        class_names=data.class_names,
        objects=network.objects,
        fit=fit_of(config),
        preparation=preparation_of(config),
    )
    fabric = devices.launch(config.accelerator, config.devices, config.num_nodes, config.precision)
    trainer = Trainer(
        fabric,
        network,
        run_data(data, recipe, fabric, config.seed),
        recipe,
        functools.partial(network.save_files, images=spec.to_dict()),
        seed=config.seed,
        progress=choose_progress() if progress is None and fabric.is_global_zero else progress,
        checkpoint_minutes=config.checkpoint_minutes,
    )
    return _Prepared(config, seen, trainer, words)


def _run(run: _Prepared, out: Path, figures: bool, command: str | None) -> dict[str, Any]:
    """Train, test and summarise in the folder ``out``, which no other process writes to."""
    config, dataset, trainer, words = run
    trainer.enter(out)
    trainer.state.commands.append(command or f"torchcaps train --config {out / CONFIG}")
    trainer.state.commits.append(devices.source_commit())
    if trainer.fabric.is_global_zero:
        remove_leftovers(out)
        if not trainer.is_done:
            (out / SUMMARY).unlink(missing_ok=True)  # of a shorter run, which this one goes on with
        write_json(out / CONFIG, config.to_dict())
    if config.init_from is not None and trainer.state.step == 0:
        trainer.save_checkpoint()  # from now on the run has the weights that it started from
    for line in words:
        trainer.progress.message(line)
    trainer.fit()
    try:
        return _finish(trainer, config, dataset, out, figures)
    except KeyboardInterrupt:
        raise Interrupted(out, trainer.state.step, 128 + signal.SIGINT) from None


def _finish(trainer: Trainer, config: TrainConfig, dataset: Dataset, out: Path, figures: bool) -> dict[str, Any]:
    """Test once, and write the summary and the pictures."""
    fabric, state = trainer.fabric, trainer.state

    def judge(network: Network, images: ImageSet) -> Evaluation:
        place: dict[str, Any] = {"device": fabric.device, "rank": fabric.global_rank, "world_size": fabric.world_size}
        found = trainer.judge(network, BatchLoader(images, EVALUATION_BATCH, shuffle=False, **place))
        assert isinstance(found, Evaluation)
        return found

    fabric.barrier()  # the first process has published the best weights
    trainer.check_folder()
    best_network = load_pretrained(out / BEST).to(fabric.device).eval()
    best = judge(best_network, dataset.test)
    # while the last epoch is the best one, both networks are the same
    last = best if trainer.is_best else judge(trainer.network.eval(), dataset.test)  # type: ignore[arg-type]
    warning, validation = None, dataset.validation
    accuracy = state.best(config.recipe.select)["validation_accuracy"]
    if dataset.num_objects == 1 and accuracy <= chance(validation):
        judged = judge(best_network, validation)
        warning = warning_of_chance(judged, config.recipe, config.preset, len(trainer.loader))
    state.note_peak(devices.peak_memory_mib(fabric.device))
    calibration = dataclasses.asdict(analysis.calibrate(best_network, validation.images))
    summary = {
        **_summarise(trainer, config, dataset, {"best": best, "last": last}),
        "out": str(out),
        "calibration": calibration,
        "warning": warning,
    }
    if fabric.is_global_zero:
        trainer.check_folder()
        about = read_json(out / BEST / CLASSES, "list of classes")
        write_json(out / BEST / CLASSES, about | {"calibration": calibration})
        write_json(out / SUMMARY, summary)
        if figures:
            draw_figures(out, best_network, dataset, best)
    fabric.barrier()
    return summary


def _summarise(
    trainer: Trainer, config: TrainConfig, dataset: Dataset, judged: Mapping[str, Evaluation]
) -> dict[str, Any]:
    """The results of a run, and all that a table of results needs besides.

    ``judged`` has the results of the weights of the ``best`` and the ``last`` epoch on the test images.
    """
    state, fabric = trainer.state, trainer.fabric
    best, last, peak = state.best(config.recipe.select), state.history[-1], state.peak_memory_mib
    return {
        "preset": config.preset,
        "data": config.data,
        "seed": config.seed,
        "precision": config.precision,
        "epochs": state.epoch,
        "best_epoch": best["epoch"],
        "select": config.recipe.select,
        "parameters": sum(p.numel() for p in trainer.network.parameters()),
        "images": {part: len(getattr(dataset, part)) for part in ("train", "validation", "test")},
        "in_shape": list(dataset.in_shape),
        "classes": dataset.num_classes,
        "objects": dataset.num_objects,
        "validation": {
            name: {"accuracy": row["validation_accuracy"], "loss": row["validation_loss"]}
            for name, row in (("best", best), ("last", last))
        },
        "test": {
            name: {"accuracy": each.accuracy, "error": each.error, "loss": each.loss, "images": each.num_images}
            for name, each in judged.items()
        },
        "skipped": list(dataset.skipped),
        "seconds": round(state.seconds, 1),
        "images_per_second": last["images_per_second"],
        "peak_memory_mib": None if peak is None else round(peak, 1),
        "hardware": devices.hardware(fabric.device) | {"processes": fabric.world_size},
        "versions": devices.versions(fabric.device),
        "commit": state.commits[-1],
        "earlier_commits": state.commits[:-1],
        "command": state.commands[0],
        "resumed_with": state.commands[1:],
    }


def draw_figures(run: Path, model: Network, dataset: Dataset, evaluation: Evaluation) -> list[Path]:
    """Draw the pictures of a run folder, of its metrics and of its best network, into its folder ``figures``.

    Returns:
        The files written.

    Raises:
        InputError: The folder cannot be written.
    """
    names, test = dataset.class_names, dataset.test
    figures = {
        "samples": analysis.figure_samples(dataset.train, names),
        "curves": analysis.figure_curves({run.name: analysis.read_metrics(run)}),
        "confusion": analysis.figure_confusion(evaluation),
    }
    if model.decoder is not None:
        first = test.preview(SHOWN)
        figures["reconstructions"] = analysis.figure_reconstructions(
            analysis.reconstruct(model, first.images, first.labels), names
        )
        figures["perturbation"] = analysis.figure_perturbation(analysis.perturb_capsule(model, test.images[0]), names)
    for number in analysis.layers_with_coupling(model):
        name = "routing" if number == len(model.layers) else f"routing-layer-{number}"
        trace = analysis.trace_routing(model, test.images[:1], layer=number)
        figures[name] = analysis.figure_coupling(trace, class_names=names if number == len(model.layers) else None)
        statistics = analysis.routing_statistics(model, test.images[:MEASURED], layer=number)
        figures[name.replace("routing", "routing-statistics")] = analysis.figure_routing_statistics(statistics)
    paths = {name: run / FIGURES / f"{name}.png" for name in figures}
    for path in paths.values():
        remove_temporaries(path)  # of an earlier sitting
    return [analysis.save_figure(figure, paths[name]) for name, figure in figures.items()]


# ---- the folder and the configuration of a run


@contextmanager
def _new_folder(config: TrainConfig, out: str | Path | None) -> Iterator[Path]:
    """Lock a folder for a new run: the one that is named, or the next free one.

    Raises:
        InputError: There is a run in the folder that is named, or another process has locked it.
        OSError: The folder cannot be written.
    """
    if out is None:
        Path("runs").mkdir(exist_ok=True)
    while out is None:
        free = _next_folder(config)
        with suppress(FileExistsError):  # another run was faster
            free.mkdir()
            out = free
    with lock_folder(Path(out)) as folder:
        _check_new(folder)
        yield folder


def _check_new(out: Path) -> None:
    """Raise InputError if there is a run in a folder."""
    if (out / CONFIG).exists() or (out / CHECKPOINT).exists():
        raise InputError(f"there is a run in {out} already; go on with it by --resume {out}, or choose another --out")


def _next_folder(config: TrainConfig) -> Path:
    """``runs/PRESET-DATA-N`` with the next free N."""
    # folder:PATH and npz:PATH become the name of what they point to
    kind, _, path = config.data.partition(":")
    data = real(path).stem if path else kind
    number = 1
    while os.path.lexists(folder := Path("runs") / f"{config.preset}-{data}-{number}"):  # a link to nothing, too
        number += 1
    return folder


def _resumed_config(out: Path, preset: str | None, overrides: Mapping[str, Any]) -> TrainConfig:
    """The run's configuration, with the changes that resuming allows."""
    if not (out / CONFIG).exists():
        raise InputError(f"there is no run to resume in {out}: it holds no {CONFIG}")
    config = read_config(out / CONFIG)
    if preset is not None and preset != config.preset:
        raise InputError(f"the run in {out} trains {config.preset}, not {preset}; start a new run for another preset")
    if overrides.get("precision") == "auto":  # it stands for the precision that the run began with
        overrides = {**overrides, "precision": config.precision}
    changed = override(config, overrides)
    check_settings(flat(config.fields), flat(changed.fields), out, ELSEWHERE)
    return changed
