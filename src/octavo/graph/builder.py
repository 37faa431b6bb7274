"""Builds a model as a graph of operations, and checks every shape and weight on the way."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.errors import GraphError
from octavo.graph.cache import CacheLayout, KVCache, StateCache, cache_layout
from octavo.graph.ops.adapted import AdaptedLinear
from octavo.graph.ops.attention import Attention, AttentionParams
from octavo.graph.ops.base import Op
from octavo.graph.ops.collective import AllGather
from octavo.graph.ops.encoder import EncoderAttention, EncoderAttentionParams, TokenTypeEmbedding
from octavo.graph.ops.latent_attention import HeadLinear
from octavo.graph.ops.linear import Embedding, Input, Linear, Logits, PositionEmbedding
from octavo.graph.ops.low_rank import AddLowRank
from octavo.graph.ops.moe import MoE, Routing
from octavo.graph.ops.rows import Gather
from octavo.graph.ops.rowwise import Add, LayerNorm, Mul, RMSNorm, Scale
from octavo.graph.ops.stages import Receive, Send
from octavo.graph.ops.streams import ScaleColumns
from octavo.graph.values import LOGITS, OUTPUTS, TOKENS, Parameter, RowDomain, Value

if TYPE_CHECKING:
    from octavo.graph.ops.recurrence import DeltaHeads, ScanHeads

_LAYER = re.compile(r"(.*?\.)?\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of a graph and its output value."""

    op: Op
    output: Value
    layer: str  # `layers.3`, or the stem of the weight outside of layers: `embed_tokens`

    @property
    def layer_index(self) -> int | None:
        """The index of the layer, for example 3 in `layers.3`; None outside layers."""
        number = self.layer.rpartition(".")[2]
        return int(number) if number.isdecimal() else None


class Graph:
    """A model as operations on symbolic values, in an order in which they can be run.

    weights: names and shapes of the checkpoint's weights. `add` adds any operation; the methods that look up weights
    are shorthands. All of these methods raise GraphError, naming operation, shapes and layer, if operands do not fit or
    a weight is unknown.
    """

    def __init__(self, weights: Mapping[str, tuple[int, ...]]) -> None:
        self.weights = weights
        self.nodes: list[Node] = []
        self.outputs: tuple[Value, ...] = ()  # outputs of a step; set once the model is complete
        self.tap: Value | None = None  # [OUTPUTS, cols], returned with the hidden states and computed before them
        self.borrowed: tuple[KVCache, ...] = ()  # caches of another graph, for operations without their own
        self._cache_layout: CacheLayout | None = None
        self._layer = ""

    @classmethod
    def from_nodes(cls, whole: Graph, nodes: Iterable[Node], outputs: tuple[Value, ...]) -> Graph:
        """Create a rewritten graph, or a part of one, and check it again from the first operation to the last.

        whole: the original graph. Its cache layout is kept: all parts of a graph share block tables.
        """
        graph = cls(whole.weights)
        graph._cache_layout, graph.borrowed = whole.cache_layout, whole.borrowed
        known: set[Value] = set()
        for node in nodes:
            for value in node.op.inputs:
                if value not in known:
                    raise GraphError(f"{node.layer}: {node.op.name}: value {value.id} is used before it is made")
            if _shape(node.op, node.layer) != (node.output.rows, node.output.cols):
                raise GraphError(f"{node.layer}: {node.op.name}: the output {node.output} has another shape")
            known.add(node.output)
            if isinstance(cache := node.op.cache, KVCache) and not node.op.owns_cache and not graph._has_cache(cache):
                raise GraphError(
                    f"{node.layer}: {node.op.name}: the cache of layer {cache.layer} is in another segment"
                )
            graph.nodes.append(node)
        graph.outputs = outputs
        graph.tap = whole.tap if whole.tap in known else None
        return graph

    @property
    def results(self) -> tuple[Value, ...]:
        """The values that outlive a step: the outputs, followed by the tap if there is one."""
        return self.outputs if self.tap is None else (*self.outputs, self.tap)

    @property
    def output(self) -> Value:
        """The only output; for a whole model the logits [LOGITS, vocab]."""
        if len(self.outputs) != 1:
            raise GraphError("the graph has no output yet, or several")
        return self.outputs[0]

    @output.setter
    def output(self, value: Value) -> None:
        if value.graph is not self:
            raise GraphError(f"the output {value} belongs to another graph")
        self.outputs = (value,)

    @property
    def makes_logits(self) -> bool:
        """True if the only output has the step's wanted rows, unlike the output of an inner segment."""
        return len(self.outputs) == 1 and self.outputs[0].rows in (OUTPUTS, LOGITS)

    @property
    def inputs(self) -> list[Value]:
        """The input values of a step, in the order of `Batch.inputs`."""
        entries = [(node.op.slot, node.output) for node in self.nodes if isinstance(node.op, Input)]
        return [value for _, value in sorted(entries, key=lambda entry: entry[0])]

    @property
    def receives(self) -> bool:
        """True if the graph belongs to a pipeline stage that follows another one."""
        return any(isinstance(node.op, Receive) for node in self.nodes)

    @property
    def sends(self) -> bool:
        """True if the graph's outputs are sent to the next pipeline stage."""
        return any(isinstance(node.op, Send) for node in self.nodes)

    @property
    def hidden_states(self) -> Value:
        """The input of the output head, or the output of a graph without one: [OUTPUTS, hidden].

        Raises GraphError if the graph ends in neither.
        """
        head = self._head
        if head is not None:
            return head.x
        if not self.makes_logits:
            raise GraphError("the graph does not end in an output head")
        return self.output

    @property
    def generates(self) -> bool:
        """True if the graph ends in an output head: its rows are the logits of the next tokens."""
        return len(self.outputs) == 1 and self._head is not None

    @property
    def _head(self) -> Logits | AdaptedLinear | None:
        ops = {node.output: node.op for node in self.nodes}
        head = ops.get(self.output)
        if isinstance(head, AllGather):  # gathers the vocabulary from all ranks
            head = ops[head.x]
        if isinstance(head, AddLowRank) and head.is_head:
            head = ops[head.y]
        return head if isinstance(head, Logits) or (isinstance(head, AdaptedLinear) and head.is_head) else None

    @property
    def takes_whole_texts(self) -> bool:
        """True if a step must contain all tokens of a sequence, because an operation of the graph sees all of them."""
        return any(node.op.needs_whole_texts and node.op.inputs[0].rows is TOKENS for node in self.nodes)

    @property
    def kv_caches(self) -> list[KVCache]:
        """The key-value caches that operations declare, in their order."""
        owners = (node.op for node in self.nodes if node.op.owns_cache)
        return [cache for op in owners if isinstance(cache := op.cache, KVCache)]

    @property
    def state_caches(self) -> list[StateCache]:
        """The state caches that operations declare, in their order."""
        return [cache for node in self.nodes if isinstance(cache := node.op.cache, StateCache)]

    @property
    def cache_layout(self) -> CacheLayout:
        """The groups of layers that have separate block tables."""
        return self._cache_layout or cache_layout(self.kv_caches)

    @property
    def kv_elements_per_token(self) -> int:
        """The number of cache elements per token, over all layers."""
        return sum(cache.elements_per_token for cache in self.kv_caches)

    @property
    def state_elements_per_sequence(self) -> int:
        """The number of state elements per sequence, over all layers."""
        return sum(cache.elements_per_sequence for cache in self.state_caches)

    @property
    def max_positions(self) -> int | None:
        """The number of positions that the model has learned embeddings for, or None if it has no such table."""
        tables = [node.op.num_positions for node in self.nodes if isinstance(node.op, PositionEmbedding)]
        return min(tables, default=None)

    @property
    def parameters(self) -> list[Parameter]:
        """The weights that the graph uses, without repetition, in the order of first use."""
        return list(dict.fromkeys(p for node in self.nodes for p in node.op.parameters))

    def borrow(self, caches: Iterable[KVCache], layout: CacheLayout) -> None:
        """Let operations read these caches of another graph and share its layout.

        In this graph, their windows may be shorter. Layers and sizes per token must match.
        """
        self.borrowed, self._cache_layout = tuple(dict.fromkeys(caches)), layout

    # Operations with weights. `name` is the stem: `layers.0.self_attn.q_proj`.

    def embedding(self, name: str, *, has_all: bool = True) -> Value:
        """Look up the embeddings of the step's tokens: [TOKENS, cols].

        has_all: False means that row 0 is used for ids beyond the table.
        """
        return self.add(Embedding(self._weight(name, "embedding"), has_all))

    def position_embedding(self, name: str, offset: int = 0) -> Value:
        """Look up the learned position embeddings of the step's tokens: [TOKENS, cols]."""
        return self.add(PositionEmbedding(self._weight(name, "position_embedding"), offset))

    def token_type_embedding(self, name: str) -> Value:
        """Look up the token type embeddings of the step's tokens: [TOKENS, cols]."""
        return self.add(TokenTypeEmbedding(self._weight(name, "token_type_embedding")))

    def linear(self, x: Value, name: str, *, bias: str | None = None) -> Value:
        """Compute x @ weight.T, plus the bias if the checkpoint has one.

        bias: as in `logits`.
        """
        return self.add(Linear(x, self._weight(name, "linear"), self._bias(bias or name)))

    def head_linear(self, x: Value, name: str) -> Value:
        """Multiply each head by its own matrix: the weight is [heads, out, in], x [rows, heads * in]."""
        return self.add(HeadLinear(x, self._weight(name, "head_linear")))

    def logits(
        self, x: Value, name: str, *, softcap: float | None = None, scale: float = 1.0, bias: str | None = None
    ) -> Value:
        """Apply the output head to the selected rows: [LOGITS, vocab]. `softcap` is applied after `scale`.

        bias: the module whose bias is used instead of the head's. The bias of a head tied to the embedding has another
        name.
        """
        return self.add(Logits(x, self._weight(name, "logits"), self._bias(bias or name), softcap, scale))

    def rms_norm(self, x: Value, name: str | None, eps: float, group: int = 0) -> Value:
        """Normalize groups of columns. A group is as wide as the weight, so that it has all columns or the columns of
        one head.

        name: None means no weight.
        group: number of columns in a group, if the weight covers several groups.
        """
        return self.add(RMSNorm(x, None if name is None else self._weight(name, "rms_norm"), eps, group))

    def layer_norm(self, x: Value, name: str, eps: float, group: int = 0) -> Value:
        """Apply LayerNorm.

        group: number of columns that are normalized together, with separate weights for each group; 0 means all.
        """
        return self.add(LayerNorm(x, self._weight(name, "layer_norm"), self._bias(name), eps, group))

    def moe(self, x: Value, name: str, routing: Routing, *, kind: str = "silu", **options: Any) -> Value:
        """Add the stacked experts under `name`: `experts.{gate,up,down}_proj.weight`, and `.bias` if the checkpoint has
        it.

        The router is `gate.weight` and `gate.bias`. The bias for choosing experts is `gate.e_score_correction.bias` (or
        `_bias`), and the factors of experts are `expert_scale.weight`. Experts of kind relu2 may lack a gate: then h =
        relu2(up x).
        options: further fields of `MoE`.
        """
        router, parts = f"{name}.gate", [f"{name}.experts.{part}_proj" for part in ("gate", "up", "down")]
        if kind == "relu2" and f"{parts[0]}.weight" not in self.weights:
            parts[0], kind = parts[1], "relu"  # up is its own gate: relu(up x) * up x is the square
        stored, renamed = f"{router}.e_score_correction_bias", f"{router}.e_score_correction.bias"
        selection, expert_scale = (
            self._parameter(n, "moe") if n in self.weights else None
            for n in (stored if stored in self.weights else renamed, f"{name}.expert_scale.weight")
        )
        gate, up, down = (self._weight(part, "moe") for part in parts)
        gate_bias, up_bias, down_bias = (self._bias(part, plain=True) for part in parts)
        op = MoE(
            x,
            self._weight(router, "moe"),
            gate,
            up,
            down,
            routing,
            kind,
            router_bias=self._bias(router),
            selection_bias=selection,
            gate_bias=gate_bias,
            up_bias=up_bias,
            down_bias=down_bias,
            expert_scale=expert_scale,
            **options,
        )
        return self.add(op)

    def short_conv(self, x: Value, name: str, kind: str | None = None) -> Value:
        """Convolve each column of a sequence causally with a vector of weights: see `ShortConv`."""
        from octavo.graph.ops.recurrence import ShortConv  # few models have states

        weight = self._weight(name, "short_conv")
        return self.add(ShortConv(x, weight, self._bias(name), len(self.state_caches), kind))

    def gated_delta_rule(self, qkv: Value, beta: Value, alpha: Value, name: str, heads: DeltaHeads) -> Value:
        """Apply the delta rule with the vectors `decay.weight` and `dt.bias` under `name`: see `GatedDeltaRule`."""
        from octavo.graph.ops.recurrence import GatedDeltaRule

        decay, dt_bias = (self._parameter(f"{name}.{part}", "gated_delta_rule") for part in ("decay.weight", "dt.bias"))
        index = len(self.state_caches)
        return self.add(GatedDeltaRule(qkv, beta, alpha, decay, dt_bias, heads, index))

    def selective_scan(self, xbc: Value, dt: Value, name: str, heads: ScanHeads) -> Value:
        """Apply the state space with the vectors `decay.weight`, `skip.weight` and `dt.bias` under `name`: see
        `SelectiveScan`.
        """
        from octavo.graph.ops.recurrence import SelectiveScan

        parts = ("decay.weight", "skip.weight", "dt.bias")
        decay, skip, dt_bias = (self._parameter(f"{name}.{part}", "selective_scan") for part in parts)
        return self.add(SelectiveScan(xbc, dt, decay, skip, dt_bias, heads, len(self.state_caches)))

    def channel_scan(self, x: Value, dt: Value, bc: tuple[Value, Value], name: str) -> Value:
        """Apply the state space with the vectors `decay.weight` and `skip.weight` under `name`: see `ChannelScan`.

        bc: b and c.
        """
        from octavo.graph.ops.recurrence import ChannelScan

        decay, skip = (self._parameter(f"{name}.{part}.weight", "channel_scan") for part in ("decay", "skip"))
        return self.add(ChannelScan(x, dt, *bc, decay, skip, len(self.state_caches)))

    def kimi_delta_rule(self, qkv: tuple[Value, Value, Value], gate: Value, beta: Value, decay: str) -> Value:
        """Apply the delta rule of Kimi Linear: see `DiagonalDeltaRule`.

        decay: full name of a vector with one number per head.
        """
        from octavo.graph.ops.recurrence import DiagonalDeltaRule

        q, k, v = qkv
        decays = self._parameter(decay, "diagonal_delta_rule")
        heads = decays.shape[0]
        sizes = q.cols // heads, v.cols // heads
        return self.add(DiagonalDeltaRule(q, k, v, k, k, gate, beta, decays, *sizes, True, len(self.state_caches)))

    def rwkv_delta_rule(
        self, rkv: tuple[Value, Value, Value], read_erase: tuple[Value, Value], gate: Value, dim: int
    ) -> Value:
        """Apply the delta rule of RWKV 7: see `DiagonalDeltaRule`.

        gate: logarithm of the decays.
        dim: number of columns in a head.
        """
        from octavo.graph.ops.recurrence import DiagonalDeltaRule

        r, k, v = rkv
        index = len(self.state_caches)
        return self.add(DiagonalDeltaRule(r, k, v, *read_erase, gate, None, None, dim, dim, False, index))

    def real_gated_recurrence(self, x: Value, name: str) -> Value:
        """Apply `RealGatedRecurrence` with `decay` under `name`, and `_gate` and `_bias` of `input` and `recurrent`."""
        from octavo.graph.ops.recurrence import RealGatedRecurrence

        into, decays = (self.head_linear(x, f"{name}.{gate}_gate") for gate in ("input", "recurrent"))
        names = ("decay.weight", "input_bias.weight", "recurrent_bias.weight")
        slope, *biases = (self._parameter(f"{name}.{part}", "real_gated_recurrence") for part in names)
        return self.add(RealGatedRecurrence(x, into, decays, slope, biases[0], biases[1], len(self.state_caches)))

    # Operations that name weights in their own way, or rows.

    def scale_columns(self, x: Value, name: str) -> Value:
        """Compute x * weight, a vector with a factor for each column or a single factor for all."""
        return self.add(ScaleColumns(x, self._weight(name, "scale_columns")))

    def attention(
        self,
        q: Value,
        k: Value | None,
        v: Value | None,
        params: AttentionParams,
        sinks: str | None = None,
        distance_bias: str | None = None,
    ) -> Value:
        """Apply causal attention over the paged cache of layer `params.layer`.

        sinks, distance_bias: full names of weights.
        k, v: None means the keys and values that an earlier attention of the layer has written.
        """
        logits = None if sinks is None else self._parameter(sinks, "attention")
        bias = None if distance_bias is None else self._parameter(distance_bias, "attention", plain=True)
        return self.add(Attention(q, k, v, params, logits, bias))

    def encoder_attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        params: EncoderAttentionParams,
        distance_bias: str | None = None,
        stem: str | None = None,
    ) -> Value:
        """Apply bidirectional attention within the texts of a step.

        distance_bias: full name of the weight.
        stem: prefix of the vectors by distance, `distance_keys` and `distance_queries`, if the checkpoint has them.
        """
        bias = None if distance_bias is None else self._parameter(distance_bias, "encoder_attention", plain=True)
        names = () if stem is None else (f"{stem}distance_{part}.weight" for part in ("keys", "queries"))
        vectors = (
            self._parameter(name, "encoder_attention", plain=True) if name in self.weights else None for name in names
        )
        return self.add(EncoderAttention(q, k, v, params, bias, *vectors))

    def select_rows(self, x: Value) -> Value:
        """Select the rows whose logits are wanted: [TOKENS, cols] -> [OUTPUTS, cols]."""
        return self.add(Gather(x))

    def plus(self, a: Value, b: Value) -> Value:
        """Compute a + b; the operators of values call this."""
        return self.add(Add(a, b))

    def times(self, a: Value, b: Value | float) -> Value:
        """Compute a * b; a value b with one column multiplies whole rows."""
        if b == 1.0:
            return a
        return self.add(Mul(a, b) if isinstance(b, Value) else Scale(a, float(b)))

    def add(self, op: Op) -> Value:
        """Check an operation, add it, and return its output.

        The methods above look up weights by name and then call this.
        """
        for value in op.inputs:
            if value.graph is not self:
                raise GraphError(f"{self._layer}: {op.name}: value {value.id} belongs to another graph")
        rows, cols = _shape(op, self._layer)
        cache = op.cache
        if isinstance(cache, KVCache):
            self._check_cache(op, cache)
        if isinstance(cache, StateCache) and any(cache.index == other.index for other in self.state_caches):
            raise GraphError(f"{self._layer}: {op.name}: state {cache.index} already exists")
        output = Value(len(self.nodes), rows, cols, self)
        self.nodes.append(Node(op, output, self._layer))
        return output

    def _check_cache(self, op: Op, cache: KVCache) -> None:
        """Raise GraphError if another operation owns the cache, or if this operation reads a cache that no operation
        owns.
        """
        if op.owns_cache and any(cache.layer == other.layer for other in self.kv_caches):
            raise GraphError(f"{self._layer}: {op.name}: layer {cache.layer} already has a cache")
        if not op.owns_cache and not self._has_cache(cache):
            raise GraphError(f"{self._layer}: {op.name}: layer {cache.layer} has no such cache to read")

    def _has_cache(self, cache: KVCache) -> bool:
        return cache in self.kv_caches or cache in self.borrowed

    def _weight(self, stem: str, op_name: str) -> Parameter:
        return self._parameter(f"{stem}.weight", op_name)

    def _bias(self, stem: str, *, plain: bool = False) -> Parameter | None:
        name = f"{stem}.bias"
        return Parameter(name, tuple(self.weights[name]), plain=plain) if name in self.weights else None

    def _parameter(self, name: str, op_name: str, *, plain: bool = False) -> Parameter:
        layer = _LAYER.match(name)
        self._layer = layer[0] if layer else name.rsplit(".", 1)[0]
        if name not in self.weights:
            raise GraphError(f"{self._layer}: {op_name}: the checkpoint has no weight {name}")
        return Parameter(name, tuple(self.weights[name]), plain=plain)


def _shape(op: Op, layer: str) -> tuple[RowDomain, int]:
    """Return the output shape of `op`; add the operation and layer to errors."""
    try:
        return op.infer_shape()
    except GraphError as error:
        raise GraphError(f"{layer}: {op.name}: {error}") from None
