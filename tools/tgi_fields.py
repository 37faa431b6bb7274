"""Request fields of Hugging Face's text generation and text embeddings inference servers, for docs/openai.md."""

from __future__ import annotations

from octavo.sampling_params import MAX_STOP_STRINGS, MAX_STRING_CHARS
from octavo.server.protocols.tgi.embedding_routes import VectorsRequest
from octavo.server.protocols.tgi.request import GenerateRequest, Parameters
from tools.field_entries import FLAG, NAMED, OPTIONS, OWN_MODEL, TOP_P, Entry, Route
from tools.llama_fields import INPUTS

TGI = Route(
    "/generate",
    Parameters,
    {"inputs": "Hi"},
    {
        "max_new_tokens": Entry(5, 0, "1 to the rest of the context"),
        "temperature": Entry(0.5, 0, "above 0, at most 2"),
        "top_k": Entry(5, 0, "at least 1"),
        "top_p": TOP_P,
        "typical_p": Entry(0.5, 0, "above 0, at most 1"),
        "repetition_penalty": Entry(1.1, 10.5, "above 0, at most 10"),
        "frequency_penalty": Entry(0.5, 3, "-2 to 2"),
        "do_sample": FLAG,
        "seed": Entry(7, 2**64, "-2^63 to 2^64 - 1"),
        "stop": Entry(["x"], [""], f"at most {MAX_STOP_STRINGS} strings of {MAX_STRING_CHARS} characters"),
        "truncate": Entry(8, 0, "at least 1"),
        "return_full_text": FLAG,
        "details": FLAG,
        "decoder_input_details": Entry(True, "yes", "true, false; not streamed"),
        "top_n_tokens": Entry(2, 21, "0 to 20, with `details` or a stream", needs={"details": True}),
        "grammar": Entry({"type": "regex", "value": "a+"}, {"type": "xml", "value": "a"}, "json, json_schema, regex"),
        "best_of": Entry(1, 2, "only 1", without_effect="one sequence is generated"),
        "watermark": Entry(False, True, "only false", without_effect="there are no watermarks"),
        "adapter_id": Entry(None, "mine", "the name of an adapter"),
    },
    {"min_p": 0.1, "n": 2},
    nest="parameters",
)
TGI_BODY = Route(
    "/generate",
    GenerateRequest,
    {"inputs": "Hi"},
    {
        "inputs": Entry("Hi", 1, "text"),
        "parameters": Entry({}, 1, "an object; its fields are listed below"),
        "stream": FLAG,
        "model": OWN_MODEL,
        "options": Entry({}, 1, "an object", without_effect=NAMED),
        **OPTIONS,
    },
    {"raw": True},
)
TEI = Route(
    "/embed",
    VectorsRequest,
    {"inputs": "Hi"},
    {
        "model": OWN_MODEL,
        "inputs": Entry(["Hi", [5, "Ho"]], [], INPUTS),
        "truncate": FLAG,
        "truncation_direction": Entry("Left", "top", "Left, Right (default); with `truncate`"),
        "normalize": FLAG,
        "prompt_name": Entry(
            None, "query", "only null", without_effect="prompts of sentence-transformers are not read"
        ),
        "dimensions": Entry(8, 7, "only the model's own number", without_effect="vectors are always normalized"),
        **OPTIONS,
    },
    {"input": "Hi"},
)
TGI_ROUTES = (TGI_BODY, TGI, TEI)
