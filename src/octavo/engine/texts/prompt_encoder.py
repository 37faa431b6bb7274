"""Turns texts and conversations into token ids, with the model's own chat template or another one."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from octavo.errors import UsageError
from octavo.generation_request import PromptInput
from octavo.prompt import Prompt
from octavo.tokenizer.chat_template import ChatTemplate, Message, TemplateProcess, check_messages
from octavo.tokenizer.image_marks import ImageMarks
from octavo.tokenizer.template_set import TemplateSet
from octavo.tokenizer.tokenizer import Tokenizer

_PROMPT_KEYS = ("prompt", "prompt_token_ids")
OWN_VARIABLES = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("tokenize", "bos_token", "eos_token", "max_tokens", "image_marks"),
    }
)
"""Names with a meaning for `PromptEncoder.encode_chat` or a template. No additional variable may have one of them."""


def plain_prompt(prompt: PromptInput) -> Any:
    """Return the text or the token ids of a prompt in any of its forms.

    Raises UsageError for unknown keys of a mapping.
    """
    if not isinstance(prompt, Mapping):
        return prompt
    given = [key for key, value in prompt.items() if value is not None]
    if unknown := [key for key in given if key not in _PROMPT_KEYS]:
        raise UsageError(
            f"a prompt has the unsupported key {unknown[0]!r:.80}; a prompt is a text, token ids, or a mapping with "
            "either prompt or prompt_token_ids",
            param="prompt",
        )
    if len(given) != 1:
        raise UsageError(f"a prompt needs one of prompt and prompt_token_ids, not {given!r:.80}", param="prompt")
    value = prompt[given[0]]  # type: ignore[literal-required]
    if isinstance(value, str) != (given[0] == "prompt"):
        raise UsageError(
            f"{given[0]} is {value!r:.80}; prompt must be a string, and prompt_token_ids a list", param="prompt"
        )
    return value


def template_eos_id(tokenizer: Tokenizer) -> int | None:
    """Return the end-of-text token of chat templates: the one named by the files, or the first that ends an answer."""
    named = [i for i in tokenizer.eos_token_ids if tokenizer.tokens[i] == tokenizer.special_tokens.get("eos_token")]
    return min(named or tokenizer.eos_token_ids, default=None)


class PromptEncoder:
    """A tokenizer with the model's chat template, which starts on first use. Thread-safe.

    eos_token_id: the end-of-text token that the template writes.
    process: the template's process, if it was started ahead of time.
    template: used in place of the tokenizer's template.
    system: system message for conversations that have none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_id: int | None,
        process: TemplateProcess | None = None,
        *,
        template: str | None = None,
        system: str | None = None,
    ) -> None:
        if template is not None:
            tokenizer = replace(tokenizer, chat_template=TemplateSet(template))
        self.tokenizer = tokenizer
        self._system = system
        self._eos_token_id = eos_token_id
        self._lock = threading.Lock()
        self._own: ChatTemplate | None = None
        self._process = process

    def encode(self, prompt: PromptInput, *, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of a prompt. Control tokens in a text are parsed, and BOS is added once.

        max_tokens: limit for a text; a longer one raises TooManyTokensError.
        Raises UsageError if the prompt is not a text, a list, a mapping with one of these, or a `Prompt`.
        """
        prompt = plain_prompt(prompt)
        if isinstance(prompt, Prompt):
            return list(prompt.token_ids)
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, parse_special=True, max_tokens=max_tokens)
        if not isinstance(prompt, (list, tuple)):
            raise UsageError(f"a prompt must be a string or a list of token ids, not {prompt!r:.80}", param="prompt")
        return list(prompt)

    def to_prompt(self, prompt: PromptInput) -> Prompt:
        """Return a prompt, given in any of its forms, in the engine's form.

        Raises the errors of `encode` and `Prompt`.
        """
        return prompt if isinstance(prompt, Prompt) else Prompt(self.encode(prompt))

    def encode_chat(
        self,
        messages: Sequence[Message] | str,
        chat_template: str | None = None,
        *,
        max_tokens: int | None = None,
        **template_arguments: Any,
    ) -> list[int]:
        """Return the token ids of a conversation. A plain text counts as a user message.

        chat_template: Jinja to use instead of the model's own, or the name of one of the model's templates.
        template_arguments: tools, documents, add_generation_prompt and other variables of the template.
        image_marks: see `ChatTemplate.encode`.
        max_tokens: limit of the conversation; a longer one raises TooManyTokensError.
        Raises UsageError if the conversation is malformed or the template does not accept it.
        """
        conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if not isinstance(conversation, Sequence) or not conversation:
            raise UsageError(f"a conversation must be a list of one or more messages, not {messages!r:.80}")
        if not isinstance(chat_template, str | None):
            raise UsageError(f"chat_template must be the text of a Jinja template, not {chat_template!r:.80}")
        check_messages(conversation)  # before reporting a missing template
        conversation = self._with_system(conversation)
        own = self.tokenizer.chat_template
        if chat_template is not None and own is not None and own.get(chat_template) is not None:
            template_arguments["chat_template"], chat_template = chat_template, None
        if chat_template is None:
            return self._own_template().encode(
                self.tokenizer, conversation, max_tokens=max_tokens, **template_arguments
            )
        template = self._make_template(chat_template, from_caller=True)
        try:
            return template.encode(self.tokenizer, conversation, max_tokens=max_tokens, **template_arguments)
        finally:
            template.close()

    def render_chat(
        self, messages: Sequence[Message], *, image_marks: ImageMarks | None = None, **template_arguments: Any
    ) -> str:
        """Render a conversation as text with the model's template. Raises the errors of `encode_chat`."""
        messages = self._with_system(messages)
        if image_marks is not None and image_marks.numbers(messages):
            return self._own_template().render_images(messages, image_marks, **template_arguments)
        return self._own_template().render_prompt(messages, **template_arguments)

    def close(self) -> None:
        """End the template's process. May be called twice."""
        with self._lock:
            ending = (self._own, self._process)
            self._own = self._process = None
        for each in ending:
            if each is not None:
                each.close()

    def _with_system(self, messages: Sequence[Message]) -> Sequence[Message]:
        if not self._system or any(message.get("role") in ("system", "developer") for message in messages):
            return messages
        return [{"role": "system", "content": self._system}, *messages]

    def _own_template(self) -> ChatTemplate:
        with self._lock:
            if self._own is None:
                self._own = self._make_template(self.tokenizer.chat_template, process=self._process)
                self._process = None  # the template ends it
            return self._own

    def _make_template(
        self, source: TemplateSet | str | None, *, from_caller: bool = False, process: TemplateProcess | None = None
    ) -> ChatTemplate:
        return ChatTemplate(
            source,
            bos_token=self._text(self.tokenizer.bos_token_id),
            eos_token=self._text(self._eos_token_id),
            special_tokens=self.tokenizer.special_tokens,
            from_caller=from_caller,
            process=process,
        )

    def _text(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.tokenizer.token_bytes(token_id).decode("utf-8", "replace")
