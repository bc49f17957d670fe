"""The training loop: one file, read from top to bottom. A single step is in ``step.py``.

Everything random is a function of (seed, epoch, batch), and the learning rate of the step, so that a run that was
stopped at any step goes on exactly as if it had not been.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from torchcaps.analysis import Evaluation, EvaluationSums, evaluation_sums
from torchcaps.datasets import BatchLoader, ImageSet
from torchcaps.errors import InputError
from torchcaps.files import write_json, write_text
from torchcaps.models import Model, build_model, load_pretrained
from torchcaps.models.pretrained import CONFIG, load_weights
from torchcaps.training.capture import set_up_steps
from torchcaps.training.checkpoint import CHECKPOINT, check_fits, read_checkpoint, write_checkpoint
from torchcaps.training.config import ELSEWHERE, TrainConfig, field_names, override, read_config
from torchcaps.training.data import RunData, fingerprint, load_run_data, training_loader
from torchcaps.training.device import PRECISION_WORDS, emulation_warning, resolve_precision
from torchcaps.training.environment import commit, peak_memory_mib
from torchcaps.training.events import Events
from torchcaps.training.launch import check_processes, launch
from torchcaps.training.lock import sole_use
from torchcaps.training.memory import memory_warning
from torchcaps.training.position import Position
from torchcaps.training.progress import Progress, Silence, choose_progress
from torchcaps.training.run import BEST, METRICS, SUMMARY, initial_weights, remove_leftovers, save_best
from torchcaps.training.schedule import learning_rate
from torchcaps.training.signals import noted_signals
from torchcaps.training.summary import summarise

#: Settings that may change when a run goes on: they do not change what is computed. (``epochs`` and ``stop_at`` change
#: only how long; other devices or another number of processes draw other dropout.)
RESUMABLE = ("epochs", "stop_at", *ELSEWHERE)

#: On a GPU, or where processes must ask each other, losses and signals are looked at once in so many steps.
CHECK_EVERY = 32

#: A step that no run reaches.
NEVER = 2**62

#: Images judged at a time, over all processes.
EVALUATION_BATCH = 256

#: Seconds. At an epoch's end, a checkpoint younger than this will do: writing one can take as long as a short epoch.
YOUNG = 10.0

#: The time between two checkpoints is over; smaller than the number of any signal that is handled.
OVERDUE = 1


class Interrupted(Exception):  # noqa: N818  no error: the user asked for it
    """A signal stopped the run; its checkpoint is written.

    Args:
        out: The run folder.
        step: Steps done.
        exit_code: 128 + the signal's number.
    """

    def __init__(self, out: Path, step: int, exit_code: int) -> None:
        super().__init__(f"stopped after step {step}; go on with: torchcaps train --resume {shlex.quote(str(out))}")
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
        progress: Where to show what happens; a live display or plain lines if None.
        figures: Draw the pictures at the end.
        command: The command to note in the summary.

    Returns:
        The summary, as written to ``summary.json``.

    Raises:
        InputError: Data or settings that do not fit, or a run in ``out`` already.
        Diverged: The loss became NaN or infinite.
        Interrupted: Ctrl-C or SIGTERM; the checkpoint is written.
    """
    if out is not None:
        _check_new(Path(out))
    trainer = _prepare(config, progress, begin=True)
    with _sole_use(trainer.fabric, partial(_take_new, config, out)) as folder:
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
        preset: If given, must be the run's.
        overrides: Settings; only those in ``RESUMABLE`` may differ from the run's.
        progress: As for :func:`train`.
        figures: As for :func:`train`.
        command: As for :func:`train`.

    Returns:
        The summary, as written to ``summary.json``.

    Raises:
        InputError: No run in ``out``, a damaged checkpoint, or settings that differ from the run's.
        Diverged: The loss became NaN or infinite.
        Interrupted: Ctrl-C or SIGTERM; the checkpoint is written.
    """
    out = Path(out)
    config = _resumed_config(out, preset, overrides or {})
    trainer = _prepare(config, progress, begin=not (out / CHECKPOINT).exists())
    with _sole_use(trainer.fabric, partial(_take, out)):
        if (out / CHECKPOINT).exists():
            trainer.restore(read_checkpoint(out / CHECKPOINT))
        return trainer.run(out, figures=figures, command=command)


def _prepare(config: TrainConfig, progress: Progress | None, *, begin: bool) -> Trainer:
    """All that can be found wrong is found here, or when the checkpoint is read: before anything is written.

    Args:
        config: The run.
        progress: As for :func:`train`.
        begin: Whether it begins here, with the weights that it is to start from.
    """
    check_processes(config)
    config = resolve_precision(config)
    if config.tensorboard:
        Events.check()
    data = load_run_data(config)
    dataset, marks = data.dataset, fingerprint(data)
    num_images = sum(len(part) for part in (dataset.train, dataset.validation, dataset.test))
    warning = memory_warning(config, data.train.in_shape, dataset.num_classes, num_images)
    torch.manual_seed(config.seed)
    network = build_model(config.model, dataset.in_shape, dataset.num_classes)
    if begin and config.init_from is not None:
        load_weights(network, initial_weights(config.init_from), Path(config.init_from))
    fabric = launch(config)
    trainer = Trainer(fabric, config, data, marks, network, _progress(fabric, progress))
    if warning is not None and fabric.device.type == "cpu":
        trainer.progress.message(f"Warning: {warning}")
    return trainer


class Trainer:
    """The state of a run, and the loop over its epochs and batches.

    Args:
        fabric: Devices, precision and processes.
        config: The run, in the precision that it computes in.
        data: What it trains on and is judged by.
        marks: The fingerprint of ``data``.
        network: What is trained, on the CPU.
        progress: Told what happens.
    """

    def __init__(
        self,
        fabric: Fabric,
        config: TrainConfig,
        data: RunData,
        marks: list[int],
        network: Model,
        progress: Progress,
    ) -> None:
        self.fabric, self.config, self.recipe = fabric, config, config.recipe
        self.dataset, self.progress = data.dataset, progress
        self.position = Position()
        self._fingerprint = marks
        device = fabric.device
        self.loader = training_loader(config, data.train, device, fabric.global_rank, fabric.world_size)
        self.network = network
        steps = set_up_steps(fabric, config, network)
        self.plain_step, self.step, self.captured = steps.plain, steps.make, steps.captured is not None
        #: Each time where a look is free, else once in a while. It is the same for all processes.
        self.look_every = 1 if fabric.world_size == 1 and device.type == "cpu" else CHECK_EVERY
        self._last_save = time.monotonic()

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Go to where the checkpoint was written.

        Raises:
            InputError: It is of another run.
        """
        check_fits(checkpoint, self.config, self._fingerprint, self.network, len(self.loader))
        self.plain_step.restore(checkpoint["model"], checkpoint["optimizer"])
        self.position = Position.from_dict(checkpoint["progress"])

    def run(self, out: Path, *, figures: bool, command: str | None) -> dict[str, Any]:
        """Train, test and sum up in the folder ``out``, which nobody else writes to."""
        self.out = out
        self.position.note_start(command or f"torchcaps train --config {self.out / CONFIG}", commit())
        self.events = Events(self.out, self.config.tensorboard and self.fabric.is_global_zero)
        if self.fabric.is_global_zero:
            remove_leftovers(self.out)
            write_json(self.out / CONFIG, self.config.to_dict())
            if not self._is_done:
                (self.out / SUMMARY).unlink(missing_ok=True)  # of a shorter run, which this one goes on with
        if self.config.init_from is not None and self.position.step == 0:
            self._save_checkpoint()  # from now on the run has the weights that it started from
        self.progress.message(f"Precision: {PRECISION_WORDS[self.config.precision]}")
        if (warning := emulation_warning(self.config.precision, self.fabric.device)) is not None:
            self.progress.message(f"Warning: {warning}")
        with self.events:
            self.fit()
        try:
            return self.finish(figures=figures)
        except KeyboardInterrupt:
            raise Interrupted(self.out, self.position.step, 128 + signal.SIGINT) from None

    def fit(self) -> None:
        """Train until the last epoch is done."""
        position, recipe = self.position, self.recipe
        if position.history:  # a kill may have come between the checkpoint and what follows from it
            self._publish()
        self.progress.start(epochs=recipe.epochs, steps_per_epoch=len(self.loader), done=position.step)
        try:
            with noted_signals() as stop:
                while not self._is_done:
                    self._train_epoch(stop)
                    self._end_epoch(stop)
        finally:
            self.progress.stop()

    def _train_epoch(self, stop: list[int]) -> None:
        position = self.position
        self.network.train()
        begin, first_batch = time.monotonic(), position.batch
        for batch in self.loader.batches(position.epoch, start=position.batch):
            self.step(batch, position.step, learning_rate(self.recipe, position.step, len(self.loader)))
            position.batch += 1
            position.step += 1
            if position.step % self.look_every:
                continue
            loss = self._check_loss()
            self.progress.step(
                epoch=position.epoch + 1,
                step=position.step,
                images_per_second=(position.batch - first_batch) * self.recipe.batch_size / (time.monotonic() - begin),
                loss=loss,
            )
            if position.batch == len(self.loader):
                continue  # an epoch that is whole is ended first, so that it counts
            if call := self._calls(stop, 60 * self.config.checkpoint_minutes):
                begin, first_batch = self._add_sums(begin), position.batch
                self._check_weights()
                self._save_checkpoint()
                self._raise_if_stopped(call)
        self._add_sums(begin)

    def _end_epoch(self, stop: list[int]) -> None:
        """Validate, write checkpoint, best weights and metrics."""
        self._check_weights()
        position = self.position
        begin = time.monotonic()
        validation = self._evaluate(self.network, self.dataset.validation)
        position.seconds += time.monotonic() - begin
        if not math.isfinite(validation.loss):
            step = position.step - 1
            raise Diverged(
                f"the loss of the validation images is NaN or infinite after step {step + 1} {self._advice(step)}"
            )
        sums, n = position.sums, position.sums.images
        has_decoder = getattr(self.network, "decoder", None) is not None
        row = {
            "epoch": position.epoch + 1,
            "step": position.step,
            "seconds": round(position.seconds, 3),
            "images_per_second": round(n / position.epoch_seconds, 1),
            "learning_rate": learning_rate(self.recipe, position.step - 1, len(self.loader)),
            "train_loss": sums.loss / n,
            "train_classification_loss": sums.classification_loss / n,
            "train_reconstruction_loss": sums.reconstruction_loss / n if has_decoder else None,
            "train_accuracy": sums.correct / n,
            "validation_loss": validation.loss,
            "validation_accuracy": validation.accuracy,
        }
        position.end_epoch(row)
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
        position, recipe = self.position, self.recipe
        if position.batch > 0 or not position.history:
            return False
        reached = recipe.stop_at is not None and position.history[-1]["validation_accuracy"] >= recipe.stop_at
        return reached or position.epoch >= recipe.epochs

    @property
    def _is_best(self) -> bool:
        """Whether the weights are those of the best epoch so far."""
        position = self.position
        return position.batch == 0 and position.best(self.recipe.select) is position.history[-1]

    def _publish(self) -> None:
        """Write what follows from the checkpoint: the metrics, and the best weights while they are the network's.

        So a kill at any time leaves the best weights in the checkpoint or in the run folder.
        """
        if not self.fabric.is_global_zero:
            return
        if self._is_best:
            save_best(self.out / BEST, self.network, self.dataset.class_names)
        write_text(self.out / METRICS, self.position.metrics())

    def _save_checkpoint(self) -> None:
        """Write ``last.ckpt``, whole or not at all; the weights have been checked."""
        self.position.note_peak(peak_memory_mib(self.fabric.device))
        write_checkpoint(self.fabric, self.out, self.plain_step, self.position, self._fingerprint)
        self._last_save = time.monotonic()

    def _calls(self, stop: list[int], seconds: float) -> int:
        """What calls for a checkpoint now: a stop signal's number, OVERDUE after so many seconds without one, or 0.

        All processes get the same answer, though a signal may have reached only some of them.
        """
        overdue = time.monotonic() - self._last_save > seconds
        own = stop[0] if stop else OVERDUE * overdue
        return int(self._over_processes(torch.tensor(own), "max"))

    def _raise_if_stopped(self, call: int) -> None:
        if call > OVERDUE:
            raise Interrupted(self.out, self.position.step, 128 + call)

    def _add_sums(self, begin: float) -> float:
        """Move what was counted since ``begin`` into the position; return the new beginning."""
        self._check_loss()
        tally = self.plain_step.tally
        loss, classification, reconstruction, correct = self._over_processes(tally.sums, "sum").tolist()
        tally.clear()
        now = time.monotonic()
        sums, position = self.position.sums, self.position
        sums.images = position.batch * self.recipe.batch_size
        sums.loss += loss
        sums.classification_loss += classification
        sums.reconstruction_loss += reconstruction
        sums.correct += correct
        position.seconds += now - begin
        position.epoch_seconds += now - begin
        return now

    def _check_loss(self) -> float:
        """Look at the losses that were counted, and return the last one; all processes stop if one has lost its way."""
        counted = self.plain_step.tally.read()
        first_bad = self.position.step - counted.steps + counted.first_bad
        first_bad = -int(self._over_processes(torch.tensor(-int(min(first_bad, NEVER))), "max"))
        if first_bad < NEVER:
            raise Diverged(f"the loss became NaN or infinite at step {first_bad + 1} {self._advice(first_bad)}")
        return counted.last_loss

    def _check_weights(self) -> None:
        """An update may ruin the weights after a good loss: then nothing is written any more."""
        if not torch.stack([p.isfinite().all() for p in self.network.parameters()]).all():
            step = self.position.step - 1
            raise Diverged(f"the weights became NaN or infinite by step {step + 1} {self._advice(step)}")

    def _advice(self, step: int) -> str:
        """Where a step was, and what to try."""
        rate = learning_rate(self.recipe, step, len(self.loader))
        to_try = [f"a smaller --learning-rate (now {rate:.2g})"]
        if hasattr(self.config.model, "weight_std"):
            to_try.append("a smaller --weight-std")
        if self.config.precision != "32":
            to_try.append("--precision 32")
        return (
            f"(epoch {step // len(self.loader) + 1}, batch {step % len(self.loader) + 1} of {len(self.loader)}); try "
            f"{' or '.join(to_try)}; {self._kept()}"
        )

    def _kept(self) -> str:
        if (self.out / CHECKPOINT).exists():
            return f"{self.out} keeps the last good checkpoint"
        return f"there was no checkpoint yet in {self.out}"

    def _evaluate(self, network: Model, images: ImageSet) -> Evaluation:
        """Judge a network, in float32; each process takes its share of the images, and every image counts once."""
        loader = BatchLoader(
            images,
            EVALUATION_BATCH,
            shuffle=False,
            device=self.fabric.device,
            rank=self.fabric.global_rank,
            world_size=self.fabric.world_size,
        )
        share = evaluation_sums(network, loader.batches(0))
        whole = EvaluationSums.from_tensor(self._over_processes(share.to_tensor(), "sum"))
        return Evaluation.from_sums(whole, self.dataset.class_names)

    def _over_processes(self, own: Tensor, reduction: str) -> Tensor:
        """The sum or maximum over all processes, the same in each; elementwise."""
        if self.fabric.world_size == 1:
            return own
        reduced = self.fabric.all_reduce(own.to(self.fabric.device, copy=True), reduce_op=reduction)
        assert isinstance(reduced, Tensor)
        return reduced

    def finish(self, *, figures: bool) -> dict[str, Any]:
        """The one look at the test images, the summary and the pictures."""
        self.fabric.barrier()  # the first process has published the best weights
        best_network = load_pretrained(self.out / BEST).to(self.fabric.device).eval()
        best = self._evaluate(best_network, self.dataset.test)
        # while the last epoch is the best one, both networks are the same
        last = best if self._is_best else self._evaluate(self.network.eval(), self.dataset.test)
        summary = summarise(self, {"best": best, "last": last})
        if self.fabric.is_global_zero:
            write_json(self.out / SUMMARY, summary)
            if figures:
                from torchcaps.training.report import draw_figures

                draw_figures(self.out, best_network, self.dataset, best)
        self.fabric.barrier()
        return summary


@contextmanager
def _sole_use(fabric: Fabric, take: Callable[[ExitStack], Path]) -> Iterator[Path]:
    """The run folder that the first process has taken for all; what keeps it from that is raised by all."""
    with ExitStack() as held:
        taken: Path | Exception | None = None
        if fabric.is_global_zero:
            try:
                taken = take(held)
            except (InputError, OSError) as error:
                taken = error
        taken = fabric.broadcast(taken)
        if isinstance(taken, Exception):
            raise taken
        assert taken is not None
        yield taken


def _take(out: Path, held: ExitStack) -> Path:
    """Lock a run folder until ``held`` ends."""
    held.enter_context(sole_use(out))
    return out


def _take_new(config: TrainConfig, out: str | Path | None, held: ExitStack) -> Path:
    """Lock a folder for a new run until ``held`` ends: the one that is named, or the next free one."""
    if out is not None:
        _take(Path(out), held)
        _check_new(Path(out))
        return Path(out)
    Path("runs").mkdir(exist_ok=True)
    while True:
        folder = _next_folder(config)
        try:
            folder.mkdir()
        except FileExistsError:
            continue  # another run was faster
        return _take(folder, held)


def _check_new(out: Path) -> None:
    if (out / CONFIG).exists() or (out / CHECKPOINT).exists():
        raise InputError(f"there is a run in {out} already; go on with it by --resume {out}, or choose another --out")


def _next_folder(config: TrainConfig) -> Path:
    """``runs/PRESET-DATA-N`` with the next free N."""
    # folder:PATH and npz:PATH become the name of what they point to
    kind, _, path = config.data.partition(":")
    data = Path(path).resolve().stem if path else kind
    number = 1
    while os.path.lexists(folder := Path("runs") / f"{config.preset}-{data}-{number}"):  # a link to nothing, too
        number += 1
    return folder


def _resumed_config(out: Path, preset: str | None, overrides: Mapping[str, Any]) -> TrainConfig:
    """The run's configuration with the few changes that resuming allows."""
    if not (out / CONFIG).exists():
        raise InputError(f"there is no run to resume in {out}: it holds no {CONFIG}")
    config = read_config(out / CONFIG)
    if preset is not None and preset != config.preset:
        raise InputError(f"the run in {out} trains {config.preset}, not {preset}; start a new run for another preset")
    if overrides.get("precision") == "auto":  # which is the one that the run was begun in
        overrides = {**overrides, "precision": config.precision}
    changed = override(config, overrides)
    for part, names in field_names(config).items():
        before = config if part == "run" else getattr(config, part)
        after = changed if part == "run" else getattr(changed, part)
        for name in names:
            if name not in RESUMABLE and getattr(before, name) != getattr(after, name):
                raise InputError(
                    f"the run in {out} has {name} = {getattr(before, name)!r}; it cannot go on with "
                    f"{getattr(after, name)!r}, only {', '.join(RESUMABLE)} may change"
                )
    if changed.recipe.epochs != config.recipe.epochs and config.recipe.schedule == "one-cycle":
        raise InputError(
            f"the run in {out} has a one-cycle schedule over {config.recipe.epochs} epochs; it cannot go on for "
            f"{changed.recipe.epochs}, only start anew"
        )
    return changed


def _progress(fabric: Fabric, progress: Progress | None) -> Progress:
    if not fabric.is_global_zero:
        return Silence()
    return choose_progress() if progress is None else progress
