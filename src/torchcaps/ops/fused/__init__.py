"""Vote-free dynamic routing with its own backward pass: the votes, B·I·J·D numbers, are never built.

``README.md`` beside this folder derives every step; names in brackets, such as [logits], are the steps' names there.
To be read in this order:

- :mod:`.forward` and :mod:`.backward`: the two passes, from top to bottom;
- :mod:`.layer`: a call's tensors, how they are cut, the work buffers, and the steps that both passes take;
- :mod:`.autograd`: how PyTorch calls all this.

Inside, poses are (B, K, I) and weights (J, D, K, I): the long axis comes last, and each step is a matrix product or
runs along it. A block is the part of the weights that is worked on at a time, (j, D, K·i); small letters are its sizes.
"""

from torchcaps.ops.fused.autograd import route_recompute
from torchcaps.ops.fused.layer import Options

__all__ = ["Options", "route_recompute"]
