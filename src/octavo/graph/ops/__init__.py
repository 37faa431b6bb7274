"""The operations, each defined once: arguments, shape rule, cost and numpy definition."""

from octavo.batch import Array as Array
from octavo.graph.ops.attention import Attention as Attention
from octavo.graph.ops.attention import AttentionParams as AttentionParams
from octavo.graph.ops.attention import FusedAttention as FusedAttention
from octavo.graph.ops.attention import Rope as Rope
from octavo.graph.ops.attention import RopeParams as RopeParams
from octavo.graph.ops.base import Evaluation as Evaluation
from octavo.graph.ops.base import LayerCache as LayerCache
from octavo.graph.ops.base import Op as Op
from octavo.graph.ops.base import StepSizes as StepSizes
from octavo.graph.ops.linear import Embedding as Embedding
from octavo.graph.ops.linear import FusedLinear as FusedLinear
from octavo.graph.ops.linear import Input as Input
from octavo.graph.ops.linear import Linear as Linear
from octavo.graph.ops.linear import Logits as Logits
from octavo.graph.ops.linear import MoE as MoE
from octavo.graph.ops.linear import SelectRows as SelectRows
from octavo.graph.ops.rowwise import Activation as Activation
from octavo.graph.ops.rowwise import Add as Add
from octavo.graph.ops.rowwise import GatedActivation as GatedActivation
from octavo.graph.ops.rowwise import LayerNorm as LayerNorm
from octavo.graph.ops.rowwise import Mul as Mul
from octavo.graph.ops.rowwise import RMSNorm as RMSNorm
from octavo.graph.ops.rowwise import Scale as Scale
from octavo.graph.ops.rowwise import Softcap as Softcap
