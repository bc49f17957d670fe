"""The training loop: one file, read from top to bottom.

Everything random is a function of (seed, epoch, batch), and the learning rate of the step, so that a run that was
stopped at any step goes on exactly as if it had not been.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import io
import logging
import math
import os
import shlex
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from torchcaps.analysis import Evaluation, EvaluationSums, evaluation_sums
from torchcaps.datasets import BatchLoader, Dataset, ImageSet
from torchcaps.errors import InputError
from torchcaps.files import commit, write_json, write_text
from torchcaps.models import Model, ModelOutput, build_model, load_pretrained
from torchcaps.models.output import Losses
from torchcaps.models.pretrained import CONFIG
from torchcaps.training.config import TrainConfig, field_names, override, read_config
from torchcaps.training.data import fingerprint, load_run_data
from torchcaps.training.environment import hardware, peak_memory_mib, versions
from torchcaps.training.memory import memory_warning
from torchcaps.training.progress import Progress, Silence, choose_progress
from torchcaps.training.run import (
    BEST,
    CHECKPOINT,
    METRICS,
    SUMMARY,
    read_checkpoint,
    save_best,
)
from torchcaps.training.schedule import learning_rate

#: Settings that may change when a run goes on: they do not change what is computed (epochs: only how long).
RESUMABLE = ("epochs", "devices", "num_nodes", "accelerator", "data_dir", "checkpoint_minutes", "tensorboard")

#: On a GPU, or where processes must ask each other, losses and signals are looked at once in so many steps.
CHECK_EVERY = 32

#: A step that no run reaches.
NEVER = 2**62

#: Images judged at a time, over all processes.
EVALUATION_BATCH = 256

#: What torch's writer says instead of the operating system's reason, such as a full disk.
WRITER_ERRORS = ("PytorchStreamWriter", "cannot be opened", "does not exist")

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


@dataclass
class EpochSums:
    """Sums over the images of the running epoch."""

    images: int = 0
    loss: float = 0.0
    classification_loss: float = 0.0
    reconstruction_loss: float = 0.0
    correct: float = 0.0


@dataclass
class Position:
    """Where a run is, and what it has seen so far."""

    epoch: int = 0
    """Finished epochs."""
    batch: int = 0
    """Finished batches of the running epoch."""
    step: int = 0
    """Finished steps."""
    seconds: float = 0.0
    """Spent in training and validation, over all sittings."""
    epoch_seconds: float = 0.0
    """Spent in the training steps of the running epoch."""
    sums: EpochSums = field(default_factory=EpochSums)
    history: list[dict[str, Any]] = field(default_factory=list)
    """The rows of metrics.csv."""
    commands: list[str] = field(default_factory=list)
    """What started the run, and what it went on with."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Position:
        """The inverse of ``dataclasses.asdict``.

        Raises:
            InputError: The values are not those of a position.
        """
        try:
            return cls(**{**values, "sums": EpochSums(**values["sums"])})
        except (TypeError, KeyError) as error:
            raise InputError(f"the run's {CHECKPOINT} is not of this version of torchcaps: {error}") from None

    def best(self, select: str) -> dict[str, Any]:
        """The row of the epoch that the validation images chose."""
        if select == "loss":
            return min(self.history, key=lambda row: row["validation_loss"])
        return max(self.history, key=lambda row: (row["validation_accuracy"], -row["validation_loss"]))


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
    if out is not None and (Path(out) / CONFIG).exists():
        raise InputError(f"there is a run in {out} already; go on with it by --resume {out}, or choose another --out")
    trainer = _prepare(config, None, progress)
    folder = Path(out) if out is not None else _next_folder(config)
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
    checkpoint = read_checkpoint(out / CHECKPOINT) if (out / CHECKPOINT).exists() else None
    return _prepare(config, checkpoint, progress).run(out, figures=figures, command=command)


def _prepare(config: TrainConfig, checkpoint: dict[str, Any] | None, progress: Progress | None) -> Trainer:
    """All that can be found wrong is found here, before processes start and before anything is written."""
    if config.tensorboard:
        _Events.check()
    dataset = load_run_data(config)
    num_images = sum(len(part) for part in (dataset.train, dataset.validation, dataset.test))
    warning = memory_warning(config, dataset.in_shape, dataset.num_classes, num_images)
    torch.manual_seed(config.seed)
    network = build_model(config.model, dataset.in_shape, dataset.num_classes)
    if checkpoint is not None:
        _check_fits(checkpoint, config, dataset, network)
    fabric = _launch(config)
    trainer = Trainer(fabric, config, dataset, network, _progress(fabric, progress))
    if warning is not None and fabric.device.type == "cpu":
        trainer.progress.message(f"Warning: {warning}")
    if checkpoint is not None:
        trainer.restore(checkpoint)
    return trainer


class Trainer:
    """The state of a run, and the loop over its epochs and batches."""

    def __init__(
        self, fabric: Fabric, config: TrainConfig, dataset: Dataset, network: Model, progress: Progress
    ) -> None:
        recipe = config.recipe
        self.fabric, self.config, self.recipe = fabric, config, recipe
        self.dataset, self.progress = dataset, progress
        self.position = Position()
        self._fingerprint = fingerprint(dataset)
        self.loader = BatchLoader(
            dataset.train,
            recipe.batch_size,
            shuffle=True,
            max_shift=recipe.max_shift,
            seed=config.seed,
            device=fabric.device,
            rank=fabric.global_rank,
            world_size=fabric.world_size,
            drop_last=True,
        )
        self.network = network
        if config.precision == "bf16" or fabric.device.type == "cuda":
            for module in network.modules():
                if isinstance(module, torch.nn.Conv2d):  # W of a capsule layer has an order of its own, also in 4 axes
                    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
        fused = fabric.device.type in ("cpu", "cuda")
        optimizer = torch.optim.Adam(network.parameters(), lr=recipe.learning_rate, fused=fused)
        self.model, self.optimizer = fabric.setup(network, optimizer)
        self._pending: list[tuple[int, Tensor]] = []
        self._shown_loss: float | None = None
        self._last_save = time.monotonic()

    def run(self, out: Path, *, figures: bool, command: str | None) -> dict[str, Any]:
        """Train, test and sum up in the folder ``out``, the first process's choice."""
        self.out = self.fabric.broadcast(out)
        self.position.commands.append(command or f"torchcaps train --config {self.out / CONFIG}")
        self.events = _Events(self.out, self.config.tensorboard and self.fabric.is_global_zero)
        if self.fabric.is_global_zero:
            write_json(self.out / CONFIG, self.config.to_dict())
        with self.events:
            self.fit()
        try:
            return self.finish(figures=figures)
        except KeyboardInterrupt:
            raise Interrupted(self.out, self.position.step, 128 + signal.SIGINT) from None

    def fit(self) -> None:
        """Train until the configured number of epochs is done."""
        position, recipe = self.position, self.recipe
        self.progress.start(epochs=recipe.epochs, steps_per_epoch=len(self.loader), done=position.step)
        try:
            with _stop_signals() as stop:
                while position.epoch < recipe.epochs:
                    self._train_epoch(stop)
                    self._end_epoch()
                    self._raise_if_stopped(self._calls(stop))
        finally:
            self.progress.stop()

    def _train_epoch(self, stop: list[int]) -> None:
        position = self.position
        self.network.train()
        begin, first_batch = time.monotonic(), position.batch
        sums = torch.zeros(4, dtype=torch.float64 if self.fabric.device.type != "mps" else torch.float32)
        sums = sums.to(self.fabric.device)
        for images, labels in self.loader.batches(position.epoch, start=position.batch):
            output, losses = self._step(images, labels)
            sums += _batch_sums(output, losses, labels)
            position.batch += 1
            position.step += 1
            elapsed = time.monotonic() - begin
            self.progress.step(
                epoch=position.epoch + 1,
                step=position.step,
                images_per_second=(position.batch - first_batch) * self.recipe.batch_size / elapsed,
                loss=self._shown_loss,
            )
            if position.batch == len(self.loader) or not self._is_check_point:
                continue  # an epoch that is whole is ended first, so that it counts
            if call := self._calls(stop):
                begin, first_batch = self._add_sums(sums, begin), position.batch
                self._save_checkpoint()
                self._raise_if_stopped(call)
        self._add_sums(sums, begin)

    def _raise_if_stopped(self, call: int) -> None:
        if call > OVERDUE:
            raise Interrupted(self.out, self.position.step, 128 + call)

    def _step(self, images: Tensor, labels: Tensor) -> tuple[ModelOutput, Losses]:
        """One update of the weights."""
        position = self.position
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, position.step, len(self.loader))
        # dropout's randomness, too, is a function of the step: nothing of it needs saving
        torch.manual_seed((self.config.seed * 1_000_003 + position.step) * 1_009 + self.fabric.global_rank)
        output = self.model(images, self.network.decoder_targets(labels))
        losses = self.network.loss(output, images, labels)
        self.fabric.backward(losses.total)
        self._pending.append((position.step, losses.total.detach()))
        if self._is_check_point:
            self._check_pending()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return output, losses

    @property
    def _is_check_point(self) -> bool:
        """Whether losses and signals are looked at after this step: each time where that is free, else once in a while.

        It is the same for all processes.
        """
        free = self.fabric.world_size == 1 and self.fabric.device.type == "cpu"
        return free or self.position.step % CHECK_EVERY == 0

    def _check_pending(self) -> None:
        """Look at the losses since the last check; all processes stop if one has lost its way."""
        if not self._pending:
            return
        steps, losses = zip(*self._pending, strict=True)
        self._pending.clear()
        values = torch.stack(losses).tolist()
        self._shown_loss = values[-1]
        bad = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
        first = -int(self._over_processes(torch.tensor(-min(bad, default=NEVER)), "max"))
        if first < NEVER:
            raise Diverged(f"the loss became NaN or infinite at step {first + 1} {self._advice(first)}")

    def _check_weights(self) -> None:
        """An update may ruin the weights after a good loss: then nothing is written any more."""
        if not all(bool(p.isfinite().all()) for p in self.network.parameters()):
            step = self.position.step - 1
            raise Diverged(f"the weights became NaN or infinite by step {step + 1} {self._advice(step)}")

    def _advice(self, step: int) -> str:
        """Where a step was, and what to try."""
        scale = "a smaller --weight-std, " if hasattr(self.config.model, "weight_std") else ""
        return (
            f"(epoch {step // len(self.loader) + 1}, batch {step % len(self.loader) + 1} of {len(self.loader)}); try a "
            f"smaller --learning-rate (now {learning_rate(self.recipe, step, len(self.loader)):.2g}), {scale}or "
            f"--precision 32; {self._kept()}"
        )

    def _kept(self) -> str:
        if (self.out / CHECKPOINT).exists():
            return f"{self.out} keeps the last good checkpoint"
        return f"there was no checkpoint yet in {self.out}"

    def _calls(self, stop: list[int]) -> int:
        """What calls for a checkpoint now: a stop signal's number, OVERDUE, or 0.

        All processes get the same answer, though a signal may have reached only some of them.
        """
        overdue = time.monotonic() - self._last_save > 60 * self.config.checkpoint_minutes
        own = stop[0] if stop else OVERDUE * overdue
        return int(self._over_processes(torch.tensor(own), "max"))

    def _add_sums(self, sums: Tensor, begin: float) -> float:
        """Move what was counted since ``begin`` into the position; return the new beginning."""
        self._check_pending()
        total = self._over_processes(sums, "sum").tolist()
        sums.zero_()
        now = time.monotonic()
        kept, position = self.position.sums, self.position
        kept.images = position.batch * self.recipe.batch_size
        kept.loss += total[0]
        kept.classification_loss += total[1]
        kept.reconstruction_loss += total[2]
        kept.correct += total[3]
        position.seconds += now - begin
        position.epoch_seconds += now - begin
        return now

    def _end_epoch(self) -> None:
        """Validate, keep the best, write metrics and checkpoint."""
        self._check_weights()
        position = self.position
        begin = time.monotonic()
        validation = self._evaluate(self.network, self.dataset.validation)
        position.seconds += time.monotonic() - begin
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
        position.history.append(row)
        position.epoch, position.batch = position.epoch + 1, 0
        position.epoch_seconds, position.sums = 0.0, EpochSums()
        if self.fabric.is_global_zero:
            if position.best(self.recipe.select) is row:
                save_best(self.out / BEST, self.network, self.dataset.class_names)
            write_text(self.out / METRICS, _as_csv(position.history))
        self._save_checkpoint()
        self.events.write(row)
        self.progress.epoch(row)

    def _evaluate(self, network: Model, images: ImageSet) -> Evaluation:
        """Judge a network; each process takes its share of the images, and every image counts once."""
        loader = BatchLoader(
            images,
            EVALUATION_BATCH,
            shuffle=False,
            device=self.fabric.device,
            rank=self.fabric.global_rank,
            world_size=self.fabric.world_size,
        )
        share = evaluation_sums(network, loader.batches(0), precision=self.config.precision)
        whole = EvaluationSums.from_tensor(self._over_processes(share.to_tensor(), "sum"))
        return Evaluation.from_sums(whole, self.dataset.class_names)

    def _over_processes(self, own: Tensor, reduction: str) -> Tensor:
        """The sum or maximum over all processes, the same in each; elementwise."""
        if self.fabric.world_size == 1:
            return own
        reduced = self.fabric.all_reduce(own.to(self.fabric.device, copy=True), reduce_op=reduction)
        assert isinstance(reduced, Tensor)
        return reduced

    def _save_checkpoint(self) -> None:
        """Write ``last.ckpt``, whole or not at all."""
        self._check_pending()
        self._check_weights()
        state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "progress": dataclasses.asdict(self.position),
            "data": self._fingerprint,
        }
        final, temporary = self.out / CHECKPOINT, self.out / f".{CHECKPOINT}.tmp"
        try:
            self.fabric.save(temporary, state)
            if self.fabric.is_global_zero:
                commit(temporary, final)
            self.fabric.barrier()  # nobody leaves before the checkpoint is whole
        except RuntimeError as error:
            if not any(words in str(error) for words in WRITER_ERRORS):
                raise
            raise OSError(f"the checkpoint {final} could not be written: {str(error).partition(chr(10))[0]}") from error
        finally:
            if self.fabric.is_global_zero:
                temporary.unlink(missing_ok=True)
        self._last_save = time.monotonic()

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Go to where the checkpoint was written."""
        self.network.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.position = Position.from_dict(checkpoint["progress"])

    def finish(self, *, figures: bool) -> dict[str, Any]:
        """The one look at the test images, the summary and the pictures."""
        position = self.position
        best_row, last_row = position.best(self.recipe.select), position.history[-1]
        best_network = load_pretrained(self.out / BEST).to(self.fabric.device).eval()
        judged = {"best": self._evaluate(best_network, self.dataset.test)}
        judged["last"] = (
            judged["best"] if best_row is last_row else self._evaluate(self.network.eval(), self.dataset.test)
        )
        summary = {
            "preset": self.config.preset,
            "data": self.config.data,
            "out": str(self.out),
            "seed": self.config.seed,
            "precision": self.config.precision,
            "epochs": position.epoch,
            "best_epoch": best_row["epoch"],
            "select": self.recipe.select,
            "parameters": sum(p.numel() for p in self.network.parameters()),
            "images": {part: len(getattr(self.dataset, part)) for part in ("train", "validation", "test")},
            "validation": {
                name: {"accuracy": row["validation_accuracy"], "loss": row["validation_loss"]}
                for name, row in (("best", best_row), ("last", last_row))
            },
            "test": {
                name: {
                    "accuracy": result.accuracy,
                    "error": result.error,
                    "loss": result.loss,
                    "images": result.num_images,
                }
                for name, result in judged.items()
            },
            "seconds": round(position.seconds, 1),
            "images_per_second": last_row["images_per_second"],
            "peak_memory_mib": _rounded(peak_memory_mib(self.fabric.device)),
            "hardware": hardware(self.fabric.device) | {"processes": self.fabric.world_size},
            "versions": versions(),
            "command": position.commands[0],
            "resumed_with": position.commands[1:],
        }
        if self.fabric.is_global_zero:
            write_json(self.out / SUMMARY, summary)
            if figures:
                from torchcaps.training.report import draw_figures

                draw_figures(self.out, best_network, self.dataset, judged["best"])
        self.fabric.barrier()
        return summary


def _launch(config: TrainConfig) -> Fabric:
    """Start the processes, or find out that torchrun has started them."""
    devices, num_nodes = config.devices, config.num_nodes
    if TorchElasticEnvironment.detect():
        devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        num_nodes = int(os.environ["WORLD_SIZE"]) // devices
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # its greetings are not for our users
    try:
        fabric = Fabric(
            accelerator=config.accelerator,
            devices=devices,
            num_nodes=num_nodes,
            strategy="ddp" if devices * num_nodes > 1 else "auto",
            precision="bf16-mixed" if config.precision == "bf16" else "32-true",
        )
    except (
        RuntimeError,
        ValueError,
        MisconfigurationException,
    ) as error:  # Fabric's own words for a device that is not there
        raise InputError(f"accelerator {config.accelerator} with {devices} devices is not to be had: {error}") from None
    fabric.launch()
    return fabric


def _next_folder(config: TrainConfig) -> Path:
    """``runs/PRESET-DATA-N`` with the next free N."""
    # folder:PATH and npz:PATH become the name of what they point to
    kind, _, path = config.data.partition(":")
    data = Path(path).resolve().stem if path else kind
    number = 1
    while (folder := Path("runs") / f"{config.preset}-{data}-{number}").exists():
        number += 1
    return folder


def _resumed_config(out: Path, preset: str | None, overrides: Mapping[str, Any]) -> TrainConfig:
    """The run's configuration with the few changes that resuming allows."""
    if not (out / CONFIG).exists():
        raise InputError(f"there is no run to resume in {out}: it holds no {CONFIG}")
    config = read_config(out / CONFIG)
    if preset is not None and preset != config.preset:
        raise InputError(f"the run in {out} trains {config.preset}, not {preset}; start a new run for another preset")
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


def _check_fits(checkpoint: dict[str, Any], config: TrainConfig, dataset: Dataset, network: Model) -> None:
    """Raise InputError unless a checkpoint is of this network, these data, and no more epochs than asked for."""
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    if shapes != {name: tuple(tensor.shape) for name, tensor in checkpoint["model"].items()}:
        raise InputError(f"the run's {CHECKPOINT} is not of the network that its {CONFIG} describes")
    if checkpoint.get("data") != fingerprint(dataset):
        raise InputError(
            f"the images of {config.data} are not those that the run was trained on; it goes on with the same ones only"
        )
    done = Position.from_dict(checkpoint["progress"]).epoch
    if config.recipe.epochs < done:
        raise InputError(f"the run has finished {done} epochs already; it cannot go on to {config.recipe.epochs}")


def _progress(fabric: Fabric, progress: Progress | None) -> Progress:
    if not fabric.is_global_zero:
        return Silence()
    return choose_progress() if progress is None else progress


def _batch_sums(output: ModelOutput, losses: Losses, labels: Tensor) -> Tensor:
    """Losses times images, and right answers, of one batch: (total, classification, reconstruction, right)."""
    reconstruction = torch.zeros_like(losses.total) if losses.reconstruction is None else losses.reconstruction
    means = torch.stack([losses.total, losses.classification, reconstruction]).detach()
    correct = (output.lengths.detach().argmax(-1) == labels).sum()
    wide = torch.float64 if means.device.type != "mps" else torch.float32  # MPS has no float64
    return torch.cat([means.to(wide) * len(labels), correct.to(wide)[None]])


def _as_csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """A list that takes up the number of the first stop signal; a second one acts as usual."""
    received: list[int] = []
    previous: dict[signal.Signals, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  the signature signal handlers have
        received.append(number)
        for each, handler in previous.items():
            signal.signal(each, handler)

    try:
        for each in (signal.SIGINT, signal.SIGTERM):
            previous[each] = signal.signal(each, note)
    except ValueError:  # not the main thread: signals go elsewhere
        previous.clear()
    try:
        yield received
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


class _Events:
    """TensorBoard events of the run, where asked for."""

    def __init__(self, out: Path, wanted: bool) -> None:
        self._folder, self._wanted = out / "tensorboard", wanted

    @staticmethod
    def check() -> None:
        """Raise InputError if TensorBoard is not installed."""
        if importlib.util.find_spec("tensorboard") is None:
            raise InputError('--tensorboard needs the package tensorboard: pip install "torchcaps[tensorboard]"')

    def __enter__(self) -> None:
        if self._wanted:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))

    def __exit__(self, *_: object) -> None:
        if self._wanted:
            self._writer.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """An epoch's metrics."""
        if not self._wanted:
            return
        for name, value in row.items():
            if name not in ("epoch", "step") and value is not None:
                self._writer.add_scalar(name.replace("_", "/", 1), value, row["step"])
        self._writer.flush()
