"""Injected faults identify themselves, and only tests can inject them."""

from __future__ import annotations

import pytest

from octavo.core.faults import Faults, InjectedFaultError
from octavo.errors import UsageError


def test_a_fault_happens_once_at_its_passage() -> None:
    faults = Faults.parse("step:raise:3")
    for _ in range(2):
        faults.at("step")
        faults.at("receive")
    with pytest.raises(InjectedFaultError, match="step"):
        faults.at("step")
    faults.at("step")


@pytest.mark.parametrize("text", [None, ""])
def test_without_the_variable_there_is_none(text: str | None) -> None:
    assert Faults.parse(text) == Faults()


@pytest.mark.parametrize("text", ["step", "step:raise", "nowhere:raise:1", "step:dance:1", "step:raise:x", "::"])
def test_a_wrong_fault_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="OCTAVO_FAULT"):
        Faults.parse(text)
