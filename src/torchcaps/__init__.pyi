from . import analysis as analysis
from . import datasets as datasets
from . import export as export
from . import models as models
from . import nn as nn
from . import ops as ops
from . import reproduce as reproduce
from . import testing as testing
from . import training as training
from .errors import InputError as InputError
from .models import CapsNet as CapsNet
from .models import create_model as create_model
from .models import list_presets as list_presets
from .models import load_pretrained as load_pretrained
from .ops.contractions import agreement as agreement
from .ops.contractions import weighted_sum as weighted_sum
from .ops.dynamic_routing import compute_votes as compute_votes
from .ops.dynamic_routing import dynamic_routing as dynamic_routing
from .ops.dynamic_routing import route as route
from .ops.dynamic_routing import routing_rounds as routing_rounds
from .ops.losses import margin_loss as margin_loss
from .ops.losses import normalised_cross_entropy as normalised_cross_entropy
from .ops.losses import reconstruction_loss as reconstruction_loss
from .ops.memory import set_working_memory as set_working_memory
from .ops.squash import safe_norm as safe_norm
from .ops.squash import squash as squash

__version__: str
