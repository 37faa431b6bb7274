"""The limits of an engine: sequences, tokens of a step, blocks of the cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of the engine. max_model_len: prompt and output of one sequence, in tokens.

    longer_context: what allows a longer one, for errors; empty at the model's own limit.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_outputs: int  # rows of a step, at least max_num_seqs
    block_size: int
    num_blocks: int
    vocab_size: int  # columns of the logits
    enable_prefix_caching: bool = True
    longer_context: str = ""
    max_itl_s: float = 0.0  # time of a step while streams wait for their next token; 0: no limit
    span_width: int = 0  # columns of the values that spans of prompts give; 0: the model takes no spans
    num_states: int = 0  # slots for states, STATES_PER_SEQUENCE for each of max_num_seqs; 0: the model keeps no states
