"""Files and batches in the form that OpenAI's clients expect."""

from __future__ import annotations

from typing import Any

from octavo.batches.store import StoredBatch, StoredFile

_TIMES = (
    "created_at",
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


def file_body(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_body(batch: StoredBatch) -> dict[str, Any]:
    usage, has_ended = batch.usage, batch.has_ended
    count = usage.get
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id if has_ended and batch.completed else None,
        "error_file_id": batch.error_file_id if has_ended and batch.failed else None,
        **{name: batch.times.get(name) for name in _TIMES},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": {
            "input_tokens": count("input_tokens", 0),
            "input_tokens_details": {"cached_tokens": count("cached_tokens", 0)},
            "output_tokens": count("output_tokens", 0),
            "output_tokens_details": {"reasoning_tokens": count("reasoning_tokens", 0)},
            "total_tokens": count("input_tokens", 0) + count("output_tokens", 0),
        },
        "metadata": batch.metadata,
    }


def list_body(items: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """Return one page of a list response."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
