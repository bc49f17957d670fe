"""Imports point one way, heavy packages load late, and nothing heavy loads with ``import torchcaps``."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

import torchcaps

SOURCE = Path(torchcaps.__file__).parent

# What each part of the package may import, besides itself. Right may import left:
# the files of BASE <- kernels, ops <- nn <- models <- analysis <- training <- cli; datasets stands beside ops.
BASE = {"_lazy", "_version", "checks", "errors", "files", "machine", "parts", "ranges", "signals", "tasks", "tracing"}
BASE |= {"words"}
INNER = BASE | {"plugins", "ops", "nn", "models", "datasets", "analysis", "training"}
MAY_IMPORT: dict[str, Set[str]] = {
    **dict.fromkeys(("errors", "_version", "words"), frozenset()),
    **dict.fromkeys(("_lazy", "files", "ranges", "machine", "plugins"), frozenset({"errors"})),
    **dict.fromkeys(("tracing", "signals"), frozenset()),
    "checks": {"errors", "ranges", "tracing", "words"},
    "parts": {"errors", "ranges", "checks"},
    # one floor: the kernels use formulas of ops, and formulas that have a kernel call it
    **dict.fromkeys(("kernels", "ops"), (BASE - {"tasks"}) | {"kernels", "ops"}),
    "tasks": BASE | {"ops"},
    "datasets": BASE,
    "nn": BASE | {"kernels", "ops"},
    **dict.fromkeys(("models", "testing"), BASE | {"ops", "nn"}),
    "analysis": BASE | {"ops", "nn", "models", "datasets"},
    **dict.fromkeys(("training", "sklearn", "export", "explorer"), INNER),
    "cli": INNER | {"export", "explorer", "testing"},
    "__init__": {"_lazy", "_version"},
    "__main__": {"cli"},
}
# The one exception: a network is saved with its model card, which imports no network.
CARD = ("models", "torchcaps.export.card")
# What a part may import from outside; the standard library always.
EVERYWHERE = {"torch", "jaxtyping", "lazy_loader"}
PACKAGES: dict[str, Set[str]] = {
    **dict.fromkeys(("errors", "_version", "words", "ranges", "machine", "plugins"), frozenset()),
    "_lazy": {"lazy_loader"},
    "files": {"filelock"},
    **dict.fromkeys(("checks", "parts", "tracing"), frozenset({"torch"})),
    **dict.fromkeys(("kernels", "ops"), EVERYWHERE | {"numpy"}),
    "tasks": EVERYWHERE | {"numpy", "sklearn"},
    "nn": EVERYWHERE | {"timm"},
    "models": EVERYWHERE | {"huggingface_hub", "safetensors"},
    "datasets": EVERYWHERE | {"numpy", "PIL", "sklearn", "scipy", "pooch", "requests", "aeon", "nibabel", "pydicom"},
}
# Loaded only where they are needed: slow to import, or optional.
HEAVY = ("torch", "numpy", "PIL", "matplotlib", "sklearn", "lightning", "lightning_fabric", "rich", "torchmetrics")
HEAVY += (
    "pooch",
    "onnx",
    "onnxruntime",
    "scipy",
    "requests",
    "huggingface_hub",
    "jinja2",
    "onnxscript",
    "timm",
    "nibabel",
    "pydicom",
)
# What is read, looked at and predicted of an ONNX file without torch.
TORCH_FREE = (
    "torchcaps, torchcaps.models, torchcaps.datasets, torchcaps.training, torchcaps.analysis, torchcaps.errors, "
    "torchcaps.files, torchcaps.ranges, torchcaps.machine, torchcaps.plugins, torchcaps.tasks, "
    "torchcaps.analysis.calibration, torchcaps.analysis.figures, torchcaps.analysis.photos, "
    "torchcaps.datasets.images, torchcaps.datasets.preparation, torchcaps.export.description, "
    "torchcaps.export.onnx_model, torchcaps.training.image_spec"
)


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Dotted names that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            start = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (start, node.module)))
            for alias in node.names:
                yield f"{module}.{alias.name}" if module in ("torchcaps", package) else module


def part_of(path: Path) -> str:
    """The part of the package that a file belongs to: its folder, or its own name."""
    return path.parts[0] if len(path.parts) > 1 else path.stem


def wrong_imports(path: Path, text: str) -> list[str]:
    """What a file, given relative to the package, imports against the rules."""
    part, wrong = part_of(path), []
    package = ".".join(("torchcaps", *path.parts[:-1]))
    for name in imports(ast.parse(text), package):
        top = name.split(".")[0]
        if top == "torchcaps":
            target = name.split(".")[1] if "." in name else "__init__"
            if target != part and target not in MAY_IMPORT[part] and (part, name) != CARD:
                wrong.append(f"{path}: {part} must not import {name}")
        elif top not in sys.stdlib_module_names and top not in PACKAGES.get(part, {top}):
            wrong.append(f"{path}: {part} must not import {name}")
    return wrong


FILES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))


def test_imports_point_one_way() -> None:
    assert not [each for path in FILES for each in wrong_imports(path, (SOURCE / path).read_text(encoding="utf-8"))]
    assert {part_of(path) for path in FILES} == set(MAY_IMPORT), "a new part of the package: give it its place"
    for path, text in (
        ("ops/squash.py", "from ..nn import Decoder"),
        ("plugins.py", "import torch"),
    ):
        assert wrong_imports(Path(path), text), text


DOORS = {f"torchcaps.kernels.{name}" for name in ("operation", "memory", "dense", "mixtures", "maps", "convolution")}
"""Modules and packages of kernels that other parts may import from."""


def test_kernels_are_used_by_their_doors() -> None:
    """Nothing outside names a module inside a package of kernels."""
    used = set()
    for path in FILES:
        if part_of(path) != "kernels":
            tree = ast.parse((SOURCE / path).read_text("utf-8"))
            used |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert {name for name in used if name.startswith("torchcaps.kernels")} == DOORS


def test_one_file_wraps_gradients_and_operations() -> None:
    words = ("autograd.Function", "torch.library", "custom_op")
    assert [str(path) for path in FILES if any(word in (SOURCE / path).read_text("utf-8") for word in words)] == [
        "kernels/operation.py"
    ]


def private_parts_of_torch(tree: ast.AST) -> list[str]:
    """Names under ``torch`` of which one part begins with an underscore, imported or read."""
    read = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    names = [name for name in [*read, *imports(tree, "torchcaps")] if re.fullmatch(r"torch(\.\w+)+", name)]
    return [name for name in names if re.search(r"\._(?!_)", name)]


def test_only_tracing_uses_private_parts_of_torch() -> None:
    users = {str(path) for path in FILES if private_parts_of_torch(ast.parse((SOURCE / path).read_text("utf-8")))}
    assert users == {"tracing.py"}


def module_graph() -> dict[str, set[str]]:
    """Which modules each module imports: at its top, in a function, or for types.

    A name of a package counts as its module.
    """
    modules = {".".join(("torchcaps", *path.with_suffix("").parts)).removesuffix(".__init__"): path for path in FILES}
    lazy = {}
    for stub in SOURCE.rglob("__init__.pyi"):
        package = ".".join(("torchcaps", *stub.parent.relative_to(SOURCE).parts))
        for node in ast.parse(stub.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                lazy |= {f"{package}.{alias.name}": f"{package}.{node.module}" for alias in node.names}

    def home(package: str, name: str) -> str:
        full = f"{package}.{name}"
        return home(lazy[full], name) if full in lazy else full if full in modules else package

    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        graph[module] = set()
        for node in ast.walk(ast.parse((SOURCE / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                graph[module] |= {home(node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                graph[module] |= {alias.name for alias in node.names if alias.name in modules}
        graph[module] -= {module}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules of which each imports the next one, and the last one the first; none if there is no circle."""
    done: set[str] = set()

    def look(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        for other in () if module in done else sorted(graph[module]):
            if round_trip := look(other, [*path, module]):
                return round_trip
        done.add(module)
        return []

    return next(filter(None, (look(module, []) for module in graph)), [])


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = module_graph()
    assert "torchcaps.models.presets.registry" in graph["torchcaps.models.unet"], "imports in functions count"
    assert "torchcaps.export.card" in graph["torchcaps.models.network"], "imports for types count"
    assert circle(graph) == []
    graph["torchcaps.errors"].add("torchcaps.models.files.saving")
    assert {"torchcaps.errors", "torchcaps.models.files.saving"} <= set(circle(graph))


def loaded_by(*statements: str) -> list[set[str]]:
    """Which heavy packages a fresh interpreter has loaded after each of some statements."""
    look = f"print(*(name for name in {HEAVY} if name in sys.modules))"
    code = "import sys\n" + "".join(f"{statement}\n{look}\n" for statement in statements)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in run.stdout.split("\n")[:-1]]


@pytest.mark.slow
def test_only_what_is_used_is_loaded() -> None:
    at_first, a_function, networks = loaded_by(
        "import torchcaps; dir(torchcaps); torchcaps.__version__", "torchcaps.squash", "torchcaps.create_model"
    )
    assert at_first == set()
    assert a_function == {"torch", "numpy"}
    assert networks <= {"torch", "numpy", "huggingface_hub", "jinja2"}
    modules = {".".join(("torchcaps", *path.with_suffix("").parts)) for path in FILES} - {"torchcaps.sklearn"}
    (of_all,) = loaded_by(f"import {', '.join(name.removesuffix('.__init__') for name in modules)}")
    assert of_all <= {"torch", "numpy", "PIL", "lightning_fabric"}, "import it in the function that needs it"
    assert loaded_by(f"import {TORCH_FREE}")[0] <= {"numpy", "PIL"}
