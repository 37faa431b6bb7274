"""A mixture by a library's grouped products, with our own kernel for the gate."""

from __future__ import annotations

import pytest
import torch

from octavo.backends.torch.providers.calls import ProvidedCalls
from tests.backends.torch.providers.test_experts import H200, Case
from tests.support.fake_humming import FakeLayer, install


def test_the_gate_between_a_librarys_products(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.backends.torch import triton_calls

    if device.type == "cuda":
        pytest.skip("the stand-in of the library is for the CPU")
    install(monkeypatch)
    case = Case(("Q4_0", "Q4_0", "Q8_0"), held=4, first_expert=2, limit=7.0, up_offset=1.0)
    calls = ProvidedCalls(triton_calls, H200, products=True)  # type: ignore[arg-type]
    biases = [bias.float() for bias in case.biases]
    found = calls.experts(case.op, case.x.float(), case.choice, case.matrices, biases, repeats=False)
    expected = case.expected()
    assert len(FakeLayer.made) == 3
    assert (found - expected).norm() / expected.norm() < 1e-3
