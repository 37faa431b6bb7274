"""`octavo serve`: serve one or more models over HTTP."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from octavo import __version__, env
from octavo.cli.command import HeadedCommand
from octavo.cli.completion import complete_model
from octavo.cli.options import (
    DEFAULT_MODEL,
    Options,
    with_default_sampling,
    with_engine_options,
    with_server_options,
)
from octavo.cli.terminal import mark_own_file
from octavo.config import EngineConfig
from octavo.engine.loading.progress_bar import ProgressBar, size
from octavo.errors import UsageError
from octavo.loader.named_models import expanded
from octavo.server.config import ServerConfig
from octavo.server.models.model_names import read_aliases, served_name, split_names
from octavo.server.models.served_adapters import AdapterGiven

if TYPE_CHECKING:
    from octavo.server.models.served_model import ServedModel


class _ServeCommand(HeadedCommand):
    """A command that accepts several values after `--lora-modules`, as vLLM does.

    All following words that contain `=` or are JSON are values of this option.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest: list[str] = []
        modules: list[str] = []
        words = iter(args)
        for word in words:
            if word != "--lora-modules":
                rest.append(word)
                continue
            for value in words:
                if value.startswith("-") or not (value.startswith(("{", "[")) or "=" in value):
                    rest.append(value)
                    break
                modules.append(value)
        if modules:
            one = modules[0] if len(modules) == 1 else json.dumps(modules)
            rest = ["--lora-modules", one, *rest]
        return super().parse_args(ctx, rest)


@click.command(cls=_ServeCommand)
@click.argument("models", shell_complete=complete_model, nargs=-1, metavar="[MODEL | NAME=MODEL ...]")
@click.option(
    "-m", "--model", "more_models", multiple=True, metavar="MODEL", help="a model, instead of the MODEL argument"
)
@with_default_sampling
@with_server_options
@with_engine_options
def serve(
    *,
    models: tuple[str, ...],
    more_models: tuple[str, ...],
    server_options: Options,
    engine_options: Options,
    default_sampling: Options,
) -> None:
    """Serve models over HTTP with OpenAI, Anthropic and other APIs.

    MODEL is a path, a hub id or a short name [default: smollm2]. Requests refer to a model file by its name without the
    suffix, or by its path. If there are several models, each needs a name and is loaded when it is first requested.

    Exit codes: 2 for an invalid option, 3 if the model cannot be loaded, 4 if the port or the memory is not
    available, 5 if the engine died too often.
    """
    began = time.monotonic()
    config = ServerConfig.from_options(server_options)
    if more_models and click.get_current_context().get_parameter_source("models") is ParameterSource.DEFAULT_MAP:
        models = ()  # from the configuration file
    words, options = [*models, *more_models] or [DEFAULT_MODEL], {**_launched(engine_options), **engine_options}
    if default_sampling.get("seed") == -1:  # llama.cpp's value for a random seed
        del default_sampling["seed"]
    if default_sampling:
        fixed = EngineConfig(override_generation_config=options.get("override_generation_config")).sampling_overrides
        options["override_generation_config"] = json.dumps({**fixed, **default_sampling})
    configs = configs_of(words, _with_adapters(options, config), config.alias)
    read_aliases(config.alias, list(configs))  # raises UsageError for a wrong alias
    _check_replicas(config, list(configs.values()))
    for each in configs.values():
        mark_own_file(each.model)
    _end_at_once_on_signals()
    helping = [each for each in configs.values() if each.node_rank > 0]
    if helping:
        _help_another_machine(helping)
        return
    # Imported here so that other commands start faster.
    import anyio

    from octavo.server.http.access_log import set_up_logging
    from octavo.server.http.listener import bind, tls_context, url_of
    from octavo.server.registry import registered
    from octavo.server.startup import check_exposure, run_server

    is_debug = logging.getLogger().level == logging.DEBUG  # --debug
    set_up_logging(as_json=config.log_json, level=logging.DEBUG if is_debug else logging.INFO)
    check_exposure(config)
    tls_context(config)  # reports an invalid certificate before the model is loaded
    with bind(config) as sock, ProgressBar(in_bytes=True, announced=True, transient=True) as progress:
        # Connections from now on are answered as soon as the web server runs.
        url = url_of(config, sock)
        _say(f"octavo {__version__}: {', '.join(configs)} at {url}")
        report = _Report(url, progress, began)
        report.phase("server", time.monotonic() - began)
        with registered(url, tuple(configs), time.time()):
            anyio.run(run_server, config, configs, sock, report)


def _with_adapters(options: Options, config: ServerConfig) -> Options:
    """Return the engine options, with adapters enabled if requests may use any."""
    is_wanted = config.lora_dir or config.allow_runtime_lora or config.admin_key or config.admin_key_file
    return {**options, "enable_lora": True} if is_wanted or options.get("lora_modules") else options


def _check_replicas(config: ServerConfig, models: list[EngineConfig]) -> None:
    """Raise UsageError if replicas are requested but not possible."""
    size = models[0].data_parallel_size
    if size > 1 and len(models) > 1:
        raise UsageError(f"data_parallel_size is {size} with {len(models)} models; only a single MODEL has replicas")
    if size > 1 and config.in_process:
        raise UsageError(f"data_parallel_size is {size} with in_process, which runs one engine; leave one out")


def _launched(engine_options: Options) -> Options:
    """Return the rank settings in a launcher's environment that the options do not set."""
    is_given = "nnodes" in engine_options or engine_options.get("distributed_executor") == "ray"
    found = {} if is_given else env.cluster_of_launcher()
    if missing := {name: value for name, value in found.items() if name not in engine_options}:
        _say("from the environment: " + ", ".join(f"{name} {value}" for name, value in missing.items()))
    return missing


def _help_another_machine(configs: list[EngineConfig]) -> None:
    from octavo.engine.ranks.following import follow

    if len(configs) > 1:
        raise UsageError(f"node_rank {configs[0].node_rank} runs ranks of one model; give one MODEL")
    ranks = ", ".join(map(str, configs[0].ranks_here))
    _say(f"octavo {__version__}: rank {ranks} for {configs[0].master}")
    follow(configs[0])


def _end_at_once_on_signals() -> None:
    """Make SIGTERM and SIGINT end the process at once. The server later replaces these handlers with its own.

    Until then there is nothing to clean up. The handlers do not raise, because an exception inside an import could turn
    into a different one.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))


class _Report:
    """Writes the server's start to standard error. Implements `octavo.server.models.model_loader.LoadReport`."""

    def __init__(self, url: str, progress: ProgressBar, began: float) -> None:
        self._url = url
        self._progress = progress
        self._began = began
        self._is_ready = False

    def progress(self, what: str, done: int, total: int) -> None:
        self._progress.update(what, done, total)

    def phase(self, name: str, seconds: float) -> None:
        if not self._is_ready:  # the log reports later loads
            _say(f"  {name:<10} {seconds:6.2f} s")

    def ready(self, model: ServedModel) -> None:
        self._is_ready = True
        info = model.info
        _say(f"  {'ready':<10} {time.monotonic() - self._began:6.2f} s  {self._url}")
        _say(
            f"context: {info.max_model_len:,} tokens per request, {info.num_cache_tokens:,} tokens of cache shared by "
            f"up to {info.max_num_seqs} sequences"
        )
        _say(
            f"memory: weights {size(info.weight_bytes)}, cache {size(info.kv_cache_bytes)} of {info.kv_dtype}, "
            f"workspace {size(info.workspace_bytes)}; {info.num_threads} threads"
        )
        _say(f"export OPENAI_BASE_URL={self._url}/v1")


def _say(line: str) -> None:
    click.echo(line, err=True)


def configs_of(words: list[str], engine_options: Options, aliases: Sequence[str]) -> dict[str, EngineConfig]:
    """Return the models' configurations by id. A model's id is the given name, or else the first alias, or else the
    result of `served_name`.

    Raises UsageError.
    """
    configs: dict[str, EngineConfig] = {}
    options = {**engine_options}
    adapters = AdapterGiven.parse_all(options.pop("lora_modules", ""))
    for word in words:
        name, separator, model = word.partition("=")
        if not separator:
            model, own = word, [name for text in aliases if "=" not in text for name in split_names(text)]
            name = own[0] if own else served_name(word)
        if not name or not model:
            raise UsageError(f"{word!r} is not NAME=MODEL")
        if len(words) > 1 and not separator:
            raise UsageError(f"{word!r} needs a name because there are several models: write NAME={word}")
        if name in configs:
            raise UsageError(f"two models have the name {name!r}; give each its own name")
        configs[name] = EngineConfig.resolve(*expanded(model, options))
    for given in adapters:
        parent = given.parent or next(iter(configs))
        if parent not in configs:
            raise UsageError(f"base_model_name is {parent!r:.100}; available: {', '.join(configs)}")
        known = configs[parent].adapters
        if given.name in known:
            raise UsageError(f"lora_modules has two adapters named {given.name!r:.100}")
        modules = {name: f"{path}:{scale}" for name, (path, scale) in known.items()}
        modules[given.name] = f"{given.source}:{given.scale}"
        configs[parent] = replace(configs[parent], lora_modules=modules)
    return configs
