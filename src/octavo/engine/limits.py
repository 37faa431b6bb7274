"""The limits of an engine: sequences, tokens per step, images and source texts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits for the images that a model's encoder takes.

    max_patches: most patches per image, or 0 if no encoder computes the values of spans.
    patch_size: side of a patch in pixels.
    merge_size: side, in patches, of the block of patches that becomes one row.
    position_components: components of a token's position; more than one only with images.
    longest_span: tokens of the longest span that must be in one step, or 0 if chunks may split any span.
    """

    max_patches: int = 0
    patch_size: int = 0
    merge_size: int = 0
    position_components: int = 1
    longest_span: int = 0


NO_IMAGES = ImageLimits()


@dataclass(frozen=True, slots=True)
class SourceLimits:
    """Limits for the texts that a model's encoder reads before the model answers.

    width: columns of their rows, or 0 if the model has no such encoder.
    start_token_id: the first token of the decoder, which is not part of the answer.
    max_rows: most rows, over all texts whose answers begin in one step.
    """

    width: int = 0
    start_token_id: int = 0
    max_rows: int = 0


NO_SOURCES = SourceLimits()


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of the engine.

    max_model_len: prompt and output of one sequence, in tokens.
    longer_context: explains in errors how to allow a longer context; empty at the model's own limit.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_outputs: int  # output rows of a step, at least max_num_seqs
    block_size: int
    num_blocks: int
    vocab_size: int  # columns of the logits
    enable_prefix_caching: bool = True
    longer_context: str = ""
    max_itl_s: float = 0.0  # time of a step while streams wait for their next token; 0 means no limit
    span_width: int = 0  # columns of the values in spans of prompts; 0 if the model takes no spans
    images: ImageLimits = NO_IMAGES
    sources: SourceLimits = NO_SOURCES
    adapter_slots: int = 0  # 0 if requests cannot name adapters
    num_states: int = 0  # slots for states, STATES_PER_SEQUENCE for each of max_num_seqs; 0 if the model keeps none
    num_draft_states: int = 0  # the part of num_states for states before drafts
