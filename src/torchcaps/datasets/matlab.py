"""Matlab's .mat files of version 5."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from torchcaps.errors import InputError


def read_mat(path: Path, *names: str) -> dict[str, np.ndarray]:
    """The variables ``names`` of a Matlab file.

    Raises:
        InputError: When the file is missing, no Matlab file of version 5 or older, truncated or corrupt, or lacks one
            of the variables.
    """
    from scipy.io import loadmat

    if not path.is_file():
        raise InputError(f"there is no file {path}")
    with path.open("rb") as file:
        try:
            found = loadmat(file, variable_names=names)
        except Exception as error:  # scipy's reader trusts the bytes: damaged ones raise whatever comes of them
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(
                f"{path} is no Matlab file of version 5, or a truncated or corrupt one: {reason}"
            ) from error
    for name in names:
        if not isinstance(found.get(name), np.ndarray):
            there = ", ".join(sorted(key for key in found if not key.startswith("__"))) or "none of those looked for"
            raise InputError(f"{path} has no variable {name}; it holds {there}")
    return {name: found[name] for name in names}
