"""Ollama's model routes: `/api/tags`, `/api/show`, `/api/ps`, `/api/pull` and `/api/version`."""

from __future__ import annotations

import dataclasses
import re
from datetime import datetime, timedelta, timezone
from typing import Any, Literal

from anyio.to_thread import run_sync
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo import __version__
from octavo.errors import UsageError
from octavo.sampling_params import SamplingParams
from octavo.server.errors import ApiError
from octavo.server.generation.infill import supports_infill
from octavo.server.http.json_body import Text, quote
from octavo.server.models.model_files import ModelFiles, read_model_files, short_count
from octavo.server.models.model_manager import ModelEntry
from octavo.server.models.served_adapters import ServedAdapter
from octavo.server.protocols.answer_schemas import (
    OLLAMA_MODEL,
    OLLAMA_MODELS,
    OLLAMA_STATUS,
    lines_answer,
    whole_answer,
)
from octavo.server.protocols.ollama.errors import OLLAMA
from octavo.server.protocols.ollama.routes import known_name
from octavo.server.protocols.protocol_fields import NullIsAbsent
from octavo.server.reasoning.reasoning_format import find_reasoning_format
from octavo.server.server_state import state_of

# The version of Ollama whose API this is. Clients compare it with the version that they need.
API_VERSION = "0.12.11"
# The expiry of a model that is never unloaded, as Ollama's clients expect it: Go's longest duration, 2^63 ns.
_FOR_EVER = timedelta(seconds=2**63 // 10**9)
_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
BODILESS_PATHS = ("/api/blobs/{digest}",)
_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
_SAMPLING |= {"typical_p": "typical_p", "repetition_penalty": "repeat_penalty"}
_SAMPLING |= {"presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty", "seed": "seed"}

router = OLLAMA.router()


class NamedModel(NullIsAbsent):
    """A request that names a model.

    name: the older name of `model`
    """

    model: Text | None = None
    name: Text | None = None

    def entry(self, request: Request) -> ModelEntry:
        """Return the named model. Raises UsageError if none is named, ApiError (404) if no model has this name."""
        name = self.model or self.name
        if not name:
            raise UsageError("model is required", param="model", code="missing_required_parameter")
        models = state_of(request).models
        return models.entry(known_name(models, name))


class ShowRequest(NamedModel):
    """A request for facts about a model. Ollama's own program always sends empty `system` and `template` fields."""

    verbose: bool | None = None
    system: Literal[""] | None = None
    template: Literal[""] | None = None


class PullRequest(NamedModel):
    """A request to make a model available.

    insecure, username, password: only for access to Ollama's registry; this server does not use it
    """

    stream: bool | None = None
    insecure: bool | None = None
    username: Text | None = None
    password: Text | None = None


@router.get("/api/version")
async def get_version() -> dict[str, str]:
    """Return the version of Ollama's API, and the server's own version."""
    return {"version": API_VERSION, "server": f"octavo {__version__}"}


@router.get("/api/tags", responses=whole_answer(OLLAMA_MODELS))
async def list_models(request: Request) -> Response:
    """List all models of the server, loaded or not, and their adapters."""
    models = state_of(request).models
    files = await run_sync(lambda: [read_model_files(entry) for entry in models.entries])
    listed = {entry.name: _listed(entry, found) for entry, found in zip(models.entries, files, strict=True)}
    adapters = [_adapted(listed[adapter.parent], adapter) for adapter in models.adapters.entries]
    return JSONResponse({"models": [*listed.values(), *adapters]})


@router.get("/api/ps", responses=whole_answer(OLLAMA_MODELS))
async def list_loaded_models(request: Request) -> Response:
    """List the loaded models. They stay loaded until another model needs their memory."""
    entries = [entry for entry in state_of(request).models.entries if entry.state == "loaded"]
    files = await run_sync(lambda: [read_model_files(entry) for entry in entries])
    return JSONResponse({"models": [_running(entry, found) for entry, found in zip(entries, files, strict=True)]})


@router.post("/api/show", responses=whole_answer(OLLAMA_MODEL))
async def show_model(request: Request, body: ShowRequest) -> Response:
    """Return a model with its metadata, chat template, sampling defaults and capabilities. For an adapter, these are
    the model's.
    """
    entry, models = body.entry(request), state_of(request).models
    adapter = models.adapter(known_name(models, body.model or body.name))
    files = await run_sync(read_model_files, entry)
    return JSONResponse(
        {
            "modelfile": f"FROM {entry.config.model}\n"
            + (f"ADAPTER {adapter.source}\n" if adapter is not None else ""),
            "parameters": _parameters(entry),
            "template": _template(entry, files) or "",
            "details": _details(files),
            "model_info": dict(files.metadata) if files is not None else {},
            "license": files.metadata.get("general.license") if files is not None else None,
            "capabilities": _capabilities(entry, files),
            "modified_at": _modified(entry, files),
        }
    )


@router.post("/api/pull", responses=lines_answer(OLLAMA_STATUS))
async def pull_model(request: Request, body: PullRequest) -> Response:
    """Make a model of the server available. If it is not on this machine yet, it is downloaded and loaded."""
    entry = body.entry(request)
    if await run_sync(read_model_files, entry) is None:
        await state_of(request).models.load(entry.name)
    return JSONResponse(
        {"status": "success"}, media_type="application/json" if body.stream is False else "application/x-ndjson"
    )


@router.get("/api/blobs/{digest}", include_in_schema=False)
async def find_blob(request: Request, digest: str) -> Response:
    """Return an empty answer if a model of the server has this digest, as in `/api/tags`. Clients ask with HEAD."""
    if not await _is_known(request, digest):
        raise ApiError(404, f"there is no blob {quote(digest, 80)}", code="not_found")
    return Response()


@router.post("/api/blobs/{digest}", include_in_schema=False)
async def refuse_blob(request: Request, digest: str) -> Response:
    """Accept a known blob, and refuse any other one, because it could only be for a new model. No bytes are read."""
    if await _is_known(request, digest):
        return Response()
    raise UsageError(
        "/api/blobs takes no files: the server serves the models it was started with; start it with `octavo serve "
        "NAME=FILE`"
    )


async def _is_known(request: Request, digest: str) -> bool:
    """Return True if a model has this digest. Raises UsageError if it is not a digest."""
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise UsageError(f"the digest is {quote(digest, 80)}; it must be sha256: and 64 hexadecimal digits")
    entries = state_of(request).models.entries
    files = await run_sync(lambda: [read_model_files(entry) for entry in entries])
    return any(found is not None and found.digest == match[1].lower() for found in files)


@router.post("/api/create", include_in_schema=False)
@router.post("/api/copy", include_in_schema=False)
@router.post("/api/push", include_in_schema=False)
@router.delete("/api/delete", include_in_schema=False)
async def refuse_change(request: Request) -> Response:
    """Refuse the request, because the server's models are fixed by its command line."""
    raise UsageError(f"{request.url.path} is not supported: the server serves the models it was started with")


def _details(files: ModelFiles | None) -> dict[str, Any]:
    if files is None:
        return {"parent_model": "", "format": "", "family": "", "families": None} | dict.fromkeys(
            ("parameter_size", "quantization_level"), ""
        )
    return {
        "parent_model": "",
        "format": files.file_format,
        "family": files.architecture,
        "families": [files.architecture],
        "parameter_size": short_count(files.num_parameters),
        "quantization_level": files.weight_type,
    }


def _listed(entry: ModelEntry, files: ModelFiles | None) -> dict[str, Any]:
    return {
        "name": entry.name,
        "model": entry.name,
        "modified_at": _modified(entry, files),
        "size": files.num_bytes if files is not None else 0,
        "digest": files.digest if files is not None else "",
        "details": _details(files),
    }


def _adapted(model: dict[str, Any], adapter: ServedAdapter) -> dict[str, Any]:
    """Return an adapter's entry, made from its model's entry."""
    details = {**model["details"], "parent_model": adapter.parent}
    return {**model, "name": adapter.name, "model": adapter.name, "size": adapter.nbytes, "details": details}


def _running(entry: ModelEntry, files: ModelFiles | None) -> dict[str, Any]:
    assert entry.info is not None
    info = entry.info
    return {
        **_listed(entry, files),
        "size": info.weight_bytes + info.kv_cache_bytes + info.workspace_bytes,
        "size_vram": 0,
        "context_length": info.max_model_len,
        "expires_at": _time(datetime.now(timezone.utc) + _FOR_EVER),
    }


def _modified(entry: ModelEntry, files: ModelFiles | None) -> str:
    return _time(datetime.fromtimestamp(entry.created if files is None else files.modified_s, timezone.utc))


def _time(when: datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")


def _parameters(entry: ModelEntry) -> str:
    """Return the model's sampling defaults that differ from `SamplingParams()`, one per line, as in a Modelfile."""
    if entry.info is None:
        return ""
    plain = SamplingParams()
    params = dataclasses.asdict(plain.with_defaults(entry.info.sampling_defaults.values))
    changed = {own: params[name] for name, own in _SAMPLING.items() if params[name] != getattr(plain, name)}
    return "\n".join(
        f"{name:<30} {value if isinstance(value, int) else format(value, 'g')}" for name, value in changed.items()
    )


def _template(entry: ModelEntry, files: ModelFiles | None) -> str | None:
    if entry.model is not None:
        return entry.model.tokenizer.template_source() or None
    return files.chat_template if files is not None else None


def _capabilities(entry: ModelEntry, files: ModelFiles | None) -> list[str]:
    """Return the capabilities that requests can ask for. `insert` is known only once the model has been loaded."""
    template = _template(entry, files) or ""
    found = ["completion"]
    if template:
        found.append("tools")  # even for templates without tools, which use a system prompt
    if find_reasoning_format(template) is not None:
        found.append("thinking")
    if entry.info is not None and entry.info.images is not None:
        found.append("vision")
    if entry.model is not None and supports_infill(entry.model.tokenizer):
        found.append("insert")
    return found
