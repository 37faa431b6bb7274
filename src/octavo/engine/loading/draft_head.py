"""The description of a head that drafts from its target's hidden states."""

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
    """A head that drafts from hidden states of its target.

    taps: the target's layers whose inputs it reads. Empty if it reads the input of the output head.
    columns: width of each of its inputs.
    target_ids: the token id for each row of its logits, or None if row numbers are token ids.
    bias: added to the product of its first input; None for no bias.
    borrows_cache: it reads the target's keys and values and has no cache of its own.
    """

    taps: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    target_ids: NDArray[np.int32] | None = None
    bias: NDArray[np.float32] | None = None
    borrows_cache: bool = False

    def tapped(self, target: Graph) -> Graph:
        """Extend the target so that it returns what the head reads. Raises GraphError like `with_tap`."""
        return with_tap(target, self.taps) if self.taps else target
