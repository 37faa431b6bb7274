"""Grouped expert routing as in DeepSeek V2 and V3, and in models that adopted it."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.graph.ops.moe import Routing
from octavo.models._reading import ConfigReader

_GATING = {1: "softmax", 2: "sigmoid"}  # expert_gating_func of GGUF files


def checked(routing: Routing, reader: ConfigReader, count: int, *, groups: str, chosen: str) -> Routing:
    """Return the routing if it is possible with `count` experts. Raises ModelLoadError if not.

    groups, chosen: keys of the number of groups and of the number of chosen experts.
    """
    num_groups = routing.num_groups
    if count % num_groups:
        raise reader.error(groups, num_groups, f"does not divide {count} experts")
    size = count // num_groups
    if size < routing.group_best:
        raise reader.error(
            groups, num_groups, f"a group has only {size} experts, fewer than the best {routing.group_best}"
        )
    if size * routing.top_groups < routing.top_k:
        within = f"{routing.top_groups} of {num_groups} groups"
        raise reader.error(chosen, routing.top_k, f"only {size * routing.top_groups} experts are in {within}")
    return routing


def grouped_from_gguf(reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Routing:
    count = reader.integer("expert_count")
    kind = reader.integer("expert_gating_func", 1)
    if kind not in _GATING:
        raise reader.error("expert_gating_func", kind, "must be 1 (softmax) or 2 (sigmoid)")
    groups = reader.integer("expert_group_count", 1, high=count)
    has_bias = any(name.endswith((".e_score_correction_bias", ".e_score_correction.bias")) for name in shapes)
    routing = Routing(
        reader.integer("expert_used_count", high=count),
        _GATING[kind],
        reader.flag("expert_weights_norm", False),
        reader.number("expert_weights_scale", 1.0),
        groups,
        reader.integer("expert_group_used_count", groups, high=groups),
        group_best=2 if has_bias else 1,
    )
    return checked(routing, reader, count, groups="expert_group_count", chosen="expert_used_count")


def grouped_from_hf(reader: ConfigReader) -> Routing:
    """Read V3's routing: sigmoid scores, a selection bias, and groups ranked by their best two experts.

    Raises ModelLoadError naming the key.
    """
    for key, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if reader.text(key, value) != value:
            raise reader.error(key, reader.text(key), f"must be {value}")
    count = reader.integer("n_routed_experts")
    groups = reader.integer("n_group", high=count)
    routing = Routing(
        reader.integer("num_experts_per_tok", high=count),
        "sigmoid",
        reader.flag("norm_topk_prob", True),
        reader.number("routed_scaling_factor", 1.0),
        groups,
        reader.integer("topk_group", high=groups),
        group_best=2,
    )
    return checked(routing, reader, count, groups="n_group", chosen="num_experts_per_tok")
