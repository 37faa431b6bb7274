"""Command line options made from the fields of `EngineConfig`, `ServerConfig` and `SamplingParams`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, get_args, get_origin, get_type_hints

import click

from octavo.config import EngineConfig
from octavo.sampling_params import SamplingParams
from octavo.server.config import ServerConfig

DEFAULT_MODEL = "smollm2"

Options = dict[str, Any]
"""What was given on the command line, by field name."""

_ENGINE_TYPES: dict[str, Any] = {
    "backend": str,
    "max_model_len": int,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
    "max_itl": int,
    "kv_cache_memory": str,
    "kv_dtype": str,
    "block_size": int,
    "enable_prefix_caching": bool,
    "pack_cache": bool,
    "pack_cache_size": str,
    "num_threads": int,
}
_SAMPLING: dict[str, tuple[Any, str]] = {
    "temperature": (float, "how freely tokens are chosen; 0: always the most likely"),
    "top_p": (float, "choose among the most likely tokens that make up this probability"),
    "top_k": (int, "choose among so many most likely tokens; 0: all"),
    "min_p": (float, "leave out tokens below this fraction of the most likely one"),
    "typical_p": (float, "choose among the most typical tokens that make up this probability"),
    "repetition_penalty": (float, "above 1: rather not what stands in prompt or answer already"),
    "presence_penalty": (float, "above 0: rather not what stands in the answer already"),
    "frequency_penalty": (float, "above 0: the less, the more often it stands in the answer already"),
    "seed": (int, "the same seed gives the same answer"),
    "stop": (list[str], "end the answer before this text; may be given several times"),
    "stop_token_ids": (list[int], "end the answer at this token; may be given several times"),
    "bad_words": (list[str], "a text that must not appear; may be given several times"),
    "allowed_token_ids": (list[int], "choose only among these tokens; may be given several times"),
    "include_stop_str_in_output": (bool, "keep the text that ended the answer"),
    "ignore_eos": (bool, "go on after the end of the answer, up to max-tokens"),
    "min_tokens": (int, "shortest answer, in tokens"),
    "max_tokens": (int, "longest answer, in tokens; default: up to the end of the context"),
    "logprobs": (int, "with --json: log-probabilities of each token and of so many most likely ones"),
    "skip_special_tokens": (bool, "leave control tokens out of the text"),
}
# An answer for people rather than for an experiment: no length limit, and little of the unlikely.
_ANSWER_DEFAULTS: Options = {"temperature": 0.2, "top_p": 0.9, "max_tokens": None}


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds an option for each field of `EngineConfig`; the command gets those given as `engine_options`."""
    helps = {field.name: field.metadata["help"] for field in dataclasses.fields(EngineConfig)}
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    options = {name: (kind, helps[name], defaults[name]) for name, kind in _ENGINE_TYPES.items()}
    return _with_options(command, "engine_options", options)


def with_server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds an option for each field of `ServerConfig`; the command gets those given as `server_options`.

    Durations are texts there (`30s`), repeated options lists: `ServerConfig.from_options` reads both.
    """
    kinds = {float: str, tuple[str, ...]: list[str], str | None: str, int | None: int}
    hints = get_type_hints(ServerConfig)
    options = {}
    for field in dataclasses.fields(ServerConfig):
        hint = hints[field.name]
        default = f"{field.default:g}s" if hint is float else field.default
        options[field.name] = (kinds.get(hint, hint), field.metadata["help"], default)
    return _with_options(command, "server_options", options)


def with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds an option for each field of `SamplingParams` that suits one answer, as `sampling_options`."""
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)} | _ANSWER_DEFAULTS
    options = {name: (kind, text, defaults[name]) for name, (kind, text) in _SAMPLING.items()}
    return _with_options(command, "sampling_options", options)


def sampling_params(options: Options) -> SamplingParams:
    """The parameters of one answer. Raises UsageError."""
    return SamplingParams(**{**_ANSWER_DEFAULTS, **options})


def in_flags(message: str) -> str:
    """The message of a wrong value as the command line knows it: `--max-queue is -1` for `max_queue is -1`."""
    name, separator, rest = message.partition(" is ")
    fields = {*_ENGINE_TYPES, *_SAMPLING, *(field.name for field in dataclasses.fields(ServerConfig))}
    return f"--{name.replace('_', '-')}{separator}{rest}" if name in fields else message


def _with_options(
    command: Callable[..., None], target: str, options: dict[str, tuple[Any, str, Any]]
) -> Callable[..., None]:
    """The command with one option for each of `options`; it gets those that were given as `target`."""

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in options}
        kept = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in given.items()
            if value not in (None, ())
        }
        command(**arguments, **{target: kept})

    decorated: Callable[..., None] = wrapper
    for name, option in reversed(options.items()):
        decorated = _option(name, *option)(decorated)
    return decorated


def _option(name: str, kind: Any, text: str, default: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    flag = "--" + name.replace("_", "-")
    shown = "" if default in (None, ()) else f" [default: {str(default).lower() if kind is bool else default}]"
    if kind is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text + shown)
    multiple = get_origin(kind) is list
    item = get_args(kind)[0] if multiple else kind
    return click.option(flag, name, type=item, multiple=multiple, help=text + shown)
