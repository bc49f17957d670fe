"""Your own images: a folder with a sub-folder for each class → train → predict.

    python examples/own_images.py                      # draws shapes first, to have something to train on
    python examples/own_images.py photos --size 32 --predict new/*.jpg     # photos/cat/*.jpg, photos/dog/*.png, ...

A fifth of the images is set aside as the test set, unless there are folders train/ and test/; the best epoch is chosen
on a validation part of the rest. Prints the progress, the test accuracy, and what the network says of new files.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from torchcaps import InputError
from torchcaps.analysis import load_image, predict
from torchcaps.training import load_run, make_config, train

SHAPES = ("circle", "square", "triangle")


def draw_shapes(folder: Path, number: int, seed: int = 0) -> None:
    """Write ``number`` images of each shape, at random places, in random sizes, tilts and colours on a noisy ground."""
    random = np.random.default_rng(seed)
    for shape in SHAPES:
        (folder / shape).mkdir(parents=True, exist_ok=True)
        for n in range(number):
            image = Image.fromarray(random.integers(0, 80, (40, 40, 3), dtype=np.uint8))
            x, y, radius = (int(random.integers(*bounds)) for bounds in ((14, 27), (14, 27), (8, 13)))
            colour = tuple(int(value) for value in random.integers(120, 256, 3))
            sides = {"circle": 60, "square": 4, "triangle": 3}[shape]
            ImageDraw.Draw(image).regular_polygon((x, y, radius), sides, int(random.integers(-20, 21)), fill=colour)
            image.save(folder / shape / f"{n:03}.png")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options, train, predict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="a sub-folder a class; drawn if none is given")
    parser.add_argument("--size", type=int, default=28, help="height and width to train at, pixels (default: 28)")
    parser.add_argument("--predict", type=Path, nargs="*", default=[], metavar="FILE", help="new images")
    parser.add_argument("--epochs", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--number", type=int, default=150, help="images of each shape to draw (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/own-images"), help="default: %(default)s")
    given = parser.parse_args(arguments)
    folder, new = given.folder, given.predict
    try:
        if folder is None:
            folder = given.out / "shapes"
            draw_shapes(folder, given.number)
            draw_shapes(given.out / "new", 1, seed=1)
            new = sorted((given.out / "new").glob("*/*.png"))
        config = make_config(
            "sabour2017",
            data=f"folder:{folder}",
            image_size=given.size,
            conv_channels=32,
            primary_types=8,
            decoder=False,  # with a decoder the network also learns to draw what it sees
            epochs=given.epochs,
            batch_size=16,
            max_shift=2,
            schedule="one-cycle",
            learning_rate=2e-3,
        )
        summary = train(config, given.out / "run")
        print(f"test accuracy {100 * summary['test']['best']['accuracy']:.2f} %")

        run = load_run(given.out / "run")
        for file in new:
            image = load_image(file, run.model.in_shape, fit="stretch")  # as the images of a folder are resized
            said = predict(run.model, image[None])
            label = said.classes[0]
            print(f"{file}: {run.class_names[label]}, its capsule {said.lengths[0, label]:.2f} long")
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
