"""Lower bounds on the time of a step split between a device and the CPU, used to choose where layers go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.backends.memory import StreamedSizes
from octavo.graph.cost import graph_cost
from octavo.graph.ops.base import StepSizes

if TYPE_CHECKING:
    from octavo.backends.memory import Sizes
    from octavo.backends.rates import Rates

# The request of each user by which `gpu_offload auto` decides.
_PROMPT_TOKENS, _ANSWER_TOKENS = 1024, 256


@dataclass(frozen=True, slots=True)
class OffloadRates:
    """device, cpu: rates of their memory and products.
    copy_bytes_per_s: rate of copies from main memory to the device.
    """

    device: Rates
    cpu: Rates
    copy_bytes_per_s: float

    def step_seconds(self, parts: Sequence[tuple[bool, Sizes]], tokens: int, requests: int, context: int) -> float:
        """Return the minimum time of a step whose parts run one after another; layers are copied while other layers are
        computed.

        parts: (is on the device, its sizes).
        """
        seconds = 0.0
        for on_device, sizes in parts:
            step = StepSizes(tokens, requests, requests, context, sizes.kv_element_bytes)
            own = (self.device if on_device else self.cpu).seconds(graph_cost(sizes.graph, step, sizes.weights))
            copied = sizes.host_bytes if isinstance(sizes, StreamedSizes) else 0
            seconds += max(own, copied / self.copy_bytes_per_s)
        return seconds

    def workload_seconds(
        self, parts: Sequence[tuple[bool, Sizes]], step_tokens: int, users: int, *, generates: bool
    ) -> float:
        """Return the minimum time to serve `users` simultaneous requests of 1,024 prompt tokens and 256 generated
        tokens.

        For a model that does not generate, return the time of one full step.
        """
        if not generates:
            return self.step_seconds(parts, step_tokens, 1, step_tokens)
        tokens = min(step_tokens, _PROMPT_TOKENS)
        steps = -(-users * _PROMPT_TOKENS // tokens)
        prompt = steps * self.step_seconds(parts, tokens, 1, _PROMPT_TOKENS // 2)
        return prompt + _ANSWER_TOKENS * self.step_seconds(parts, users, users, _PROMPT_TOKENS)


def workload_name(step_tokens: int, users: int, *, generates: bool) -> str:
    """Describe the workload as the beginning of a sentence, up to its verb: `a step of 512 tokens takes`."""
    if not generates:
        return f"a step of {step_tokens:,} tokens takes"
    if users > 1:
        return f"{users} prompts of {_PROMPT_TOKENS:,} and answers of {_ANSWER_TOKENS} tokens at the same time take"
    return f"a prompt of {_PROMPT_TOKENS:,} and an answer of {_ANSWER_TOKENS} tokens takes"
