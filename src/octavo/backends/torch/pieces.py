"""Steps with parts of prompts, run as captured pieces between the operations that depend on sequences.

Within a piece, each row of a step is computed independently. A piece captured for 640 tokens can therefore compute a
step of 543: the last 97 rows contain numbers that nobody reads. Attention and states are launched for the actual step
with its sequences and their lengths. A mixed step of a 32-layer model thus takes about 100 launches instead of 330.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.backends.torch.coded import CodedRows
from octavo.backends.torch.graphs import Capture, Replay, SentNumbers
from octavo.backends.torch.operations import evaluate
from octavo.backends.torch.paged_step import PagedStep
from octavo.backends.torch.step_arrays import HostArrays
from octavo.batch import Batch
from octavo.graph.builder import Graph, Node
from octavo.graph.ops.attention import Attention, FusedAttention
from octavo.graph.ops.encoder import CrossAttention, EncoderAttention
from octavo.graph.ops.latent_attention import LatentAttention
from octavo.graph.ops.low_rank import BesideWeights
from octavo.graph.values import TOKENS, Value

MOST_TOKENS = 2048
# Operations that depend on sequences, besides those with states.
_OF_SEQUENCES = (Attention, FusedAttention, LatentAttention, EncoderAttention, CrossAttention, BesideWeights)


def token_sizes(most: int) -> list[int]:
    """Return the numbers of tokens that are captured, largest first, for steps of up to `most` tokens."""
    sizes = [8, 16, 32, *range(64, 513, 64), *range(640, 1025, 128), *range(1280, MOST_TOKENS + 1, 256)]
    return sorted({min(size, most) for size in sizes}, reverse=True)


class Stretch(NamedTuple):
    """Consecutive nodes.

    is_captured: True if they compute each row independently.
    """

    nodes: tuple[Node, ...]
    is_captured: bool


def stretches_of(nodes: Sequence[Node]) -> list[Stretch]:
    """Divide nodes into the longest possible stretches of either kind."""
    found: list[Stretch] = []
    for node in nodes:
        has_states = node.op.cache is not None
        is_captured = node.output.rows is TOKENS and not has_states and not isinstance(node.op, _OF_SEQUENCES)
        if found and found[-1].is_captured == is_captured:
            found[-1] = Stretch((*found[-1].nodes, node), is_captured)
        else:
            found.append(Stretch((node,), is_captured))
    return found


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch captured for a certain number of tokens.

    values, codes: its outputs that other stretches read.
    """

    replay: Replay
    values: Mapping[Value, Tensor]
    codes: Mapping[Value, CodedRows]


class _Recorded:
    """A repeatable run of a stretch. `step` is the last step that ran, with its outputs."""

    def __init__(self, begin: Callable[[], PagedStep], nodes: Sequence[Node]) -> None:
        """begin: returns a new step, or the step of the previous stretches."""
        self.step = begin()
        self._begin, self._nodes = begin, nodes
        self._before = dict(self.step.values), dict(self.step.codes)

    def __call__(self) -> Tensor:
        self.step = step = self._begin()
        step.values, step.codes = dict(self._before[0]), dict(self._before[1])
        for node in self._nodes:
            evaluate(node, step)
        last = self._nodes[-1].output
        return step.values[last] if last in step.values else step.codes[last].codes


def _same(step: PagedStep) -> PagedStep:
    return step


class PromptPieces:
    """The captured pieces of an executor, one for each stretch of nodes and number of tokens."""

    def __init__(
        self,
        graph: Graph,
        nodes: Sequence[Node],
        begin: Callable[[HostArrays, Tensor], PagedStep],
        host_of: Callable[[int], HostArrays],
        capture: Capture,
        sizes: Sequence[int],
        device: torch.device,
    ) -> None:
        """nodes: the nodes before the output head.
        begin: starts a step, which may be captured, from arrays on the device.
        host_of: returns a step's host arrays for a number of tokens.
        sizes: numbers of tokens, largest first.
        """
        self._stretches, self._begin, self._capture = stretches_of(nodes), begin, capture
        self._sizes = sorted(sizes)
        readers = [{x for node in stretch.nodes for x in node.op.inputs} for stretch in self._stretches]
        before_head = set(nodes)
        head = {x for node in graph.nodes if node not in before_head for x in node.op.inputs}
        kept = {*graph.results, *head, *([graph.hidden_states] if graph.makes_logits else [])}
        self._read = [
            {node.output for node in stretch.nodes} & kept.union(*readers[:i], *readers[i + 1 :])
            for i, stretch in enumerate(self._stretches)
        ]
        self._inputs: dict[int, SentNumbers] = {}
        self._pieces: dict[int, list[Piece | None]] = {}
        for size in sizes:
            self._pieces[size] = self._captured(host_of(size), size, device)

    def _captured(self, host: HostArrays, size: int, device: torch.device) -> list[Piece | None]:
        numbers = self._inputs[size] = SentNumbers(host.flat, device)
        step: PagedStep | None = None
        pieces: list[Piece | None] = []
        for stretch, read in zip(self._stretches, self._read, strict=True):
            if stretch.is_captured:
                begin = partial(self._begin, host, numbers.tensor) if step is None else partial(_same, step)
                recorded = _Recorded(begin, stretch.nodes)
                replay = self._capture(recorded)
                step = recorded.step
                pieces.append(
                    Piece(
                        replay,
                        {value: step.values[value] for value in read if value in step.values},
                        {value: step.codes[value] for value in read if value in step.codes},
                    )
                )
                continue
            assert step is not None, "the first operation makes rows of tokens"
            for value in (node.output for node in stretch.nodes):
                if value.rows is TOKENS:  # where the operation will write it
                    place = step.workspace.place(value, size)
                    assert place is not None, f"value {value.id} is a view"
                    step.values[value] = place
            pieces.append(None)
        return pieces

    def size_of(self, batch: Batch) -> int | None:
        """Return the captured number of tokens for a step, or None if the step has too many tokens or has
        token types.
        """
        count = len(batch.token_ids)
        if not count or count > self._sizes[-1] or batch.token_types is not None:
            return None
        return self._sizes[bisect_left(self._sizes, count)]

    def evaluate(self, step: PagedStep, batch: Batch, size: int) -> None:
        """Compute the outputs of all nodes and store them in the step.

        size: result of `size_of`.
        """
        count = len(batch.token_ids)
        sent = self._inputs[size]
        sent.settle()
        ids, sources, positions = sent.numbers[: 3 * size].reshape(3, size)
        ids[:count], ids[count:] = batch.token_ids, 0
        sources[:count] = -1 if batch.token_sources is None else batch.token_sources
        sources[count:] = -1
        positions[:count], positions[count:] = batch.positions, 0
        sent.send()
        if batch.late is not None:
            moved = sent.tensor[: 3 * size].view(3, size)[:, :count]
            moved[0], moved[1], moved[2] = step.rows.token_ids, -1, step.rows.positions
        for stretch, piece in zip(self._stretches, self._pieces[size], strict=True):
            if piece is None:
                for node in stretch.nodes:
                    evaluate(node, step)
                continue
            piece.replay()
            for value, tensor in piece.values.items():
                step.values[value] = tensor[:count]
            for value, rows in piece.codes.items():
                step.codes[value] = replace(rows, codes=rows.codes[:count], scales=rows.scales[:count])
