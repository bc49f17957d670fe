"""Train segcaps with MONAI's transforms, loss and sliding windows, on discs and squares in noise.

pip install monai
python examples/segment_with_monai.py --steps 60
"""

import argparse

import torch
from monai.data import DataLoader, Dataset
from monai.inferers import SlidingWindowInferer
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.utils import one_hot
from monai.transforms import Compose, RandFlipd, RandGaussianNoised, RandRotate90d, RandSpatialCropd

from torchcaps import create_model


def scene(number: int, side: int = 48) -> dict[str, torch.Tensor]:
    """Return an image with a grey disc (class 1) and a white square (class 2), and its mask, both (1, side, side)."""
    random = torch.Generator().manual_seed(number)
    y, x, top, left = torch.randint(6, side - 12, (4,), generator=random).tolist()
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    mask = ((rows - y) ** 2 + (columns - x) ** 2 <= 25).long()
    mask[top : top + 8, left : left + 8] = 2
    return {"image": mask[None] / 2 * 0.8, "mask": mask[None]}


def main(steps: int) -> float:
    """Train, and return the mean Dice score of both classes on 8 new images."""
    torch.manual_seed(0)
    both = ["image", "mask"]
    patches = [RandSpatialCropd(both, (32, 32), random_size=False), RandFlipd(both, 0.5), RandRotate90d(both, 0.5)]
    transforms = Compose([*patches, RandGaussianNoised("image", 1.0, std=0.1)])
    loader = DataLoader(Dataset([scene(n) for n in range(4 * steps)], transforms), batch_size=4)
    model = create_model("segcaps", (1, 32, 32), 3, layer_types=4, decoder=False)
    optimizer, loss_of = torch.optim.Adam(model.parameters(), 2e-3), DiceCELoss(softmax=True, to_onehot_y=True)
    for batch in loader:
        lengths = model(batch["image"]).scores  # (4, 3, 32, 32)
        loss = loss_of(10 * lengths, batch["mask"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    images, masks = (torch.stack([scene(10_000 + n)[key] for n in range(8)]) for key in both)
    with torch.no_grad():
        windows = SlidingWindowInferer((32, 32), overlap=0.25)
        answers = windows(images, lambda patch: model.eval()(patch).scores).argmax(1, keepdim=True)
    dice = DiceMetric(include_background=False)(one_hot(answers, 3), one_hot(masks, 3)).nanmean().item()
    print(f"Dice score after {steps} steps: {dice:.3f}")
    return dice


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="training steps of 4 images")
    main(parser.parse_args().steps)
