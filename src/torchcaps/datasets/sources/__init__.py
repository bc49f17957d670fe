"""The data sets, one file each. Importing them registers them, in the order of the list."""

# isort: off
from torchcaps.datasets.sources import digits, mnist, affnist, multimnist, smallnorb, svhn, cifar10  # noqa: F401
from torchcaps.datasets.sources import folder, table, aeon, npz, nifti, scene, tetrominoes  # noqa: F401
