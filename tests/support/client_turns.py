"""Scripts for clients that run tools: the answer depends on the tool results in the conversation so far.

with scripted_server(tokenizer, "openai") as server:
    server.script = turns(tokenizer, CALL, "It is 5.")
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.generation_request import GenerationRequest
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import Script

_RESULT = "<|im_start|>user\n<tool_response>"


def call_of(name: str, arguments: str) -> str:
    """Format a call as the model writes it.

    arguments: JSON text.
    """
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CALL = call_of("add", '{"a": 2, "b": 3}')


def turns(tokenizer: Tokenizer, *texts: str, result: str = _RESULT) -> Callable[[GenerationRequest], Script]:
    """Return a script that answers with one text after each tool result, repeating the last one from then on.

    result: text that identifies a result in the prompt.
    """

    def script(request: GenerationRequest) -> Script:
        prompt = tokenizer.decode(request.prompt.token_ids, skip_special_tokens=False)
        text = texts[min(prompt.count(result), len(texts) - 1)]
        middle = len(text) // 2
        return Script([text[:middle], text[middle:]])

    return script
