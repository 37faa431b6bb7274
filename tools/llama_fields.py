"""Request fields of Ollama and llama.cpp, for docs/openai.md."""

from __future__ import annotations

from typing import Any

from octavo.sampling_params import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_STRINGS, MAX_STRING_CHARS
from octavo.server.generation.prompt import MAX_PROMPTS
from octavo.server.protocols.embedding import MAX_INPUTS
from octavo.server.protocols.ignored_fields import LLAMA_CPP, OLLAMA
from octavo.server.protocols.llama_cpp.embedding_routes import MAX_NORM_ORDER, EmbeddingRequest
from octavo.server.protocols.llama_cpp.request import CompletionRequest, InfillRequest
from octavo.server.protocols.llama_cpp.routes import TemplateRequest
from octavo.server.protocols.ollama.embedding_routes import EmbeddingsRequest, EmbedRequest
from octavo.server.protocols.ollama.model_routes import PullRequest, ShowRequest
from octavo.server.protocols.ollama.request import MAX_MESSAGES, ChatRequest, GenerateRequest, Options
from tools.field_entries import (
    AN_IGNORED_FLAG,
    AN_IGNORED_NUMBER,
    FLAG,
    LLAMA_DRAFTS,
    MESSAGES,
    MOST_DRAFTS,
    NAMED,
    OPTIONS,
    OWN_MODEL,
    SCHEMA,
    TEMPERATURE,
    TOOL,
    TOP_K,
    TOP_P,
    WITHOUT_THINKING,
    Entry,
    Route,
)

INPUTS = f"text, ids, a mix of both, or 1 to {MAX_INPUTS} of these"
PENALTY = {"repeat_penalty": 1.1}
IS_OFF = "its sampler is off"
STOP = Entry(["x"], [""], f"text, or at most {MAX_STOP_STRINGS} strings of {MAX_STRING_CHARS} characters")
OTHER_SAMPLERS = {
    "mirostat": Entry(0, 2, "only 0", without_effect=IS_OFF),
    "mirostat_eta": Entry(0.1, "x", "a number", without_effect=IS_OFF),
    "mirostat_tau": Entry(5.0, "x", "a number", without_effect=IS_OFF),
    "tfs_z": Entry(1, 0.5, "only 1", without_effect=IS_OFF),
    "dynatemp_range": Entry(0, 0.5, "only 0", without_effect=IS_OFF),
    "dynatemp_exponent": Entry(1, "x", "a number", without_effect=IS_OFF),
    "top_n_sigma": Entry(-1, 1, "only -1 and 0", without_effect=IS_OFF),
    "xtc_probability": Entry(0, 0.5, "only 0", without_effect=IS_OFF),
    "xtc_threshold": Entry(0.1, "x", "a number", without_effect=IS_OFF),
    "dry_multiplier": Entry(0, 0.8, "only 0", without_effect=IS_OFF),
    "dry_base": Entry(1.75, "x", "a number", without_effect=IS_OFF),
    "dry_allowed_length": Entry(2, "x", "an integer", without_effect=IS_OFF),
    "dry_penalty_last_n": Entry(-1, "x", "an integer", without_effect=IS_OFF),
    "dry_sequence_breakers": Entry(["x"], [1], "texts", without_effect=IS_OFF),
    "min_keep": Entry(0, 5, "only 0 and 1", without_effect="the most likely token is always kept"),
    "n_indent": Entry(0, 4, "only 0", without_effect="lines are not indented"),
    "t_max_predict_ms": Entry(0, 100, "only 0", without_effect="generation has no time limit"),
}
SAMPLING = {
    "temperature": TEMPERATURE,
    "top_k": TOP_K,
    "top_p": TOP_P,
    "min_p": Entry(0.1, 1.5, "0 to 1"),
    "typical_p": Entry(0.5, 0, "above 0, at most 1"),
    "presence_penalty": Entry(0.5, 3, "-2 to 2"),
    "frequency_penalty": Entry(0.5, -3, "-2 to 2"),
    "seed": Entry(7, 2**64, "-2^63 to 2^64 - 1, where -1 is random"),
    "stop": STOP,
    "repeat_penalty": Entry(1.1, 10.5, "above 0, at most 10"),
    "repeat_last_n": Entry(
        -1, 64, "-1 for the whole context, 0 for no penalties; any number if there is no penalty", PENALTY
    ),
    **OTHER_SAMPLERS,
    "penalize_newline": Entry(True, False, "true; also false without a penalty", PENALTY, "penalties count all tokens"),
    "penalize_nl": Entry(True, False, "true; also false without a penalty", PENALTY, "penalties count all tokens"),
}
N_PREDICT = Entry(5, 0, "at least 1, reduced to the rest of the context; -1 and -2 for no limit")
MACHINERY, LLAMA_MACHINERY = (
    {name: AN_IGNORED_FLAG if kind is bool else AN_IGNORED_NUMBER for name, kind in table.items()}
    for table in (OLLAMA, LLAMA_CPP)
)
KEEP_ALIVE = Entry(-1, "soon", f"0 unloads the model after the answer; other times above 0 are {NAMED}")
ALL_OPTIONS = Entry({"top_k": 5}, {"top_q": 1}, "an object; its fields are listed below")
OLLAMA_BODY: dict[str, Entry] = {
    "model": OWN_MODEL,
    "stream": Entry(False, "yes", "true (default), false"),
    "options": ALL_OPTIONS,
    "format": Entry(SCHEMA, {"type": "banana"}, "`json` or a JSON schema"),
    "keep_alive": KEEP_ALIVE,
    "think": Entry(True, "much", f"true, false, low, medium, high; {WITHOUT_THINKING}"),
    "logprobs": FLAG,
    "top_logprobs": Entry(2, MAX_LOGPROBS + 1, f"0 to {MAX_LOGPROBS}, with `logprobs`", {"logprobs": True}),
    "truncate": Entry(
        True, "yes", "true: the oldest turns may be left out; false (default): a long prompt is an error"
    ),
    "shift": Entry(False, True, "only false", without_effect="tokens are never shifted out of a full context"),
    **OPTIONS,
}
NO_IMAGES = Entry([], ["aGk="], "only an empty list", without_effect="there are no images")
UNSTREAMED: dict[str, Any] = {"stream": False}
GENERATE = Route(
    "/api/generate",
    GenerateRequest,
    {"prompt": "Hi"},
    OLLAMA_BODY
    | {
        "prompt": Entry("Hi", 1, "text; without it the model is loaded"),
        "suffix": Entry("x", 1, "text, for models with fill-in-the-middle tokens"),
        "system": Entry("Be kind.", 1, "text"),
        "template": Entry("", "{{ .Prompt }}", "only empty", without_effect="the model's own template is used"),
        "context": Entry([5, 6], [-1], "the token ids of an earlier answer"),
        "raw": FLAG,
        "images": NO_IMAGES,
    },
    {"width": 64, "height": 64, "steps": 3},
)
CHAT = Route(
    "/api/chat",
    ChatRequest,
    {"messages": MESSAGES},
    OLLAMA_BODY
    | {
        "messages": Entry(MESSAGES, [{"role": "robot"}], f"at most {MAX_MESSAGES}; without them the model is loaded"),
        "tools": Entry([TOOL], [{"type": "retrieval", "function": {"name": "x"}}], "functions"),
    },
    {"tool_choice": "auto", "prompt": "Hi"},
)
OLLAMA_OPTIONS = Route(
    "/api/chat",
    Options,
    {"messages": MESSAGES, **UNSTREAMED},
    SAMPLING | {"num_predict": N_PREDICT, "draft_num_predict": MOST_DRAFTS} | MACHINERY,
    {"n": 2, "top_a": 0.1},
    nest="options",
)
EMBED = Route(
    "/api/embed",
    EmbedRequest,
    {"input": "Hi"},
    {
        "model": OWN_MODEL,
        "input": Entry(["Hi", "Ho"], [1], f"text, or up to {MAX_INPUTS} texts"),
        "truncate": FLAG,
        "dimensions": Entry(8, 7, "only the model's own number", without_effect="vectors are always normalized"),
        "options": ALL_OPTIONS,
        "keep_alive": KEEP_ALIVE,
        **OPTIONS,
    },
    {"encoding_format": "float"},
)
EMBEDDINGS = Route(
    "/api/embeddings",
    EmbeddingsRequest,
    {"prompt": "Hi"},
    {"model": OWN_MODEL, "prompt": Entry("Hi", 1, "text"), "options": ALL_OPTIONS, "keep_alive": KEEP_ALIVE, **OPTIONS},
    {"input": "Hi"},
)
NAME = {"model": OWN_MODEL, "name": Entry("fake", 1, "the older name for `model`", {"model": None})}
SHOW = Route(
    "/api/show",
    ShowRequest,
    {"model": "fake"},
    {
        **NAME,
        "verbose": Entry(True, "yes", "true, false", without_effect="the answer is the same"),
        "system": Entry("", "Be kind.", "only empty", without_effect="the model's own value is shown"),
        "template": Entry("", "{{ .Prompt }}", "only empty", without_effect="the model's own value is shown"),
    },
    {"options": {"seed": 1}},
)
NO_REGISTRY = "no registry is used"
PULL = Route(
    "/api/pull",
    PullRequest,
    {"model": "fake"},
    {
        **NAME,
        "stream": FLAG,
        "insecure": Entry(False, "yes", "true, false", without_effect=NO_REGISTRY),
        "username": Entry("", 1, "text", without_effect=NO_REGISTRY),
        "password": Entry("", 1, "text", without_effect=NO_REGISTRY),
    },
    {"digest": "x"},
)
LLAMA_CPP_BODY: dict[str, Entry] = {
    "model": OWN_MODEL,
    "stream": FLAG,
    **SAMPLING,
    "n_predict": Entry(5, -2, "at least 1, reduced to the rest of the context; -1 for no limit, 0 for only the prompt"),
    "max_tokens": Entry(5, "x", "another name for `n_predict`"),
    "n_cmpl": Entry(2, 0, f"1 to {MAX_CHOICES}"),
    "n_probs": Entry(2, MAX_LOGPROBS + 1, f"0 to {MAX_LOGPROBS}"),
    "post_sampling_probs": Entry(True, "yes", "true, false; with `n_probs`", {"n_probs": 2}),
    "timings_per_token": FLAG,
    "return_progress": Entry(True, "yes", "true, false; in a stream"),
    "logit_bias": Entry([[5, 1], ["Hi", False]], [[5, 101]], "pairs of a token id or text, and -100 to 100 or false"),
    "grammar": Entry('root ::= "a"', "root ::= nowhere", "a grammar in GBNF or Lark"),
    "json_schema": Entry(SCHEMA, {"type": "banana"}, "a JSON schema"),
    "ignore_eos": FLAG,
    "return_tokens": FLAG,
    "response_fields": Entry(["content"], [1], "names of fields in the answer"),
    "lora": Entry([], [{"id": 0}], "adapters from `/lora-adapters` with their `scale`; at most one may differ from 0"),
    "samplers": Entry([], ["top_k"], "only an empty list", without_effect="the order of samplers is fixed"),
    **LLAMA_MACHINERY,
    **LLAMA_DRAFTS,
    **OPTIONS,
}
COMPLETION = Route(
    "/completion",
    CompletionRequest,
    {"prompt": "Hi"},
    LLAMA_CPP_BODY | {"prompt": Entry(["Hi", 5], [], f"text, ids, a mix of both, or 1 to {MAX_PROMPTS} of these")},
    {"image_data": [], "suffix": "x"},
)
EMBEDDING = Route(
    "/embedding",
    EmbeddingRequest,
    {"content": "Hi"},
    {
        "model": OWN_MODEL,
        "content": Entry(["Hi", [5, "Ho"]], [], INPUTS),
        "input": Entry([5, "Hi"], [], f"another name for `content`: {INPUTS}", {"content": None}),
        "embd_normalize": Entry(1, -2, f"-1 to {MAX_NORM_ORDER}"),
        **OPTIONS,
    },
    {"inputs": "Hi"},
)
TEMPLATE = Route(
    "/apply-template",
    TemplateRequest,
    {"messages": MESSAGES},
    {
        "model": OWN_MODEL,
        "messages": Entry(MESSAGES, [], "as in `/v1/chat/completions`"),
        "tools": Entry([TOOL], [{"type": "retrieval", "function": {"name": "x"}}], "functions"),
        "chat_template_kwargs": Entry({"a": 1}, {"messages": []}, "an object"),
        "add_generation_prompt": FLAG,
        "continue_final_message": Entry(
            True, True, "true, false", {"messages": [*MESSAGES, {"role": "assistant", "content": "Yes"}]}
        ),
    },
    {"max_tokens": 5},
)
INFILL = Route(
    "/infill",
    InfillRequest,
    {"input_prefix": "a = ", "input_suffix": "\n"},
    LLAMA_CPP_BODY
    | {
        "input_prefix": Entry("a = ", 1, "text"),
        "input_suffix": Entry("\n", 1, "text; needs a model with fill-in-the-middle tokens"),
        "prompt": Entry("1", 1, "text: the beginning of the missing part"),
        "input_extra": Entry([{"filename": "b.py", "text": "b = 1"}], [1], "other files: `filename` and `text`"),
    },
    {"suffix": "x"},
)
LLAMA_ROUTES = (GENERATE, CHAT, OLLAMA_OPTIONS, EMBED, EMBEDDINGS, SHOW, PULL, COMPLETION, INFILL, EMBEDDING, TEMPLATE)
