"""Errors that users can see, each with its exit code for the command line."""

from __future__ import annotations


class OctavoError(Exception):
    """Base class of every error that Octavo raises on purpose: one clear line that needs no traceback."""

    exit_code = 1


class UsageError(OctavoError, ValueError):
    """The request or command is invalid: the message names the value, the limit and the remedy.

    param: name of the invalid field in the request, if only one field is invalid.
    code: stable identifier of the reason, for programs, such as `decimal_above_max_value`.
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
    """A model is missing, damaged or unsupported, or a file is not a model. The message names the file, offset and
    reason.
    """

    exit_code = 3


class ModelWriteError(OctavoError):
    """A model cannot be written: the message names the file and the reason.

    A partial file never gets the model's name.
    """

    exit_code = 4


class InsufficientMemoryError(OctavoError):
    """A model or request does not fit into memory: the message shows the arithmetic."""

    exit_code = 3


class EngineDeadError(OctavoError):
    """The engine failed or was closed; every pending request gets this error."""


class OverloadedError(OctavoError):
    """There is no capacity for this request now; the same request may succeed later.

    code: `server_overloaded`, `queue_timeout`, `server_shutting_down`, `engine_restarting`, `engine_stalled` or
        `model_loading`.
    retry_after_s: seconds to wait before the next attempt.
    """

    def __init__(self, message: str, *, code: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class GenerationTimeoutError(OctavoError):
    """A request exceeded its time limit. A caller that does not stream loses the text generated so far."""


class NumericalError(OctavoError):
    """The model's logits for this request contain a NaN or an infinity; other requests are not affected."""
