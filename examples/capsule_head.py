"""A capsule head on a backbone: feature map in, one capsule for each class out.

    python examples/capsule_head.py                              # resnet18 of timm or torchvision, if installed
    python examples/capsule_head.py --backbone small             # the small backbone below
    python examples/capsule_head.py --backbone resnet18 --pretrained

The backbone stops where its maps are still maps: capsules need places, which global pooling throws away. Without timm
and torchvision the small backbone takes its place. Trains on the embedded digits; prints the shapes on the way, the
loss of each epoch and the test accuracy.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchcaps import margin_loss
from torchcaps.datasets import Augmentation, BatchLoader, ImageSet, load_dataset
from torchcaps.nn import Capsules, DenseCapsules, PrimaryCapsules

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of red, green and blue, pixels 0..1: what downloaded weights expect their images to be standardised with."""


class CapsuleHead(nn.Module):
    """Feature maps (B, C, H, W) of a known shape to class capsules (B, num_classes, 16)."""

    def __init__(self, feature_shape: Sequence[int], num_classes: int, num_types: int = 8) -> None:
        super().__init__()
        channels, height, width = feature_shape
        self.primary = PrimaryCapsules(channels, primary_types=num_types, primary_kernel=3, primary_stride=1)
        num_capsules = num_types * (height - 2) * (width - 2)  # a 3×3 kernel takes a pixel from each side
        self.classes = DenseCapsules(num_capsules, 8, num_classes, 16)

    def forward(self, features: Tensor) -> Capsules:
        """Class capsules; their lengths are the scores."""
        return self.classes(self.primary(features))


class SmallBackbone(nn.Sequential):
    """Three convolutions of stride 2: (B, 3, 28, 28) to (B, 64, 4, 4)."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for fan_in, fan_out in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(fan_in, fan_out, 3, stride=2, padding=1), nn.BatchNorm2d(fan_out), nn.ReLU()]
        super().__init__(*layers)


class Standardize(nn.Module):
    """Pixels 0..1 as a backbone trained on ImageNet was given them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(IMAGENET_MEAN)[:, None, None])
        self.register_buffer("std", torch.tensor(IMAGENET_STD)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        """Less the mean, over the standard deviation, channel by channel."""
        return (images - self.mean) / self.std


class TimmBackbone(nn.Module):
    """The feature map of stride 8 of any model in timm that gives its features."""

    def __init__(self, name: str, pretrained: bool) -> None:
        import timm

        super().__init__()
        self.model = timm.create_model(name, features_only=True, out_indices=(2,), pretrained=pretrained)

    def forward(self, images: Tensor) -> Tensor:
        """The one map asked for."""
        return self.model(images)[0]


class TorchvisionBackbone(nn.Module):
    """The feature map of stride 8 of one of torchvision's ResNets."""

    def __init__(self, name: str, pretrained: bool) -> None:
        from torchvision.models import get_model
        from torchvision.models.feature_extraction import create_feature_extractor

        super().__init__()
        model = get_model(name, weights="DEFAULT" if pretrained else None)
        self.model = create_feature_extractor(model, ["layer2"])

    def forward(self, images: Tensor) -> Tensor:
        """The map after the second group of layers."""
        return self.model(images)["layer2"]


def make_backbone(name: str, pretrained: bool = False) -> nn.Module:
    """A backbone for images of three channels with pixels 0..1, from whatever is installed."""
    if name != "small":
        for package, backbone in (("timm", TimmBackbone), ("torchvision", TorchvisionBackbone)):
            if importlib.util.find_spec(package):
                print(f"{name} of {package}")
                model = backbone(name, pretrained)
                return nn.Sequential(Standardize(), model) if pretrained else model
        print(f"neither timm nor torchvision is installed, so the small backbone stands in for {name}")
    return SmallBackbone()


class Network(nn.Module):
    """Backbone and head; grey images are given to all three channels."""

    def __init__(self, backbone: nn.Module, in_shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        with torch.no_grad():  # a look at one image tells the shape of the map
            features = backbone.eval()(torch.zeros(1, 3, *in_shape[1:]))
        print(f"images {tuple(in_shape)} → feature map {tuple(features.shape[1:])}")
        self.head = CapsuleHead(features.shape[1:], num_classes)

    def forward(self, images: Tensor) -> Capsules:
        """Class capsules."""
        return self.head(self.backbone(images.expand(-1, 3, -1, -1)))


def train(network: nn.Module, image_set: ImageSet, epochs: int, batch_size: int = 64, seed: int = 0) -> None:
    """Adam on the margin loss."""
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
    """Share of the images whose longest capsule is that of their class."""
    network.eval()
    batches = BatchLoader(image_set, 256, shuffle=False).batches(0)
    right = sum(int((network(batch.images).scores().argmax(1) == batch.labels).sum()) for batch in batches)
    return right / len(image_set)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options, build, train, test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="resnet18", help='a name of timm or torchvision, or "small"')
    parser.add_argument("--pretrained", action="store_true", help="download the backbone's weights")
    parser.add_argument("--epochs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--images", type=int, help="train on the first so many images only")
    given = parser.parse_args(arguments)
    digits = load_dataset("digits", limit_train=given.images)
    torch.manual_seed(0)
    network = Network(make_backbone(given.backbone, given.pretrained), digits.in_shape, digits.num_classes)
    train(network, digits.train, given.epochs)
    print(f"test accuracy {100 * accuracy(network, digits.test):.2f} %")


if __name__ == "__main__":
    main()
