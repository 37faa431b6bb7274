"""Chat templates: render a conversation to the text format that the model was trained on.

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
MAX_SOURCE_CHARS = 1 << 20
_RESERVED = frozenset({"messages", "add_generation_prompt", "chat_template", "tokenize", "bos_token", "eos_token"})

Message = Mapping[str, Any]
"""A message: `role`, `content` and other fields that the template knows, such as `tool_calls`."""


class TemplateProcess:
    """The process of one template. It may be started before the template is known. Not thread-safe."""

    def __init__(self) -> None:
        worker = Path(__file__).with_name("template_worker.py")
        self._owner = os.getpid()
        # In a session of its own, so that Ctrl-C at the terminal reaches the program and not this process.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", str(worker), json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
            start_new_session=True,
        )
        self._finalizer = weakref.finalize(self, _stop, self._process, self._owner)

    def open(self, source: str, compute_seconds: float) -> None:
        """Sends the template, once; the process compiles it in the background.

        compute_seconds: the limit on compiling, and on each rendering.
        """
        self._write(json.dumps({"source": source, "seconds": compute_seconds}))

    def is_usable(self) -> bool:
        """True if the process is alive and belongs to this process; after a fork it belongs to the parent."""
        return self._owner == os.getpid() and self._process.poll() is None

    def render(self, variables: str) -> dict[str, str] | None:
        """The worker's answer to variables as JSON. None: it died."""
        self._write(variables)
        answer = cast(IO[str], self._process.stdout).readline()
        return json.loads(answer) if answer.endswith("\n") else None

    def close(self) -> None:
        """Kills the process and takes its exit status. May be called twice."""
        self._finalizer()

    def _write(self, line: str) -> None:
        stdin = cast(IO[str], self._process.stdin)
        with suppress(BrokenPipeError):  # it died; the missing answer tells the caller
            stdin.write(line + "\n")
            stdin.flush()


def _stop(process: subprocess.Popen[str], owner: int) -> None:
    if owner == os.getpid():
        with suppress(OSError), process:  # unwritten data is discarded
            process.kill()


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
        process: TemplateProcess | None = None,
    ) -> None:
        """Starts the template's process, so that it is ready when the first conversation comes.

        source: Jinja, as in the model file. bos_token, eos_token: their texts, for templates that write them.
        from_caller: the caller supplied the template instead of the model's own, so an error in it is a UsageError.
        process: a process that was started ahead of time; the template takes it over.
        Raises UsageError if there is no template (source None or empty).
        """
        self._name = "the chat template given" if from_caller else "the model's chat template"
        self._fault: type[OctavoError] = UsageError if from_caller else ModelLoadError
        if not source and from_caller:
            raise UsageError("the chat template given is empty; leave it out to use the model's own")
        if not source:
            raise UsageError(
                "this model has no chat template, so it may be a base model: give it text to continue "
                "(`octavo run --raw`, `LLM.generate`) instead of a conversation"
            )
        if len(source) > MAX_SOURCE_CHARS:
            raise self._fault(f"{self._name} has {len(source):,} characters; the limit is {MAX_SOURCE_CHARS:,}")
        self.source = source
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._max_seconds = max_render_seconds
        self._lock = threading.Lock()
        self._process = process or TemplateProcess()
        self._process.open(source, max_render_seconds)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The text of the conversation, for the model to continue.

        messages: the conversation. tools, documents: descriptions that the template may show to the model.
        kwargs: further variables of this model's template, such as `enable_thinking`.

        Raises UsageError with the template's own message if a message is malformed or the template fails on this
        conversation. Raises ModelLoadError if the model's template does not compile, is unsafe, or exceeds 2 s of
        computing, 4 Mi characters or 512 MiB; for a template from the caller that is a UsageError too.
        """
        check_messages(messages)
        if wrong := _RESERVED & kwargs.keys():
            raise UsageError(f"{sorted(wrong)[0]!r} cannot be passed to the chat template: Octavo sets it")
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
            raise UsageError(f"the conversation may hold only strings, numbers, lists and dicts: {error}") from error
        with self._lock:
            answer = self._answer(line)
        if "refusal" in answer:
            raise UsageError(f"the chat template {answer['refusal']}")
        if "fault" in answer:
            raise self._fault(f"{self._name} {answer['fault']}")
        return answer["text"]

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        continue_final_message: bool = False,
        max_tokens: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of the conversation; kwargs are those of `render`, with its errors.

        max_tokens: of the conversation, which otherwise raises TooManyTokensError.
        continue_final_message: the model continues the last message instead of starting a new one.
        Only the template can produce control tokens: their text in a message, a tool or a document stays text, so
        that a message cannot pretend to come from another role.
        """
        for name in ("tools", "documents"):
            if kwargs.get(name) is not None:
                kwargs[name] = tokenizer.guard(list(kwargs[name]))
        guarded = tokenizer.guard(list(messages))
        rendered = self.render_prompt(guarded, continue_final_message=continue_final_message, **kwargs)
        return tokenizer.encode_chat(rendered, max_tokens=max_tokens)

    def render_prompt(self, messages: Sequence[Message], *, continue_final_message: bool = False, **kwargs: Any) -> str:
        """The text of `render`, up to the end of the last message's content if the model is to continue it."""
        if not continue_final_message:
            return self.render(messages, **kwargs)
        if kwargs.setdefault("add_generation_prompt", False):
            raise UsageError("continue_final_message and add_generation_prompt cannot both be true")
        return _up_to_content(self.render(messages, **kwargs), messages[-1])

    def close(self) -> None:
        """Ends the template's process. May be called twice; a later `render` starts a new one."""
        with self._lock:
            self._process.close()

    def _answer(self, variables: str) -> dict[str, str]:
        if not self._process.is_usable():
            self._process = TemplateProcess()
            self._process.open(self.source, self._max_seconds)
        if (answer := self._process.render(variables)) is not None:
            return answer
        self._process.close()
        return {"fault": f"was stopped: it computed for more than {self._max_seconds:g} s"}


def check_messages(messages: Sequence[Message]) -> None:
    """Raises UsageError naming the first malformed message and its key.

    A message is a mapping with a string `role`, and `content` that is a string or a list of text parts
    (`{"type": "text", "text": "..."}`). With `tool_calls` the content may be missing or None.
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
                "only a message with tool_calls may have none"
            )


def _up_to_content(rendered: str, message: Message) -> str:
    """The rendered text up to the end of the last message's content, from which templates may strip white space."""
    content = message.get("content")
    body = content.strip() if isinstance(content, str) else ""
    at = rendered.rfind(body)
    if not body or at < 0:
        raise UsageError("the last message cannot be continued: the template must show its content, as text")
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
