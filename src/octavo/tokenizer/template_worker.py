"""The process that renders a chat template. `chat_template.py` starts and ends it.

A template is a program that comes with a model file. A separate process limits the template's memory and can be stopped
at any time, even in the middle of one huge multiplication.

The argument is `sys.path` as JSON. Protocol: lines of JSON. The first, which may arrive much later, is `{"source":
template, "seconds": limit of computing}` and gets no answer. Each further line contains variables. Its answer is
`{"text": ...}`, or `{"refusal": ...}` or `{"fault": ...}` with the rest of a sentence that begins with the template's
name: either the template does not accept this conversation, or the template itself is wrong. This file runs as a
script. It imports only the limits from the package, so that the process starts at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from jinja2 import Template

MAX_OUTPUT_CHARS = 4 << 20
MAX_MEMORY_BYTES = 512 << 20
# Limits a template that hangs without computing, or that has to wait on a busy machine.
_MAX_WAIT_SECONDS = 60.0


class RaisedByTemplateError(Exception):
    """The template called `raise_exception`: it does not accept the conversation."""


def compile_template(source: str) -> Template:
    """Compile the template in the environment that published templates are written for.

    It is sandboxed and immutable, with the settings, filters and functions of transformers' `apply_chat_template`.
    """
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationExtension(Extension):
        """The tag `{% generation %}`, which marks the assistant's text for training. It renders only its body."""

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


def render(template: Template, variables: str) -> str:
    """Return the text for `variables`, a JSON object. Raises MemoryError as soon as it exceeds MAX_OUTPUT_CHARS
    characters.
    """
    pieces: list[str] = []
    length = 0
    for piece in template.generate(json.loads(variables)):
        length += len(piece)
        if length > MAX_OUTPUT_CHARS:
            raise MemoryError(f"more than {MAX_OUTPUT_CHARS:,} characters of output")
        pieces.append(piece)
    return "".join(pieces)


def main() -> None:
    """Serve one template over standard input and output until the input ends."""
    sys.path[:] = [str(Path(__file__).parents[2]), *json.loads(sys.argv[1])]

    import jinja2.sandbox  # noqa: F401  (before the limits apply, since the import is not the template's doing)

    from octavo.platform import limits

    if not (line := sys.stdin.readline()):  # closed without a template
        return
    setup = json.loads(line)
    template: Template

    def compile_source() -> str:
        nonlocal template
        template = compile_template(setup["source"])
        return ""

    limits.limit_memory(MAX_MEMORY_BYTES)
    limits.leave_no_core()
    compiled = _attempt(compile_source, setup["seconds"], "fault", "is broken")
    for line in sys.stdin:
        answer = compiled
        if "text" in compiled:
            work = partial(render, template, line)
            answer = _attempt(work, setup["seconds"], "refusal", "failed on this conversation")
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _attempt(work: Callable[[], str], seconds: float, kind: str, failure: str) -> dict[str, str]:
    """Return an answer with the text that `work` returns, or with its error.

    Computing for more than `seconds` kills the process.

    kind, failure: kind and description of errors that have no description of their own
    """
    from jinja2.exceptions import SecurityError, TemplateSyntaxError, UndefinedError

    from octavo.platform import limits

    limits.start_clock(seconds, _MAX_WAIT_SECONDS)
    try:
        return {"text": work()}
    except RaisedByTemplateError as error:
        kind, reason = "refusal", f"refuses this conversation: {error}"
    except UndefinedError as error:
        kind, reason = "refusal", f"needs something that this conversation lacks: {error}"
    except SecurityError as error:
        kind, reason = "fault", f"does something unsafe and was stopped: {error}"
    except MemoryError as error:
        kind, reason = "limit", f"was stopped: {str(error) or 'more memory than allowed'}"
    except RecursionError:
        kind, reason = "fault", "was stopped: too many calls within calls"
    except OverflowError as error:  # the sandbox's limit on ranges, or a number too large for the machine
        kind, reason = "fault", f"was stopped: OverflowError: {error}"
    except TemplateSyntaxError as error:
        reason = f"{failure}: line {error.lineno}: {error.message}"
    except Exception as error:  # anything that a template can provoke in Python
        reason = f"{failure}: {type(error).__name__}: {error}"
    finally:
        limits.stop_clock()
    return {kind: reason[:500]}


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
