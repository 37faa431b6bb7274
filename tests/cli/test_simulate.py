"""`octavo plan --simulate`: ways to divide machines, and the figures that they follow from."""

from __future__ import annotations

import json
import math
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.bench.simulation import busiest_rank
from octavo.cli.simulate import machines_of, needs_all_logits
from octavo.errors import UsageError
from tests.backends.cpu.test_sampling_on_ranks import assert_same_answers
from tests.support.large_model import HIDDEN, KV_HEADS, LAYERS, PARAMETERS, VOCAB, save_large_model
from tests.support.processes import octavo_here
from tests.support.sampling_batches import sampling_batch
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
    assert "Computed, not measured" in text
    assert "sampled from all logits, which the ranks of a stage gather (sampling options: neutral values)" in text


def test_logits_that_ranks_gather(model: Path, tmp_path: Path) -> None:
    """A temperature alone needs them all; greedy tokens need a few."""
    figures = "nodes=2,bandwidth=1e18,compute=1e18,memory=1e9,latency=1e-12,link=1e3"
    assert machines_of(figures)[1].sockets == 1
    greedy = Path(shutil.copytree(model, tmp_path / "greedy"))
    (greedy / "generation_config.json").write_text('{"do_sample": false}')
    whole, few = (choices(path, figures)[2, 2, 1, 1]["tokens_per_s_of_one"] for path in (model, greedy))
    config = json.loads((model / "config.json").read_text())
    more_s = config["vocab_size"] * 4 / 2 / 1e3  # half of the logits through the link of each rank
    assert 1 / whole - 1 / few == pytest.approx(more_s, rel=1e-3)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.0}, {"top_k": 256}, {"top_k": 257}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.9}]
)
def test_options_that_need_all_logits_on_torch(sampling: dict[str, float]) -> None:
    """As the ranks decide for each row."""
    rank_sampling = pytest.importorskip("octavo.backends.torch.rank_sampling")
    rows = sampling_batch(1, **{"temperature": 1.0, **sampling})
    assert needs_all_logits(sampling, on_torch=True) == (rank_sampling.offers_of(rows) is None)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, True),
        ({"temperature": 0.0, "top_k": 500}, False),
        ({"temperature": 0.7, "top_k": 256}, False),
        ({"top_k": 257}, True),
        ({"top_k": 257, "top_p": 0.9}, True),
        ({"top_k": 0, "top_p": 0.9}, False),
        ({"top_p": 0.9, "typical_p": 0.5}, True),
        ({"top_k": 500, "min_p": 0.1}, False),
    ],
)
def test_options_that_need_all_logits(sampling: dict[str, float], expected: bool) -> None:
    """As the ranks decide for each row, which nobody but the rows' errors would tell otherwise."""
    assert needs_all_logits(sampling) is expected
    row = sampling_batch(1, **{"temperature": 1.0, **sampling})
    logits = np.random.default_rng(0).normal(size=(1, 4000)).astype(np.float32)
    given = assert_same_answers(logits, row, [0, 2000, 4000])
    if expected:
        assert given[1] >= 2000 * 4


@pytest.fixture(scope="module")
def of_70b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_large_model(tmp_path_factory.mktemp("llama70b"))


SOCKETS = "sockets=2,bandwidth=2e11,compute=8e12,memory=2e11"


def check_70b(of_70b: Path, nodes: list[int]) -> None:
    """Beside what follows from the weights by hand: 141 GB read for each token, at 70 % of 200 GB/s of a socket."""
    text = f"nodes={'+'.join(map(str, nodes))},{SOCKETS}"
    answer = octavo_here("plan", of_70b, "--ctx", "4096", "--users", "64", "--simulate", text, "--json").stdout
    found = json.loads(answer)
    assert found["machines"]["efficiency"] == 0.7
    assert any("Computed, not measured" in each for each in found["assumptions"])
    read_s = (2 * PARAMETERS - 2 * VOCAB * HIDDEN) / (0.7 * 2e11)  # of the embedding only a row
    flops_s = 2 * (PARAMETERS - VOCAB * HIDDEN) * 4096 / (0.7 * 8e12)
    for each in found["choices"]:
        tensor, pipeline, replicas = each["tensor_parallel"], each["pipeline_parallel"], each["replicas"]
        assert tensor * pipeline * replicas == 2 * each["nodes"]
        if tensor <= 2:
            assert each["runs"]
            assert 0.9 < each["tokens_per_s_of_one"] * read_s / tensor <= 1.0
            # Eight steps of 512 tokens, handed on by each stage over the link.
            handed_on_s = 8 * (pipeline - 1) * (50e-6 + 512 * HIDDEN * 4 / 1.25e9)
            assert 1.0 <= (each["first_token_s"] - handed_on_s) / (flops_s / tensor) < 1.2
            layers = math.ceil(LAYERS / pipeline)  # of the stage that has most
            cache = math.ceil(64 / replicas) * 4096 * 2 * layers * KV_HEADS * 128 * 2 / tensor
            embedding = 2 * VOCAB * HIDDEN
            weights = (2 * PARAMETERS - 2 * embedding) / LAYERS * layers / tensor
            assert weights + cache < each["rank_bytes"] < weights + cache + 2 * embedding / tensor + 1e9
    for count in nodes:
        of_count = {
            (each["tensor_parallel"], each["pipeline_parallel"]): each
            for each in found["choices"]
            if each["nodes"] == count
        }
        assert {(2, 1), (1, 2), (2, 2)} <= set(of_count)
        assert all(each["fits"] == (each["rank_bytes"] <= 2e11) for each in of_count.values())


def test_a_model_of_70_billion_parameters_on_two_machines(of_70b: Path) -> None:
    check_70b(of_70b, [2])


@pytest.mark.slow
def test_a_model_of_70_billion_parameters_on_up_to_64_machines(of_70b: Path) -> None:
    check_70b(of_70b, [2, 4, 8, 16, 32, 64])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nodes=0", "not positive"),
        ("nodes=5000", "more than 1024"),
        ("speed=1", "'speed' is not one of nodes, bandwidth"),
        ("link=fast", "'link=fast' is not NAME=NUMBER"),
        ("nodes=2,latency=-1", "not positive"),
        ("nodes=2,memory=1e9", "needs bandwidth, compute"),
    ],
)
def test_wrong_figures(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        machines_of(text)


def test_options_that_ranks_cannot_have(model: Path) -> None:
    done = octavo_here("plan", model, "--gpu-memory", "20GiB", "--simulate", "nodes=2")
    assert done.returncode == 2
    assert "--simulate divides the model among several ranks: " in done.stderr
    assert "gpu_memory" in done.stderr.replace("-", "_")


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
    assert busiest_rank(1, 12, 8, 4, identities=4) == (4, 4)
