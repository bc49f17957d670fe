"""Numbers of the analyses that the command line shows, too. Nothing here imports torch."""

from __future__ import annotations

from torchcaps.ranges import Range

# Where nobody says otherwise:
ANGLES = tuple(range(-90, 91, 15))  # degrees, counter-clockwise
EPSILONS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)  # largest changes of a pixel of 0..1
PGD_STEPS = 10
EVASION_STEPS = 40  # of adaptive PGD, and of PGD in the same table

STEPS = Range(1, 10_000, whole=True)  # of PGD
