"""The options of a request are checked when they are made."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import UsageError
from octavo.generation_request import RequestOptions
from octavo.llm import take_options


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"priority": "high"}, "priority", "invalid_type"),
        ({"priority": True}, "priority", "invalid_type"),
        ({"priority": 2**31}, "priority", "integer_above_max_value"),
        ({"priority": -(2**70)}, "priority", "integer_below_min_value"),
        ({"cache_salt": 5}, "cache_salt", "invalid_type"),
        ({"cache_salt": "x" * 1025}, "cache_salt", "string_above_max_length"),
        ({"cache_salt": "\ud800"}, "cache_salt", "invalid_encoding"),
    ],
)
def test_wrong_options_are_refused_by_name(given: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(UsageError) as refusal:
        RequestOptions(**given)
    assert (refusal.value.param, refusal.value.code) == (param, code)


def test_options_are_taken_out_of_keyword_arguments() -> None:
    given = {"cache_salt": "s", "tools": []}
    assert take_options(given) == {"cache_salt": "s"}
    assert given == {"tools": []}
