"""Batches through Ray Data: rows in their order, and an error for each bad row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import UsageError
from octavo.llm import LLM
from octavo.ray.data import Generate
from octavo.sampling_params import SamplingParams

OPTIONS: dict[str, Any] = {"num_threads": 1, "kv_cache_memory": "16MiB"}
GREEDY = {"max_tokens": 5, "temperature": 0.0}


def test_a_batch_keeps_its_rows_and_names_their_errors(tiny_path: Path) -> None:
    prompts = ["abcd", None, "ab" * 300, "", [{"role": "user"}], 7, "cd"]
    column = np.empty(len(prompts), dtype=object)
    column[:] = prompts
    batch = {"id": np.arange(len(prompts)), "prompt": column}
    with LLM(str(tiny_path), **OPTIONS) as llm:
        outputs = llm.generate(["abcd", "cd"], SamplingParams(**GREEDY), use_tqdm=False)
        expected = [output.outputs[0].text for output in outputs]
    generate = Generate(str(tiny_path), sampling_params=GREEDY, **OPTIONS)
    made = generate(batch)
    assert made["id"].tolist() == list(range(len(prompts)))
    good = [i for i, error in enumerate(made["error"]) if not error]
    assert {0, 6} <= set(good) <= {0, 3, 6}  # the empty text may have a token for its beginning
    assert [made["generated_text"][0], made["generated_text"][6]] == expected
    assert all(0 < made["num_tokens"][i] <= 5 and made["finish_reason"][i] in ("stop", "length") for i in good)
    for i, part in ((1, "not None"), (2, "tokens"), (5, "not 7")):
        assert part in made["error"][i], made["error"][i]
        assert (made["generated_text"][i], made["num_tokens"][i], made["finish_reason"][i]) == ("", 0, "")
    assert made["error"][4]  # a message without content, and a model without a template
    with pytest.raises(UsageError, match="no column 'prompt'; it has text"):
        generate({"text": column})
