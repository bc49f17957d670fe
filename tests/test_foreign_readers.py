"""Every call of a third-party reader of files is made inside the one wrapper that turns its errors into a sentence."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchcaps
from support import assert_raises
from torchcaps.errors import InputError
from torchcaps.files import one_sentence

SOURCE = Path(torchcaps.__file__).parent
WRAPPERS = {"one_sentence", "reading"}
READERS = {
    *("Image.open", "ImageColor.getrgb", "nib.load", "nib.as_closest_canonical", "np.load", "np.fromfile"),
    *("np.genfromtxt", "np.loadtxt", "zipfile.ZipFile", "tarfile.open", "gzip.open", "gzip.GzipFile", "csv.reader"),
    *("csv.DictReader", "json.load", "json.loads", "torch.load", "loadmat", "safetensors.torch.load"),
    *("safetensors.torch.load_file", "archive.load_classification", "tomllib.load", "tomllib.loads", "pickle.load"),
}
"""Functions that parse the contents of a file, as the code calls them."""
OWN = {
    "explorer/state.py": "an image that comes with torchcaps",
    "analysis/groups.py": "a table that was written a line before",
    "testing/routing_checks.py": "weights that were written a line before",
    "export/onnx_worker.py": "a process of its own, whose errors its parent reads",
}
"""Files that parse nothing from elsewhere."""
OWN_FUNCTIONS = {("models/files/weights.py", "weights_file")}
"""Functions that parse what they wrote themselves."""


def bare_calls(tree: ast.AST, readers: set[str], inside: bool = False, function: str = "") -> Iterator[tuple[str, int]]:
    """Yield each call of a reader outside the wrappers: the function that makes it, and its line."""
    if isinstance(tree, ast.FunctionDef):
        function, inside = tree.name, False
    if isinstance(tree, ast.With):
        wraps = False
        for item in tree.items:
            yield from bare_calls(item.context_expr, readers, inside or wraps, function)
            call = item.context_expr
            wraps |= isinstance(call, ast.Call) and ast.unparse(call.func) in WRAPPERS
        for each in tree.body:
            yield from bare_calls(each, readers, inside or wraps, function)
        return
    if isinstance(tree, ast.Call) and not inside and ast.unparse(tree.func) in readers:
        yield function, tree.lineno
    for each in ast.iter_child_nodes(tree):
        yield from bare_calls(each, readers, inside, function)


def uncovered(sources: dict[str, str]) -> list[str]:
    """Return the calls that nothing wraps; a private function of a file counts as a reader if it calls one bare."""
    faults = list[str]()
    for name, text in sources.items():
        tree, helpers, calls = ast.parse(text), set[str](), list[tuple[str, int]]()
        while True:
            calls = list(bare_calls(tree, READERS | {"unpacked"} | helpers))
            new = {function for function, _ in calls if function.startswith("_")} - helpers
            if not new:
                break
            helpers |= new
        faults += [f"{name}:{line} in {each}" for each, line in calls if each not in {*helpers, "unpacked"}]
    return [each for each in faults if (each.partition(":")[0], each.split()[-1]) not in OWN_FUNCTIONS]


def test_no_reader_is_called_bare() -> None:
    sources = {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}
    assert OWN.keys() <= sources.keys()
    assert uncovered({name: text for name, text in sources.items() if name not in OWN}) == []


@pytest.mark.parametrize("body", ["np.load(path)", "with a(): np.load(path)", "_inner(path)", "with unpacked(path): 0"])
def test_a_bare_call_is_noticed(body: str) -> None:
    inner = "def _inner(path):\n    return np.load(path)\n"
    assert uncovered({"a.py": f"{inner}def read(path):\n    {body}\n"}) == ["a.py:4 in read"]
    assert uncovered({"a.py": f"{inner}def read(path):\n    with one_sentence(path):\n        {body}\n"}) == []


@pytest.mark.parametrize("kind", [ZeroDivisionError, MemoryError, RecursionError, StopIteration, BaseException])
def test_any_error_becomes_a_sentence(kind: type[BaseException]) -> None:
    def read() -> None:
        with one_sentence("a.png cannot be read"):
            raise kind("its\nreason")

    assert_raises(InputError, read, say="a.png cannot be read: its reason")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_a_stop_stays_a_stop(kind: type[BaseException]) -> None:
    with pytest.raises(kind), one_sentence("a.png cannot be read"):
        raise kind
