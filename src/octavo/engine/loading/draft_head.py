"""The description of a head that drafts from hidden states of its target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.graph.builder import Graph
from octavo.graph.taps import with_tap

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class DraftHead:
    """taps: the layers of the target whose inputs it reads; none: it reads the input of the output head.
    columns: of each of its inputs.
    target_ids: the token of each row of its logits; None means the row's number.
    bias: added to the product of its first input, or None if there is none.
    borrows_cache: it reads the target's keys and values and has none of its own.
    """

    taps: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    target_ids: NDArray[np.int32] | None = None
    bias: NDArray[np.float32] | None = None
    borrows_cache: bool = False

    def tapped(self, target: Graph) -> Graph:
        """The target, which gives what the head reads. Raises GraphError as `with_tap`."""
        return with_tap(target, self.taps) if self.taps else target
