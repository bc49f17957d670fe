from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from torchcaps.datasets.registry import DataRequest
from torchcaps.datasets.sources import cifar10, smallnorb, svhn
from torchcaps.datasets.sources.source import Source, data_folders
from torchcaps.errors import InputError

FILES = {"a.gz": b"first", "b.tar": b"second"}
SOURCE = Source(
    name="things",
    mirrors=("http://127.0.0.1:9/",),  # the discard port, where nobody listens
    sha256={name: hashlib.sha256(contents).hexdigest() for name, contents in FILES.items()},
    unpacked={"b.tar": "b-folder"},
    folders=("Other/raw",),
)


def put(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name.endswith("folder"):
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(FILES.get(name, b"unpacked"))
    return folder


def paths(source: Source, data_dir: Path | None = None, *, download: bool = False) -> Mapping[str, Path]:
    return source.paths(DataRequest(data_dir=data_dir, download=download))


@pytest.mark.parametrize("sub", [".", "things", "Other/raw"])
def test_files_are_found_packed_or_not(tmp_path: Path, sub: str) -> None:
    folder = put(tmp_path / sub, "a.gz", "b-folder")
    assert SOURCE.find(tmp_path) == folder
    assert paths(SOURCE, tmp_path) == {"a.gz": folder / "a.gz", "b.tar": folder / "b-folder"}
    put(folder, "a", "b.tar")
    assert paths(SOURCE, tmp_path) == {"a.gz": folder / "a", "b.tar": folder / "b-folder"}  # unpacked comes first


def test_missing_files_are_named_with_what_stands_for_them(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no a and no b-folder \(or a\.gz, b\.tar\); put all files of things"):
        paths(SOURCE, tmp_path)
    put(tmp_path / "things", "a")
    with pytest.raises(
        InputError, match=rf"{re.escape(str(tmp_path / 'things'))} has no b-folder \(or b\.tar\); put all"
    ):
        paths(SOURCE, tmp_path)
    assert SOURCE.find(tmp_path) is None


def test_places_are_looked_at_in_turn(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_folders(None) == [cache]
    assert data_folders(tmp_path) == [tmp_path]
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path / "named"))
    assert data_folders(None) == [tmp_path / "named", cache]
    assert data_folders(tmp_path) == [tmp_path]
    put(tmp_path / "named")
    put(cache / "things", "a.gz", "b.tar")
    assert SOURCE.find(None) == cache / "things"
    assert paths(SOURCE)["b.tar"] == cache / "things" / "b.tar"
    put(tmp_path / "named", "a.gz", "b.tar")
    assert SOURCE.find(None) == tmp_path / "named"


def test_shared_names_in_a_folder_that_was_not_named_for_the_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = dataclasses.replace(SOURCE, shares_names=True)
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path))
    put(tmp_path, "a.gz", "b.tar")
    assert SOURCE.find(None) == SOURCE.find(tmp_path) == shared.find(tmp_path) == tmp_path
    assert shared.find(None) is None
    with pytest.raises(InputError, match="things is not on this machine"):
        paths(shared)
    put(tmp_path / "things", "a.gz", "b.tar")
    assert shared.find(None) == tmp_path / "things"


def test_contents_are_verified(tmp_path: Path) -> None:
    put(tmp_path, "a.gz")
    SOURCE.verify(tmp_path / "a.gz")
    (tmp_path / "a.gz").write_bytes(b"other")
    with pytest.raises(InputError, match=rf"{re.escape(str(tmp_path / 'a.gz'))} is not things's, or it is damaged"):
        SOURCE.verify(tmp_path / "a.gz")


def test_what_is_missing_is_downloaded(serve: Callable[[dict[str, bytes]], str], cache: Path) -> None:
    with pytest.raises(InputError, match=r"things is not on this machine \(a\.gz is not in .*--data-dir FOLDER"):
        paths(SOURCE)
    with pytest.raises(InputError, match=r"a\.gz could not be downloaded .*127\.0\.0\.1:9.*--data-dir FOLDER"):
        paths(SOURCE, download=True)
    there = dataclasses.replace(SOURCE, mirrors=(serve(FILES),))
    assert paths(there, download=True)["a.gz"].read_bytes() == b"first"
    assert paths(SOURCE) == {name: cache / "things" / name for name in FILES}  # needs no network any more


@pytest.mark.parametrize("sub", ["things", "Other/raw"])
def test_what_is_unpacked_in_the_cache_is_used(sub: str, cache: Path) -> None:
    folder = put(cache / sub, "a")
    with pytest.raises(
        InputError, match=rf"things is not on this machine \(b\.tar is not in {re.escape(str(folder))}\)"
    ):
        paths(SOURCE)
    put(folder, "b-folder")
    whole = {"a.gz": folder / "a", "b.tar": folder / "b-folder"}
    assert SOURCE.find(None) == folder
    assert paths(SOURCE) == paths(SOURCE, download=True) == whole, "its mirror cannot be reached"


@pytest.mark.parametrize("other", ["b.tar", "b-folder"])
def test_a_download_that_was_damaged_is_made_again(
    other: str, serve: Callable[[dict[str, bytes]], str], cache: Path
) -> None:
    put(cache / "things", other)
    (cache / "things" / "a.gz").write_bytes(b"half a fi")
    there = dataclasses.replace(SOURCE, mirrors=(serve(FILES),))
    assert paths(there, download=True)["a.gz"].read_bytes() == FILES["a.gz"]


@pytest.mark.parametrize("published", [cifar10.SOURCE, svhn.SOURCE, smallnorb.SOURCE], ids=lambda source: source.name)
def test_published_sources_are_complete(published: Source) -> None:
    assert published.mirrors
    assert all(mirror.endswith("/") for mirror in published.mirrors)
    assert all(len(bytes.fromhex(sha256)) == 32 for sha256 in published.sha256.values())
    assert set(published.unpacked) <= set(published.sha256)


def test_a_folder_is_no_file_and_a_file_no_unpacked_archive(tmp_path: Path) -> None:
    put(tmp_path, "b-folder")
    for name in ("a", "a.gz"):
        (tmp_path / name).mkdir()
        assert SOURCE.find(tmp_path) is None
    put(tmp_path / "things", "a")
    (tmp_path / "things" / "b-folder").touch()
    assert SOURCE.find(tmp_path) is None
    with pytest.raises(InputError, match=r"things has no b-folder \(or b\.tar\)"):
        paths(SOURCE, tmp_path)


def test_folders_with_the_names_of_files_do_not_stop_the_list(tmp_path: Path) -> None:
    from torchcaps.datasets import list_datasets
    from torchcaps.datasets.sources.mnist import FAMILIES

    for name in FAMILIES[0].sha256:
        (tmp_path / name.removesuffix(".gz")).mkdir()
    read = [info for info in list_datasets() if info.takes_data_dir]
    assert all(info.locate(tmp_path) is None for info in read)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows guesses a home for any name")
def test_the_home_of_a_user_who_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchcaps.datasets import load_dataset

    nobody = "~no-such-user/data"
    for spec, options in (
        (f"folder:{nobody}", {}),
        (f"npz:{nobody}", {}),
        (nobody, {}),
        ("mnist", {"data_dir": nobody}),
    ):
        with pytest.raises(InputError, match=f"{nobody} begins with the home folder of a user who is not known"):
            load_dataset(spec, **options)
    monkeypatch.setenv("TORCHCAPS_DATA", nobody)
    with pytest.raises(InputError, match=f"{nobody} begins with the home folder"):
        SOURCE.find(None)
