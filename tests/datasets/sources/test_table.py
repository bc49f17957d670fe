"""Tables of image files and labels: ``csv:``."""

import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import assert_raises
from tiny_runs import save_image
from torchcaps.datasets import Dataset, load_dataset
from torchcaps.errors import InputError

N = 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images whose every pixel is the image's number, in sub-folders of odd and even ones, and hidden ones."""
    for n in range(N):
        save_image(tmp_path / "images" / "ab"[n % 2] / f"im{n:02}.png", np.full((6, 5), n, np.uint8))
    for hidden in ("__MACOSX/im00.png", ".cache/im01.png"):
        save_image(tmp_path / hidden)
    return tmp_path


def write(folder: Path, header: str, row: str, *more: str, name: str = "t.csv", **lists: list[Any]) -> str:
    """Write a table, whose row holds ``{n}`` for the number of the image and names of lists."""
    lines = [row.format(n=f"{n:02}", **{key: each[n] for key, each in lists.items()}) for n in range(N)]
    (folder / name).write_text("\n".join([header, *lines, *more]) + "\n", encoding="utf-8")
    return f"csv:{folder / name}"


def all_of(data: Dataset) -> tuple[list[int], torch.Tensor]:
    """The number and the label of each image of all parts."""
    parts = (data.train, data.validation, data.test)
    numbers = torch.cat([part.images[:, 0, 0, 0] for part in parts])
    return numbers.tolist(), torch.cat([part.labels for part in parts])


CATS = ["cat" if n % 3 else "dog" for n in range(N)]


@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("image,label", "images/{at}/im{n}.png,{cat}"),
        ("id,class", "im{n},{cat}"),
        ("Filename;Category", "im{n}.png;{cat}"),
        ("label\tsomething", "{cat}\tim{n}"),
        ('"file","label","age"', '"im{n}.png","{cat}","3"'),
        ("\ufefffile , label", " im{n}.png , {cat} "),
        ("file,label\r", "im{n}.png,{cat}\r"),
    ],
)
def test_a_table_names_files_and_classes(header: str, row: str, folder: Path) -> None:
    data = load_dataset(write(folder, header, row, "", at=[*"ab"] * (N // 2), cat=CATS))
    assert data.class_names == ("cat", "dog")
    numbers, labels = all_of(data)
    assert sorted(numbers) == list(range(N))
    assert labels.tolist() == [["cat", "dog"].index(CATS[n]) for n in numbers]


def test_labels_of_every_form(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for header, row, task, names, targets in (
        ("file,label", "im{n},{x}", "classes", ("1", "2", "10"), [(1, 2, 10)[n % 3] for n in range(N)]),
        ("file,cat,dog", "im{n},{x[0]},{x[1]}", "classes", ("cat", "dog"), [(n % 2, 1 - n % 2) for n in range(N)]),
        ("file,a,b", "im{n},{x[0]},{x[1]}", "labels", ("a", "b"), rng.integers(0, 2, (N, 2)).tolist()),
        ("file,found", "im{n},{x}", "labels", ("a", "b"), ["", "a|b", "b"] * 13 + [""]),
        ("file,age", "im{n},{x}", "regression", ("age",), (rng.random(N) * 90).tolist()),
        ("file,x,y", "im{n},{x[0]},{x[1]}", "regression", ("x", "y"), rng.normal(size=(N, 2)).tolist()),
    ):
        data = load_dataset(write(folder, header, row, x=targets))
        assert (data.task.name, data.class_names) == (task, names)
        numbers, labels = all_of(data)
        if header == "file,label":
            expected: Any = [names.index(str(each)) for each in targets]
        elif header == "file,cat,dog":
            expected = [int(each[1]) for each in targets]
        elif header == "file,found":
            expected = [[name in each for name in names] for each in targets]
        else:
            expected = np.reshape(targets, (N, -1))
        assert torch.equal(labels, torch.tensor(np.asarray(expected)[numbers], dtype=labels.dtype))
    ages = write(folder, "file,age", "im{n},{x}", x=list(range(20, 20 + N)))
    assert load_dataset(ages, task="regression").train.labels.min() >= 20
    assert load_dataset(write(folder, "file,a", "im{n},{x}", x=CATS), task="labels").class_names == ("cat", "dog")


def test_a_column_says_the_part_of_each_image(folder: Path) -> None:
    parts = ["train", "val", "Test", "train"] * (N // 4)
    data = load_dataset(write(folder, "file,label,split", "im{n},{c},{part}", c=CATS, part=parts))
    for part, images in (("train", data.train), ("val", data.validation), ("Test", data.test)):
        assert sorted(images.images[:, 0, 0, 0].tolist()) == [n for n in range(N) if parts[n] == part]


def test_hidden_and_missing_files_are_left_out_and_said(folder: Path) -> None:
    spec = write(folder, "file,label", "im{n}.png,{c}", "__MACOSX/im00.png,cat", c=CATS)
    data = load_dataset(spec)
    assert len(all_of(data)[0]) == N
    assert data.skipped == (f"{folder / 't.csv'}, line 42: {folder / '__MACOSX' / 'im00.png'} is hidden",)
    spec = write(folder, "file,label", "im{n}.png,{c}", "im99.png,cat", c=CATS)
    assert_raises(InputError, load_dataset, spec, say=f"there is no image file {folder / 'im99.png'}")
    assert len(load_dataset(spec, skip_damaged=True).skipped) == 1


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["file,label", "im03,dog", "im04,cat", "im03.png,cat"], "im03.png twice, in lines 2 and 4"),
        (["file,label", "im03,dog", ",cat"], "line 3 names no image file"),
        (["file,label", "im03,dog", "im04,"], "line 3 has no label"),
        (["file,label", "im03,dog", "im04,cat,x"], "line 3 has 3 cells, but there are 2 columns"),
        (["file,label", "im03,dog", "im04"], "line 3 has 1 cell, but there are 2 columns"),
        (["file,label", "im03,dog", "two,cat"], "line 3: two may be images"),
        (["file,label", "im03,dog", '"im04,cat'], "line 3 is no line of a table: unexpected end of data"),
        (["file,label", "im03,dog", "im04,\0"], "contains the character NUL"),
        (["file,file", "im03,dog"], "must have columns with different names"),
        (["file", "im03"], "must have columns with different names"),
        (["file,split", "im03,train"], "has no column of labels, only file"),
        (["file,label"], "and a line for each image"),
        ([""], "and a line for each image"),
        (["a,b", "1,2"], "has no column with image files"),
        (
            ["file,what,age", "im03,cat,3"],
            "line 2: the column what has 'cat', a text, but the table has several columns",
        ),
        (["file,label,split", "im03,cat,fold1"], "line 2: the split must be train, val or test, got 'fold1'"),
        (["file,label,split", "im03,cat,test"], "has only test images, and none to train on"),
        (["file,label", "im03,dog", "im04,dog", "im05,dog"], "only the class dog; at least two are needed"),
    ],
)
def test_tables_that_cannot_be(lines: list[str], said: str, folder: Path) -> None:
    for name in "ab":
        save_image(folder / "images" / name / "two.png")
    (folder / "t.csv").write_text("\n".join(lines))
    with pytest.raises(InputError) as caught:
        load_dataset(f"csv:{folder / 't.csv'}")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def numbered(row: str, header: str = "", first: str = "") -> str:
    """Return the text of a table, a row for each image, with its number n, a class c and fractions x and y."""
    rows = [row.format(n=f"{n:02}", c="abc"[n % 3], x=n + 0.25, y=-n / 8) for n in range(N)]
    return "\n".join([*([first] if first else []), *([header] if header else []), *rows]) + "\n"


WRITTEN: dict[str, tuple[bytes, str]] = {
    "no header": (numbered("im{n}.png,{c}").encode(), "classes"),
    "no header, labels first": (numbered("{c}\timages/x/im{n}.png").replace("images/x/", "").encode(), "classes"),
    "decimal commas": (numbered("im{n}.png;{x}", "file;x").replace(".25", ",25").encode(), "regression"),
    "decimal commas, no header": (numbered("im{n}.png;{x}").replace(".25", ",25").encode(), "regression"),
    "decimal commas in two columns": (
        numbered("im{n};{x};{y}", "file;x;y").replace(".", ",").encode(),
        "regression",
    ),
    "commas between tabs": (numbered("im{n}\t{x}", "file\tsize, in mm").replace(".", ",").encode(), "regression"),
    "UTF-16": (numbered("im{n};{c}", "file;klasse").encode("utf-16"), "classes"),
    "UTF-16, the other way": (b"\xfe\xff" + numbered("im{n}\t{c}", "file\tklasse").encode("utf-16-be"), "classes"),
    "a mark of UTF-8": (numbered("im{n};{c}", "file;label").encode("utf-8-sig"), "classes"),
    "a line for Excel": (numbered("im{n}|{c}", "file|label", "sep=|").encode(), "classes"),
    "backslashes": (numbered("images\\{f}\\im{n}.png,{c}".replace("{f}", "a"), "file,label").encode(), "classes"),
    "paths of another machine": (numbered("C:\\scans\\im{n}.png,{c}", "file,label").encode(), "classes"),
    "empty columns of a spreadsheet": (numbered("im{n},{c},,", "file,label,,").encode() + b",,,\n", "classes"),
    "an index": (numbered("{n},im{n},{c}", ",file,label").encode(), "classes"),
    "exponents": (numbered("im{n},{x}e-3", "file,x").encode(), "regression"),
    "NA as a class": (numbered("im{n},{c}", "file,label").replace(",a", ",NA").encode(), "classes"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_tables_as_other_programs_write_them(name: str, folder: Path) -> None:
    contents, task = WRITTEN[name]
    if name == "backslashes":
        for file in (folder / "images/b").iterdir():
            file.rename(folder / "images/a" / file.name)
    (folder / "t.csv").write_bytes(contents)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = load_dataset(f"csv:{folder / 't.csv'}")
    words = ["t.csv, line 2: the column label has 'NA', which is a class like the others"] * ("NA" in name)
    assert [word in str(each.message) for each, word in zip(caught, words, strict=True)] == [True] * len(words)
    numbers, labels = all_of(data)
    assert (sorted(numbers), data.task.name) == (list(range(N)), task)
    if task == "classes":
        names = ["NA", "b", "c"] if "NA" in name else ["a", "b", "c"]
        assert [data.class_names[label] for label in labels] == [names[n % 3] for n in numbers]
    else:
        factor = 1e-3 if name == "exponents" else 1
        rows = torch.tensor([[n + 0.25, -n / 8] for n in numbers])[:, : labels.shape[1]] * factor
        torch.testing.assert_close(labels, rows)


REFUSED: dict[str, tuple[bytes, str]] = {
    "no header, several columns": (numbered("im{n}.png,{x},{y}").encode(), "line 1 must name the columns"),
    "no header, no suffix": (numbered("im{n},{c}").encode(), "line 1 must name the columns, such as image,label"),
    "NA among fractions": (
        numbered("im{n},{x}", "file,x").replace("7.25", "NA", 1).encode(),
        "line 9: the column x has 'NA'",
    ),
    "NA among whole numbers": (
        numbered("im{n},1{n}", "file,x").replace(",107", ",#N/A").encode(),
        "line 9: the column x has '#N/A' in place of a number",
    ),
    "NaN": (numbered("im{n},{x},{y}", "file,x,y").replace("7.25", "nan", 1).encode(), "line 9: the column x has 'nan'"),
    "quoted decimal commas": (
        numbered('im{n},"{x}"', "file,x").replace(".25", ",25").encode(),
        "line 2: the column x has '0,25' in place of a number, written like 1.5",
    ),
    "thousands": (numbered("im{n};1.{n}0,5", "file;x").encode(), "line 2: the column x has '1.000,5', and every line"),
    "a unit": (
        numbered("im{n};{x}", "file;x").replace("7.25", "7.25 mm", 1).encode(),
        "line 9: the column x has '7.25 mm'",
    ),
    "cp1252": (
        numbered("im{n};{c}", "file;label").replace(";b", ";Käfer").encode("cp1252"),
        "line 3, 'im01;Käfer', is not UTF-8",
    ),
    "UTF-16 without a mark": (numbered("im{n};{c}", "file;label").encode("utf-16-le"), "contains the character NUL"),
    "a workbook": (b"PK\x03\x04\x14\x00", "is a workbook of a spreadsheet; save its sheet as a table"),
    "an old workbook": (b"\xd0\xcf\x11\xe0\xa1", "is a workbook of a spreadsheet"),
    "another text on each line": (
        numbered("im{n},of {n}", "file,patient").encode(),
        "has 'of 00', and every line has another",
    ),
    "masks": (
        numbered("im{n}.png,im{n}_mask.png", "image,mask").encode(),
        "line 2: the column mask has 'im00_mask.png', an image file, but a table has one image a line; masks are read",
    ),
    "missing files beside names of others": (
        numbered("gone{n}.png,im01", "image,label").encode(),
        "there is no image file",
    ),
    "an index beside numbers": (numbered("{n},im{n},{x},{y}", ",file,x,y").encode(), "has a column without a name"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_cells_that_would_be_misread_are_named(name: str, folder: Path) -> None:
    contents, words = REFUSED[name]
    (folder / "t.csv").write_bytes(contents)
    assert_raises(InputError, load_dataset, f"csv:{folder / 't.csv'}", say=words)


def test_a_regression_of_texts_is_refused(folder: Path) -> None:
    spec = write(folder, "file,label", "im{n},{c}", c=CATS)
    assert_raises(
        InputError, load_dataset, spec, task="regression", say="line 2: the column label has 'dog' in place of"
    )


def test_what_is_no_table_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("file,label")
    assert_raises(InputError, load_dataset, str(tmp_path / "t.csv"), say=f'write "csv:{tmp_path / "t.csv"}"')
    assert_raises(InputError, load_dataset, f"csv:{tmp_path}", say="this path is a folder")
    if os.name != "nt":
        os.mkfifo(tmp_path / "fifo.csv")
        assert_raises(InputError, load_dataset, f"csv:{tmp_path / 'fifo.csv'}", say="this path is a FIFO")


def test_large_tables_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / "t.csv").open("wb") as file:
        file.truncate(2**25)
    assert_raises(InputError, load_dataset, f"csv:{tmp_path / 't.csv'}", say="it must have at most 16 MiB")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=60), st.text(alphabet='im0,;\t\n"|. -1é\r', max_size=60).map(str.encode)))
def test_any_bytes_are_a_data_set_or_a_sentence(folder: Path, contents: bytes) -> None:
    (folder / "t.csv").write_bytes(b"file,label\n" + contents)
    with suppress(InputError):
        load_dataset(f"csv:{folder / 't.csv'}")
