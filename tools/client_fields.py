"""Request fields of other products, as plain facts: product -> route here -> field names.

Each list was compared with its source in November 2026:

- OpenAI and Anthropic: the parameters of their Python libraries (openai 2.54, anthropic 2.12). Ollama: the request
  structures of `api/types.go` at fb307609, and the request models of its Python library (ollama 0.6), which still has
  options of older versions. A test compares these lists with the installed libraries.
- vLLM, in addition to OpenAI's fields: its request models. Chat and completions at 002032ee; `pooling/base/protocol.py`
  at 020638a6 and `pooling/scoring/protocol.py` at 004706d8 for embeddings, scores and reranking;
  `serve/tokenize/protocol.py` at 030ea52e; responses as documented on 2026-09-24. The `guided_` fields and `normalize`
  belong to earlier versions.
- llama.cpp: what `server-schema.cpp` (0177c342), `server-common.cpp` (006639c3) and the server's handlers read from a
  body. OpenAI's routes take all fields of the server's own route, because it copies them from one to the other.
- TGI: the request structures of `router/src/lib.rs` at db931fcf.
"""

from __future__ import annotations

from collections.abc import Mapping

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
RERANK, SCORE, TOKENIZE, DETOKENIZE = "/v1/rerank", "/v1/score", "/tokenize", "/detokenize"
_VLLM_SCORES = """cache_salt mm_processor_kwargs model padding priority request_id truncate_prompt_tokens
    truncation_side use_activation user"""
# Fields of a body on any text route in addition to OpenAI's. The last lines are fields that the server itself adds to
# a chat request and would also read from a client's body.
_LLAMA_CPP = """adaptive_decay adaptive_target backend_sampling cache_prompt dry_allowed_length dry_base dry_multiplier
    dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range echo grammar id_slot ignore_eos
    json_schema lora min_keep min_p mirostat mirostat_eta mirostat_tau n_cache_reuse n_cmpl n_discard n_indent n_keep
    n_predict n_probs parse_tool_calls post_sampling_probs reasoning_budget_tokens reasoning_control reasoning_format
    repeat_last_n repeat_penalty response_fields return_progress return_tokens samplers sse_ping_interval
    speculative.n_max speculative.n_min speculative.p_min t_max_predict_ms timings_per_token top_k top_n_sigma typical_p
    verbose xtc_probability xtc_threshold
    chat_format chat_parser continue_final_message generation_prompt grammar_lazy grammar_triggers preserved_tokens
    reasoning_budget_end_tag reasoning_budget_end_tags reasoning_budget_message reasoning_budget_start_tag"""

CLIENT_FIELDS: Mapping[str, Mapping[str, str]] = {
    "OpenAI": {
        CHAT: """audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
            messages metadata modalities model moderation n parallel_tool_calls prediction presence_penalty
            prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format
            safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools
            top_logprobs top_p user verbosity web_search_options""",
        COMPLETIONS: """best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt
            seed stop stream stream_options suffix temperature top_p user""",
        RESPONSES: """background context_management conversation include input instructions max_output_tokens
            max_tool_calls metadata model moderation parallel_tool_calls previous_response_id prompt prompt_cache_key
            prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier store stream
            stream_options temperature text tool_choice tools top_logprobs top_p truncation user""",
        EMBEDDINGS: "dimensions encoding_format input model user",
    },
    "Anthropic": {
        MESSAGES: """cache_control container diagnostics inference_geo max_tokens messages metadata model output_config
            service_tier speed stop_sequences stream system temperature thinking tool_choice tools top_k top_p
            user_profile_id workspace_id""",
        COUNT: """cache_control messages model output_config speed system thinking tool_choice tools user_profile_id
            workspace_id""",
    },
    "Ollama": {
        "/api/generate": """_debug_render_only context format height images keep_alive logprobs model options prompt
            raw shift steps stream suffix system template think top_logprobs truncate width""",
        "/api/chat": """_debug_render_only format keep_alive logprobs messages model options shift stream think tools
            top_logprobs truncate""",
        "/api/chat options": """draft_num_predict embedding_only f16_kv frequency_penalty logits_all low_vram main_gpu
            min_p mirostat mirostat_eta mirostat_tau num_batch num_ctx num_gpu num_keep num_predict num_thread numa
            penalize_newline presence_penalty repeat_last_n repeat_penalty seed stop temperature tfs_z top_k top_p
            typical_p use_mlock use_mmap vocab_only""",
        "/api/embed": "dimensions input keep_alive model options truncate",
        "/api/embeddings": "keep_alive model options prompt",
        "/api/show": "model name options system template verbose",
        "/api/pull": "insecure model name password stream username",
    },
    "vLLM": {
        CHAT: """add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
            chat_template_kwargs continue_final_message documents echo ec_transfer_params guided_choice
            guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern ignore_eos
            include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logits_processors
            logprob_token_ids media_io_kwargs min_p min_tokens mm_processor_kwargs priority prompt_logprobs
            repetition_detection repetition_penalty request_id return_mm_kwargs return_prompt_text return_token_ids
            return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start session_id skip_special_tokens
            spaces_between_special_tokens stop_token_ids stream_interval structured_outputs thinking_token_budget top_k
            truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking""",
        COMPLETIONS: """add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params guided_choice
            guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern ignore_eos
            include_stop_str_in_output kv_transfer_params length_penalty logits_processors logprob_token_ids min_p
            min_tokens priority prompt_embeds prompt_logprobs repetition_detection repetition_penalty request_id
            response_format return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids
            routed_experts_prompt_start session_id skip_special_tokens spaces_between_special_tokens stop_token_ids
            stream_interval structured_outputs thinking_token_budget top_k truncate_prompt_tokens truncation_side
            use_beam_search vllm_xargs watermarking""",
        RESPONSES: """cache_salt chat_template_kwargs ec_transfer_params enable_response_messages frequency_penalty
            ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params logit_bias media_io_kwargs
            mm_processor_kwargs presence_penalty previous_input_messages priority repetition_penalty request_id seed
            session_id skip_special_tokens stop structured_outputs top_k vllm_xargs watermarking""",
        EMBEDDINGS: """add_generation_prompt add_special_tokens cache_salt chat_template chat_template_kwargs
            continue_final_message embed_dtype endianness media_io_kwargs messages mm_processor_kwargs normalize padding
            priority request_id truncate_prompt_tokens truncation_side use_activation""",
        RERANK: f"documents query top_n {_VLLM_SCORES}",
        SCORE: f"data_1 data_2 documents items queries text_1 text_2 {_VLLM_SCORES}",
        TOKENIZE: """add_generation_prompt add_special_tokens chat_template chat_template_kwargs continue_final_message
            media_io_kwargs messages mm_processor_kwargs model prompt return_token_strs tools""",
        DETOKENIZE: "model tokens",
    },
    "llama.cpp": {
        CHAT: f"{_LLAMA_CPP} add_generation_prompt chat_template_kwargs",
        COMPLETIONS: _LLAMA_CPP,
        EMBEDDINGS: "content embd_normalize",
        RERANK: "documents query texts top_n",
        TOKENIZE: "add_special content parse_special with_pieces",
        DETOKENIZE: "tokens",
        "/completion": f"""{_LLAMA_CPP} frequency_penalty logit_bias logprobs max_completion_tokens max_tokens n
            presence_penalty prompt seed stop stream stream_options temperature top_p""",
        "/infill": f"""{_LLAMA_CPP} frequency_penalty input_extra input_prefix input_suffix logit_bias logprobs
            max_completion_tokens max_tokens n presence_penalty prompt seed stop stream stream_options temperature
            top_p""",
        "/embedding": "content embd_normalize encoding_format input",
        "/apply-template": """add_generation_prompt chat_template_kwargs continue_final_message json_schema messages
            parallel_tool_calls reasoning_format response_format tool_choice tools""",
    },
    "TGI": {
        "/generate": "inputs parameters stream",
        "/generate parameters": """adapter_id best_of decoder_input_details details do_sample frequency_penalty grammar
            max_new_tokens repetition_penalty return_full_text seed stop temperature top_k top_n_tokens top_p truncate
            typical_p watermark""",
        CHAT: """frequency_penalty logit_bias logprobs max_completion_tokens max_tokens messages model n
            presence_penalty response_format seed stop stream stream_options temperature tool_choice tool_prompt tools
            top_logprobs top_p""",
        COMPLETIONS: """frequency_penalty max_tokens model prompt repetition_penalty seed stop stream suffix temperature
            top_p""",
    },
}
