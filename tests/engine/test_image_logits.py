"""All logits of models that see, of every family and switch, against transformers: in all backends and in all ways."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo import LLM, SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.request import RequestStatus
from tests.engine.test_images import NUM_TOKENS, PARTS, expected, loaded, model, prompt_of
from tests.support import tiny_vision

# Their rows are recorded; the tokens are those of transformers, which the other tests of images check.
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=0, ignore_eos=True, processed_logprobs=True)
TOLERANCE = 6e-3  # of the largest logit: that of the text models, whose caches have 16 bits
ORDERS: list[tuple[int, ...]] = [(0, 1, 2, 3, 4), (1, 2), (0, 3), (0, 2, 4)]

Rows = dict[str, dict[int, NDArray[np.float32]]]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """The logits of each request by its name, and by the place of the token that they follow."""
    found: Rows = defaultdict(dict)
    consume = Engine._consume

    def recorded(self: Engine, step: Any, output: Any) -> Any:
        for use, row, _ in step.schedule.rows():
            if use.sequence.status is not RequestStatus.RUNNING:  # a token that nobody wants any more
                continue
            # Of a draft that was wrong, the next step has the right row of the same place.
            logits = output.logits[row : row + use.count].copy()
            found[use.sequence.request.request_id] |= dict(enumerate(logits, use.start))
        return consume(self, step, output)

    monkeypatch.setattr(Engine, "_consume", recorded)
    return found


def right(name: str, order: tuple[int, ...]) -> NDArray[np.float32]:
    """[NUM_TOKENS, vocab]: the logits of transformers."""
    tokens = expected(name, order)[0]
    return tiny_vision.expected_logits(name, model(name), [PARTS[i] for i in order], tokens[:-1])[-NUM_TOKENS:]


def check(llm: LLM, rows: Rows, name: str, orders: list[tuple[int, ...]]) -> list[int]:
    """Compares the logits of these prompts at once. Returns the cached tokens of each."""
    prompts = [prompt_of(llm, [PARTS[i] for i in order], "ab" if 1 in order else "b") for order in orders]
    outputs = llm.generate(prompts, PARAMS)
    for output, order in zip(outputs, orders, strict=True):
        of_place, wanted, last = rows.pop(output.request_id), right(name, order), len(output.prompt_token_ids) - 1
        found = np.stack([of_place[last + i] for i in range(NUM_TOKENS)])
        assert np.abs(found - wanted).max() < TOLERANCE * np.abs(wanted).max()
    return [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch:cpu"])
@pytest.mark.parametrize("name", [*tiny_vision.FAMILIES, *tiny_vision.SWITCHES])
def test_all_logits_are_those_of_transformers(name: str, backend: str, rows: Rows, tmp_path: Path) -> None:
    """Whole, from the prefix cache, in a batch, and in a batch in chunks."""
    folder = tiny_vision.save(model(name), tmp_path / name, name)
    with loaded(folder, backend=backend, block_size=16) as llm:
        assert check(llm, rows, name, ORDERS[:1]) == [0]
        (num_cached,) = check(llm, rows, name, ORDERS[:1])
        assert num_cached >= 16
        check(llm, rows, name, ORDERS)
    with loaded(folder, backend=backend, max_num_batched_tokens=7) as llm:
        check(llm, rows, name, ORDERS)
