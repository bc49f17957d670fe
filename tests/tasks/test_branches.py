"""Code outside the tasks asks the task object: it never compares the name of a task, and asks few questions."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchcaps
from torchcaps.tasks import TASKS
from torchcaps.tasks.base import Task

SOURCE = Path(torchcaps.__file__).parent
MAX_QUESTIONS = 7
FLAGS = {name for name, value in vars(Task).items() if isinstance(value, bool)} | {"supports", "has_targets"}
"""Attributes that say what kind of task it is."""
CLASSES = {"Evaluation", "TargetEvaluation", "PixelEvaluation", "ColumnTask", "Objects"}
CLASSES |= {type(task).__name__ for task in TASKS.values()}


AMBIGUOUS = {"pixels", "objects"}
"""Names of tasks that are also other words; they count beside the word task only."""


def is_name(node: ast.AST, inside: ast.AST | None = None) -> bool:
    if not isinstance(node, ast.Constant) or node.value not in TASKS:
        return False
    return node.value not in AMBIGUOUS or inside is None or "task" in ast.unparse(inside)


def questions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines that ask which task it is: comparisons and tables of names, flags, and types."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(is_name(each, node) for side in sides for each in getattr(side, "elts", [side])):
                yield node.lineno, "comparison"
        elif isinstance(node, ast.MatchValue) and is_name(node.value):
            yield node.value.lineno, "match"
        elif isinstance(node, ast.Dict):
            if sum(key is not None and is_name(key) and key.value not in AMBIGUOUS for key in node.keys) > 1:
                yield node.lineno, "table"
        elif isinstance(node, ast.Attribute) and node.attr in FLAGS:
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            kinds = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
            if kinds & CLASSES:
                yield node.lineno, "isinstance"


def test_no_code_compares_the_name_of_a_task() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        if SOURCE / "tasks" not in path.parents:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found += [f"{path.relative_to(SOURCE)}:{line}: {kind}" for line, kind in questions(tree)]
    assert not [each for each in found if each.endswith(("comparison", "match", "table", "isinstance"))], found
    assert len(found) <= MAX_QUESTIONS, found


@pytest.mark.parametrize(
    "code",
    [
        'if network.task == "labels": pass',
        'if task.name != "pixels": pass',
        'if "regression" != network.task: pass',
        'if network.task in ("labels", "regression"): pass',
        'words = {"classes": 1, "labels": 2}[network.task]',
        "if images.has_targets: pass",
        "if task.has_masks: pass",
        'if task.supports("x"): pass',
        "if isinstance(found, TargetEvaluation): pass",
        'match network.task:\n case "labels": pass',
        'WORDS: dict[TaskName, int] = {"classes": 1, "labels": 2}',
    ],
)
def test_a_question_is_found(code: str) -> None:
    assert len(list(questions(ast.parse(code)))) == 1
