"""The answer to a chat completion in OpenAI's shapes with vLLM's additions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from octavo.server.generation.events import Choice, ChoiceEnd, ChoiceEvent, ReasoningDelta, TextDelta, TokenLogprobs
from octavo.server.generation.spec import ChatSpec
from octavo.server.protocols.chat_request import ChatCompletionRequest
from octavo.server.protocols.conversation import chat_call
from octavo.server.protocols.openai_answer import OpenAIWriter, chat_logprobs, end_of, prompt_logprobs


class ChatWriter(OpenAIWriter[ChatCompletionRequest, ChatSpec]):
    """Writes chat completions. The role comes with the first token, so clients can time the first chunk."""

    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first_chunks(self, index: int) -> Iterator[dict[str, Any]]:
        chunk = self.chunk(index, {"delta": {"role": "assistant", "content": "", "refusal": None}})
        if self.request.return_token_ids and not self._begun:
            chunk["prompt_token_ids"] = self.generation.prompt_token_ids[0]
        yield chunk

    def content(self, event: ChoiceEvent) -> dict[str, Any]:
        if isinstance(event, ChoiceEnd):
            delta: dict[str, Any] = {}
        elif isinstance(event, TextDelta):
            delta = {"content": event.text}
        elif isinstance(event, ReasoningDelta):
            delta = {"reasoning_content": event.text, "reasoning": event.text}
        else:
            function: dict[str, Any] = {"arguments": event.arguments}
            call: dict[str, Any] = {"index": event.call_index, "function": function}
            if event.call_id is not None:
                call["id"], call["type"], function["name"] = event.call_id, "function", event.name
            delta = {"tool_calls": [call]}
        return {"delta": delta}

    def logprobs(self, index: int, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:  # noqa: ARG002
        num_top = self.request.num_top_logprobs or 0
        return {"content": chat_logprobs(self.model.tokenizer, tokens, num_top), "refusal": None}

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.text if choice.text is not None or choice.tool_calls else "",
            "refusal": None,
        }
        if choice.reasoning is not None:
            message["reasoning_content"] = message["reasoning"] = choice.reasoning
        if choice.tool_calls:
            message["tool_calls"] = [chat_call(call.call_id, call.name, call.arguments) for call in choice.tool_calls]
        logprobs = None if self.request.num_top_logprobs is None else self.logprobs(index, choice.logprobs)
        token_ids = {"token_ids": choice.token_ids} if self.request.return_token_ids else {}
        return {"index": index, "message": message, "logprobs": logprobs, **end_of(choice), **token_ids}

    def prompt_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if any(positions is not None for positions in self.generation.prompt_logprobs):
            fields["prompt_logprobs"] = prompt_logprobs(self.generation.prompt_logprobs[0])
        if self.request.return_token_ids:
            fields["prompt_token_ids"] = self.generation.prompt_token_ids[0]
        return fields
