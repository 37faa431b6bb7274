"""The reasons why a client cannot take a request now."""

from __future__ import annotations

from octavo.core.client import EngineState
from octavo.errors import EngineDeadError, OctavoError, OverloadedError

_CODES = {
    EngineState.LOADING: ("model_loading", "the model is being loaded"),
    EngineState.RESTARTING: ("engine_restarting", "the engine is being restarted"),
    EngineState.STALLED: ("engine_stalled", "the engine makes no progress"),
}


def refusal(state: EngineState, reason: str | None, retry_after_s: float = 1.0) -> OctavoError:
    """The error that `generate` raises in a state other than READY. reason: the state's, as in `EngineStatus`."""
    if state is EngineState.DEAD:
        return EngineDeadError(f"the engine has ended: {reason or 'it was closed'}")
    code, text = _CODES[state]
    detail = f" ({reason})" if reason else ""
    return OverloadedError(
        f"{text}{detail}; try again in {max(retry_after_s, 1.0):.0f} s", code=code, retry_after_s=retry_after_s
    )
