"""`octavo plan --simulate`: ways to divide machines, and the figures that they follow from."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.simulate import machines_of
from octavo.engine.simulation import busiest_rank
from octavo.errors import UsageError
from tests.support.processes import octavo_here
from tests.support.tiny_models import save_safetensors, tiny_model

FAST_LINK = "latency=1e-12,local_latency=1e-12,link=1e18,local_link=1e18"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_safetensors(tiny_model("llama"), tmp_path_factory.mktemp("llama"))


def choices(model: Path, text: str, *options: str) -> dict[tuple[int, int, int, int], dict[str, Any]]:
    """By nodes, tensor parallel, pipeline parallel and replicas."""
    found = json.loads(
        octavo_here("plan", model, "--ctx", "64", "--users", "8", "--simulate", text, "--json", *options).stdout
    )
    names = ("nodes", "tensor_parallel", "pipeline_parallel", "replicas")
    return {tuple(each[name] for name in names): each for each in found["choices"]}  # type: ignore[misc]


def test_every_choice_takes_all_sockets(model: Path) -> None:
    found = choices(model, "nodes=2+4,sockets=2,bandwidth=1e9,compute=1e10,memory=1e9")
    assert {(2, 2, 1, 2), (2, 1, 2, 2), (2, 2, 2, 1), (4, 1, 1, 8)} <= set(found)
    for (nodes, tensor, pipeline, replicas), each in found.items():
        assert tensor * pipeline * replicas == 2 * nodes
        assert each["runs"] == (tensor <= 2)
        assert each["fits"]
    assert found[2, 2, 1, 2]["rank_bytes"] < found[2, 1, 1, 4]["rank_bytes"] * 2


def test_the_speed_follows_from_the_figures(model: Path) -> None:
    slow, fast = (
        choices(model, f"nodes=2,bandwidth={bandwidth},compute=1e18,memory=1e5,{FAST_LINK}") for bandwidth in (1e9, 2e9)
    )
    for place, each in slow.items():
        assert fast[place]["tokens_per_s_of_one"] == pytest.approx(2 * each["tokens_per_s_of_one"], rel=1e-3)
        assert fast[place]["first_token_s"] == pytest.approx(each["first_token_s"] / 2, rel=1e-3)
        assert not each["fits"]
    # Two stages read as much for one user as one, and have two steps in flight for many.
    alone, staged = slow[2, 1, 1, 2], slow[2, 1, 2, 1]
    assert staged["tokens_per_s_of_one"] == pytest.approx(alone["tokens_per_s_of_one"], rel=0.1)
    assert staged["tokens_per_s"] > 1.1 * 4 * staged["tokens_per_s_of_one"]  # four users a step
    waiting = choices(model, "nodes=2,bandwidth=1e9,compute=1e18,memory=1e5,latency=1,local_latency=1")
    assert waiting[2, 2, 1, 1]["tokens_per_s_of_one"] < 0.5  # two exchanges a layer


def test_table(model: Path) -> None:
    text = octavo_here(
        "plan", model, "--ctx", "64", "--simulate", "nodes=2,bandwidth=1e9,compute=1e9,memory=1e9"
    ).stdout
    assert "1 GB/s and 1 G operations/s at 70%" in text
    assert "tensor  pipeline  replicas" in text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nodes=0", "not positive"),
        ("nodes=5000", "more than 1024"),
        ("speed=1", "'speed' is none of nodes, bandwidth"),
        ("link=fast", "'link=fast' is not NAME=NUMBER"),
        ("nodes=2,latency=-1", "not positive"),
        ("nodes=2,memory=1e9", "needs bandwidth, compute"),
    ],
)
def test_wrong_figures(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        machines_of(text)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_safetensors(tiny_model("qwen3moe"), tmp_path_factory.mktemp("mixture"))


def test_whole_experts_on_each_rank(mixture: Path) -> None:
    """A rank reads whole experts or a part of each; the busiest one decides."""
    figures = f"nodes=2,bandwidth=1e9,compute=1e18,memory=1e9,{FAST_LINK}"
    of_parts, whole = choices(mixture, figures), choices(mixture, figures, "--enable-expert-parallel")
    alone = whole[2, 1, 1, 2]
    assert alone == of_parts[2, 1, 1, 2]  # one rank has all experts either way
    together, uneven = of_parts[2, 2, 1, 1], whole[2, 2, 1, 1]
    assert uneven["rank_bytes"] == pytest.approx(together["rank_bytes"], rel=0.2)
    # A token's two experts are sometimes on one rank, which the other one waits for.
    assert alone["tokens_per_s_of_one"] < uneven["tokens_per_s_of_one"] < 2 * alone["tokens_per_s_of_one"]


def test_the_table_says_how_experts_are_chosen(mixture: Path, model: Path) -> None:
    figures = "nodes=2,bandwidth=1e9,compute=1e9,memory=1e9"
    arguments = ("--ctx", "64", "--simulate", figures, "--enable-expert-parallel")
    assert "choose experts evenly" in octavo_here("plan", mixture, *arguments).stdout
    assert "this model has no experts" in octavo_here("plan", model, *arguments).stderr


def test_the_busiest_rank() -> None:
    """Against all possible choices of one token: of 8 experts 2, in two halves or four quarters."""
    for held, expected in ((4, Fraction(2 * 6 * 2 + 16, 28)), (2, Fraction(4 * 2 + 24, 28))):
        # Pairs in one part count two, others one.
        found = busiest_rank(1, 2, 8, held)
        assert found.pairs == found.experts == pytest.approx(float(expected), rel=0.05)
    many = busiest_rank(512, 8, 128, 64)
    assert many.experts == 64
    assert 1.0 < many.pairs / (512 * 8 / 2) < 1.1
    assert busiest_rank(1, 8, 8, 4) == (4, 4)
