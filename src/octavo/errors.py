"""The errors a user can meet, each with the exit code that the command line gives it."""

from __future__ import annotations


class OctavoError(Exception):
    """Base of every error that Octavo raises on purpose: one clear line, no traceback needed."""

    exit_code = 1


class UsageError(OctavoError, ValueError):
    """The request or the command is wrong: the message names the value, the limit and the remedy.

    param: the field that is wrong, by its name in the request, as far as it is one field.
    code: what is wrong with it in one word that programs can rely on, such as `decimal_above_max_value`.
    """

    exit_code = 2

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class GraphError(OctavoError):
    """A model definition is wrong: the message names the operation, the shapes and the layer."""

    exit_code = 3


class ModelLoadError(OctavoError):
    """A model is missing, is no model, is damaged or unsupported: names file, offset and reason."""

    exit_code = 3


class InsufficientMemoryError(OctavoError):
    """A model or one request does not fit: the message shows the arithmetic."""

    exit_code = 3


class EngineDeadError(OctavoError):
    """The engine failed or was closed; every request that waited for it gets this."""


class OverloadedError(OctavoError):
    """There is no room for this request now; the same request may succeed later.

    code: `server_overloaded`, `queue_timeout`, `server_shutting_down`, `engine_restarting`, `engine_stalled` or
    `model_loading`. retry_after_s: when it is worth another try.
    """

    def __init__(self, message: str, *, code: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class GenerationTimeoutError(OctavoError):
    """A request ran longer than it was allowed to; what it had generated is lost to a caller that does not stream."""


class NumericalError(OctavoError):
    """The model's logits for this request hold a NaN or an infinity; nobody else is affected."""
