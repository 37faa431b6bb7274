"""Write docs/openai.md: every field of every request, its support and its bounds.

    python -m tools.openai_matrix > docs/openai.md
    python -m tools.openai_matrix --check

The fields are read from the request models; the tool fails on a field that has no description here.
`tests/server/test_openai_matrix.py` sends each field with valid and invalid values, and compares the page.
"""

from __future__ import annotations

import sys
from pathlib import Path

from octavo.batches.lines import ENDPOINTS
from octavo.sampling_params import (
    MAX_CHOICES,
    MAX_LIST_ITEMS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STRING_CHARS,
)
from octavo.server.endpoints.tokenize import MAX_TOKENS, DetokenizeRequest, TokenizeRequest
from octavo.server.generation.prompt import MAX_PROMPTS
from octavo.server.protocols.batches.request import BatchRequest
from octavo.server.protocols.embedding import MAX_INPUTS
from octavo.server.protocols.openai.chat_request import MAX_MESSAGES, ChatCompletionRequest
from octavo.server.protocols.openai.completion_request import CompletionRequest
from octavo.server.protocols.openai.embedding_routes import EmbeddingsRequest, PoolingRequest
from octavo.server.protocols.rerank.routes import RerankRequest, ScoreRequest
from octavo.server.protocols.responses.compaction import CompactRequest
from octavo.server.protocols.responses.request import MAX_ITEMS, ResponsesRequest
from tools.anthropic_fields import ANTHROPIC_ROUTES
from tools.field_entries import (
    AN_IGNORED_FLAG,
    AN_IGNORED_NUMBER,
    AN_IGNORED_TEXT,
    BEAMS,
    FLAG,
    LLAMA_DRAFTS,
    MESSAGES,
    NAMED,
    OPTIONS,
    OWN_MODEL,
    OWN_TOOL,
    SCHEMA,
    SPEAKS_ONLY,
    STRINGS,
    TEMPERATURE,
    TOOL,
    TOP_K,
    TOP_P,
    USER,
    WITHOUT_THINKING,
    Entry,
    Route,
)
from tools.field_table import table
from tools.llama_fields import INPUTS, LLAMA_MACHINERY, LLAMA_ROUTES, OTHER_SAMPLERS
from tools.tgi_fields import TGI_ROUTES

PAGE = Path(__file__).parents[1] / "docs" / "openai.md"

SESSION = dict.fromkeys(("request_id", "session_id"), AN_IGNORED_TEXT)
IGNORED_EVERYWHERE = {
    **SESSION,
    "guided_decoding_backend": Entry("x", 1, "text", without_effect=NAMED),
    "stream_interval": AN_IGNORED_NUMBER,
    "return_mm_kwargs": AN_IGNORED_FLAG,
    "return_token_offsets": AN_IGNORED_FLAG,
    "routed_experts_prompt_start": AN_IGNORED_NUMBER,
    **LLAMA_MACHINERY,
}
MM_KWARGS = {"mm_processor_kwargs": Entry({"a": 1}, 1, "an object", without_effect=NAMED)}
MEDIA = {"media_io_kwargs": Entry({"image": {}}, 1, "an object", without_effect=NAMED), **MM_KWARGS}
VECTORS = {"request_id": SESSION["request_id"], **MM_KWARGS}
THOUGHTS_APART = "reasoning is always separate from the content"
RETENTION = Entry("24h", "1y", "24h: for 24 hours the prompt is evicted after other prompts; in_memory: no effect")
CACHE_OPTIONS = Entry(
    {"ttl": "30m"},
    {"ttl": "1h"},
    "`ttl` 30m: for 30 minutes the prompt is evicted after other prompts; with `mode` explicit only up to content "
    "parts with a `prompt_cache_breakpoint`. Breakpoints work without this field, too",
)
SAMPLING = {
    "model": OWN_MODEL,
    "stream": FLAG,
    "stream_options": Entry(
        {"include_usage": True},
        {"include_obfuscation": True},
        "`include_usage`, `continuous_usage_stats`",
        {"stream": True},
    ),
    "n": Entry(2, 0, f"1 to {MAX_CHOICES}; with beam search at most `--max-num-seqs`"),
    "temperature": TEMPERATURE,
    "top_p": TOP_P,
    "top_k": TOP_K,
    "min_p": Entry(0.1, 1.5, "0 to 1"),
    "typical_p": Entry(0.5, 0, "above 0, at most 1"),
    "repetition_penalty": Entry(1.1, 10.5, "above 0, at most 10"),
    "presence_penalty": Entry(0.5, 3, "-2 to 2"),
    "frequency_penalty": Entry(0.5, -3, "-2 to 2"),
    "logit_bias": Entry({"5": 1}, {"5": 101}, f"token ids with -100 to 100; at most {MAX_LOGIT_BIAS}"),
    "seed": Entry(7, 2**64, "-2^63 to 2^64 - 1"),
    "stop": Entry(["x"], [""], f"at most {MAX_STOP_STRINGS} strings of {MAX_STRING_CHARS} characters"),
    "stop_token_ids": Entry([5], [-1], f"at most {MAX_LIST_ITEMS} of the model's token ids"),
    "include_stop_str_in_output": FLAG,
    "bad_words": Entry(["x"], [""], STRINGS),
    "allowed_token_ids": Entry([5, 6], [], "a list of at least 1 of the model's token ids"),
    "ignore_eos": FLAG,
    "min_tokens": Entry(2, -1, "0 to `max_tokens`", {"max_tokens": 5}),
    "max_tokens": Entry(5, -2, "at least 1, reduced to the rest of the context, or -1 for no limit"),
    "skip_special_tokens": FLAG,
    "spaces_between_special_tokens": Entry(True, False, "only true", without_effect="this is always done"),
    "prompt_logprobs": Entry(1, MAX_LOGPROBS + 1, f"0 to {MAX_LOGPROBS}, not streamed"),
    "use_beam_search": Entry(True, "yes", "true, false; not together with sampling fields", {"n": 2, "max_tokens": 3}),
    "length_penalty": Entry(1.5, "x", "a number, with `use_beam_search`", BEAMS),
    "early_stopping": Entry(True, 3, 'true, false, "never", with `use_beam_search`', BEAMS),
    "response_format": Entry(
        {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}},
        "`text`, `json_object` (with TGI's `value` or llama.cpp's `schema` if given), `json_schema`; always strict",
    ),
    "structured_outputs": Entry(
        {"regex": "a+"}, {"regex": "a", "choice": ["b"]}, "one of `json`, `regex`, `choice`, `grammar`, `json_object`"
    ),
    "guided_json": Entry(SCHEMA, {"type": "banana"}, "a JSON schema"),
    "guided_regex": Entry("a+", 1, "a regular expression"),
    "guided_choice": Entry(["a", "b"], [], f"1 to {MAX_LIST_ITEMS} strings"),
    "json_schema": Entry(SCHEMA, {"type": "banana"}, "a JSON schema"),
    "grammar": Entry('root ::= "a"', "root ::= nowhere", "a grammar in GBNF or Lark"),
    "n_predict": Entry(5, -2, "as `max_tokens`"),
    "repeat_penalty": Entry(1.1, 10.5, "as `repetition_penalty`"),
    "guided_grammar": Entry('start: "a"', 1, "a grammar in GBNF or Lark"),
    "truncate_prompt_tokens": Entry(8, 0, "at least 1, or -1 for the maximum"),
    "truncation_side": Entry(
        "middle",
        "top",
        "left, middle, right, and for conversations turns; with `truncate_prompt_tokens`",
        {"truncate_prompt_tokens": 8},
    ),
    **OPTIONS,
    "return_token_ids": FLAG,
    "timings": FLAG,
    "timings_per_token": FLAG,
    "return_progress": Entry(True, "yes", "true, false; in a stream"),
    "user": USER,
    "metadata": Entry({"a": "b"}, 1, "an object", without_effect=SPEAKS_ONLY),
    "store": Entry(False, True, "only false", without_effect="nothing is stored"),
    "service_tier": Entry("flex", "slow", "auto, default; flex: the priority of batches, below all other requests"),
    "safety_identifier": USER,
    "prompt_cache_options": CACHE_OPTIONS,
    "prompt_cache_retention": RETENTION,
    **OTHER_SAMPLERS,
    **LLAMA_DRAFTS,
    **IGNORED_EVERYWHERE,
}
CHAT = Route(
    "/v1/chat/completions",
    ChatCompletionRequest,
    {"messages": MESSAGES},
    SAMPLING
    | {
        "messages": Entry(MESSAGES, [], f"1 to {MAX_MESSAGES}; parts of type `text`"),
        "max_completion_tokens": Entry(5, 0, "as `max_tokens`"),
        "logprobs": FLAG,
        "top_logprobs": Entry(2, MAX_LOGPROBS + 1, f"0 to {MAX_LOGPROBS}, with `logprobs`", {"logprobs": True}),
        "tools": Entry([TOOL], [{"type": "retrieval", "function": {"name": "x"}}], "functions"),
        "tool_choice": Entry("required", "always", "none, auto, required, a function", {"tools": [TOOL]}),
        "parallel_tool_calls": Entry(False, "no", "true, false", {"tools": [TOOL]}),
        "reasoning_effort": Entry("medium", 1, f"an effort for the chat template; {NAMED} if it has no efforts"),
        "thinking": Entry({"type": "enabled"}, {"type": "x"}, f"enabled, disabled, adaptive; {WITHOUT_THINKING}"),
        "enable_thinking": Entry(True, "yes", f"true, false; {WITHOUT_THINKING}"),
        "verbosity": Entry("low", "mute", "low, medium, high", without_effect=NAMED),
        "prediction": Entry(
            {"type": "content", "content": "Yes"}, {"type": "x"}, "text that the answer may repeat, or `type: content`"
        ),
        **MEDIA,
        "reasoning_format": Entry("auto", "none", "only auto, deepseek", without_effect=THOUGHTS_APART),
        "include_reasoning": Entry(True, False, "only true", without_effect=THOUGHTS_APART),
        "parse_tool_calls": Entry(True, False, "only true", without_effect="calls are always parsed"),
        "functions": Entry([], [{}], "only an empty list", without_effect=NAMED),
        "modalities": Entry(["text"], ["audio"], "only text", without_effect="answers are text"),
        "chat_template_kwargs": Entry({"a": 1}, {"messages": []}, "an object"),
        "add_generation_prompt": FLAG,
        "continue_final_message": Entry(
            True, True, "true, false", {"messages": [*MESSAGES, {"role": "assistant", "content": "Yes"}]}
        ),
    },
    {
        "function_call": "auto",
        "audio": {},
        "web_search_options": {},
        "best_of": 2,
        "lora_name": "x",
    },
)
COMPLETIONS = Route(
    "/v1/completions",
    CompletionRequest,
    {"prompt": "Hi"},
    SAMPLING
    | {
        "prompt": Entry(["Hi", "Ho"], [], f"text or token ids, or 1 to {MAX_PROMPTS} of these"),
        "max_completion_tokens": Entry(5, 0, "as `max_tokens`"),
        "echo": FLAG,
        "logprobs": Entry(2, MAX_LOGPROBS + 1, f"0 to {MAX_LOGPROBS}"),
        "best_of": Entry(1, 0, "equal to `n`"),
    },
    {"suffix": "x", "messages": [], "tools": [], "top_logprobs": 1, "prompt_embeds": "x"},
)
A_CONVERSATION = {"input": None, "messages": MESSAGES}
EMBEDDINGS = Route(
    "/v1/embeddings",
    EmbeddingsRequest,
    {"input": "Hi"},
    {
        "model": OWN_MODEL,
        "input": Entry(["Hi", [5, "Ho"]], [], INPUTS),
        "messages": Entry(MESSAGES, [], "a conversation as in chat, in place of `input`", {"input": None}),
        "add_generation_prompt": Entry(True, "x", "true, false; with `messages`", A_CONVERSATION),
        "chat_template_kwargs": Entry({"a": 1}, {"messages": []}, "an object; with `messages`", A_CONVERSATION),
        "continue_final_message": Entry(
            True,
            True,
            "true, false; with `messages`",
            {"input": None, "messages": [*MESSAGES, {"role": "assistant", "content": "Yes"}]},
        ),
        "encoding_format": Entry("base64", "hex", "float, base64"),
        "dimensions": Entry(8, 7, "only the model's own number", without_effect="vectors are always normalized"),
        "pooling": Entry("last", "max", "mean, last, cls; an encoder supports only its own"),
        "truncate_prompt_tokens": Entry(8, -2, "at least 1, or -1 for the maximum"),
        "user": USER,
        **OPTIONS,
        **VECTORS,
    },
    {"input_type": "query", "normalize": False, "seed": 1},
)
POOLING = Route(
    "/pooling",
    PoolingRequest,
    {"input": "Hi"},
    {
        "model": OWN_MODEL,
        "input": Entry(["Hi", [5, "Ho"]], [], INPUTS),
        "task": Entry("token_embed", "classify", "token_embed, embed; the default depends on the model"),
        "truncate_prompt_tokens": Entry(8, -2, "at least 1, or -1 for the maximum"),
        "user": USER,
        **OPTIONS,
    },
    {"data": "x"},
)
INSTRUCTION = Entry("Find animals.", 1, "text, for causal rerankers")
TRUNCATION = Entry(8, 0, "at least 1, or -1 for the maximum")
RERANK = Route(
    "/v1/rerank",
    RerankRequest,
    {"query": "Hi", "documents": ["Hi", "Ho"]},
    {
        "model": OWN_MODEL,
        "query": Entry("Hi", 1, "text"),
        "documents": Entry(["Hi", {"text": "Ho"}], [], f"1 to {MAX_INPUTS} texts, or objects with `text`"),
        "top_n": Entry(1, 0, "at least 1"),
        "return_documents": FLAG,
        "truncate_prompt_tokens": TRUNCATION,
        "max_tokens_per_doc": Entry(8, "x", "another name for `truncate_prompt_tokens`"),
        "instruction": INSTRUCTION,
        "user": USER,
        **OPTIONS,
        **VECTORS,
    },
    {"rank_fields": ["a"]},
)
SCORE = Route(
    "/v1/score",
    ScoreRequest,
    {"text_1": "Hi", "text_2": ["Hi", "Ho"]},
    {
        "model": OWN_MODEL,
        "text_1": Entry(["Hi", "Ho"], [], f"text, or 1 to {MAX_INPUTS} texts"),
        "text_2": Entry("Ho", [], f"text, or 1 to {MAX_INPUTS} texts"),
        "truncate_prompt_tokens": TRUNCATION,
        "instruction": INSTRUCTION,
        "user": USER,
        **OPTIONS,
        **VECTORS,
    },
    {"top_n": 1},
)
CODEX = {"client_metadata": Entry({"a": "b"}, 1, "an object", without_effect=NAMED)}
RESPONSES_TIER = Entry("auto", "slow", f"flex: the priority of batches; OpenAI's other names are {NAMED}")
RESPONSES = Route(
    "/v1/responses",
    ResponsesRequest,
    {"input": "Hi"},
    {
        "model": OWN_MODEL,
        "input": Entry([{"role": "user", "content": "Hi"}], [], f"text, or 1 to {MAX_ITEMS} items"),
        "instructions": Entry("Be kind.", 1, "text"),
        "tools": Entry(
            [OWN_TOOL],
            [{"type": "web_search"}],
            "functions, custom tools, namespaces; also `web_search` and other built-in tools",
        ),
        "tool_choice": Entry(
            "required",
            {"type": "mcp"},
            "none, auto, required, a function, a custom tool, `allowed_tools`",
            {"tools": [OWN_TOOL]},
        ),
        "parallel_tool_calls": FLAG,
        "text": Entry({"format": {"type": "json_object"}}, {"verbosity": "mute"}, f"`format`; `verbosity` is {NAMED}"),
        "reasoning": Entry(
            {"summary": "auto"},
            {"summary": "short"},
            f"`effort`, {NAMED} if the chat template has no efforts; `summary` is {NAMED}",
        ),
        "prompt_cache_options": CACHE_OPTIONS,
        "prompt_cache_retention": RETENTION,
        "max_output_tokens": Entry(5, 0, "as `max_tokens`"),
        "temperature": TEMPERATURE,
        "top_p": TOP_P,
        "top_k": TOP_K,
        "presence_penalty": Entry(0.5, 3, "-2 to 2"),
        "frequency_penalty": Entry(0.5, -3, "-2 to 2"),
        "top_logprobs": Entry(2, 21, "0 to 20"),
        "stream": FLAG,
        "stream_options": Entry(
            {}, {"include_obfuscation": True}, "an object", {"stream": True}, without_effect="events are not padded"
        ),
        "include": Entry(
            ["message.output_text.logprobs"],
            ["everything"],
            f"`message.output_text.logprobs`, `reasoning.encrypted_content`; results of OpenAI's tools are {NAMED}",
        ),
        "metadata": Entry({"a": "b"}, {"a": 1}, "16 texts; echoed", without_effect=SPEAKS_ONLY),
        "truncation": Entry("auto", "left", "auto, disabled"),
        "user": USER,
        "safety_identifier": USER,
        "service_tier": RESPONSES_TIER,
        "store": Entry(False, "no", "true (default), false"),
        "background": Entry(True, "no", "true, false; not with `store: false`"),
        "previous_response_id": Entry(None, "resp_1", "the id of a stored response"),
        "conversation": Entry(None, "conv_1", "only null", without_effect="there are no conversations"),
        "max_tool_calls": Entry(None, 3, "only null", without_effect="there are no built-in tools"),
        "prompt": Entry(None, {"id": "x"}, "only null", without_effect="there are no stored prompts"),
        **CODEX,
        **OPTIONS,
        **SESSION,
        **MEDIA,
    },
    {"seed": 1, "stop": "x", "context_management": []},
)
COMPACT = Route(
    "/v1/responses/compact",
    CompactRequest,
    {"input": "Hi"},
    {
        **{name: RESPONSES.entries[name] for name in ("model", "input", "instructions", "previous_response_id")},
        **{name: RESPONSES.entries[name] for name in ("prompt_cache_key", "service_tier")},
        "prompt_cache_retention": Entry("24h", 1, "text", without_effect=NAMED),
        "prompt_cache_options": Entry({"a": "b"}, 1, "an object", without_effect=NAMED),
        "stream": Entry(False, True, "only false", without_effect="the answer is never streamed"),
        "max_output_tokens": Entry(5, -1, "at least 1, for the summary; the default is 2048"),
        "tools": Entry([OWN_TOOL], 1, "a list", without_effect=NAMED),
        "parallel_tool_calls": Entry(True, "yes", "true, false", without_effect=NAMED),
        "reasoning": Entry({"effort": "low"}, 1, "an object", without_effect=NAMED),
        "text": Entry({"verbosity": "low"}, 1, "an object", without_effect=NAMED),
        **CODEX,
        **OPTIONS,
        **SESSION,
    },
    {"temperature": 1, "store": True},
)
BATCHES = Route(
    "/v1/batches",
    BatchRequest,
    {"input_file_id": "file-1", "endpoint": "/v1/chat/completions"},
    {
        "input_file_id": Entry("file-1", 1, "the id of a file with the purpose `batch`"),
        "endpoint": Entry("/v1/completions", "/v1/rerank", ", ".join(f"`{path}`" for path in ENDPOINTS)),
        "completion_window": Entry("24h", "25d", "1m to 7d; the default is 24h"),
        "metadata": Entry({"a": "b"}, {"a": 1}, "16 texts; echoed", without_effect=SPEAKS_ONLY),
        "output_expires_after": Entry(
            {"anchor": "created_at", "seconds": 3600},
            {"anchor": "created_at", "seconds": 60},
            "`created_at` and 3600 to 2592000 seconds",
        ),
    },
    {"model": "fake", "requests": []},
)
A_CONTENT = {"messages": None, "content": "Hi"}
A_PROMPT = {"messages": None, "prompt": "Hi"}
TOKENIZE = Route(
    "/tokenize",
    TokenizeRequest,
    {"messages": MESSAGES},
    {
        "model": OWN_MODEL,
        "prompt": Entry("Hi", 1, "text; not with `messages`", A_PROMPT),
        **{name: CHAT.entries[name] for name in ("messages", "tools", "chat_template_kwargs")},
        **{name: CHAT.entries[name] for name in ("add_generation_prompt", "continue_final_message")},
        "add_special_tokens": Entry(True, "yes", "true, false; true only with `prompt`", A_PROMPT),
        "return_token_strs": FLAG,
        "content": Entry("Hi", 1, "text, instead of the other fields", {"messages": None}),
        "add_special": Entry(True, "yes", "true, false; with `content`", A_CONTENT),
        "parse_special": Entry(False, "yes", "true, false; with `content`", A_CONTENT),
        "with_pieces": Entry(True, "yes", "true, false; with `content`", A_CONTENT),
    },
    {"max_tokens": 5, "tool_choice": "auto"},
)
DETOKENIZE = Route(
    "/detokenize",
    DetokenizeRequest,
    {"tokens": [5]},
    {"model": OWN_MODEL, "tokens": Entry([5, 6], [-1], f"at most {MAX_TOKENS} of the model's token ids")},
    {"skip_special_tokens": True},
)
ROUTES = (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    POOLING,
    RERANK,
    SCORE,
    RESPONSES,
    COMPACT,
    *ANTHROPIC_ROUTES,
    BATCHES,
    TOKENIZE,
    DETOKENIZE,
    *TGI_ROUTES,
    *LLAMA_ROUTES,
)

_HEAD = """# Fields of requests

`tools/openai_matrix.py` writes this page from the request models. A test sends a valid and an invalid value for every \
field below and expects a 200 for the valid one and a 400 that names the field for the invalid one. `null` is the same \
as omitting a field. A field that is not listed is refused with an error that names it, because it may be misspelt. \
Fields that only control another product's internals are accepted, named in the answer's header \
`x-octavo-ignored-fields`, and logged once. Messages of earlier turns may have any other keys. \
[Other protocols](protocols.md) describes the answers.

- Required and named tools (`tool_choice`) are enforced by a grammar in every tool format. Under `auto`, `strict` \
tools are enforced after the marks of the format. They are refused for gemma's format and with beam search. \
[Other protocols](protocols.md#tool-calls) describes which other text is read as a call.
- If a request has tools and a JSON format for the answer (`response_format`, `text.format`, `output_config.format`), \
a grammar makes the answer either a call or JSON that matches the schema. Tools cannot be combined with a regular \
expression, a choice or a grammar.
- Hugging Face's `InferenceClient` names a model `dummy` if it is given only an address; pass `model` with each chat \
request.
"""


def render() -> str:
    """Return the page."""
    parts = [_HEAD]
    for route in ROUTES:
        title = f"`{route.path}`" + (f": `{route.nest}`" if route.nest else "")
        parts.append(f"\n## {title}\n\n| Field | Values | Support |\n|---|---|---|\n")
        for name, entry in route.described().items():
            effect = f"accepted without effect: {entry.without_effect}" if entry.without_effect else "honoured"
            parts.append(f"| `{name}` | {entry.bounds} | {effect} |\n")
        parts.append(f"\nRefused by name, for example: {', '.join(f'`{name}`' for name in route.refused)}.\n")
    return "".join(parts) + table(ROUTES)


def main(arguments: list[str]) -> int:
    """Write the page to standard output. With `--check`, return 1 if docs/openai.md differs."""
    if arguments == ["--check"]:
        if PAGE.read_text() == render():
            return 0
        sys.stderr.write("docs/openai.md is not up to date; run: python -m tools.openai_matrix > docs/openai.md\n")
        return 1
    sys.stdout.write(render())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
