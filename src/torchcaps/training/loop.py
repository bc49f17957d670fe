"""The training loop: one file, read from top to bottom. A single step is in ``step.py``.

Everything random is a function of (seed, epoch, batch), and the learning rate of the step, so that a run that was
stopped at any step goes on exactly as if it had not been.
"""

from __future__ import annotations

import functools
import math
import operator
import shlex
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from torchcaps.analysis import Evaluation, calibrate, evaluation_sums
from torchcaps.datasets import BatchLoader, Dataset, ImageSet
from torchcaps.errors import InputError
from torchcaps.files import write_json, write_text
from torchcaps.models import Network, build_network, load_pretrained
from torchcaps.models.pretrained import CONFIG
from torchcaps.parts import flat, own_parts
from torchcaps.plugins import loaded_plugins, plugin_options
from torchcaps.training.checkpoint import CHECKPOINT, ProgressState, check_fits, read_checkpoint, write_checkpoint
from torchcaps.training.config import ELSEWHERE, TrainConfig, override, read_config
from torchcaps.training.data import FEW, FOR_FEW, as_seen, fingerprint, fit_recipe, load_run_data, training_loader
from torchcaps.training.environment import (
    PRECISION_WORDS,
    emulation_warning,
    peak_memory_mib,
    resolve_precision,
    source_commit,
)
from torchcaps.training.folder import check_free, new_folder, sole_use, taken_for_all
from torchcaps.training.launch import check_processes, launch
from torchcaps.training.progress import Events, Progress, choose_progress
from torchcaps.training.recipe import Recipe
from torchcaps.training.report import chance, draw_figures, summarise, warning_of_chance
from torchcaps.training.run import BEST, METRICS, SUMMARY, remove_leftovers, start_from
from torchcaps.training.signals import noted_signals
from torchcaps.training.step import SUMS, learning_rate, set_up_step

#: Settings that may change when a run goes on: they do not change what is computed. (``epochs`` and ``stop_at`` change
#: only how long; other devices or another number of processes draw other dropout.)
RESUMABLE = ("epochs", "stop_at", *ELSEWHERE)

#: On a GPU, or with several processes, losses and signals are checked once in so many steps.
CHECK_EVERY = 32

#: A number of steps that no run reaches.
NEVER = 2**62

#: Images of a batch in evaluation, over all processes.
EVALUATION_BATCH = 256

#: Seconds. A checkpoint younger than this is not replaced at an epoch's end: writing can take as long as a short epoch.
YOUNG = 10.0

#: Damaged images that are named one by one.
MOST_NAMED = 20

#: Says that a checkpoint is due; smaller than the number of any signal that is handled.
OVERDUE = 1


class Interrupted(Exception):  # noqa: N818  the user asked for it, so it is no error
    """A signal stopped the run; its checkpoint is written.

    Args:
        out: The run folder.
        step: How many steps are finished.
        exit_code: 128 + the signal's number.
    """

    def __init__(self, out: Path, step: int, exit_code: int) -> None:
        again = shlex.join(["torchcaps", "train", "--resume", str(out), *plugin_options(loaded_plugins())])
        super().__init__(f"stopped after step {step}; go on with: {again}")
        self.out, self.step, self.exit_code = out, step, exit_code


class Diverged(Exception):  # noqa: N818  the word the field uses
    """The loss became NaN or infinite; the last good checkpoint stays."""


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
        InputError: Data or settings do not fit, or there is a run in ``out`` already.
        Diverged: The loss became NaN or infinite.
        Interrupted: Ctrl-C or SIGTERM; the checkpoint is written.
    """
    if out is not None:
        check_free(Path(out))
    trainer = _prepare(config, progress, begin=True)
    with taken_for_all(trainer.fabric, new_folder(config, out)) as folder:
        return trainer.run(folder, figures=figures, command=command)


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
        overrides: Settings, of which only those in ``RESUMABLE`` may differ from the run's.
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
    trainer = _prepare(config, progress, begin=not (out / CHECKPOINT).exists())
    with taken_for_all(trainer.fabric, sole_use(out)):
        if (out / CHECKPOINT).exists():
            trainer.restore(read_checkpoint(out / CHECKPOINT))
        return trainer.run(out, figures=figures, command=command)


def _prepare(config: TrainConfig, progress: Progress | None, *, begin: bool) -> Trainer:
    """Check everything that can be checked before anything is written, and make the trainer.

    A run that begins here takes the weights that it starts from.
    """
    check_processes(config)
    config = resolve_precision(config)
    if config.tensorboard:
        Events.check()
    whole = load_run_data(config)
    asked = config.recipe
    config = fit_recipe(config, len(whole.train))
    marks = fingerprint(whole, config.recipe)
    torch.manual_seed(config.seed)
    network = build_network(config.model, as_seen(whole, config.recipe).in_shape, whole.num_classes)
    if begin and config.init_from is not None:
        start_from(network, config.init_from)
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # a part of one's own may raise
        network.eval()(torch.rand(2, *network.in_shape))
    fabric = launch(config)
    shown = Progress()  # of the other processes nothing is shown
    if fabric.is_global_zero:
        shown = choose_progress() if progress is None else progress
    trainer = Trainer(fabric, config, whole, marks, network, shown)
    if config.recipe != asked:
        trainer.progress.message(_fitted(asked, config.recipe, len(whole.train)))
        if len(whole.train) < FEW * whole.num_classes and config.preset != FOR_FEW:
            trainer.progress.message(f"With fewer than {FEW} training images of a class {FOR_FEW} learns better")
    if whole.skipped:
        named = [*whole.skipped[:MOST_NAMED], *["…"] * (len(whole.skipped) > MOST_NAMED)]
        trainer.progress.message("\n  ".join([f"Left out {len(whole.skipped)} damaged images:", *named]))
    return trainer


def _fitted(asked: Recipe, recipe: Recipe, images: int) -> str:
    """A line that says how a recipe was fitted to few images."""
    steps = recipe.epochs * (images // recipe.batch_size)
    return (
        f"Recipe: for {images:,} training images {recipe.epochs} epoch{'s' * (recipe.epochs != 1)} in batches of "
        f"{recipe.batch_size}, {steps:,} steps, to a learning rate of {recipe.learning_rate:.2g}, in place of "
        f"{asked.epochs} in batches of {asked.batch_size} to {asked.learning_rate:.2g}; --epochs, "
        "--batch-size and --learning-rate choose others"
    )


class Trainer:
    """The state of a run, and the loop over its epochs and batches.

    Args:
        fabric: Devices, precision and processes.
        config: The run, with the precision that it computes in.
        whole: Its data set, the images whole.
        marks: The fingerprint of the data.
        network: The network to train, on the CPU.
        progress: Shows the progress of the run.
    """

    def __init__(
        self,
        fabric: Fabric,
        config: TrainConfig,
        whole: Dataset,
        marks: list[int],
        network: Network,
        progress: Progress,
    ) -> None:
        self.fabric, self.config, self.recipe = fabric, config, config.recipe
        self.dataset, self.progress = as_seen(whole, config.recipe), progress
        self.state = ProgressState()
        self._fingerprint = marks
        device = fabric.device
        self.loader = training_loader(config, whole.train, device, fabric.global_rank, fabric.world_size)
        self.network = network
        self.step = set_up_step(fabric, config, network)
        #: Steps between two checks of losses and signals, the same in all processes: 1 where a check takes no time.
        self.look_every = 1 if fabric.world_size == 1 and device.type == "cpu" else CHECK_EVERY
        self._last_save = time.monotonic()

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Go on from a checkpoint; raise InputError if it is of another run."""
        check_fits(checkpoint, self.config, self._fingerprint, self.network, len(self.loader))
        self.step.restore(checkpoint["model"], checkpoint["optimizer"])
        self.state = ProgressState.from_dict(checkpoint["progress"])
        if self.fabric.is_global_zero:  # the sums of all processes are added
            self.step.tally.restore([self.state.sums[name] for name in SUMS])

    def run(self, out: Path, *, figures: bool, command: str | None) -> dict[str, Any]:
        """Train, test and summarise in the folder ``out``, which no other process writes to."""
        self.out = out
        self.state.note_start(command or f"torchcaps train --config {self.out / CONFIG}", source_commit())
        if self.fabric.is_global_zero:
            remove_leftovers(self.out)
            if not self._is_done:
                (self.out / SUMMARY).unlink(missing_ok=True)  # of a shorter run, which this one goes on with
            write_json(self.out / CONFIG, self.config.to_dict())
        if self.config.init_from is not None and self.state.step == 0:
            self._save_checkpoint()  # from now on the run has the weights that it started from
        self.progress.message(f"Precision: {PRECISION_WORDS[self.config.precision]}")
        if (warning := emulation_warning(self.config.precision, self.fabric.device)) is not None:
            self.progress.message(f"Warning: {warning}")
        self.events = Events(self.out, self.config.tensorboard and self.fabric.is_global_zero)
        try:
            self.fit()
        finally:
            self.events.close()
        try:
            return self.finish(figures=figures)
        except KeyboardInterrupt:
            raise Interrupted(self.out, self.state.step, 128 + signal.SIGINT) from None

    def fit(self) -> None:
        """Train until the last epoch is done."""
        state, recipe = self.state, self.recipe
        if state.history:  # a killed process may have written the checkpoint, but not the files that follow from it
            self._publish()
        self.progress.network(self.network)
        self.progress.start(epochs=recipe.epochs, steps_per_epoch=len(self.loader), done=state.step)
        try:
            with noted_signals() as stop:
                while not self._is_done:
                    self._train_epoch(stop)
                    self._end_epoch(stop)
        finally:
            self.progress.stop()

    def _train_epoch(self, stop: list[int]) -> None:
        state = self.state
        self.network.train()
        begin, first_batch = time.monotonic(), state.batch
        for batch in self.loader.batches(state.epoch, start=state.batch):
            self.step(batch, state.step, learning_rate(self.recipe, state.step, len(self.loader)))
            state.batch += 1
            state.step += 1
            if state.step % self.look_every:
                continue
            loss = self._check_loss()
            self.progress.step(
                epoch=state.epoch + 1,
                step=state.step,
                images_per_second=(state.batch - first_batch) * self.recipe.batch_size / (time.monotonic() - begin),
                loss=loss,
            )
            if state.batch == len(self.loader):
                continue  # a finished epoch is ended first, so that it counts
            if call := self._calls(stop, 60 * self.config.checkpoint_minutes):
                begin, first_batch = self._note_sums(begin), state.batch
                self._check_weights()
                self._save_checkpoint()
                self._raise_if_stopped(call)
        self._note_sums(begin)

    def _end_epoch(self, stop: list[int]) -> None:
        """Validate, and write checkpoint, best weights and metrics."""
        self._check_weights()
        state = self.state
        begin = time.monotonic()
        validation = self._evaluate(self.network, self.dataset.validation)
        state.seconds += time.monotonic() - begin
        if not math.isfinite(validation.loss):
            raise self._diverged("the loss of the validation images is NaN or infinite after", state.step - 1)
        images = state.batch * self.recipe.batch_size
        means = {name: total / images for name, total in state.sums.items()}
        has_decoder = getattr(self.network, "decoder", None) is not None
        row = {
            "epoch": state.epoch + 1,
            "step": state.step,
            "seconds": round(state.seconds, 3),
            "images_per_second": round(images / state.epoch_seconds, 1),
            "learning_rate": learning_rate(self.recipe, state.step - 1, len(self.loader)),
            "train_loss": means["loss"],
            "train_classification_loss": means["classification_loss"],
            "train_reconstruction_loss": means["reconstruction_loss"] if has_decoder else None,
            "train_accuracy": means["correct"],
            "validation_loss": validation.loss,
            "validation_accuracy": validation.accuracy,
        }
        state.end_epoch(row)
        self.step.tally.clear()
        call = self._calls(stop, min(YOUNG, 60 * self.config.checkpoint_minutes))
        if call or self._is_best or self._is_done:
            self._save_checkpoint()
        self._publish()
        self.events.write(row)
        self.progress.epoch(row | {"improved": self._is_best})
        self._raise_if_stopped(call)

    @property
    def _is_done(self) -> bool:
        """Whether the run stands at the end of its last epoch: the recipe's last, or the first to reach ``stop_at``."""
        state, recipe = self.state, self.recipe
        if state.batch > 0 or not state.history:
            return False
        reached = recipe.stop_at is not None and state.history[-1]["validation_accuracy"] >= recipe.stop_at
        return reached or state.epoch >= recipe.epochs

    @property
    def _is_best(self) -> bool:
        """Whether the weights are those of the best epoch so far."""
        state = self.state
        return state.batch == 0 and state.best(self.recipe.select) is state.history[-1]

    def _publish(self) -> None:
        """Write the metrics, and the network's weights while they are the best ones; both follow from the checkpoint.

        So a process that is killed at any time leaves the best weights in the checkpoint or in the run folder.
        """
        if not self.fabric.is_global_zero:
            return
        if self._is_best:
            self.network.save_files(self.out / BEST, class_names=self.dataset.class_names)
        write_text(self.out / METRICS, self.state.metrics())

    def _save_checkpoint(self) -> None:
        """Write ``last.ckpt``, whole or not at all; the caller has checked the weights."""
        self.state.note_peak(peak_memory_mib(self.fabric.device))
        write_checkpoint(self.fabric, self.out, self.step, self.state, self._fingerprint)
        self._last_save = time.monotonic()

    def _calls(self, stop: list[int], seconds: float) -> int:
        """The reason for a checkpoint: a stop signal's number, OVERDUE after so many seconds without one, or 0.

        All processes get the same answer, also if a signal has reached only some of them.
        """
        overdue = time.monotonic() - self._last_save > seconds
        own = stop[0] if stop else OVERDUE * overdue
        return int(self._over_processes(torch.tensor(own), "max"))

    def _raise_if_stopped(self, call: int) -> None:
        if call > OVERDUE:
            raise Interrupted(self.out, self.state.step, 128 + call)

    def _note_sums(self, begin: float) -> float:
        """Note the sums of the epoch so far and the time since ``begin``; return the new beginning."""
        self._check_loss()
        sums = self._over_processes(self.step.tally.sums, "sum").tolist()
        now, state = time.monotonic(), self.state
        state.sums = dict(zip(SUMS, sums, strict=True))
        state.seconds += now - begin
        state.epoch_seconds += now - begin
        return now

    def _check_loss(self) -> float:
        """Return the last loss; all processes raise Diverged if a loss of one of them is NaN or infinite."""
        counted = self.step.tally.read()
        first_bad = self.state.step - counted.steps + counted.first_bad
        first_bad = -int(self._over_processes(torch.tensor(-int(min(first_bad, NEVER))), "max"))
        if first_bad < NEVER:
            raise self._diverged("the loss became NaN or infinite at", first_bad)
        return counted.last_loss

    def _check_weights(self) -> None:
        """Raise Diverged if the weights are not finite, as an update may ruin them after a good loss."""
        if not torch.stack([p.isfinite().all() for p in self.network.parameters()]).all():
            raise self._diverged("the weights became NaN or infinite by", self.state.step - 1)

    def _diverged(self, what: str, step: int) -> Diverged:
        """The error, with the place of the step, and settings to try."""
        rate = learning_rate(self.recipe, step, len(self.loader))
        to_try = [f"a smaller --learning-rate (now {rate:.2g})"]
        if "weight_std" in flat(self.config.model):
            to_try.append("a smaller --weight-std")
        if self.config.precision != "32":
            to_try.append("--precision 32")
        if parts := own_parts("network", self.config.model):
            to_try.append(f"to mend what is not finite in {' and '.join(parts)}")
        kept = f"there was no checkpoint yet in {self.out}"
        if (self.out / CHECKPOINT).exists():
            kept = f"{self.out} keeps the last good checkpoint"
        batches = len(self.loader)
        return Diverged(
            f"{what} step {step + 1} (epoch {step // batches + 1}, batch {step % batches + 1} of {batches}); try "
            f"{' or '.join(to_try)}; {kept}"
        )

    def _evaluate(self, network: Network, images: ImageSet) -> Evaluation:
        """Evaluate a network in float32; each process takes its share of the images, and every image counts once."""
        loader = BatchLoader(
            images,
            EVALUATION_BATCH,
            shuffle=False,
            device=self.fabric.device,
            rank=self.fabric.global_rank,
            world_size=self.fabric.world_size,
        )
        shares = [evaluation_sums(network, loader.batches(0))] * self.fabric.world_size
        if self.fabric.world_size > 1:
            torch.distributed.all_gather_object(shares, shares[0])
        return Evaluation.from_sums(functools.reduce(operator.add, shares), self.dataset.class_names)

    def _over_processes(self, own: Tensor, reduction: str) -> Tensor:
        """The elementwise sum or maximum over all processes, the same in all of them."""
        if self.fabric.world_size == 1:
            return own
        reduced = self.fabric.all_reduce(own.to(self.fabric.device, copy=True), reduce_op=reduction)
        assert isinstance(reduced, Tensor)
        return reduced

    def finish(self, *, figures: bool) -> dict[str, Any]:
        """Test once, and write the summary and the pictures."""
        self.fabric.barrier()  # the first process has published the best weights
        best_network = load_pretrained(self.out / BEST).to(self.fabric.device).eval()
        best = self._evaluate(best_network, self.dataset.test)
        # while the last epoch is the best one, both networks are the same
        last = best if self._is_best else self._evaluate(self.network.eval(), self.dataset.test)
        warning = None
        validation = self.dataset.validation
        accuracy = self.state.best(self.recipe.select)["validation_accuracy"]
        if self.dataset.num_objects == 1 and accuracy <= chance(validation):
            judged = self._evaluate(best_network, validation)
            warning = warning_of_chance(judged, self.recipe, self.config.preset, len(self.loader))
        self.state.note_peak(peak_memory_mib(self.fabric.device))
        summary = summarise(
            self.config,
            self.dataset,
            self.network,
            self.state,
            {"best": best, "last": last},
            self.fabric,
            out=self.out,
            calibration=calibrate(best_network, self.dataset.validation.images),
            warning=warning,
        )
        if self.fabric.is_global_zero:
            write_json(self.out / SUMMARY, summary)
            if figures:
                draw_figures(self.out, best_network, self.dataset, best)
        self.fabric.barrier()
        return summary


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
    before, after = flat(config.fields), flat(changed.fields)
    for name in {**before, **after}:
        if name not in RESUMABLE and before.get(name) != after.get(name):
            raise InputError(
                f"the run in {out} has {name} = {before.get(name)!r}; it cannot go on with {after.get(name)!r}, only "
                f"{', '.join(RESUMABLE)} may change"
            )
    if changed.recipe.epochs != config.recipe.epochs and config.recipe.schedule == "one-cycle":
        raise InputError(
            f"the one-cycle schedule of the run in {out} ends with epoch {config.recipe.epochs}; it cannot go on to "
            f"epoch {changed.recipe.epochs}: take --schedule constant in a new run"
        )
    return changed
