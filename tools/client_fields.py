"""The fields that other products' requests have, as facts: products and their routes here -> names.

Those of OpenAI and Anthropic are the parameters of their Python libraries (openai 2.54, anthropic 2.12); a test
compares them with the installed libraries. Those of Ollama are the request models of its library (ollama 0.6). Those of
vLLM's chat route, beside OpenAI's, are those of its request model at 002032ee and the `guided_` ones of earlier
versions; those of llama.cpp's own route are what its server reads from a request. Those of the other routes of both,
and of TGI, are named in their documentation of the same routes.
"""

from __future__ import annotations

from collections.abc import Mapping

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"

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
        "/api/generate": """context format height images keep_alive logprobs model options prompt raw steps stream
            suffix system template think top_logprobs width""",
        "/api/chat": "format keep_alive logprobs messages model options stream think tools top_logprobs",
        "/api/chat options": """embedding_only f16_kv frequency_penalty logits_all low_vram main_gpu mirostat
            mirostat_eta mirostat_tau num_batch num_ctx num_gpu num_keep num_predict num_thread numa penalize_newline
            presence_penalty repeat_last_n repeat_penalty seed stop temperature tfs_z top_k top_p typical_p use_mlock
            use_mmap vocab_only""",
        "/api/embed": "dimensions input keep_alive model options truncate",
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
        COMPLETIONS: """add_special_tokens allowed_token_ids cache_salt guided_choice guided_decoding_backend
            guided_grammar guided_json guided_regex guided_whitespace_pattern ignore_eos include_stop_str_in_output
            kv_transfer_params length_penalty logits_processors min_p min_tokens priority prompt_embeds prompt_logprobs
            repetition_penalty request_id response_format return_token_ids return_tokens_as_token_ids
            skip_special_tokens spaces_between_special_tokens stop_token_ids structured_outputs top_k
            truncate_prompt_tokens use_beam_search vllm_xargs""",
        EMBEDDINGS: """add_special_tokens cache_salt embed_dtype encoding_format normalize priority request_id
            truncate_prompt_tokens""",
    },
    "llama.cpp": {
        CHAT: """cache_prompt chat_template_kwargs dry_allowed_length dry_base dry_multiplier dry_penalty_last_n
            dry_sequence_breakers dynatemp_exponent dynatemp_range grammar id_slot ignore_eos json_schema lora min_keep
            min_p mirostat mirostat_eta mirostat_tau n_indent n_keep n_predict n_probs parse_tool_calls
            post_sampling_probs reasoning_format repeat_last_n repeat_penalty response_fields return_progress
            return_tokens samplers t_max_predict_ms timings_per_token top_k top_n_sigma typical_p xtc_probability
            xtc_threshold""",
        COMPLETIONS: """cache_prompt grammar id_slot ignore_eos json_schema lora min_keep min_p mirostat n_keep
            n_predict n_probs post_sampling_probs repeat_last_n repeat_penalty response_fields return_progress
            return_tokens samplers t_max_predict_ms timings_per_token top_k typical_p xtc_probability xtc_threshold""",
        "/completion": """adaptive_decay adaptive_target cache_prompt dry_allowed_length dry_base dry_multiplier
            dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range frequency_penalty grammar id_slot
            ignore_eos json_schema logit_bias lora max_tokens min_keep min_p mirostat mirostat_eta mirostat_tau
            n_cache_reuse n_discard n_indent n_keep n_predict n_probs post_sampling_probs presence_penalty prompt
            repeat_last_n repeat_penalty response_fields return_progress return_tokens samplers seed stop stream
            t_max_predict_ms temperature timings_per_token top_k top_n_sigma top_p typical_p xtc_probability
            xtc_threshold""",
    },
    "TGI": {
        "/generate": "inputs options parameters stream",
        "/generate parameters": """adapter_id best_of decoder_input_details details do_sample frequency_penalty grammar
            max_new_tokens repetition_penalty return_full_text seed stop temperature top_k top_n_tokens top_p truncate
            typical_p watermark""",
    },
}
