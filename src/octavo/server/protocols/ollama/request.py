"""The bodies of Ollama's `/api/generate` and `/api/chat`, and their conversion to model-independent requests."""

from __future__ import annotations

import re
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from octavo.generation_request import RequestOptions
from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from octavo.server.errors import refuse
from octavo.server.generation.content import Media, plain
from octavo.server.generation.infill import Infill
from octavo.server.generation.json_schema import check_schema
from octavo.server.generation.spec import ChatSpec, TextSpec, read_options
from octavo.server.http.json_body import WHOLE, WHOLE_NUMBERS, Int, Number, Text, quote
from octavo.server.models.image_reader import ImageSource
from octavo.server.protocols.conversation import arguments_text, chat_call, chat_tools
from octavo.server.protocols.ignored_fields import OLLAMA, with_ignored
from octavo.server.protocols.llama_sampling import LlamaSampling
from octavo.server.protocols.protocol_fields import AnsweredFields, Historic, NullIsAbsent, NumLogprobs

MAX_MESSAGES = 4096
MAX_CONTEXT_TOKENS = 1 << 20
IMAGE_MARKER = f"<image-{secrets.token_hex(16)}>"  # before the text of a raw prompt

_NAMES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
)
FIELD_NAMES = {
    **{name: f"options.{name}" for name in _NAMES},
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "structured_outputs": "format",
    "logprobs": "top_logprobs",
    "thinking.type": "think",
    "reasoning_effort": "think",
}

_DURATION = re.compile(r"(?P<sign>[+-]?)(?P<parts>\d+(?:\.\d+)?|(?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h)){1,8})", re.ASCII)
_PART = re.compile(r"([\d.]+)(ns|us|µs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

KeepAlive: TypeAlias = Number | Text


class Options(with_ignored(LlamaSampling, OLLAMA)):  # type: ignore[misc]
    """Ollama's `options`.

    num_predict: -1 and -2 mean no limit
    draft_num_predict: maximum number of draft tokens per step, or 0 for none
    """

    num_predict: Int | None = None
    draft_num_predict: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] | None = None


class OllamaRequest(AnsweredFields):
    """The fields that `/api/generate` and `/api/chat` share.

    stream: true by default; the endpoint fills in the default
    truncate: whether to leave out the oldest turns of a conversation that is too long; otherwise this is an error
    shift: has no effect; the answer ends at the end of the context, and nothing is shifted
    """

    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    keep_alive: KeepAlive | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    truncate: bool | None = None
    shift: Literal[False] | None = None

    @property
    def own_names(self) -> Mapping[str, str]:
        return {"thinking": "think", "reasoning_effort": "think"}

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to answer, so that the request only loads or unloads the model."""
        raise NotImplementedError

    @property
    def unloads(self) -> bool:
        """True if the model should be unloaded after this request."""
        return seconds_of(self.keep_alive) == 0

    def find_ignored(self) -> list[str]:
        return find_ignored_options(self.options, self.keep_alive)

    def read_params(self) -> tuple[SamplingParams, frozenset[str]]:
        """Return the parameters, and the names of those that the request sets."""
        options = self.options or Options()
        arguments = options.read_sampling("options.")
        limit = None if options.num_predict in (-1, -2) else options.num_predict
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs", "needs logprobs: true", "invalid_value")
        params = SamplingParams(
            **arguments,
            max_tokens=limit,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            structured_outputs=self._structured(),
        )
        return params, options.given_names(arguments)

    def read_options(self) -> RequestOptions:
        """Return the request's options; see `spec.read_options`."""
        return read_options(self, num_speculative_tokens=self.options.draft_num_predict if self.options else None)

    def read_truncation(self) -> dict[str, Any]:
        """Return the fields of Common about prompts that are too long."""
        return {"truncate_prompt_tokens": -1, "truncation_side": "turns"} if self.truncate else {}

    def read_thinking(self) -> dict[str, Any]:
        """Return the fields of ChatSpec about thinking."""
        if isinstance(self.think, str):
            return {"thinking": "enabled", "reasoning_effort": self.think}
        return {"thinking": "adaptive" if self.think is None else "enabled" if self.think else "disabled"}

    def _structured(self) -> StructuredOutputsParams | None:
        if isinstance(self.format, dict):
            check_schema(self.format, "format")
            return StructuredOutputsParams(json=self.format)
        return StructuredOutputsParams(json_object=True) if self.format == "json" else None


class GenerateRequest(OllamaRequest):
    """A prompt, or a prefix with a suffix. The chat template wraps the prompt unless `raw` is set."""

    prompt: Text | None = None
    suffix: Text | None = None
    system: Text | None = None
    template: Text | None = None
    context: Annotated[list[int], Field(max_length=MAX_CONTEXT_TOKENS), WHOLE_NUMBERS] | None = None
    raw: bool | None = None
    images: list[Text] | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.prompt or self.suffix or self.images)

    def to_spec(self, tenant: str) -> ChatSpec | TextSpec:
        self._refuse_unsupported()
        params, names = self.read_params()
        common: dict[str, Any] = {"params": params, "given": names, "tenant": tenant, "options": self.read_options()}
        common |= {"constraint_field": "format", **self.read_truncation()}
        prompt = self.prompt or ""
        images = _images(self.images, "images")
        if self.suffix:
            return TextSpec(prompts=[Infill(prompt, self.suffix)], media=images, **common)
        if self.raw:
            marked = IMAGE_MARKER * len(images) + prompt
            return TextSpec(prompts=[marked], media=images, media_marker=IMAGE_MARKER, **common)
        system = [{"role": "system", "content": plain(self.system)}] if self.system else []
        messages = [*system, {"role": "user", "content": (*images, *plain(prompt))}]
        return ChatSpec(messages=messages, earlier_token_ids=self.context or (), **self.read_thinking(), **common)

    def _refuse_unsupported(self) -> None:
        has_form = self.raw or self.suffix
        for name, is_wrong, reason in (
            ("template", self.template, "is not supported; use the model's chat template, or raw: true"),
            ("system", has_form and self.system, "is part of the chat template; leave it out with raw or suffix"),
            ("context", has_form and self.context, "cannot be combined with raw or suffix"),
            ("raw", self.raw and self.suffix, "cannot be combined with suffix"),
            ("think", has_form and self.think, "is part of the chat template; leave it out with raw or suffix"),
        ):
            if is_wrong:
                raise refuse(name, reason)


class CalledFunction(Historic):
    """An earlier call of a function.

    arguments: an object; a text, such as invalid JSON, is shown to the model unchanged
    """

    name: Text
    arguments: dict[str, Any] | Text | None = None


class CalledTool(Historic):
    id: Text | None = None
    function: CalledFunction


class Message(Historic):
    """A message of a conversation.

    tool_name, tool_call_id: identify the call that a tool's message answers; without them it answers the next open call
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    images: list[Any] | None = None
    tool_calls: list[CalledTool] | None = None
    tool_name: Text | None = None
    tool_call_id: Text | None = None


class FunctionTool(NullIsAbsent):
    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class Tool(NullIsAbsent):
    type: Literal["function"] | None = None
    function: FunctionTool


class ChatRequest(OllamaRequest):
    """A conversation to continue."""

    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)] | None = None
    tools: list[Tool] | None = None

    @property
    def is_empty(self) -> bool:
        return not self.messages

    def to_spec(self, tenant: str) -> ChatSpec:
        params, names = self.read_params()
        functions = [
            {**tool.function.model_dump(), "parameters": _with_lists_of_types(tool.function.parameters)}
            for tool in self.tools or ()
        ]
        return ChatSpec(
            params=params,
            given=names,
            tenant=tenant,
            options=self.read_options(),
            constraint_field="format",
            **self.read_truncation(),
            messages=_chat_messages(self.messages or ()),
            tools=chat_tools(functions, "auto"),
            **self.read_thinking(),
        )


def find_ignored_options(options: Options | None, keep_alive: float | str | None) -> list[str]:
    """Return the names of the given fields that have no effect."""
    ignored = () if options is None else sorted(options.ignored_fields)
    names = [f"options.{name}" for name in ignored if getattr(options, name) is not None]
    # A model stays in memory until another one needs the room, just as a negative time requests.
    return [*names, "keep_alive"] if seconds_of(keep_alive) > 0 else names


def seconds_of(keep_alive: float | str | None) -> float:
    """Return `keep_alive` in seconds. It is a number of seconds or a duration in Go's form, such as `1h30m`. A negative
    value means forever.

    Raises UsageError for any other text.
    """
    if keep_alive is None or isinstance(keep_alive, (int, float)):
        return -1.0 if keep_alive is None else float(keep_alive)
    match = _DURATION.fullmatch(keep_alive.strip())
    if match is None:
        raise refuse(
            "keep_alive", f"is {quote(keep_alive)}; write seconds, or a time such as 5m, 1h30m or -1", "invalid_value"
        )
    parts = _PART.findall(match["parts"]) or [(match["parts"], "s")]
    total = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    return -total if match["sign"] == "-" else total


def _chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert the conversation to the format of chat completions, where calls and results have ids."""
    converted: list[dict[str, Any]] = []
    open_calls: deque[tuple[str, str]] = deque()  # (id, name) of the calls that have no result yet
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        content = (*_images(message.images, f"{where}.images"), *plain(message.content or ""))
        shown: dict[str, Any] = {"role": message.role, "content": content}
        if message.role == "assistant" and message.thinking:
            shown["reasoning_content"] = message.thinking
        if message.role == "assistant" and message.tool_calls:
            calls = [(call.id or f"call_{secrets.token_hex(4)}", call.function) for call in message.tool_calls]
            open_calls.extend((call_id, function.name) for call_id, function in calls)
            texts = [arguments_text(function.arguments or {}) for _, function in calls]
            shown["tool_calls"] = [
                chat_call(call_id, function.name, text) for (call_id, function), text in zip(calls, texts, strict=True)
            ]
        elif message.role == "tool":
            shown["tool_call_id"], shown["name"] = _take_call(open_calls, message, where)
        converted.append(shown)
    return converted


def _images(images: Sequence[Any] | None, where: str) -> tuple[Media, ...]:
    names = [f"{where}[{i}]" for i in range(len(images or ()))]
    sources = [
        ImageSource(text, name, is_data=True) if isinstance(text, str) else None
        for name, text in zip(names, images or (), strict=True)
    ]
    return tuple(Media("image", name, source) for name, source in zip(names, sources, strict=True))


def _take_call(open_calls: deque[tuple[str, str]], message: Message, where: str) -> tuple[str, str]:
    """Return (id, name) of the call that a tool's message answers."""
    found = next((call for call in open_calls if call[0] == message.tool_call_id), None)
    if found is None:  # most clients do not send ids
        found = next((call for call in open_calls if message.tool_name in (None, call[1])), None)
    if found is None:
        raise refuse(where, "is a tool's result, but no earlier call is waiting for one", "invalid_value")
    open_calls.remove(found)
    return found


def _with_lists_of_types(schema: Any) -> Any:
    """Return the schema with a list of types in place of each string that contains several types. Ollama's client
    writes such strings.
    """
    if isinstance(schema, list):
        return [_with_lists_of_types(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {name: _with_lists_of_types(value) for name, value in schema.items()}
    if isinstance(kind := copy.get("type"), str) and ", " in kind:
        copy["type"] = kind.split(", ")
    return copy
