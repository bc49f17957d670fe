"""Answers to image files."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from torchcaps.analysis import PhotoAnswers, Prediction
from torchcaps.datasets import Photo, Prepared
from torchcaps.datasets.preparation import NOTHING


def test_a_file_has_its_class_its_scores_and_why_it_is_unsure(words) -> None:
    prepared = Prepared(np.zeros((1, 28, 28), np.uint8), ("dark ink turned light",), (90, 180, 450, 540))
    scores, drawn, unsure = np.float32([[0.1, 0.3]]), np.zeros((1, 1, 28, 28)), "length 0.30 is below 0.50"
    said = Prediction(np.array([1]), scores, drawn, [(unsure,)])
    photo = Photo(np.full((3, 900, 1800), 200, np.uint8), prepared)
    answers = PhotoAnswers([Path("a $file$.jpg")], [prepared], said, ("cat", "dog\x1b"), [photo])
    (found,) = answers.to_dict()
    assert (found["image"], found["class"]) == ("a $file$.jpg", "dog\x1b")
    assert (found["prepared"], found["unsure"]) == (("dark ink turned light",), (unsure,))
    (table,) = answers.tables()
    lines = [line if isinstance(line, str) else line.text for line in table.note]
    assert (table.title, lines[:2]) == (
        "a $file$.jpg  dog\x1b",
        ["  prepared: dark ink turned light", f"  unsure: {unsure}"],
    )
    assert [line.split()[:2] for line in lines[-2:]] == [["cat", "0.100"], [r"dog\x1b", "0.300"]]
    figure = answers.figures()[""]
    assert [image.get_array().shape[:2] for image in figure.axes[0].images] == [(200, 400), (28, 28), (28, 28)]
    row = ["cat  0.10", r"dog\x1b  0.30", r"a $file$.jpg: dog\x1b", "dark ink turned light", f"unsure: {unsure}"]
    assert words(figure) == ["photo", "network input", "reconstruction", "length", *row]
    long = dataclasses.replace(answers, prediction=dataclasses.replace(said, caveats=[("word " * 30,)]))
    assert max(map(len, words(long.figures()[""]))) <= 50  # reasons are wrapped
    said = dataclasses.replace(said, scores=np.linspace(0, 1, 25)[None])
    many = dataclasses.replace(answers, class_names=tuple(map(str, range(25))), prediction=said)
    assert "… and 15 lower ones (--json shows all)" in many.tables()[0].note[-1]


@pytest.fixture
def answers() -> PhotoAnswers:
    prepared = [Prepared(np.zeros((1, 8, 8), np.uint8), changes) for changes in ((), (NOTHING,))]
    said = Prediction(np.array([1, 0]), np.float32([[0.1, 0.9], [0.6, 0.2]]), None, [(), ("low",)])
    return PhotoAnswers([Path("a.png"), Path("b.png")], prepared, said, ("cat", "dog"))


def test_an_empty_page_is_the_first_reason_to_be_unsure(answers) -> None:
    assert [answers.caveats(n) for n in range(2)] == [(), (NOTHING, "low")]
    assert [answers.given(n) for n in range(2)] == [["dog"], ["cat"]]


def test_csv_has_a_line_for_each_file(answers) -> None:
    assert answers.to_csv().splitlines() == [
        "image,class,unsure,cat,dog",
        "a.png,dog,,0.1000,0.9000",
        f"b.png,cat,{NOTHING}; low,0.6000,0.2000",
    ]


@pytest.mark.parametrize(("classes", "shown"), [(20, 20), (21, 10)])
def test_many_classes_are_cut_to_the_highest_ten(classes, shown) -> None:
    said = Prediction(np.array([0]), np.linspace(1, 0, classes)[None], None, [()])
    prepared = [Prepared(np.zeros((1, 8, 8), np.uint8), ())]
    answers = PhotoAnswers([Path("a.png")], prepared, said, tuple(map(str, range(classes))))
    assert [name for name, _ in answers.highest(0)] == [str(n) for n in range(shown)]
