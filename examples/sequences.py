"""Compare capsules, a GRU and a CNN of the same size on sequences of any lengths, with the same search for each.

    pip install "torchcaps[app,aeon]"
    python examples/sequences.py                                       # JapaneseVowels, 7 to 29 time steps, 12 channels
    python examples/sequences.py --data npz:mine.npz --epochs 100      # x (N, C, L), y and lengths

Each network gets the same trials with seed 100, each with a learning rate and a dropout. Validation accuracy selects a
trial; the loss decides between equal ones. Only the selected trial is trained with the seeds 0, 1, … and tested, at the
epoch with the best validation accuracy. Padding is NaN and never changes a result.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from statistics import mean, stdev

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from torchcaps import create_model, fit
from torchcaps.datasets import Dataset, load_dataset
from torchcaps.nn import SequenceBackbone
from torchcaps.training import Progress, Recipe

Make = Callable[[Dataset, float], nn.Module]
"""Function that makes a network for a data set and a dropout."""
RATES, DROPOUTS = (3e-3, 1e-2, 3e-2), (0.0, 0.3)


class GRU(nn.Module):
    """A bidirectional GRU and a linear layer on its last states."""

    def __init__(self, channels: int, classes: int, width: int, dropout: float) -> None:
        super().__init__()
        self.gru = nn.GRU(channels, width, batch_first=True, bidirectional=True)
        self.classify = nn.Sequential(nn.Dropout(dropout), nn.Linear(2 * width, classes))

    def forward(self, sequences: Tensor) -> Tensor:
        """Return the logits of sequences (B, C, 1, L)."""
        steps = sequences.squeeze(2).mT  # (B, L, C)
        lengths = (~steps.isnan().any(2)).sum(1).cpu()
        packed = pack_padded_sequence(steps.nan_to_num(0), lengths, batch_first=True, enforce_sorted=False)
        return self.classify(self.gru(packed)[1].transpose(0, 1).flatten(1))


class CNN(nn.Module):
    """The backbone of the capsules with one more convolution, the mean over time without padding, and a layer."""

    def __init__(self, channels: int, classes: int, widths: tuple[int, ...], dropout: float) -> None:
        super().__init__()
        self.backbone = SequenceBackbone(channels, sequence_channels=widths, conv_dropout=dropout)
        self.classify = nn.Linear(widths[-1], classes)

    def forward(self, sequences: Tensor) -> Tensor:
        """Return the logits of sequences (B, C, 1, L)."""
        return self.classify(self.backbone(sequences).nanmean((2, 3)))


def capsules(**options: object) -> Make:
    """Return a function that makes the preset with other options."""
    return lambda data, dropout: create_model(
        "sequences", data.in_shape, data.num_classes, conv_dropout=dropout, **options
    )


NETWORKS: dict[str, Make] = {
    "capsules, dynamic routing": capsules(),
    "capsules, uniform coupling": capsules(num_iterations=1),
    "GRU": lambda data, dropout: GRU(data.in_shape[0], data.num_classes, 48, dropout),
    "CNN": lambda data, dropout: CNN(data.in_shape[0], data.num_classes, (32, 42, 44), dropout),
}


def train(
    make: Make, data: Dataset, seed: int, epochs: int, rate: float, dropout: float
) -> tuple[nn.Module, tuple[float, float]]:
    """Train a network, and return it with its accuracy and negative loss on the validation cases."""
    torch.manual_seed(seed)
    network = make(data, dropout)
    recipe = Recipe(epochs=epochs, batch_size=16, learning_rate=rate, schedule="one-cycle")
    rows = fit(network, data, recipe, seed=seed, accelerator="cpu", progress=Progress())
    return network, max((row["validation_accuracy"], -row["validation_loss"]) for row in rows)


def accuracy(network: nn.Module, data: Dataset) -> float:
    """Return the accuracy on the test cases, 0..1."""
    with torch.no_grad():
        output = network(data.test.images)
    return float((getattr(output, "scores", output).argmax(1) == data.test.labels).float().mean())


def main(arguments: Sequence[str] | None = None) -> None:
    """Search, train and test each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="aeon:JapaneseVowels", help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--validation-size", type=int, default=45, help="validation cases (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="number of runs to test (default: %(default)s)")
    given = parser.parse_args(arguments)

    data = load_dataset(given.data, validation_size=given.validation_size, seed=0)
    for name, make in NETWORKS.items():
        trials = {
            trial: train(make, data, 100, given.epochs, *trial)[1] for trial in itertools.product(RATES, DROPOUTS)
        }
        best = max(trials, key=lambda trial: trials[trial])
        tested = [accuracy(train(make, data, seed, given.epochs, *best)[0], data) for seed in range(given.seeds)]
        spread = f" ± {100 * stdev(tested):.2f}" if len(tested) > 1 else ""
        size = sum(parameter.numel() for parameter in make(data, 0.0).parameters())
        print(
            f"{name:<28} {size:>7,} parameters; rate {best[0]:g}, dropout {best[1]:g}: validation "
            f"{100 * trials[best][0]:.2f} %, test {100 * mean(tested):.2f}{spread} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
