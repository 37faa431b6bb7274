"""Mixtures of experts against the blocks of transformers, in float64: routing, biases, activations, shared experts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma4TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LongcatFlashConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Step3p7TextConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts, Gemma4TextRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.step3p7.modeling_step3p7 import Step3p7SparseMoeBlock

from octavo.errors import GraphError
from octavo.graph.builder import Graph
from octavo.graph.ops.base import Evaluation
from octavo.graph.ops.linear import Input
from octavo.graph.ops.moe import MoE, Routing
from octavo.graph.ops.rowwise import Activation
from octavo.graph.values import LOGITS, TOKENS, Parameter, Value
from octavo.models._layers import gated_mlp
from tests.support.evaluation import whole_prompt

ROWS, HIDDEN, WIDTH, EXPERTS = 40, 24, 10, 12
Tensors = dict[str, torch.Tensor]
Build = Callable[[Graph, Value], Value]
SIZES = {"hidden_size": HIDDEN, "num_attention_heads": 2, "num_experts_per_tok": 3}
NAMES = {"mlp.shared_experts.": "mlp.shared_expert.", "mlp.router.": "mlp.gate."}


def randomized(block: torch.nn.Module) -> tuple[torch.nn.Module, Tensors]:
    """A block of float64 with random tensors, and these under the graph's names."""
    torch.manual_seed(3)
    block = block.double().eval()
    tensors = {}
    for key, tensor in block.state_dict().items():
        tensor.copy_(torch.randn(tensor.shape, dtype=tensor.dtype) * (0.1 if "correction" in key else 0.5))
        name = f"mlp.{key}"
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        tensors[name] = tensor
    return block, tensors


def with_halves(tensors: Tensors) -> Tensors:
    """`gate_up_proj` [experts, 2 width, hidden], gate before up."""
    gate, up = tensors.pop("mlp.experts.gate_up_proj").chunk(2, dim=1)
    down = tensors.pop("mlp.experts.down_proj")
    return tensors | {f"mlp.experts.{n}_proj.weight": w for n, w in (("gate", gate), ("up", up), ("down", down))}


def with_turns(tensors: Tensors) -> Tensors:
    """gpt-oss' `gate_up_proj` [experts, hidden, 2 width] with gate and up in turn, and its biases."""
    both, bias = tensors.pop("mlp.experts.gate_up_proj").mT, tensors.pop("mlp.experts.gate_up_proj_bias")
    down, down_bias = tensors.pop("mlp.experts.down_proj").mT, tensors.pop("mlp.experts.down_proj_bias")
    parts = {"gate": (both[:, ::2], bias[:, ::2]), "up": (both[:, 1::2], bias[:, 1::2]), "down": (down, down_bias)}
    kinds = ("weight", "bias")
    return tensors | {f"mlp.experts.{n}_proj.{k}": t for n, p in parts.items() for k, t in zip(kinds, p, strict=True)}


def check(block: torch.nn.Module, tensors: Tensors, build: Build) -> None:
    """The same rows through the block and through the graph that `build` makes of its input."""
    x = 1.5 * torch.randn(1, ROWS, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        expected = block(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    g = Graph({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    value = g.add(Input(0, TOKENS, HIDDEN))
    build(g, value)
    weights = {p: tensors[p.name].numpy() for p in g.parameters}
    assert {p.name for p in weights} == set(tensors)
    evaluation = Evaluation(whole_prompt(ROWS), np.float64, weights, {}, {}, {value: x[0].numpy()})
    for node in g.nodes[1:]:
        evaluation.values[node.output] = node.op.evaluate(evaluation)
    out = evaluation.values[g.nodes[-1].output]
    # transformers computes scores in float32.
    np.testing.assert_allclose(out, expected.reshape(x.shape)[0].numpy(), atol=2e-5 * expected.abs().max().item())


def test_llama4_scales_what_experts_read() -> None:
    config = Llama4TextConfig(
        **{**SIZES, "num_experts_per_tok": 2}, intermediate_size=WIDTH, num_local_experts=EXPERTS, head_dim=8
    )
    block, tensors = randomized(Llama4TextMoe(config))
    tensors["mlp.experts.gate_up_proj"] = tensors["mlp.experts.gate_up_proj"].mT
    tensors["mlp.experts.down_proj"] = tensors["mlp.experts.down_proj"].mT
    routing = Routing(2, "sigmoid", normalize=False, on_input=True)
    check(block, with_halves(tensors), lambda g, x: g.moe(x, "mlp", routing) + gated_mlp(g, x, "mlp.shared_expert"))


def test_mixtral() -> None:
    config = MixtralConfig(**SIZES, intermediate_size=WIDTH, num_local_experts=EXPERTS)
    block, tensors = randomized(MixtralSparseMoeBlock(config))
    check(block, with_halves(tensors), lambda g, x: g.moe(x, "mlp", Routing(3)))


@pytest.mark.parametrize("normalize", [False, True])
def test_qwen2_moe_has_a_shared_expert_with_a_gate(normalize: bool) -> None:
    config = Qwen2MoeConfig(
        **SIZES,
        moe_intermediate_size=WIDTH,
        shared_expert_intermediate_size=14,
        num_experts=EXPERTS,
        norm_topk_prob=normalize,
    )
    block, tensors = randomized(Qwen2MoeSparseMoeBlock(config))

    def build(g: Graph, x: Value) -> Value:
        gate = g.add(Activation(g.linear(x, "mlp.shared_expert_gate"), "sigmoid"))
        return g.moe(x, "mlp", Routing(3, normalize=normalize)) + gated_mlp(g, x, "mlp.shared_expert") * gate

    check(block, with_halves(tensors), build)


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_deepseek_v2(method: str) -> None:
    config = DeepseekV2Config(
        **SIZES,
        moe_intermediate_size=WIDTH,
        n_routed_experts=EXPERTS,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        topk_method=method,
        routed_scaling_factor=2.5,
    )
    block, tensors = randomized(DeepseekV2Moe(config))
    groups = {"num_groups": 4, "top_groups": 2} if method != "greedy" else {}
    routing = Routing(3, normalize=False, scale=2.5, **groups)
    check(block, with_halves(tensors), lambda g, x: g.moe(x, "mlp", routing) + gated_mlp(g, x, "mlp.shared_expert"))


@pytest.mark.parametrize("normalize", [False, True])
def test_deepseek_v3(normalize: bool) -> None:
    config = DeepseekV3Config(
        **SIZES,
        moe_intermediate_size=WIDTH,
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        n_group=3,
        topk_group=2,
        norm_topk_prob=normalize,
        routed_scaling_factor=2.5,
    )
    block, tensors = randomized(DeepseekV3MoE(config))
    routing = Routing(3, "sigmoid", normalize, 2.5, 3, 2, 2)
    check(block, with_halves(tensors), lambda g, x: g.moe(x, "mlp", routing) + gated_mlp(g, x, "mlp.shared_expert"))


def test_gpt_oss() -> None:
    """Softmax after the choice, biases everywhere, gates and products that are limited."""
    config = GptOssConfig(**SIZES, intermediate_size=WIDTH, num_local_experts=EXPERTS)
    block, tensors = randomized(GptOssMLP(config))
    check(
        block,
        with_turns(tensors),
        lambda g, x: g.moe(x, "mlp", Routing(3), kind="quick_gelu", limit=7.0, up_offset=1.0),
    )


def test_longcat_flash_has_experts_that_return_their_input() -> None:
    config = LongcatFlashConfig(
        hidden_size=HIDDEN, expert_ffn_hidden_size=WIDTH, n_routed_experts=EXPERTS, zero_expert_num=5, moe_topk=4
    )
    block, tensors = randomized(LongcatFlashMoE(config))
    tensors["mlp.gate.weight"] = tensors.pop("mlp.gate.classifier.weight")
    tensors["mlp.experts.gate_up_proj"] = tensors["mlp.experts.gate_up_proj"][:EXPERTS]
    routing = Routing(4, normalize=False, scale=6.0, num_identities=5)
    check(block, with_halves(tensors), lambda g, x: g.moe(x, "mlp", routing))


@pytest.mark.parametrize("limit", [0.0, 0.2, 1.5])
def test_step_limits_gates_behind_their_activation(limit: float) -> None:
    config = Step3p7TextConfig(
        **{**SIZES, "num_hidden_layers": 1},
        moe_intermediate_size=WIDTH,
        share_expert_dim=14,
        n_routed_experts=EXPERTS,
        moe_router_scaling_factor=3.0,
        swiglu_limits=[limit],
    )
    block, tensors = randomized(Step3p7SparseMoeBlock(config, 0))
    routing = Routing(3, "sigmoid", scale=3.0)

    def build(g: Graph, x: Value) -> Value:
        routed = g.moe(x, "mlp", routing, limit=limit or None, limits_activated=True)
        return routed + gated_mlp(g, x, "mlp.shared_expert")

    check(block, with_halves(tensors), build)


class Gemma4Block(torch.nn.Module):
    """The router reads other rows than the experts."""

    def __init__(self, config: Gemma4TextConfig) -> None:
        super().__init__()
        self.router, self.experts = Gemma4TextRouter(config), Gemma4TextExperts(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, HIDDEN)
        _, weights, chosen = self.router(rows)
        out: torch.Tensor = self.experts(0.5 * rows, chosen, weights.to(rows.dtype))
        return out


def test_gemma4_scales_experts_and_routes_by_other_rows() -> None:
    config = Gemma4TextConfig(
        hidden_size=HIDDEN, num_experts=EXPERTS, top_k_experts=3, moe_intermediate_size=WIDTH, rms_norm_eps=1e-6
    )
    block, tensors = randomized(Gemma4Block(config))
    theirs = {"gate.proj": "gate", "gate.scale": "router_norm.weight", "gate.per_expert_scale": "expert_scale.weight"}
    for old, new in theirs.items():
        tensors = {name.replace(f"mlp.{old}", f"mlp.{new}"): tensor for name, tensor in tensors.items()}

    def build(g: Graph, x: Value) -> Value:
        routed = g.rms_norm(x, "mlp.router_norm", 1e-6) * HIDDEN**-0.5
        return g.moe(x * 0.5, "mlp", Routing(3), kind="gelu_tanh", router_x=routed)

    check(block, with_halves(tensors), build)


def test_equal_scores_choose_the_lower_expert() -> None:
    chosen, weights = Routing(3, num_groups=3, top_groups=2).choose(np.zeros((1, 12)), None)
    np.testing.assert_array_equal(chosen, [[0, 1, 2]])
    np.testing.assert_allclose(weights, 1 / 3)


X = Value(0, TOKENS, 8)
WEIGHTS = (Parameter("r", (4, 8)), Parameter("g", (4, 6, 8)), Parameter("u", (4, 6, 8)), Parameter("d", (4, 8, 6)))
WRONG = {
    "down": (lambda: MoE(X, *WEIGHTS[:3], WEIGHTS[1], Routing(2)), r"g is \[4, 6, 8\], not \[4, 8, 6\]"),
    "scoring": (
        lambda: MoE(X, *WEIGHTS, Routing(2, "silu")),
        "scoring is 'silu'; it must be one of softmax, sigmoid",
    ),
    "mixed": (lambda: MoE(X, *WEIGHTS, Routing(2, "sparsemixer")), "sparsemixer allows no groups"),
    "top_k": (lambda: MoE(X, *WEIGHTS, Routing(5)), "top_k 5 of 4 experts"),
    "groups": (lambda: MoE(X, *WEIGHTS, Routing(2, num_groups=3)), "num_groups 3 does not divide 4 experts"),
    "top_groups": (lambda: MoE(X, *WEIGHTS, Routing(2, num_groups=2, top_groups=3)), "top_groups 3 of 2 groups"),
    "group_best": (lambda: MoE(X, *WEIGHTS, Routing(2, group_best=5)), "group_best 5 of 4 experts in a group"),
    "too few": (lambda: MoE(X, *WEIGHTS, Routing(3, num_groups=2)), "top_k 3 of 2 experts"),
    "identities": (
        lambda: MoE(X, *WEIGHTS, Routing(2, num_identities=4)),
        "num_identities 4 of 4 choices leaves no expert",
    ),
    "experts beside identities": (
        lambda: MoE(X, *WEIGHTS, Routing(2, num_identities=1)),
        "experts 0 to 3 are not part of 3",
    ),
    "limit": (lambda: MoE(X, *WEIGHTS, Routing(2), limit=0.0), "limit 0.0 is not positive"),
    "router_x": (
        lambda: MoE(X, *WEIGHTS, Routing(2), router_x=Value(1, LOGITS, 8)),
        r"router_x \[logits, 8\] has other rows than x \[tokens, 8\]",
    ),
    "scale": (lambda: MoE(X, *WEIGHTS, Routing(2), expert_scale=Parameter("s", (8,))), r"s is \[8\], not \[4\]"),
    "bias": (
        lambda: MoE(X, *WEIGHTS, Routing(2), gate_bias=Parameter("b", (4, 8), plain=True)),
        r"b is \[4, 8\], not \[4, 6\]",
    ),
    "packed bias": (
        lambda: MoE(X, *WEIGHTS, Routing(2), gate_bias=Parameter("b", (4, 6))),
        "biases of experts must be plain parameters",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_shape_rules(case: str) -> None:
    make, message = WRONG[case]
    with pytest.raises(GraphError, match=message):
        make().infer_shape()
