"""The description of the HTTP interface: FastAPI's document with our errors, and a page that shows it."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        }
    },
}
ERRORS = {
    "400": "The request is wrong",
    "401": "No API key, or a wrong one",
    "403": "This host or page may not call the server",
    "404": "There is no such model or path",
    "405": "The path has other methods",
    "408": "The request did not arrive in time",
    "413": "The body is too large",
    "415": "The body is not plain JSON",
    "429": "Too many requests of one caller",
    "431": "The headers are too large",
    "499": "The request was cancelled through /v1/requests",
    "500": "A fault of the server",
    "503": "No room now; try again after Retry-After seconds",
    "504": "The request ran for too long",
}


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI 3.1 document. Every operation can answer with every error, in its protocol's schema."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description="Runs and serves large language models with the interfaces of OpenAI, Anthropic and TGI.",
        routes=app.routes,
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas["Error"] = _ERROR_SCHEMA
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}, {}]
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for operations in document.get("paths", {}).values():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            for status, description in ERRORS.items():
                responses.setdefault(status, {"description": description, "content": content})
    return document


_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
summary { cursor: pointer; padding: .3rem 0 }
summary b { display: inline-block; min-width: 4.5rem }
pre { overflow-x: auto; padding: .8rem; border: 1px solid color-mix(in srgb, currentColor 25%, transparent) }
"""


def render_page(document: dict[str, Any]) -> str:
    """The document as one HTML page that loads nothing and runs no script."""
    info = document["info"]
    sections = [
        _operation(method, path, operation)
        for path, operations in sorted(document.get("paths", {}).items())
        for method, operation in operations.items()
    ]
    schemas = [
        f"<details id='{escape(name)}'><summary>{escape(name)}</summary>{_code(schema)}</details>"
        for name, schema in sorted(document["components"]["schemas"].items())
    ]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])}</title>"
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style>"
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])} "
        f"The same as a document: <a href=/openapi.json>/openapi.json</a></p>"
        f"<h2>Paths</h2>{''.join(sections)}<h2>Schemas</h2>{''.join(schemas)}</html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    about = escape(operation.get("description") or operation.get("summary") or "")
    parts = [f"<p>{about}</p>"]
    for title, key in (("Parameters", "parameters"), ("Body", "requestBody")):
        if key in operation:
            parts.append(f"<h4>{title}</h4>{_code(operation[key])}")
    answers = {status: answer for status, answer in operation["responses"].items() if status < "400"}
    parts.append(f"<h4>Answers</h4>{_code(answers)}")
    return (
        f"<details><summary><b>{escape(method.upper())}</b> <code>{escape(path)}</code></summary>"
        f"{''.join(parts)}</details>"
    )


def _code(value: object) -> str:
    return f"<pre>{escape(json.dumps(value, indent=2, ensure_ascii=False))}</pre>"
