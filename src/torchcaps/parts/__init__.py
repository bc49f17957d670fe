"""Parts: the modules of a network and its optimizer. Each is chosen by its name and declares its options once.

A part is a class that is registered under a name. An argument of its constructor *without* a default is a size, which
follows from the data. An argument *with* a default is an option: its annotation gives its range, its ``Args:`` line is
its help, and an attribute of the same name holds its value. That is enough to check an option, to save it in
config.json, to read it back, and to set it by its name from Python and from the command line.

A caller names a part in one of four ways:

- by its name: ``"dynamic"``;
- by its name and the value of its first option, if that is a text: ``"timm:resnet18"``;
- by a mapping: ``{"name": "dynamic", "leaky": True}``;
- by the module itself.

A tree is a mapping with every option of every part, as config.json holds it.
"""

from torchcaps.parts.modules import Device as Device
from torchcaps.parts.modules import Dtype as Dtype
from torchcaps.parts.modules import build, describe, register
from torchcaps.parts.modules import placed as placed
from torchcaps.parts.modules import summary as summary
from torchcaps.parts.registry import HOMES as HOMES
from torchcaps.parts.registry import KINDS as KINDS
from torchcaps.parts.registry import PARTS as PARTS
from torchcaps.parts.registry import Choice, Option, options
from torchcaps.parts.registry import Registry as Registry
from torchcaps.parts.registry import Spec as Spec
from torchcaps.parts.registry import Tree as Tree
from torchcaps.parts.registry import all_parts as all_parts
from torchcaps.parts.registry import find as find
from torchcaps.parts.registry import part_of as part_of
from torchcaps.parts.trees import MOVED_OPTIONS as MOVED_OPTIONS
from torchcaps.parts.trees import Settings as Settings
from torchcaps.parts.trees import UnknownOption as UnknownOption
from torchcaps.parts.trees import complete, flat, override
from torchcaps.parts.trees import own_parts as own_parts

__all__ = ["Choice", "Option", "build", "complete", "describe", "flat", "options", "override", "register"]
