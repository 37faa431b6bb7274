"""The description of the HTTP interface: FastAPI's document with our errors, and a page that shows it."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from octavo.server.protocols.answer_schemas import OPENAI_ERROR, errors

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
summary { cursor: pointer; padding: .3rem 0 }
summary b { display: inline-block; min-width: 4.5rem }
pre { overflow-x: auto; padding: .8rem; border: 1px solid color-mix(in srgb, currentColor 25%, transparent) }
"""


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI 3.1 document. Every operation can answer with every error, in its protocol's schema."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description="Runs and serves large language models with the interfaces of OpenAI, Anthropic and TGI.",
        routes=app.routes,
    )
    schemas = document["components"]["schemas"]
    schemas["Error"] = OPENAI_ERROR
    del schemas["HTTPValidationError"], schemas["ValidationError"]
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}, {}]
    all_errors = errors({"$ref": "#/components/schemas/Error"})
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            for status, response in all_errors.items():
                operation["responses"].setdefault(str(status), response)
    return document


def render_page(document: dict[str, Any]) -> str:
    """The document as one HTML page that loads nothing and runs no script."""
    info = document["info"]
    title, version, description = (escape(info[key]) for key in ("title", "version", "description"))
    paths = "".join(
        _details(f"<b>{method.upper()}</b> <code>{escape(path)}</code>", _operation(operation))
        for path, operations in sorted(document["paths"].items())
        for method, operation in operations.items()
    )
    schemas = "".join(
        _details(escape(name), _code(schema)) for name, schema in sorted(document["components"]["schemas"].items())
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style><h1>{title} {version}</h1>"
        f"<p>{description} The same as a document: <a href=/openapi.json>/openapi.json</a></p>"
        f"<h2>Paths</h2>{paths}<h2>Schemas</h2>{schemas}</html>"
    )


def _operation(operation: dict[str, Any]) -> str:
    about = escape(operation.get("description") or operation.get("summary") or "")
    answers = {status: answer for status, answer in operation["responses"].items() if status < "400"}
    parts = {"Parameters": operation.get("parameters"), "Body": operation.get("requestBody"), "Answers": answers}
    shown = (f"<h4>{title}</h4>{_code(part)}" for title, part in parts.items() if part is not None)
    return f"<p>{about}</p>{''.join(shown)}"


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{summary}</summary>{content}</details>"


def _code(value: object) -> str:
    return f"<pre>{escape(json.dumps(value, indent=2, ensure_ascii=False))}</pre>"
