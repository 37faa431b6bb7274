"""Anthropic's request fields, for docs/openai.md."""

from __future__ import annotations

from octavo.sampling_params import MAX_STOP_STRINGS, MAX_STRING_CHARS
from octavo.server.protocols.anthropic.request import CountTokensRequest, MessagesRequest
from octavo.server.protocols.openai.chat_request import MAX_MESSAGES
from tools.field_entries import (
    AN_IGNORED_TEXT,
    ANTHROPIC_TOOL,
    FLAG,
    MESSAGES,
    NAMED,
    OPTIONS,
    OWN_MODEL,
    SCHEMA,
    SPEAKS_ONLY,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Entry,
    Route,
)

CACHE_CONTROL = Entry(
    {"type": "ephemeral"},
    {"type": "forever"},
    "`ephemeral`, `ttl` 5m or 1h: the prompt up to here is evicted after other prompts; only the last four marks count",
)
ASKED = {
    "model": OWN_MODEL,
    "messages": Entry(MESSAGES, [], f"1 to {MAX_MESSAGES}; the last one is the user's"),
    "system": Entry("Be kind.", 1, "text, or blocks of text"),
    "tools": Entry([ANTHROPIC_TOOL], [{"type": "bash_20250124", "name": "bash"}], "with `input_schema`"),
    "tool_choice": Entry({"type": "any"}, {"type": "all"}, "auto, any, none, tool", {"tools": [ANTHROPIC_TOOL]}),
    "thinking": Entry({"type": "disabled"}, {"type": "enabled", "budget_tokens": 0}, "if the model can think"),
    "output_config": Entry(
        {"format": {"type": "json_schema", "schema": SCHEMA}}, {"effort": "huge"}, "`format`, `effort`"
    ),
    "cache_control": CACHE_CONTROL,
    "context_management": Entry(
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        {"edits": 1},
        f"no edit is made; edits that would change the conversation are {NAMED}",
    ),
    "anthropic_version": AN_IGNORED_TEXT,
    **dict.fromkeys(("inference_geo", "speed", "fallback_credit_token", "user_profile_id"), AN_IGNORED_TEXT),
    **{name: Entry({"a": 1}, 1, "an object", without_effect=NAMED) for name in ("diagnostics", "billing_policy")},
    "anthropic_beta": Entry(["x"], 1, "texts", without_effect=NAMED),
    "fallbacks": Entry("default", 1, "text or a list", without_effect=NAMED),
    "mcp_servers": Entry([], [{}], "only an empty list", without_effect=NAMED),
}
MESSAGES_ROUTE = Route(
    "/v1/messages",
    MessagesRequest,
    {"messages": MESSAGES, "max_tokens": 5},
    ASKED
    | {
        "thread": Entry({"type": "create"}, {"type": "continue"}, "only `create`", without_effect=NAMED),
        "max_tokens": Entry(5, 0, "at least 1"),
        "stop_sequences": Entry(["x"], [""], f"at most {MAX_STOP_STRINGS} strings of {MAX_STRING_CHARS} characters"),
        "temperature": TEMPERATURE,
        "top_p": TOP_P,
        "top_k": TOP_K,
        "metadata": Entry({"user_id": "me"}, {"user_id": 1}, "`user_id`", without_effect=SPEAKS_ONLY),
        "service_tier": Entry("auto", "priority", "auto, standard_only", without_effect="there is only one tier"),
        "stream": FLAG,
        **OPTIONS,
    },
    {"container": "x", "workspace_id": "x", "seed": 1},
)
COUNT_TOKENS = Route(
    "/v1/messages/count_tokens",
    CountTokensRequest,
    {"messages": MESSAGES},
    {**ASKED, "thread": Entry({"type": "continue"}, {"type": "new"}, "create, continue", without_effect=NAMED)},
    {"max_tokens": 5, "stream": True},
)
ANTHROPIC_ROUTES = (MESSAGES_ROUTE, COUNT_TOKENS)
