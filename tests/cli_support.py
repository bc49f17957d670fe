"""The command line, called in this process."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from torchcaps.cli import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


class Cli:
    """Calls ``torchcaps`` with words, or paths."""

    def __call__(self, *words: Any) -> Result:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main([str(word) for word in words])
        return Result(code, out.getvalue(), err.getvalue())

    def out(self, *words: Any) -> str:
        """What it prints, where nothing is wrong."""
        result = self(*words)
        assert (result.code, result.err) == (0, "")
        return result.out

    def json(self, *words: Any) -> Any:
        """What it prints for programs."""
        result = self(*words, "--json")
        assert result.code == 0, result.err
        return json.loads(result.out)
