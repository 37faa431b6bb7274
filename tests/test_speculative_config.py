"""The options of speculation, in vLLM's form and in the short one."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.errors import UsageError
from octavo.speculative_config import SpeculativeConfig


def test_json_and_dictionary_say_the_same() -> None:
    wanted = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3, "prompt_lookup_max": 8}
    text = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3, "prompt_lookup_max": 8}'
    found = [SpeculativeConfig.of(EngineConfig(speculative_config=value)) for value in (wanted, text)]
    assert found[0] == found[1] == SpeculativeConfig(**wanted)  # type: ignore[arg-type]
    assert SpeculativeConfig.of(EngineConfig(speculation="off")).method == "off"
    assert SpeculativeConfig.of(EngineConfig()).method == "auto"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"speculation": "fast"}, "speculation is 'fast'; it must be auto, off or ngram"),
        ({"speculative_config": "{"}, "speculative_config is not valid JSON"),
        ({"speculative_config": "[1]"}, "must be an object"),
        ({"speculative_config": {"metod": "ngram"}}, "no key 'metod'; did you mean method"),
        ({"speculative_config": {"method": "fast"}}, "method is 'fast'; it must be auto"),
        ({"speculative_config": {"num_speculative_tokens": "4"}}, "num_speculative_tokens is '4'"),
        ({"speculative_config": {"num_speculative_tokens": -1}}, "num_speculative_tokens is -1"),
        ({"speculative_config": {"prompt_lookup_min": 5, "prompt_lookup_max": 3}}, "more than prompt_lookup_max 3"),
        ({"speculative_config": {"prompt_lookup_min": 17}}, "prompt_lookup_min is 17; .* from 1 to 16"),
        ({"speculative_config": {"prompt_lookup_max": 1}}, "prompt_lookup_max is 1; .* from 2 to 1024"),
        ({"speculation": "off", "speculative_config": {"method": "ngram"}}, "give one of them"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem.replace("[", r"\[")):
        EngineConfig(**options)
