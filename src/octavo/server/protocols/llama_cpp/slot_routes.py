"""llama.cpp's `POST /slots/{id}`: save prompts to files, restore them from files, and erase them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo import env
from octavo.engine.slots import SlotAction, SlotReport
from octavo.generation_request import MAX_CACHE_SALT_CHARS, RequestOptions
from octavo.server.errors import ApiError, refuse
from octavo.server.generation.running import separated
from octavo.server.http.json_body import Text
from octavo.server.http.long_answer import run_unless_gone
from octavo.server.protocols.answer_schemas import LLAMA_SLOT_ACTION, whole_answer
from octavo.server.protocols.answering import tenant_of
from octavo.server.protocols.llama_cpp.errors import LLAMA_CPP
from octavo.server.protocols.protocol_fields import NullIsAbsent
from octavo.server.server_state import state_of

# One component of a path that every operating system reads in the same way, as in llama.cpp.
_FILE_NAME = re.compile(
    r"[^\x00-\x1f\x7f/\\:*?\"<>|.~ ]([^\x00-\x1f\x7f/\\:*?\"<>|]{0,253}[^\x00-\x1f\x7f/\\:*?\"<>|. ])?"
)

router = LLAMA_CPP.router()


class SlotBody(NullIsAbsent):
    """The body of an action on a slot.

    filename: name in the folder given by `--slot-save-path`
    cache_salt: salt of the request that filled the slot
    """

    model: Text | None = None
    filename: Text | None = None
    cache_salt: Annotated[Text, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None = None


_NOTHING = SlotBody()  # a slot may be erased without a body


@router.post("/slots/{id_slot}", responses=whole_answer(LLAMA_SLOT_ACTION))
async def act_on_slot(
    request: Request,
    id_slot: int,
    action: Annotated[Literal["save", "restore", "erase"], Query()],
    body: SlotBody = _NOTHING,
    model: str | None = None,
) -> Response:
    """Save a slot's content to a file, load a file into a slot, or erase a slot. Needs `--slot-save-path`."""
    folder = state_of(request).config.slot_save_path
    if folder is None:
        message = "this server saves no slots; start it with --slot-save-path DIR"
        raise ApiError(501, message, code="not_supported_error")
    path = "" if action == "erase" else str(env.user_path(folder) / _file_name(body.filename))
    salt = separated(RequestOptions(cache_salt=body.cache_salt or ""), tenant_of(request)).cache_salt
    async with state_of(request).models.use(body.model or model) as used:
        if not 0 <= id_slot < used.info.max_num_seqs:
            raise refuse("id_slot", f"is {id_slot}; it must be from 0 to {used.info.max_num_seqs - 1}", "invalid_value")
        wanted = SlotAction(action, id_slot, path, salt)
        report = await run_unless_gone(request, used.client.act_on_slot(wanted))
    return JSONResponse({"id_slot": id_slot, **_answer(action, body.filename, report)})


def _file_name(name: str | None) -> str:
    if name is None:
        raise refuse(
            "filename", "is missing; name a file in the folder of --slot-save-path", "missing_required_parameter"
        )
    if not _FILE_NAME.fullmatch(name) or len(name.encode()) > 200:
        reason = f"is {name!r:.80}; it must be the plain name of a file, without folders, of at most 200 bytes"
        raise refuse("filename", reason, "invalid_value")
    return name


def _answer(action: str, filename: str | None, report: SlotReport) -> dict[str, Any]:
    milliseconds = round(report.seconds * 1e3, 3)
    if action == "save":
        counts: dict[str, Any] = {"n_saved": report.num_tokens, "n_written": report.num_bytes}
        return {"filename": filename, **counts, "timings": {"save_ms": milliseconds}}
    if action == "restore":
        counts = {"n_restored": report.num_tokens, "n_read": report.num_bytes}
        return {"filename": filename, **counts, "timings": {"restore_ms": milliseconds}}
    return {"n_erased": report.num_tokens}
