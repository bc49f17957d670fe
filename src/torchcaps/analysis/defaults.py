"""Defaults of the analyses, shared with the command line. Nothing here imports torch."""

from __future__ import annotations

from torchcaps.ranges import Range

ANGLES = tuple(range(-90, 91, 15))  # degrees, counter-clockwise
EPSILONS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)  # largest change of a pixel of 0..1
PGD_STEPS = 10
EVASION_STEPS = 40  # steps of adaptive PGD, and of plain PGD in the same table

STEPS = Range(1, 10_000, whole=True)  # steps of PGD
