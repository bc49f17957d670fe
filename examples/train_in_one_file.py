"""Train a capsule network in one file, without ``torchcaps.training``: copy it and change what you like.

    python examples/train_in_one_file.py                              # the embedded digits, a minute on a CPU
    python examples/train_in_one_file.py --data mnist --epochs 3

The script prints the loss and the validation error of each epoch, then the test accuracy of the epoch with the smallest
validation error, and saves the network as a folder that every command of torchcaps reads.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchcaps import create_model
from torchcaps.datasets import ImageSet, load_dataset
from torchcaps.models import Network


def shifted(images: Tensor, most: int) -> Tensor:
    """Shift images (B, C, H, W) together by up to ``most`` pixels in each direction, with zeros from outside."""
    height, width = images.shape[2:]
    down, right = torch.randint(2 * most + 1, (2,)).tolist()
    return torch.nn.functional.pad(images, (most,) * 4)[:, :, down : down + height, right : right + width]


@torch.no_grad()
def error(network: Network, image_set: ImageSet, device: torch.device) -> float:
    """Return the share of wrongly classified images, 0..1."""
    network.eval()
    parts = zip(image_set.images.split(256), image_set.labels.split(256), strict=True)
    wrong = [network(images.to(device) / 255).scores.argmax(1).cpu() != labels for images, labels in parts]
    return float(torch.cat(wrong).double().mean())


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, test and save a network as the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="first", help="network to train (default: %(default)s)")
    parser.add_argument("--data", default="digits", help="data set (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--images", type=int, help="number of training images (default: all)")
    parser.add_argument("--out", type=Path, default=Path("network"), help="folder to save to (default: %(default)s)")
    given = parser.parse_args(arguments)

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = load_dataset(given.data, limit_train=given.images)
    network = create_model(given.preset, data.in_shape, data.num_classes).to(device)
    steps = given.epochs * -(-len(data.train) // 64)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    best, weights = 1.0, copy.deepcopy(network.state_dict())
    for epoch in range(1, given.epochs + 1):
        network.train()
        total = 0.0
        for batch in torch.randperm(len(data.train)).split(64):
            images = shifted(data.train.images[batch].to(device) / 255, most=2)
            labels = data.train.labels[batch].to(device)
            output = network(images, labels)  # the labels select the capsules that the decoder redraws
            loss = network.loss(output, images, labels).total
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(batch)
        validation = error(network, data.validation, device)
        print(f"epoch {epoch}: loss {total / len(data.train):.4f}, validation error {100 * validation:.2f} %")
        if validation <= best:
            best, weights = validation, copy.deepcopy(network.state_dict())
    network.load_state_dict(weights)
    print(f"test accuracy {100 * (1 - error(network, data.test, device)):.2f} %")
    network.cpu().save_pretrained(given.out)


if __name__ == "__main__":
    main()
