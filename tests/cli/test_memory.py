import subprocess
import sys

import pytest


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "torchcaps", "memory", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_names_parts_and_the_largest_batch() -> None:
    done = run("sabour2017", "--data", "mnist", "--batch-size", "512")
    assert done.returncode == 0, done.stderr
    for words in ("feature maps", "Adam's moments", "peak", "512 images", "Largest batch"):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("precision", "words"),
    [("auto", "float32"), ("32", "float32"), ("bf16", "bfloat16 convolutions and dense layers, all else in float32")],
)
def test_it_says_the_precision(precision: str, words: str) -> None:
    done = run("sabour2017", "--data", "mnist", "--accelerator", "cpu", "--precision", precision)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("Precision"))
    assert line.split(maxsplit=1)[1].strip() == words


def test_it_knows_several_objects_crops_and_pooling() -> None:
    for arguments, words in (
        (("sabour2017-multimnist", "--data", "multimnist"), "decoder"),
        (("sabour2017-cifar10", "--data", "cifar10"), "primary capsules"),
        (("cnn-matched", "--data", "mnist"), "feature maps"),
    ):
        done = run(*arguments)
        assert done.returncode == 0, done.stderr
        assert words in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sabour2017-multimnist", "--data", "mnist"), "an image of mnist holds 1 object, but the network looks for 2"),
        (("sabour2017", "--data", "mnist", "--crop", "29"), "crop is 29 pixels"),
        (("sabour",), 'did you mean "sabour2017"'),
        (("sabour2017", "--image-size", "10"), "smallest size that fits is 17×17"),
        (("baseline-cnn", "--num-iterations", "3"), "no option of baseline-cnn"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
