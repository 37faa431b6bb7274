"""The canonical weights to which every checkpoint format is converted when it is loaded.

The code of a format turns its own packing into one of these types and knows nothing about devices. A backend packs
these types for its kernels and knows nothing about formats.
"""

from octavo.quantization.packed.base import Weight as Weight
from octavo.quantization.packed.base import WeightInfo as WeightInfo
from octavo.quantization.packed.base import arrays_of as arrays_of
from octavo.quantization.packed.base import check_finite as check_finite
from octavo.quantization.packed.base import concat as concat
from octavo.quantization.packed.base import stack as stack
from octavo.quantization.packed.codebook import CodebookWeight as CodebookWeight
from octavo.quantization.packed.float8 import Float8Weight as Float8Weight
from octavo.quantization.packed.grouped import GroupedWeight as GroupedWeight
from octavo.quantization.packed.stored import DENSE_TYPES as DENSE_TYPES
from octavo.quantization.packed.stored import DenseWeight as DenseWeight
from octavo.quantization.packed.stored import GGMLWeight as GGMLWeight
from octavo.quantization.packed.stored import group_of as group_of
