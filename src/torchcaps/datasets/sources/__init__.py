"""The data sets, a file each, imported in the order of the list for what they register."""

# isort: off
# imported for what they register
from torchcaps.datasets.sources import digits, mnist, affnist, multimnist, smallnorb, svhn, cifar10  # noqa: F401
from torchcaps.datasets.sources import folder, table, aeon, npz  # noqa: F401
