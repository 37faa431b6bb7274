"""The output file of a batch: resumed after any end, ordered, and never two lines of one id."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from octavo.batches import journal as journal_module
from octavo.batches.journal import Journal
from octavo.batches.lines import LineResult
from octavo.batches.runner import line_answer
from octavo.errors import UsageError


def result(number: int, status: int = 200) -> LineResult:
    return LineResult(number, f"id-{number}", status, "req", b'{"usage": null}')


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]


def test_answers_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever gets them: the journal takes their usage, and reads only the files of earlier runs."""
    body = b'{"usage": {"prompt_tokens": 3, "completion_tokens": 5}}'
    answer = line_answer(200, {}, body)
    assert answer.usage == {"input_tokens": 3, "output_tokens": 5}
    with monkeypatch.context() as patched:
        patched.setattr(journal_module.json, "loads", lambda *_: pytest.fail("parsed again"))
        with Journal(tmp_path / "out", None) as journal:
            journal.put(LineResult(1, "a", 200, "req", answer.body, usage=answer.usage))
            assert journal.usage == answer.usage
    with Journal(tmp_path / "out", None) as journal:
        assert journal.usage == answer.usage


def test_a_file_that_was_cut_anywhere_goes_on(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    with Journal(whole, None) as journal:
        for number in (1, 2):
            journal.put(result(number))
    data = whole.read_bytes()
    first = data.index(b"\n") + 1
    for end in (*range(0, first, 7), first, *range(first + 1, len(data), 11), len(data)):
        path = tmp_path / "cut"
        path.write_bytes(data[:end])
        with Journal(path, None) as journal:
            done = (end >= first) + (end >= len(data))
            assert [journal.has(f"id-{number}") for number in (1, 2)] == [done > 0, done > 1]
            for number in range(done + 1, 3):
                journal.put(result(number))
        assert ids(path) == ["id-1", "id-2"]


def test_failed_lines_go_to_their_own_file_and_are_run_again_if_asked(tmp_path: Path) -> None:
    output, errors = tmp_path / "out", tmp_path / "errors"
    with Journal(output, errors) as journal:
        for number, status in ((1, 200), (2, 400), (3, 200)):
            journal.put(result(number, status))
    assert (ids(output), ids(errors)) == (["id-1", "id-3"], ["id-2"])
    with Journal(output, errors) as journal:
        assert (journal.num_completed, journal.num_failed) == (2, 1)
        assert journal.has("id-2")
    with Journal(output, errors, retry_failed=True) as journal:
        assert (journal.num_completed, journal.num_failed) == (2, 0)
        assert not journal.has("id-2")
        journal.put(result(2))
    assert (ids(output), ids(errors)) == (["id-1", "id-3", "id-2"], [])


def test_failed_lines_in_the_output_are_replaced_from_one_moment_to_the_next(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with Journal(output, None) as journal:
        for number, status in ((1, 500), (2, 200), (3, 404)):
            journal.put(result(number, status))
    (tmp_path / "out.partial").write_text("left behind by a killed process")
    with Journal(output, None, retry_failed=True) as journal:
        journal.put(result(1))
        with pytest.raises(UsageError, match="being written by another batch"):
            Journal(output, None)
    assert ids(output) == ["id-2", "id-1"]
    assert not (tmp_path / "out.partial").exists()


def test_results_in_order(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with Journal(output, None, ordered=True) as journal:
        journal.expect([1, 2, 4, 5])
        for number in (5, 2, 1):
            journal.put(result(number))
        assert ids(output) == ["id-1", "id-2"]
        journal.put(result(4))
    assert ids(output) == ["id-1", "id-2", "id-4", "id-5"]


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "notes.txt"
    for text in ("my notes\n", '{"custom_id": "a"}\n', "[]\n"):
        output.write_text(text)
        with pytest.raises(UsageError, match="something other"):
            Journal(output, None)
        assert output.read_text() == text
    with pytest.raises(UsageError, match="no such directory"):
        Journal(tmp_path / "absent" / "out", None)
    with pytest.raises(UsageError, match="their own file"):
        Journal(tmp_path / "out", tmp_path / "out")
    with pytest.raises(UsageError, match="not a regular file"):
        Journal(tmp_path, None)


def test_results_do_not_wait_for_the_disk_and_its_failure_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes nothing until the test lets it go on, and then fails."""
    is_asked, may_fail = threading.Event(), threading.Event()

    def fails(_: int) -> None:
        is_asked.set()
        may_fail.wait(20)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(journal_module, "_SYNC_S", 0.0)
    journal = Journal(tmp_path / "out", None)
    monkeypatch.setattr(os, "fsync", fails)
    for number in range(3):
        journal.put(result(number))
        assert is_asked.wait(20)
    assert (tmp_path / "out").read_bytes().count(b"\n") == 3
    may_fail.set()
    with pytest.raises(OSError, match="No space left"):
        journal.end()
