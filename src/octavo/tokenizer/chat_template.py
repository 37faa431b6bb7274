"""Renders conversations with a chat template to the text format that the model was trained on.

The template runs in a separate process (`template_worker.py`), with limits on time, memory and output.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.confined_process import ConfinedProcess
from octavo.errors import ModelLoadError, OctavoError, UsageError
from octavo.tokenizer.content_form import ContentForms
from octavo.tokenizer.image_marks import ImageMarks
from octavo.tokenizer.template_set import TemplateSet

if TYPE_CHECKING:
    from octavo.tokenizer.tokenizer import Tokenizer

MAX_RENDER_SECONDS = 2.0
MAX_SOURCE_CHARS = 1 << 20
_LONG_CHARS = 256 << 10  # if a longer conversation exceeds a template's limits, the conversation is at fault
_ROLES = ("system", "developer", "user", "assistant", "tool")
_RESERVED = frozenset({"messages", "tokenize", "bos_token", "eos_token"})

Message = Mapping[str, Any]
"""A message: `role`, `content` and other fields that the template uses, such as `tool_calls`."""


class TemplateProcess(ConfinedProcess):
    """The process of one template. It may be started before the template is known. Not thread-safe."""

    def __init__(self) -> None:
        super().__init__(Path(__file__).with_name("template_worker.py"))

    def open(self, source: str, compute_seconds: float) -> None:
        """Send the template. Call this only once. The process compiles the template in the background.

        compute_seconds: time limit for compiling and for each rendering
        """
        self._write_line(json.dumps({"source": source, "seconds": compute_seconds}))

    def render(self, variables: str) -> dict[str, str] | None:
        """Return the worker's answer to variables given as JSON, or None if it died."""
        self._write_line(variables)
        answer = self.read_line()
        return None if answer is None else json.loads(answer)

    def _write_line(self, line: str) -> None:
        self.write(line.encode("ascii") + b"\n")


class ChatTemplate:
    """A model's chat templates. Thread-safe; renderings run one at a time."""

    def __init__(
        self,
        source: TemplateSet | str | None,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        from_caller: bool = False,
        max_render_seconds: float = MAX_RENDER_SECONDS,
        process: TemplateProcess | None = None,
    ) -> None:
        """Start the default template's process, so that it is ready when the first conversation arrives.

        source: one or several Jinja templates, as in the model file
        bos_token, eos_token: the texts of these tokens, for templates that write them
        special_tokens: the texts of other tokens by name, such as `pad_token`; templates can use only the tokens given
            here
        from_caller: whether the caller supplied the template instead of the model, so that an error in it is a
            UsageError
        process: a process started ahead of time, for this template to use

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
        self.sources = TemplateSet(source) if isinstance(source, str) else source
        for text in (self.sources.default, *self.sources.named.values()):
            if len(text) > MAX_SOURCE_CHARS:
                raise self._fault(f"{self._name} has {len(text):,} characters; the limit is {MAX_SOURCE_CHARS:,}")
        self._tokens = {**(special_tokens or {}), "bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._max_seconds = max_render_seconds
        self._lock = threading.Lock()
        self._processes = {self.sources.default: process or TemplateProcess()}
        self._processes[self.sources.default].open(self.sources.default, max_render_seconds)
        self._forms: dict[str, ContentForms] = {}

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Render the conversation to text for the model to continue.

        messages: the conversation; its content is converted to the form that the template accepts
        tools, documents: descriptions that the template may show to the model. With tools, the template named
        `tool_use` is used if there is one.
        chat_template: name of another of the model's templates
        kwargs: additional variables of this model's template, such as `enable_thinking`

        Raises UsageError with the template's own message if a message is malformed or the template fails on this
        conversation. Raises ModelLoadError if the model's template does not compile, is unsafe, or exceeds 2 s of
        computing, 4 Mi characters or 512 MiB. For a template from the caller, and for a conversation of more than 256
        Ki characters that exceeds these limits, that is a UsageError too.
        """
        check_messages(messages, with_images=True)
        if wrong := _RESERVED & kwargs.keys():
            raise UsageError(f"{sorted(wrong)[0]!r} cannot be passed to the chat template: Octavo sets it")
        source = self._chosen(chat_template, has_tools=tools is not None)
        _check_roles(messages, source)
        variables = {
            "add_generation_prompt": add_generation_prompt,
            "tools": None if tools is None else list(tools),
            "documents": None if documents is None else list(documents),
            **self._tokens,
            **kwargs,
        }
        with self._lock:
            fitted = self._forms_of(source).fit(messages)
            try:
                line = json.dumps({"messages": fitted, **variables})
            except (TypeError, ValueError, RecursionError) as error:
                raise UsageError(
                    f"the conversation may contain only strings, numbers, lists and dicts: {error}"
                ) from error
            answer = self._answer(source, line)
        if "refusal" in answer:
            raise UsageError(f"the chat template {answer['refusal']}")
        if "limit" in answer and len(line) > _LONG_CHARS:
            raise UsageError(
                f"the conversation of {len(line):,} characters is too long for the chat template, which "
                f"{answer['limit']}; send fewer or shorter messages",
                code="context_length_exceeded",
            )
        if fault := answer.get("limit") or answer.get("fault"):
            raise self._fault(f"{self._name} {fault}")
        return answer["text"]

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        /,
        *,
        continue_final_message: bool = False,
        max_tokens: int | None = None,
        image_marks: ImageMarks | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Return the conversation's token ids.

        max_tokens: limit for the conversation; if it is longer, raises TooManyTokensError
        image_marks: the marks in its texts; each becomes a placeholder
        continue_final_message: let the model continue the last message instead of starting a new one
        kwargs: arguments of `render`

        Only the template can produce control tokens. Their text in a message, a tool or a document stays text, so that
        a message cannot pretend to come from another role. Raises the same errors as `render`.
        """
        for name in ("tools", "documents"):
            if kwargs.get(name) is not None:
                kwargs[name] = tokenizer.guard(list(kwargs[name]))
        guarded = tokenizer.guard(list(messages))
        kwargs["continue_final_message"] = continue_final_message
        if image_marks is None or not image_marks.numbers(messages):
            rendered = self.render_prompt(guarded, **kwargs)
        else:
            rendered = self.render_images(guarded, image_marks, **kwargs)
        return tokenizer.encode_chat(rendered, max_tokens=max_tokens)

    def render_images(self, messages: Sequence[Message], marks: ImageMarks, /, **kwargs: Any) -> str:
        """Return the text of `render_prompt` with the placeholder in place of each mark.

        If the template writes the images of a message itself, it receives the message in parts. Raises UsageError if
        the text does not contain all images.
        """
        count = len(marks.numbers(messages))
        forms = self._forms_of(self._chosen(kwargs.get("chat_template"), has_tools=kwargs.get("tools") is not None))
        with self._lock:
            in_parts = [
                {**message, "content": marks.in_parts(message["content"])}
                if isinstance(message.get("content"), str) and forms.shows_image(message["role"], marks.placeholder)
                else message
                for message in messages
            ]
        for form in (in_parts, messages):
            rendered = marks.shown(self.render_prompt(form, **kwargs))
            if rendered.count(marks.placeholder) == count:
                return rendered
        raise UsageError("the chat template does not show all images of the conversation")

    def render_prompt(
        self, messages: Sequence[Message], /, *, continue_final_message: bool = False, **kwargs: Any
    ) -> str:
        """Return the text of `render`, cut after the last message's content if the model is to continue it."""
        if not continue_final_message:
            return self.render(messages, **kwargs)
        if kwargs.setdefault("add_generation_prompt", False):
            raise UsageError("continue_final_message and add_generation_prompt cannot both be true")
        return _up_to_content(self.render(messages, **kwargs), messages[-1])

    def close(self) -> None:
        """End the processes. May be called twice. A later `render` starts a new process."""
        with self._lock:
            for process in self._processes.values():
                process.close()

    def _chosen(self, name: str | None, *, has_tools: bool) -> str:
        if name is None:
            return self.sources.chosen(has_tools=has_tools)
        if (source := self.sources.get(name)) is None:
            known = ", ".join(["default", *self.sources.named])
            raise UsageError(f"the model has no chat template named {name!r:.80}; it has {known}")
        return source

    def _forms_of(self, source: str) -> ContentForms:
        """Return the forms of content that this template accepts."""
        if source not in self._forms:
            plain = {"add_generation_prompt": False, "tools": None, "documents": None, **self._tokens}

            def render(messages: Sequence[Message]) -> str | None:
                return self._answer(source, json.dumps({"messages": messages, **plain})).get("text")

            self._forms[source] = ContentForms(render)
        return self._forms[source]

    def _answer(self, source: str, variables: str) -> dict[str, str]:
        process = self._processes.get(source)
        if process is None or not process.is_usable():
            process = self._processes[source] = TemplateProcess()
            process.open(source, self._max_seconds)
        if (answer := process.render(variables)) is not None:
            return answer
        process.close()
        return {"limit": f"was stopped: it computed for more than {self._max_seconds:g} s"}


def check_messages(messages: Sequence[Message], *, with_images: bool = False) -> None:
    """Raise UsageError naming the first malformed message and its key.

    with_images: also allow `{"type": "image"}` parts

    A message is a mapping with a string `role`, and `content` that is a string or a list of text parts (`{"type":
    "text", "text": "..."}`). With `tool_calls` the content may be missing or None.
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
            _check_parts(i, [part for part in content if not (with_images and part == {"type": "image"})])
        elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise UsageError(
                f"message {i}: content must be a string or a list of text parts, {_found(message, 'content')}; "
                "only a message with tool_calls may have none"
            )


def _check_roles(messages: Sequence[Message], source: str) -> None:
    """Raise UsageError for a role that is neither a standard role nor named in this template's `source`."""
    for i, message in enumerate(messages):
        role = message["role"]
        if role in _ROLES or any(f"{quote}{role}{quote}" in source for quote in "\"'"):
            continue
        from difflib import get_close_matches  # imported here because it is rarely needed

        near = get_close_matches(role, _ROLES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it must be one of {', '.join(_ROLES)}"
        raise UsageError(f"message {i}: the role is {role!r:.80}, which the chat template does not know; {hint}")


def _up_to_content(rendered: str, message: Message) -> str:
    """Return the rendered text up to the end of the last message's content.

    The content is also found if the template stripped white space from its ends.
    """
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        content = content[-1].get("text", "") if content else ""
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
