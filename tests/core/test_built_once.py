"""Outputs and parameters between engine and server: built and checked once on each side."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from octavo.config import EngineConfig
from octavo.outputs import OutputDelta, RequestOutput
from octavo.sampling_params import SamplingParams
from tests.support.engine_clients import collect, engine_here, request, tokens


def test_each_part_of_an_answer_is_built_once(tiny_config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the publisher: what arrives over the wire is handed on as it was decoded."""
    built: Counter[type] = Counter()

    def counted(kind: type) -> None:
        make = kind.__init__  # type: ignore[misc]

        def note(self: object, *arguments: object, **named: object) -> None:
            built[kind] += 1
            make(self, *arguments, **named)

        monkeypatch.setattr(kind, "__init__", note)

    async def run() -> None:
        # An accepted draft would make two tokens one part.
        async with engine_here(replace(tiny_config, speculation="off")) as client:
            for kind in (OutputDelta, RequestOutput):
                counted(kind)
            params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
            assert len(tokens(await collect(await client.generate(request([0, 2], params))))) == 20

    asyncio.run(run())
    assert built == {OutputDelta: 20}
