"""The answers of a peer whose engine does nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def protocol(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("protocol")


class Idle:
    """Generates so many tokens more than it is asked for, or fewer."""

    version = ""

    def __init__(self, protocol: ModuleType, surplus: int = 0) -> None:
        self._protocol, self._surplus = protocol, surplus

    def load(self, options: Any) -> None:
        self.options = options
        self.version = "idle 1"

    def decode(self, prompt: list[int], count: int) -> Any:
        return self.many([prompt], count)

    def many(self, prompts: list[list[int]], count: int) -> Any:
        return self._protocol.Generated(1.0, 2.0, [[0] * (count + 1 + self._surplus) for _ in prompts])

    def host_time(self, prompts: list[list[int]], count: int) -> float:
        return 0.25 * len(prompts) * count


def test_load_says_what_was_loaded(protocol: ModuleType) -> None:
    engine = Idle(protocol)
    values = {"model": "a.gguf", "threads": 2, "context": 100, "sequences": 4}
    assert protocol.answer_to(engine, "load", values)["version"] == "idle 1"
    assert engine.options == protocol.LoadOptions("a.gguf", 2, 100, 4)


def test_an_answer_has_times_and_tokens(protocol: ModuleType) -> None:
    answer = protocol.answer_to(Idle(protocol), "decode", {"prompt": [1], "count": 2})
    assert answer == {"first_s": 1.0, "steps_s": 2.0, "tokens": [[0, 0, 0]]}
    assert len(protocol.answer_to(Idle(protocol), "many", {"prompts": [[1], [2]], "count": 2})["tokens"]) == 2
    assert protocol.answer_to(Idle(protocol), "host_time", {"prompts": [[1]], "count": 2}) == {"result": 0.5}


@pytest.mark.parametrize("surplus", [-1, 1])
def test_an_engine_that_generates_less_or_more_than_it_was_asked_has_no_figure(
    protocol: ModuleType, surplus: int
) -> None:
    with pytest.raises(
        protocol.PeerError, match=rf"asked for 3 tokens after each of 1 prompts, generated \[{3 + surplus}\]"
    ):
        protocol.answer_to(Idle(protocol, surplus), "decode", {"prompt": [1], "count": 2})


@pytest.mark.parametrize("command", ["shared_prefix", "_protocol", ""])
def test_a_command_that_the_engine_lacks_is_refused_by_name(protocol: ModuleType, command: str) -> None:
    with pytest.raises(protocol.PeerError, match="unknown command"):
        protocol.answer_to(Idle(protocol), command, {})


def test_the_process_knows_its_memory(protocol: ModuleType) -> None:
    assert protocol.answer_to(Idle(protocol), "memory", {})["peak_bytes"] > 10**7


def test_a_peer_without_a_module_is_named(protocol: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(protocol.PeerError, match=r"no module peers/eniac\.py"):
        protocol.Peer("eniac", "python", tmp_path / "log")
