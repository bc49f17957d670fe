"""Train a capsule head on a backbone, with a plain PyTorch training loop.

    python examples/capsule_head.py                                            # a small backbone
    python examples/capsule_head.py --backbone resnet18                        # from timm: pip install timm
    python examples/capsule_head.py --backbone resnet18 --pretrained --freeze  # train only the head

The backbone ends before global pooling, because capsules need feature maps with positions. The script trains on the
embedded digits and prints the shapes, the loss of each epoch and the test accuracy.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import nn

from torchcaps import margin_loss
from torchcaps.datasets import Augmentation, BatchLoader, ImageSet, load_dataset
from torchcaps.nn import CapsuleHead, StackBackbone, TimmBackbone


def make_network(backbone: nn.Module, in_shape: Sequence[int], num_classes: int) -> nn.Sequential:
    """Join a backbone and a head; one image is passed through to find the number of channels."""
    with torch.no_grad():
        features = backbone.eval()(torch.zeros(1, *in_shape))
    print(f"images {tuple(in_shape)} → feature map {tuple(features.shape[1:])}")
    return nn.Sequential(backbone, CapsuleHead(features.shape[1], num_classes))


def train(network: nn.Module, image_set: ImageSet, epochs: int, batch_size: int = 64, seed: int = 0) -> None:
    """Minimise the margin loss with Adam."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    loader = BatchLoader(image_set, batch_size, shuffle=True, augmentation=Augmentation(max_shift=2), seed=seed)
    for epoch in range(epochs):
        network.train()
        losses = []
        for batch in loader.batches(epoch):
            loss = margin_loss(network(batch.images).scores(), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.4f}")


@torch.no_grad()
def accuracy(network: nn.Module, image_set: ImageSet) -> float:
    """Return the share of images whose longest capsule belongs to their class, 0..1."""
    network.eval()
    batches = BatchLoader(image_set, 256, shuffle=False).batches(0)
    right = sum(int((network(batch.images).scores().argmax(1) == batch.labels).sum()) for batch in batches)
    return right / len(image_set)


def main(arguments: Sequence[str] | None = None) -> None:
    """Build, train and test a network as the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", help="name of a timm model (default: a small stack of convolutions)")
    parser.add_argument("--pretrained", action="store_true", help="download the backbone's weights")
    parser.add_argument("--freeze", action="store_true", help="do not train the backbone's weights")
    parser.add_argument("--epochs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--images", type=int, help="number of training images (default: all)")
    given = parser.parse_args(arguments)
    digits = load_dataset("digits", limit_train=given.images)
    torch.manual_seed(0)
    sizes = {"stack_channels": (16, 32, 64), "stack_kernels": (3, 3, 3), "stack_strides": (2, 2, 2)}
    backbone: nn.Module = StackBackbone(1, **sizes, stack_padding=1, stack_norm="batch")
    if given.backbone is not None:  # the map of stride 8
        weights = {"pretrained": given.pretrained, "freeze": given.freeze}
        backbone = TimmBackbone(1, timm_model=given.backbone, timm_map=3, **weights)
    network = make_network(backbone, digits.in_shape, digits.num_classes)
    train(network, digits.train, given.epochs)
    print(f"test accuracy {100 * accuracy(network, digits.test):.2f} %")


if __name__ == "__main__":
    main()
