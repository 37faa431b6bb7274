"""Chat templates: a conversation to the text that the model was trained on.

The template runs in a process of its own (`template_worker.py`), with limits on time, memory and output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from octavo.errors import ModelLoadError, OctavoError, UsageError

if TYPE_CHECKING:
    from octavo.tokenizer.tokenizer import Tokenizer

MAX_RENDER_SECONDS = 2.0
MAX_OUTPUT_CHARS = 4 << 20
MAX_MEMORY_BYTES = 512 << 20
MAX_SOURCE_CHARS = 1 << 20
# Against a process that hangs without computing, or that a busy machine leaves waiting.
_MAX_WAIT_SECONDS = 60.0
_RESERVED = frozenset({"messages", "add_generation_prompt", "chat_template", "tokenize", "bos_token", "eos_token"})

Message = Mapping[str, Any]
"""A message: `role`, `content` and whatever else the template knows, such as `tool_calls`."""


class ChatTemplate:
    """A model's chat template. Safe to share between threads; renderings of one template run one at a time."""

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        from_caller: bool = False,
        max_render_seconds: float = MAX_RENDER_SECONDS,
    ) -> None:
        """source: Jinja, as the model file has it. bos_token, eos_token: their texts, which templates write.
        from_caller: the caller gave it instead of the model's own, so a fault in it is a UsageError.

        Starts the template's process, so that it is ready when the first conversation comes.
        Raises UsageError where there is no template (source None or empty).
        """
        self._name = "the chat template given" if from_caller else "the model's chat template"
        self._fault: type[OctavoError] = UsageError if from_caller else ModelLoadError
        if not source and from_caller:
            raise UsageError("the chat template given is empty; leave it out for the model's own")
        if not source:
            raise UsageError(
                "this model has no chat template, so it may be a base model: give it a text to continue "
                "(`octavo run --raw`, `LLM.generate`) instead of a conversation"
            )
        if len(source) > MAX_SOURCE_CHARS:
            raise self._fault(f"{self._name} has {len(source):,} characters; the limit is {MAX_SOURCE_CHARS:,}")
        self.source = source
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._max_render_seconds = max_render_seconds
        self._lock = threading.Lock()
        self._worker: _Worker | None = _Worker(source, max_render_seconds)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The text of the conversation, ready for the model to go on.

        messages: the conversation; tools, documents: descriptions that the template may show to the model;
        kwargs: what this model's template knows besides, such as `enable_thinking`.

        Raises UsageError where a message is malformed or the template fails on this conversation, with the
        template's own words, and ModelLoadError where the model's template does not compile, is unsafe, or exceeds
        2 s of computing, 4 Mi characters or 512 MiB. The caller's own template gives a UsageError then too.
        """
        check_messages(messages)
        if wrong := _RESERVED & kwargs.keys():
            raise UsageError(f"{sorted(wrong)[0]!r} cannot be passed to the chat template: Octavo sets it itself")
        variables = {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": None if tools is None else list(tools),
            "documents": None if documents is None else list(documents),
            **self._tokens,
            **kwargs,
        }
        try:
            line = json.dumps(variables)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"the conversation is not made of strings, numbers, lists and dicts: {error}") from error
        with self._lock:
            return self._text(self._render_line(line))

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of the conversation; kwargs are those of `render`, with its errors.

        continue_final_message: the model goes on with the last message itself, instead of beginning one of its own.
        Control tokens come only from the template: their text within a message, a tool or a document stays text,
        so nobody can play another role.
        """
        for name in ("tools", "documents"):
            if kwargs.get(name) is not None:
                kwargs[name] = tokenizer.guard(list(kwargs[name]))
        guarded = tokenizer.guard(list(messages))
        if not continue_final_message:
            return tokenizer.encode_chat(self.render(guarded, **kwargs))
        if kwargs.setdefault("add_generation_prompt", False):
            raise UsageError("continue_final_message and add_generation_prompt exclude each other")
        return tokenizer.encode_chat(_up_to_content(self.render(guarded, **kwargs), guarded[-1]))

    def close(self) -> None:
        """Ends the template's process. May be called twice; a later `render` starts another."""
        with self._lock:
            if self._worker is not None:
                self._worker.close()
            self._worker = None

    def _render_line(self, line: str) -> dict[str, str]:
        if self._worker is None or not self._worker.is_usable():
            self._worker = _Worker(self.source, self._max_render_seconds)
        answer = self._worker.render(line)
        if answer is None:
            self._worker.close()
            self._worker = None
            return {"error": "limit", "message": f"it computed for {self._max_render_seconds:g} s without end"}
        return answer

    def _text(self, answer: dict[str, str]) -> str:
        kind = answer.get("error")
        if kind is None:
            return answer["text"]
        message = answer["message"]
        if kind == "raised":
            raise UsageError(f"the chat template refuses this conversation: {message}")
        if kind == "undefined":
            raise UsageError(f"the chat template misses something in this conversation: {message}")
        if kind == "failed":
            raise UsageError(f"the chat template failed on this conversation: {message}")
        if kind == "unsafe":
            raise self._fault(f"{self._name} does something unsafe and was stopped: {message}")
        if kind == "limit":
            raise self._fault(f"{self._name} was stopped: {message}")
        raise self._fault(f"{self._name} is broken: {message}")


def check_messages(messages: Sequence[Message]) -> None:
    """Raises UsageError naming the first message that is malformed, and its key.

    A message is a mapping with a string `role`, and `content` that is a string or a list of text parts
    (`{"type": "text", "text": "..."}`); beside `tool_calls` the content may be missing or None.
    """
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(
                f"a message must be a mapping such as {{'role': 'user', 'content': '...'}}; "
                f"message {i} is {message!r:.80}"
            )
        if not isinstance(message.get("role"), str):
            raise UsageError(f"message {i}: role must be a string such as 'user', {_found(message, 'role')}")
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            _check_parts(i, content)
        elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise UsageError(
                f"message {i}: content must be a string or a list of text parts, {_found(message, 'content')}; "
                "only a message with tool_calls may go without"
            )


def _up_to_content(rendered: str, message: Message) -> str:
    """The text up to the end of its last message's content, which templates may strip of white space."""
    content = message.get("content")
    body = content.strip() if isinstance(content, str) else ""
    at = rendered.rfind(body)
    if not body or at < 0:
        raise UsageError("the last message cannot be continued: its content must be a text that the template shows")
    end = at + len(body)
    space = content[len(content.rstrip()) :] if isinstance(content, str) else ""
    return rendered[: end + len(space)] if rendered.startswith(space, end) else rendered[:end]


def _check_parts(index: int, parts: Sequence[Any]) -> None:
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UsageError(
                f"message {index}: a part of content must be {{'type': 'text', 'text': '...'}}, not {part!r:.80}"
            )


def _found(message: Message, key: str) -> str:
    return f"not {message[key]!r:.80}" if key in message else "and it is missing"


class _Worker:
    """The process of one template. Not safe for threads; the template's lock guards it."""

    def __init__(self, source: str, max_render_seconds: float) -> None:
        self._owner = os.getpid()
        self._compiled: dict[str, str] | None = None
        # In a session of its own, so that Ctrl-C at the terminal reaches the program and not this process.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", str(Path(__file__).with_name("template_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
            start_new_session=True,
        )
        self._finalizer = weakref.finalize(self, _stop, self._process, self._owner)
        limits = {
            "memory_bytes": MAX_MEMORY_BYTES,
            "max_output_chars": MAX_OUTPUT_CHARS,
            "compute_seconds": max_render_seconds,
        }
        self._send(json.dumps({"path": sys.path, "limits": limits, "source": source}))

    def is_usable(self) -> bool:
        """Whether the process lives and is ours; after a fork it is the parent's."""
        return self._owner == os.getpid() and self._process.poll() is None

    def render(self, line: str) -> dict[str, str] | None:
        """The worker's answer to a line of variables. None: it died or had to be killed."""
        if self._compiled is None:
            if self._exchange(None) is None:  # it is ready
                return None
            self._compiled = self._exchange(None)
        if self._compiled is None or "error" in self._compiled:
            return self._compiled
        return self._exchange(line)

    def close(self) -> None:
        """Kills the process and takes its exit status."""
        self._finalizer()

    def _exchange(self, line: str | None) -> dict[str, str] | None:
        """Sends a line, if there is one, and waits for the answer. None: the process died."""
        watchdog = threading.Timer(_MAX_WAIT_SECONDS, self._process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            if line is not None:
                self._send(line)
            answer = cast(IO[str], self._process.stdout).readline()
        finally:
            watchdog.cancel()
        return json.loads(answer) if answer.endswith("\n") else None

    def _send(self, line: str) -> None:
        stdin = cast(IO[str], self._process.stdin)
        with suppress(BrokenPipeError):  # it died; the missing answer says so
            stdin.write(line + "\n")
            stdin.flush()


def _stop(process: subprocess.Popen[str], owner: int) -> None:
    if owner != os.getpid():
        return
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):  # what was still to be written goes nowhere
                stream.close()
    process.wait()
