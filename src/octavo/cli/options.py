"""Command line options made from the fields of `EngineConfig`, `ServerConfig` and `SamplingParams`."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from types import GenericAlias, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from octavo.cli.command import HeadedOption
from octavo.cli.config_file import read_value
from octavo.config import EngineConfig
from octavo.errors import UsageError
from octavo.sampling_params import SamplingParams
from octavo.server.config import ServerConfig

DEFAULT_MODEL = "smollm2"

Options = dict[str, Any]
"""Options given on the command line, by field name."""
_Flag = tuple[Any, str, Any]  # type, help, default

_SAMPLING_HELP: dict[str, str] = {
    "temperature": "sampling randomness; 0 always picks the most likely token",
    "top_p": "sample from the most likely tokens that together reach this probability",
    "top_k": "sample from this many of the most likely tokens; 0 means all",
    "min_p": "drop tokens less likely than this fraction of the most likely one",
    "typical_p": "sample from the most typical tokens that together reach this probability",
    "repetition_penalty": "above 1, make tokens of the prompt and answer less likely",
    "presence_penalty": "above 0, make tokens already in the answer less likely",
    "frequency_penalty": "above 0, make a token less likely each time it appears in the answer",
    "seed": "random seed; the same seed gives the same answer",
    "stop": "stop before this text; may be repeated",
    "stop_token_ids": "stop at this token id; may be repeated",
    "bad_words": "text that must not appear in the answer; may be repeated",
    "allowed_token_ids": "sample only this token id; may be repeated",
    "include_stop_str_in_output": "keep the stop text in the answer",
    "ignore_eos": "continue after the end-of-text token, up to --max-tokens",
    "min_tokens": "minimum tokens in the answer",
    "max_tokens": "maximum tokens in the answer",
    "logprobs": "with --json: log-probabilities of each token and this many of the most likely ones",
    "skip_special_tokens": "leave control tokens out of the text",
}
# Longer than any useful answer, but stops a model that repeats itself.
MAX_ANSWER_TOKENS = 4096
# As in `octavo.loader.generation_config`; importing that module takes a tenth of a second.
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
_SHOWN_DEFAULTS: Options = {**dict.fromkeys(MODEL_DEFAULTS, "the model's"), "max_tokens": MAX_ANSWER_TOKENS}
_SHORT_FLAGS = {"tensor_parallel_size": ["--tp"], "pipeline_parallel_size": ["--pp"], "data_parallel_size": ["--dp"]}
# Names known from llama.cpp and vLLM.
_SHORT_FLAGS |= {
    "temperature": ["--temp"],
    "max_tokens": ["-n", "--predict", "--n-predict"],
    "max_model_len": ["-c", "--ctx-size"],
    "num_threads": ["-t", "--threads"],
    "gpu_layers": ["-ngl", "--n-gpu-layers"],
    "gpu_memory": ["--gpu-memory-utilization"],
    "draft_model": ["-md", "--model-draft"],
    "alias": ["-a", "--served-model-name"],
    "cors_origin": ["--cors-origins", "--cors"],
}
_ADAPTERS = ("enable_lora", "max_loras", "max_lora_rank")
_MODEL_OPTIONS = ("revision", "quantization", "dtype", "kv_dtype")


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each field of `EngineConfig`. The command receives the given ones as `engine_options`."""
    options = _options_of(EngineConfig)
    del options["model"]  # the command's argument
    return _with_options(command, "engine_options", options, "Engine")


def with_model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `EngineConfig` that change a model's sizes, for commands that load nothing."""
    return _with_some_options(command, *_MODEL_OPTIONS)


def with_plan_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `with_model_options`, and options for offloading, drafts, the GPU, ranks and replicas."""
    places = ("device", "backend", "gpu_layers", "gpu_offload", "gpu_offload_users", "gpu_memory")
    groups = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel")
    return _with_some_options(
        command, *_MODEL_OPTIONS, "pack_cache_size", "draft_model", *_ADAPTERS, "speculation", *places, *groups
    )


def _with_some_options(command: Callable[..., None], *names: str) -> Callable[..., None]:
    options = _options_of(EngineConfig)
    return _with_options(command, "engine_options", {name: options[name] for name in names}, "Engine")


def with_server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each field of `ServerConfig`. The command receives the given ones as `server_options`.

    Durations are strings (`30s`) and repeated options are lists. `ServerConfig.from_options` accepts both.
    """
    options = {
        name: (str, text, f"{default:g}s") if kind is float else (kind, text, default)
        for name, (kind, text, default) in _options_of(ServerConfig).items()
    }
    return _with_options(command, "server_options", options, "Server")


def with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each field of `SamplingParams` that applies to a single answer.

    The command receives the given ones as `sampling_options`.
    """
    known = _options_of(SamplingParams)
    options = {
        name: (known[name][0], text, _SHOWN_DEFAULTS.get(name, known[name][2])) for name, text in _SAMPLING_HELP.items()
    }
    return _with_options(command, "sampling_options", options, "Sampling")


def with_default_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--temperature` and `--seed` as defaults for requests that do not set these parameters.

    The command receives the given ones as `default_sampling`.
    """
    options: dict[str, _Flag] = {
        "temperature": (float, "temperature of requests that set none", "the model's"),
        "seed": (int, "seed of requests that set none; by default, or with -1, random each time", None),
    }
    return _with_options(command, "default_sampling", options, "Sampling")


def first_given(names: Iterable[str]) -> str | None:
    """Return the first of these parameters that was given on the command line, as a flag such as `--few-shot`."""
    source = click.get_current_context().get_parameter_source
    return next((f"--{name.replace('_', '-')}" for name in names if source(name) is ParameterSource.COMMANDLINE), None)


def sampling_params(options: Options) -> SamplingParams:
    """Return the sampling parameters of one answer, without the model's defaults. Raises UsageError."""
    return SamplingParams(**{"max_tokens": MAX_ANSWER_TOKENS, **options})


def sampling_names() -> list[str]:
    """Return the names of the sampling parameters that apply to a conversation."""
    return [name for name in _SAMPLING_HELP if name != "logprobs"]


def parse_sampling_value(name: str, text: str) -> Any:
    """Parse a sampling parameter's value as typed by a user. A list is typed as words, in quotes if needed.

    Raises UsageError.
    """
    if name not in sampling_names():
        near = difflib.get_close_matches(name, sampling_names(), 1)
        hint = f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(sampling_names())}"
        raise UsageError(f"there is no sampling parameter {name!r}{hint}")
    kind: Any = _options_of(SamplingParams)[name][0]
    is_list = bool(get_args(kind))
    item = click.types.convert_type(get_args(kind)[0] if is_list else kind)
    try:
        values = [item.convert(word, None, None) for word in (shlex.split(text) if is_list else [text])]
    except (click.BadParameter, ValueError) as error:
        raise UsageError(f"{name} cannot be {text!r}: {error}") from error
    return values if is_list else values[0]


def in_flags(message: str) -> str:
    """Rewrite option names in a message as flags: `--max-queue is -1` for `max_queue is -1`.

    A name that is also an English word, such as `host`, is rewritten only at the start of the message.
    """
    fields = {*_options_of(EngineConfig), *_options_of(ServerConfig), *_SAMPLING_HELP} - {"model"}
    names = "|".join(sorted((name for name in fields if "_" in name), key=len, reverse=True))
    beginning = "|".join(fields)
    pattern = rf"^(?:{beginning})(?= is )|(?<![\w./-])(?:{names})(?![\w/-]|\.\w)"
    return re.sub(pattern, lambda found: f"--{found[0].replace('_', '-')}", message)


def _options_of(config: type[Any]) -> dict[str, _Flag]:
    """Return an option for each field of a dataclass, with the annotation's type and the help in the metadata."""
    hints = get_type_hints(config)
    return {
        field.name: (_flag_type(hints[field.name]), field.metadata.get("help", ""), field.default)
        for field in dataclasses.fields(config)
    }


def _flag_type(hint: Any) -> Any:
    """Return the type of an option's value on the command line, as a list type if the option may be repeated.

    If a field accepts strings as well as numbers, such as "2GiB", the type is str. If it accepts one string or several,
    the type is a list.
    """
    is_union = get_origin(hint) in (Union, UnionType)
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] if is_union else [hint]
    for kind in kinds:
        if get_origin(kind) in (tuple, Iterable, Sequence):
            return GenericAlias(list, get_args(kind)[:1])
    return str if str in kinds or get_origin(kinds[0]) is Literal else kinds[0]


def _with_options(
    command: Callable[..., None], target: str, options: dict[str, _Flag], heading: str
) -> Callable[..., None]:
    """Add `options` to a command, which receives the given ones as the argument `target`."""

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> None:
        given = _given({name: arguments.pop(name) for name in options})
        _check_overruled(given, set(options), _CHECKS[target])
        command(**arguments, **{target: given})

    decorated: Callable[..., None] = wrapper
    for name, option in reversed(options.items()):
        decorated = _option(name, *option, heading)(decorated)
    return decorated


def _given(values: Options) -> Options:
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v not in (None, ())}


_CHECKS: dict[str, Callable[[Options], object]] = {
    "engine_options": lambda options: EngineConfig(**options),
    "server_options": ServerConfig.from_options,
    "sampling_options": sampling_params,
    "default_sampling": lambda options: SamplingParams(**options),
}


def _check_overruled(given: Options, names: set[str], check: Callable[[Options], object]) -> None:
    """Check values of the configuration file that the command line overrides, which would otherwise never be checked.

    A value is an error only if it conflicts with the rest of the file and also with the options that are in effect.
    Raises UsageError.
    """
    context = click.get_current_context()
    file = context.default_map or {}
    params = [param for param in context.command.params if param.name in names and param.name in file]
    own = _given({param.name or "": read_value(context, param) for param in params})
    source = context.get_parameter_source
    for name in [name for name in own if source(name) is ParameterSource.COMMANDLINE]:
        for options in ({**given, name: own[name]}, own):
            try:
                check(options)
                break
            except UsageError as error:
                reason = error
        else:
            raise UsageError(f"the configuration file: {reason}")


def _option(
    name: str, kind: Any, text: str, default: object, heading: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    flag = "--" + name.replace("_", "-")
    shown = "" if default in (None, ()) else f" [default: {str(default).lower() if kind is bool else default}]"
    if kind is bool:
        return click.option(
            f"{flag}/--no-{flag[2:]}", name, default=None, help=text + shown, cls=HeadedOption, heading=heading
        )
    multiple = get_origin(kind) is list
    item = get_args(kind)[0] if multiple else kind
    flags = [flag, *_SHORT_FLAGS.get(name, [])]
    return click.option(
        *flags, name, type=item, multiple=multiple, help=text + shown, cls=HeadedOption, heading=heading
    )
