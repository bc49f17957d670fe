"""Where a data set's files are looked for, and how they are downloaded."""

import dataclasses
import hashlib
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support import assert_raises
from torchcaps.datasets import DataRequest, data_folders, load_dataset
from torchcaps.datasets.sources import source
from torchcaps.datasets.sources.source import Source
from torchcaps.errors import InputError

FILES = {"a.gz": b"first" * 1000, "b.tar": b"second"}
CLOSED = "http://127.0.0.1:9/"  # the discard port, where nobody listens
SOURCE = Source(
    name="things",
    mirrors=(CLOSED,),
    sha256={name: hashlib.sha256(contents).hexdigest() for name, contents in FILES.items()},
    unpacked={"b.tar": "b-folder"},
    folders=("Other/raw",),
)
Serve = Callable[[dict[str, bytes]], str]


def put(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name.endswith("folder"):
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(FILES.get(name, b"unpacked"))
    return folder


def paths(which: Source, data_dir: Path | None = None) -> dict[str, Path]:
    return which.paths(DataRequest(data_dir=data_dir))


def test_missing_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gz").mkdir()  # a folder is no file
    said = "has no a and no b-folder (or a.gz, b.tar); put all files of things"
    assert_raises(InputError, paths, SOURCE, tmp_path, say=said)
    put(tmp_path / "things", "a")
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path))  # half a set there is a mistake, not a wish to download
    for data_dir in (tmp_path, None):
        assert_raises(InputError, paths, SOURCE, data_dir, say=f"{tmp_path / 'things'} has no b-folder")
        assert SOURCE.find(data_dir) is None
    (tmp_path / "things" / "b-folder").touch()  # a file is no unpacked archive
    assert_raises(InputError, paths, SOURCE, tmp_path, say="things has no b-folder (or b.tar)")


def test_places_are_looked_at_in_turn(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_folders(None) == [cache]
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path / "named"))
    assert data_folders(None) == [tmp_path / "named", cache]
    assert data_folders(tmp_path) == [tmp_path]
    assert_raises(InputError, paths, SOURCE, say=f"TORCHCAPS_DATA is {tmp_path / 'named'}, but this is no folder")
    assert_raises(InputError, paths, SOURCE, tmp_path / "no", say=f"data_dir is {tmp_path / 'no'}, but this")
    put(tmp_path / "named")
    put(cache / "things", "a.gz", "b.tar")
    assert SOURCE.find(None) == cache / "things"
    assert paths(SOURCE)["b.tar"] == cache / "things" / "b.tar"
    put(tmp_path / "named", "a.gz", "b.tar")
    assert SOURCE.find(None) == tmp_path / "named"


def test_shared_names_count_only_in_a_folder_named_for_the_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = dataclasses.replace(SOURCE, shares_names=True)
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path))
    put(tmp_path, "a.gz", "b.tar")
    assert SOURCE.find(None) == SOURCE.find(tmp_path) == shared.find(tmp_path) == tmp_path
    assert shared.find(None) is None
    assert_raises(InputError, paths, shared, say="a.gz could not be downloaded")
    put(tmp_path / "things", "a.gz", "b.tar")
    assert shared.find(None) == tmp_path / "things"


def test_what_is_missing_is_downloaded(serve: Serve, cache: Path, tmp_path: Path) -> None:
    assert_raises(InputError, paths, SOURCE, say="without a network, name a folder with its files: --data-dir")
    there = dataclasses.replace(SOURCE, mirrors=(serve(FILES),))
    whole = {name: cache / "things" / name for name in FILES}
    assert paths(there) == whole
    assert paths(SOURCE) == whole  # needs no network any more
    for damaged in (b"", b"half a fi", b"x" * 5000):
        whole["a.gz"].write_bytes(damaged)
        assert paths(there)["a.gz"].read_bytes() == FILES["a.gz"]
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):  # no matter of mirrors
        there.fetch("a.gz", tmp_path / "file" / "cache")


def test_what_is_unpacked_in_the_cache_is_used(cache: Path) -> None:
    folder = put(cache / "Other/raw", "a")
    assert_raises(InputError, paths, SOURCE, say=f"a.gz could not be downloaded ({CLOSED}: ConnectionError)")
    put(folder, "b-folder", "a.gz", "b.tar")  # what is unpacked comes first
    whole = {"a.gz": folder / "a", "b.tar": folder / "b-folder"}
    assert paths(SOURCE) == whole, "its mirror cannot be reached"


def test_mirrors_are_tried_until_one_has_the_right_file(serve: Serve, tmp_path: Path) -> None:
    bodies = {"corrupt": FILES["a.gz"][:-1] + b"x", "half": FILES["a.gz"][:100], "empty": b"", "good": FILES["a.gz"]}
    root = serve({f"{mirror}/a.gz": body for mirror, body in bodies.items()})

    def fetch(*mirrors: str) -> Path:
        addresses = tuple(f"{root}{mirror}/" for mirror in mirrors)
        return dataclasses.replace(SOURCE, mirrors=addresses).fetch("a.gz", tmp_path / "new")

    said = f"{root}missing/: HTTP status 404; {root}corrupt/: not the expected contents (SHA-256); {root}half/: "
    assert_raises(InputError, fetch, "missing", "corrupt", "half", say=said)
    assert list((tmp_path / "new").iterdir()) == []
    path = fetch("missing", "corrupt", "half", "empty", "good", "never")
    assert path.read_bytes() == FILES["a.gz"]
    assert list((tmp_path / "new").iterdir()) == [path]


def test_mirrors_that_do_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        there = dataclasses.replace(SOURCE, mirrors=(f"http://127.0.0.1:{silent.getsockname()[1]}/",))
        assert_raises(InputError, there.fetch, "a.gz", tmp_path, say="ReadTimeout")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows guesses a home for any name")
def test_the_home_of_a_user_who_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = "~no-such-user/data"
    said = f"{nobody} begins with the home folder of an unknown user"
    for spec, options in ((f"folder:{nobody}", {}), (nobody, {}), ("mnist", {"data_dir": nobody})):
        assert_raises(InputError, load_dataset, spec, **options, say=said)
    monkeypatch.setenv("TORCHCAPS_DATA", nobody)
    assert_raises(InputError, SOURCE.find, None, say=nobody)
