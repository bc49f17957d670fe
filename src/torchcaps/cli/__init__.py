"""The command line: ``torchcaps``, or ``python -m torchcaps``.

It reads options, calls :mod:`torchcaps.training`, :mod:`torchcaps.analysis` and :mod:`torchcaps.datasets`, and prints.
No module of it imports anything heavy outside its commands, so that ``--help`` and a mistyped option answer at once.
"""

from torchcaps.cli.app import main as main
