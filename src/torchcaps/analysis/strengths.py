"""Numbers of the analyses that the command line shows, too. Nothing here imports torch."""

from __future__ import annotations

from torchcaps.ranges import Range

#: Where nobody says otherwise: degrees, counter-clockwise.
ANGLES = tuple(range(-90, 91, 15))
#: Likewise: largest changes of a pixel of 0..1.
EPSILONS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
#: Likewise: steps of PGD.
PGD_STEPS = 20
#: How many steps of PGD there may be.
STEPS = Range(1, 10_000)
#: How many strengths a curve may have.
MOST_STRENGTHS = 1000
#: How many routing iterations fit into one figure.
DRAWN_ITERATIONS = Range(1, 100)
