"""The errors a user can meet, each with the exit code that the command line gives it."""

from __future__ import annotations


class OctavoError(Exception):
    """Base of every error that Octavo raises on purpose: one clear line, no traceback needed."""

    exit_code = 1


class UsageError(OctavoError, ValueError):
    """The request or the command is wrong: the message names the value, the limit and the remedy."""

    exit_code = 2


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
