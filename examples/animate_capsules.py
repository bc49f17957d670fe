"""Animate what capsules encode: decoded digits while one component of each capsule changes.

    python examples/animate_capsules.py --out docs/images/capsules.gif --data mnist    # as in docs/capsules.md
    python examples/animate_capsules.py --network runs/compact-kmnist-1 --data kmnist --out kmnist.gif

For each digit, the script changes the three components that change the decoded image most, one after the other, by
−0.25 … 0.25 as in figure 4 of the paper. It writes an animated GIF with the test digits above.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from torchcaps import InputError, load_pretrained
from torchcaps.analysis import Perturbation, perturb_capsule, predict
from torchcaps.datasets import load_dataset
from torchcaps.files import atomic_path
from torchcaps.models import Network

SIZE, GAP, LINE, LEFT = 76, 8, 26, 88  # pixels: an image, between images, a line of text, before the first image
FRAMES, MILLISECONDS, GREYS = 20, 90, 16
PAPER, INK, MUTED, ACCENT = 255, 20, 150, 90  # grey levels


def choose(network: Network, data: str, classes: Sequence[int], amplitude: float) -> list[Perturbation]:
    """Perturb the capsule of one test image per class, the image with the highest score."""
    test = load_dataset(data).test.preview(1000)
    is_class = test.labels.numpy()[:, None] == np.arange(network.num_classes)
    clearest = np.where(is_class, predict(network, test.images).scores, 0).argmax(axis=0)[list(classes)]
    return [perturb_capsule(network, test.images[n], amplitude=amplitude, steps=FRAMES // 2 + 1) for n in clearest]


def frames(digits: Sequence[Perturbation], phases: int) -> Iterator[Image.Image]:
    """Yield the frames: ``phases`` components of each digit, each moved up, down and back to the middle."""
    change = [digit.images - digit.reconstruction for digit in digits]
    ranking = [np.square(each).mean(axis=(1, 2, 3, 4)).argsort()[::-1] for each in change]
    middle = FRAMES // 4
    font = ImageFont.load_default(13)
    for phase in range(phases):
        for t in range(FRAMES):
            place = middle + round(middle * math.sin(2 * math.pi * t / FRAMES))
            frame = Image.new("L", (LEFT + len(digits) * (SIZE + GAP), 2 * (SIZE + GAP) + LINE), PAPER)
            draw = ImageDraw.Draw(frame)
            for row, words in enumerate(("test digit", "decoded", "component")):
                y = row * (SIZE + GAP) + (SIZE // 2 if row < 2 else LINE // 2 - 4)
                draw.text((4, y), words, INK, font, anchor="lm")
            for n, digit in enumerate(digits):
                x, component = LEFT + n * (SIZE + GAP), int(ranking[n][phase])
                for row, pixels in enumerate((digit.image, digit.images[component, place])):
                    tile = Image.fromarray(np.uint8(255 * pixels[0].clip(0, 1)))
                    frame.paste(tile.resize((SIZE, SIZE), Image.Resampling.BICUBIC), (x, row * (SIZE + GAP)))
                y = 2 * (SIZE + GAP)
                draw.text((x + 12, y + 11), str(component), INK, font, anchor="mm")
                draw.line((x + 26, y + 11, x + SIZE - 6, y + 11), MUTED, 2)
                knob = x + 26 + (SIZE - 32) * place / (2 * middle)
                draw.ellipse((knob - 5, y + 6, knob + 5, y + 16), ACCENT)
            yield frame


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the animation as the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="compact", help="a network with a decoder (default: %(default)s)")
    parser.add_argument("--data", default="digits", help="data set of grey images (default: %(default)s)")
    parser.add_argument("--classes", type=int, nargs="+", default=[2, 3, 4, 5, 7, 8], help="default: 2 3 4 5 7 8")
    parser.add_argument("--components", type=int, default=3, help="components of each digit (default: %(default)s)")
    parser.add_argument("--amplitude", type=float, default=0.25, help="largest change (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("capsules.gif"), help="default: %(default)s")
    given = parser.parse_args(arguments)
    try:
        digits = choose(load_pretrained(given.network), given.data, given.classes, given.amplitude)
    except InputError as error:
        parser.error(str(error))
    step = 255 / (GREYS - 1)  # few greys, the same in all frames, make a small file
    few = [frame.point(lambda grey: round(round(grey / step) * step)) for frame in frames(digits, given.components)]
    options = {"append_images": few[1:], "duration": MILLISECONDS, "loop": 0, "optimize": True, "format": "GIF"}
    with atomic_path(given.out) as part:
        few[0].save(part, save_all=True, **options)
    print(f"wrote {given.out}: {len(few)} frames, {given.out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
