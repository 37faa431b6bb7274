"""Saves slots to files and restores them, on a thread that may wait for the engine and the disk."""

from __future__ import annotations

import time
from concurrent.futures import TimeoutError  # noqa: A004 - another one before Python 3.11
from contextlib import suppress
from pathlib import Path

from octavo.engine.engine_thread import EngineThread
from octavo.engine.kv.prefix_move import PrefixMove
from octavo.engine.kv.prompt_file import KeptPrompt, read_prompt_file, write_prompt_file
from octavo.engine.slots import SlotAction, SlotReport
from octavo.errors import EngineDeadError, UsageError

_LOOK_S = 0.5  # between two checks of the engine


def run_action(thread: EngineThread, action: SlotAction) -> SlotReport:
    """Run an action. Raises UsageError if a file cannot be written or read, and EngineDeadError."""
    begun_at, engine, slots = time.perf_counter(), thread.engine, thread.engine.slots
    if action.kind == "erase":
        return SlotReport(thread.call(lambda: slots.erase(action)).result())
    if engine.identity.is_unique or not engine.limits.enable_prefix_caching:
        why = "prefix caching is off" if not engine.limits.enable_prefix_caching else "its files were modified just now"
        raise UsageError(f"prompts of this model cannot be saved or restored: {why}", code="invalid_value")
    path, identity = Path(action.path), engine.identity.root()
    if action.kind == "save":
        content, move = thread.call(lambda: slots.save(action)).result()
        _wait(thread, move)
        prompt = KeptPrompt(content.token_ids, content.hashes, move.data, bool(content.salt))
        num_bytes = write_prompt_file(path, identity, prompt)
    else:
        prompt, num_bytes = read_prompt_file(path, identity, slots.size_of_key, slots.wanted_keys)

        def restore() -> PrefixMove:
            engine.wake_up()
            return slots.restore(action, prompt)

        move = thread.call(restore).result()
        _wait(thread, move)
    return SlotReport(move.num_tokens, num_bytes, time.perf_counter() - begun_at)


def _wait(thread: EngineThread, move: PrefixMove) -> None:
    """Wait for the step that makes a move. Raises EngineDeadError if the engine ends first."""
    while thread.failure is None:
        with suppress(TimeoutError):
            move.done.result(_LOOK_S)
            return
    raise EngineDeadError(str(thread.failure))
