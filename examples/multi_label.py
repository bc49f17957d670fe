"""Train on images with several classes or none: multi-hot targets, and a threshold on the capsule lengths.

    python examples/multi_label.py

Softmax probabilities sum to one, but capsule lengths are independent, so any number of classes may be present. The
margin loss takes rows of zeros and ones as well as labels. It pushes lengths above 0.9 or below 0.1, so the threshold
is 0.5. The script puts zero, one or two of the embedded digits into an image. It prints the loss of each epoch, the
share of test images whose classes are all right, precision and recall, and the lengths for three images.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from torchcaps import create_model, margin_loss
from torchcaps.datasets import ImageSet, load_dataset

THRESHOLD = 0.5


def compose(digits: ImageSet, number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images (number, 1, 28, 56), each half empty with probability 1/3, and multi-hot rows (number, 10)."""
    random = torch.Generator().manual_seed(seed)
    images = torch.zeros(number, 1, 28, 56)
    targets = torch.zeros(number, 10)
    for left in (0, 28):
        chosen = torch.randint(len(digits), (number,), generator=random)
        filled = torch.rand(number, generator=random) > 1 / 3
        images[filled, :, :, left : left + 28] = digits.images[chosen[filled]].float() / 255
        targets[filled, digits.labels[chosen[filled]]] = 1
    return images, targets


def train(network: torch.nn.Module, images: Tensor, targets: Tensor, epochs: int, batch_size: int = 64) -> None:
    """Minimise the margin loss of multi-hot targets with Adam."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for epoch in range(epochs):
        losses = []
        for batch in torch.randperm(len(images)).split(batch_size):
            loss = margin_loss(network(images[batch]).scores, targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.4f}")


def report(lengths: Tensor, targets: Tensor) -> str:
    """Describe the classes whose lengths exceed the threshold."""
    found, present = lengths > THRESHOLD, targets.bool()
    right = int((found & present).sum())
    exact = (found == present).all(1)
    lines = [f"all classes of an image right: {100 * exact.float().mean():.2f} % of {len(targets)} images"]
    for count, words in ((0, "no digit"), (1, "one class"), (2, "two classes")):
        these = present.sum(1) == count
        lines.append(f"  with {words}: {100 * exact[these].float().mean():.2f} % of {int(these.sum())}")
    lines.append(f"precision {right / max(int(found.sum()), 1):.4f}, recall {right / int(present.sum()):.4f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compose images, train and test as the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--images", type=int, default=2000, help="number of training images (default: %(default)s)")
    given = parser.parse_args(arguments)
    digits = load_dataset("digits")
    images, targets = compose(digits.train, given.images, seed=0)
    test_images, test_targets = compose(digits.test, 500, seed=1)

    torch.manual_seed(0)
    network = create_model("sabour2017", (1, 28, 56), 10, conv_channels=32, primary_types=8, decoder=False)
    train(network, images, targets, given.epochs)
    with torch.no_grad():
        lengths = torch.cat([network(batch).scores for batch in test_images.split(250)])
    print(report(lengths, test_targets))
    for count in (0, 1, 2):
        n = int((test_targets.sum(1) == count).nonzero()[0])  # the first image with this number of classes
        present = ", ".join(str(int(j)) for j in test_targets[n].nonzero()) or "nothing"
        print(f"present: {present:<8} lengths of 0 to 9:", *(f"{length:.2f}" for length in lengths[n]))


if __name__ == "__main__":
    main()
