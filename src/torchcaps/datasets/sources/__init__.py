"""The data sets, a file each, imported in the order of the list for what they register."""

# isort: off
# imported for what they register
from torchcaps.datasets.sources import digits, mnist, affnist, multimnist, smallnorb, svhn, cifar10, folder, aeon, npz  # noqa: F401
