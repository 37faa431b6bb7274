"""`octavo run`: one prompt, one streamed answer."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.options import (
    DEFAULT_MODEL,
    Options,
    sampling_params,
    with_engine_options,
    with_sampling_options,
)
from octavo.cli.terminal import load_model, write, write_json
from octavo.errors import UsageError

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.outputs import RequestOutput
    from octavo.sampling_params import SamplingParams


@click.command()
@click.argument("words", nargs=-1, metavar="[MODEL] PROMPT")
@click.option("--system", help="system message before the prompt")
@click.option("--raw", is_flag=True, help="continue the prompt as it is, without the chat template")
@click.option("--json", "as_json", is_flag=True, help="print text, token ids and timings as JSON at the end")
@with_engine_options
@with_sampling_options
def run(
    *,
    words: tuple[str, ...],
    system: str | None,
    raw: bool,
    as_json: bool,
    engine_options: Options,
    sampling_options: Options,
) -> None:
    """Answer a prompt. The answer is printed as it is generated.

    MODEL is a path, a hub id or a short name [default: smollm2]. With - as PROMPT, the prompt is read from standard
    input.
    """
    started = time.monotonic()
    model, prompt = _model_and_prompt(list(words))
    params = sampling_params(sampling_options)
    if raw and system is not None:
        raise UsageError("--system needs the chat template, which --raw leaves out: use only one of the two")
    if params.logprobs is not None and not as_json:
        raise UsageError("--logprobs needs --json, which shows them")
    with load_model(model, engine_options, will_chat=not raw) as llm:
        load_s = time.monotonic() - started
        prompt_ids = llm.encode(prompt) if raw else llm.encode_chat(_messages(system, prompt))
        parts = _stream(llm, prompt_ids, params, show=not as_json)
    if as_json:
        write_json(_report(model, prompt, parts, load_s, time.monotonic() - started), indent=None)


def _model_and_prompt(words: list[str]) -> tuple[str, str]:
    """Raises UsageError if there are too many words or no prompt."""
    if len(words) > 2:
        raise UsageError(f"run takes a model and a prompt, not {len(words)} words: put quotes around the prompt")
    is_piped = not sys.stdin.isatty()
    if len(words) == 2:
        model, prompt = words
    elif words and is_piped and _is_model(words[0]):
        model, prompt = words[0], "-"
    else:
        model, prompt = DEFAULT_MODEL, words[0] if words else "-"
    if prompt == "-":
        if not words and not is_piped:
            raise UsageError("the prompt is missing: octavo run [MODEL] PROMPT; for a conversation: octavo chat")
        prompt = sys.stdin.read()
    elif len(words) == 1 and _is_model(prompt):
        raise UsageError(f"{prompt} is a model, and the prompt is missing: octavo run {prompt} PROMPT")
    if not prompt.strip():
        raise UsageError("the prompt is empty: octavo run [MODEL] PROMPT")
    return model, prompt


def _is_model(word: str) -> bool:
    """True if a single word names a model and is unlikely to be a prompt."""
    from octavo.loader.aliases import ALIASES

    with suppress(OSError, ValueError):  # a prompt can be longer than a path
        if word.endswith((".gguf", ".safetensors")) or (Path(word) / "config.json").is_file():
            return True
    return word.lower() in ALIASES


def _messages(system: str | None, prompt: str) -> list[dict[str, str]]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": prompt}]


def _stream(llm: LLM, prompt_ids: list[int], params: SamplingParams, *, show: bool) -> list[RequestOutput]:
    parts = []
    with llm.stream(prompt_ids, params) as stream:
        try:
            for part in stream:
                parts.append(part)
                if show:
                    write(part.outputs[0].text)
        except KeyboardInterrupt:
            if show:
                write("\n")  # so that the shell's prompt starts on a new line
            raise
    if show:
        write("\n")
    return parts


def _report(model: str, prompt: str, parts: list[RequestOutput], load_s: float, total_s: float) -> dict[str, Any]:
    last = parts[-1]
    metrics = last.metrics
    decoded = metrics.num_generated_tokens - 1
    computed = metrics.num_prompt_tokens - metrics.num_cached_tokens
    timings = {
        "load_s": load_s,
        "total_s": total_s,
        **asdict(metrics),
        "prefill_tokens_per_s": computed / metrics.prefill_s if metrics.prefill_s else None,
        "decode_tokens_per_s": decoded / metrics.decode_s if metrics.decode_s else None,
    }
    report: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "text": "".join(part.outputs[0].text for part in parts),
        "finish_reason": last.outputs[0].finish_reason,
        "stop_reason": last.outputs[0].stop_reason,
        "prompt_token_ids": last.prompt_token_ids,
        "token_ids": [i for part in parts for i in part.outputs[0].token_ids],
        "timings": timings,
    }
    entries = [entry for part in parts for entry in part.outputs[0].logprobs or []]
    if entries:
        report["logprobs"] = [{str(i): asdict(logprob) for i, logprob in entry.items()} for entry in entries]
    return report
