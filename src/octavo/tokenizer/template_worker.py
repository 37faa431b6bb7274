"""The process that renders a chat template. `template_process.py` starts it and kills it when it takes too long.

A template is a program that comes with a model file. A process of its own limits the template's memory and can be
stopped at any time, even in the middle of one huge multiplication.

Protocol: lines of JSON. The first is `{"path": sys.path}`, which gets no answer. The second, perhaps much later, is
`{"source": template, "memory_bytes": ..., "max_chars": ..., "seconds": ...}`; its answer is `{}` or an error. Each
further line holds variables; its answer is `{"text": ...}` or an error: `{"error": kind, "message": ...}`.
This file runs as a script, so that the process starts without importing the package.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from jinja2 import Template


class RaisedByTemplateError(Exception):
    """The template called `raise_exception`: it does not accept the conversation."""


class OutputTooLongError(Exception):
    """The output has more characters than allowed."""


def compile_template(source: str) -> Template:
    """Compiles the template in the environment that published templates are written for.

    It is sandboxed and immutable, with the settings, filters and functions of transformers' `apply_chat_template`.
    """
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationExtension(Extension):
        """The tag `{% generation %}`, which marks the assistant's text for training; it renders only its body."""

        tags = {"generation"}  # noqa: RUF012  (the type that jinja2 declares)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationExtension, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(source)


def render(template: Template, variables: dict[str, Any], max_chars: int) -> str:
    """Renders the template. Raises OutputTooLongError as soon as the text exceeds `max_chars` characters."""
    pieces: list[str] = []
    length = 0
    for piece in template.generate(variables):
        length += len(piece)
        if length > max_chars:
            raise OutputTooLongError(f"more than {max_chars:,} characters of output")
        pieces.append(piece)
    return "".join(pieces)


def main() -> None:
    """Serves one template over standard input and output until the input ends."""
    source = sys.stdin
    sys.path[:] = json.loads(source.readline())["path"]

    import jinja2.sandbox  # noqa: F401  (before the limits apply, since the import is not the template's doing)

    if not (line := source.readline()):  # closed without a template
        return
    setup = json.loads(line)
    template: list[Template] = []

    def compile_source() -> dict[str, str]:
        template.append(compile_template(setup["source"]))
        return {}

    def render_line(line: str) -> dict[str, str]:
        return {"text": render(template[0], json.loads(line), setup["max_chars"])}

    _limit_memory(setup["memory_bytes"])
    _answer(_attempt(compile_source, setup["seconds"], "broken"))
    for line in source:
        _answer(_attempt(partial(render_line, line), setup["seconds"], "failed"))


def _attempt(work: Callable[[], dict[str, str]], seconds: float, failure: str) -> dict[str, str]:
    """The result of `work`, or a description of its error. Computing for more than `seconds` kills the process.

    failure: the kind of errors that have no kind of their own.
    """
    from jinja2.exceptions import SecurityError, TemplateSyntaxError, UndefinedError

    try:
        with _compute_limit(seconds):
            return work()
    except RaisedByTemplateError as error:
        return _error("raised", str(error))
    except SecurityError as error:
        return _error("unsafe", str(error))
    except TemplateSyntaxError as error:
        return _error(failure, f"line {error.lineno}: {error.message}")
    except UndefinedError as error:
        return _error("undefined", str(error))
    except OutputTooLongError as error:
        return _error("limit", str(error))
    except MemoryError:
        return _error("limit", "more memory than allowed")
    except RecursionError:
        return _error("limit", "too many calls within calls")
    except OverflowError as error:  # the sandbox's limit on ranges, or a number too large for the machine
        return _error("limit", f"OverflowError: {error}")
    except Exception as error:  # anything that a template can provoke in Python
        return _error(failure, f"{type(error).__name__}: {error}")


def _error(kind: str, message: str) -> dict[str, str]:
    return {"error": kind, "message": message[:500]}


def _answer(answer: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


@contextmanager
def _compute_limit(seconds: float) -> Iterator[None]:
    """Limits the processor time, not the wall time, so that a busy machine does not fail a normal template."""
    if not hasattr(signal, "setitimer"):  # on Windows only the parent's timeout applies
        yield
        return
    # The default action of the signal ends the process, even within one long call.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory(nbytes: int) -> None:
    with suppress(ImportError):  # not on Windows
        import resource

        with suppress(ValueError, OSError):  # a lower limit is set already
            resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise RaisedByTemplateError(str(message))


if __name__ == "__main__":
    main()
