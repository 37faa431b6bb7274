"""The provider of each kind of operation, and the reasons against the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.backends.torch.kernels.planes import planes_of
from octavo.backends.torch.providers import problems as problems_module
from octavo.backends.torch.providers.choice import ProviderChoice, choices, choose, product_problems, report
from octavo.backends.torch.providers.humming import extra_bytes
from octavo.backends.torch.providers.problems import KernelProblem, Place, ProductProblem, PromptProblem, StateProblem
from octavo.backends.torch.weights import held_type
from octavo.graph.ops.attention import AttentionParams
from tests.support.quantize import random_weight
from tests.support.tiny_models import tiny_graph

H200 = Place((9, 0), torch.bfloat16)
PLAIN = AttentionParams(0, 32, 8, 128, 0.1)
PROMPT = PromptProblem(H200, PLAIN, torch.bfloat16)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The optional libraries that seem to be there: those of a machine with the extra."""
    found = {"humming", "fla"}
    monkeypatch.setattr(problems_module, "find_spec", lambda name: name if name in found else None)
    choose.cache_clear()
    yield found
    choose.cache_clear()


def product(type_name: str, shape: tuple[int, int] = (256, 512), place: Place = H200) -> ProductProblem:
    planes = planes_of(random_weight(type_name, (2, shape[1]), 1))
    assert planes is not None
    return ProductProblem.of(place, planes, shape)


@pytest.mark.parametrize(
    ("problem", "winner"),
    [
        (product("Q4_K"), "humming"),
        (product("Q6_K"), "humming"),
        (PROMPT, "varlen"),
        (replace(PROMPT, params=replace(PLAIN, window=512)), "varlen"),
        (StateProblem(H200, "gated delta rule", 128, 128), "fla"),
        (StateProblem(H200, "selective scan", 128, 64), "fla"),
    ],
)
def test_libraries_that_can_win(problem: KernelProblem, winner: str, installed: set[str]) -> None:
    assert choose(problem).winner == winner
    installed.clear()
    choose.cache_clear()
    expected = "varlen" if winner == "varlen" else "triton"
    assert choose(problem).winner == expected


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (product("IQ4_NL"), "its codes are entries of a table"),
        (product("Q4_K", (100, 512)), "100 x 512 is not a multiple of 64 x 128"),
        (product("Q4_K", place=Place((7, 5), torch.float16)), "it needs compute capability 8.0, and the GPU has 7.5"),
        (product("Q4_K", place=replace(H200, repeats=True)), "deterministic"),
        (product("Q4_K", place=replace(H200, capability=None)), "there is no GPU"),
        (product("Q4_K", place=replace(H200, dtype=torch.float32)), "in 16 bits, not in float32"),
        (replace(product("Q8_0"), rounds_inputs=True), "rounds inputs to eight bits"),
        (replace(PROMPT, params=replace(PLAIN, softcap=30.0)), "a soft cap"),
        (replace(PROMPT, params=replace(PLAIN, window=64, chunked=True)), "chunks"),
        (replace(PROMPT, params=replace(PLAIN, value_dim=64)), "the keys are a latent"),
        (replace(PROMPT, params=replace(PLAIN, head_dim=320)), "heads of 320 columns"),
        (replace(PROMPT, params=replace(PLAIN, sees_spans=9)), "tokens of an image"),
        (replace(PROMPT, has_sinks=True), "sinks"),
        (replace(PROMPT, cache_dtype=torch.float8_e4m3fn), "the cache has float8_e4m3fn"),
        (StateProblem(H200, "gated delta rule", 512, 128), "states of 512 x 128, at most 256 x 256"),
    ],
)
def test_what_a_library_cannot_is_ours_with_the_reason(
    problem: KernelProblem,
    reason: str,
    installed: set[str],  # noqa: ARG001
) -> None:
    found = choose(problem)
    assert found.winner == "triton"
    assert all(reason in why for _, why in found.refusals)
    assert reason in found.line


def test_a_torch_without_the_parameters_leaves_prompts_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.backends.torch.providers import varlen

    monkeypatch.setattr(varlen, "_parameters", lambda: frozenset({"query", "scale"}))
    choose.cache_clear()
    found = choose(PROMPT)
    choose.cache_clear()
    assert found.winner == "sdpa"
    assert found.refusals == (("varlen", f"torch {torch.__version__} has no varlen_attn with window_size, enable_gqa"),)
    assert not varlen.reads_pages(256)


def test_the_choices_of_a_graph(installed: set[str]) -> None:  # noqa: ARG001
    graph, weights = tiny_graph("qwen35")
    matrices = {p: held_type(weights, p, torch.bfloat16) for p in graph.parameters if p.is_matrix}
    types = {kv.layer: torch.bfloat16 for kv in graph.kv_caches}
    found = choices(graph, product_problems(graph, matrices, H200).values(), H200, types)
    assert {choice.title: choice.winner for choice in found} == {
        "attention of prompts": "varlen", "gated delta rule of prompts": "fla"
    }  # fmt: skip
    assert ProviderChoice("a", "triton", (("b", "no"), ("c", "never"))).line == "a: triton (b: no; c: never)"


def test_the_packed_form_of_a_matrix_is_counted(installed: set[str]) -> None:  # noqa: ARG001
    """Codes of 4 bits, and a scale and a zero in 16 bits for 32 columns: 5 bits a number."""
    assert extra_bytes(product("Q4_K")) == 256 * 512 * 5 // 8
    assert extra_bytes(product("Q6_K")) == 256 * 512 * 7 // 8
    graph, weights = tiny_graph("llama")
    quantized: dict[str, Any] = {name: weights[name] for name in weights}
    parameter = next(node.op.parameters[0] for node in graph.nodes if "Linear" in type(node.op).__name__)
    quantized[parameter.name] = random_weight("Q8_0", (parameter.shape[0], parameter.shape[1]), 1)
    matrices = {p: held_type(quantized, p, torch.bfloat16) for p in graph.parameters if p.is_matrix}
    assert [*product_problems(graph, matrices, H200)] == [parameter]


def test_the_report_without_a_gpu() -> None:
    found = report(Place(None, torch.float32))
    assert found[1:3] == ["varlen: there is no GPU", "sdpa: there is no GPU"]
    for name, package in (("humming", "humming-kernels"), ("fla", "fla-core")):
        assert f"{name}: {package} is not installed (pip install 'octavo[gpu-fast]')" in found
