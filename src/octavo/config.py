"""Options of the engine. Flags and documentation are generated from these fields."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

from octavo.errors import UsageError
from octavo.speculative_config import SpeculationMode, SpeculativeConfig
from octavo.unknown_options import advice_on, in_our_words

KVDtype = Literal["float16", "int8", "fp8"]
KV_DTYPES: tuple[KVDtype, ...] = get_args(KVDtype)
CPU_KV_DTYPES: tuple[KVDtype, ...] = ("float16", "int8")  # supported by every backend
WeightDtype = Literal["auto", "float32", "float16", "bfloat16"]
Offload = Literal["auto", "cpu", "stream"]
DistributedExecutor = Literal["processes", "ray"]
Quantization = Literal["nf4", "fp4", "int8", "int4", "fp8"]
PdfAs = Literal["auto", "pages", "text"]
# Called with (phase, bytes done, total bytes) while a model is loaded. Phases are for people: `packing`.
LoadProgress: TypeAlias = Callable[[str, int, int], None]

SamplingValue: TypeAlias = "int | float | tuple[str, ...]"

# Sampling values that `override_generation_config` can set, with the names of `SamplingParams`.
SAMPLING_DEFAULTS: tuple[str, ...] = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
)
SAMPLING_DEFAULTS += ("frequency_penalty", "seed", "max_tokens", "stop")

_SIZE_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def option(default: Any, help: str) -> Any:  # noqa: A002 - the name used by command line parsers
    """Declare a configuration field with the help text for its flag."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of an engine. Fields are checked on construction; an invalid one raises UsageError."""

    model: str = option("smollm2", "path, hub id (org/name or org/name:Q4_K_M) or short name of the model")
    revision: str | None = option(None, "branch, tag or commit on the hub; default: the newest version")
    quantization: Quantization | None = option(  # noqa: RUF009 - a literal cannot change
        None, "quantize an unquantized model while loading it: nf4, fp4, int8, int4 or fp8"
    )
    dtype: WeightDtype = option(  # noqa: RUF009 - a literal cannot change
        "auto",
        "in-memory number type of unquantized weights: auto (as stored), float32, float16 or bfloat16; "
        "the CPU always computes in float32",
    )
    trust_remote_code: bool = option(False, "accepted for compatibility; code from a model repository is never run")
    device: str | None = option(
        None, "where to compute: cuda, cuda:1 (the second GPU) or cpu; default: a GPU if torch finds one, else the CPU"
    )
    backend: str = option(
        "auto",
        "compute backend: auto (that of the device), cpu, torch (torch:cpu runs its code on the CPU, for tests), or "
        "reference (numpy: slow, but it defines the results)",
    )
    gpu_layers: int | str = option(
        "auto", "layers to run on the GPU; the CPU runs the rest; auto: as many as fit in GPU memory"
    )
    gpu_offload: Offload = option(  # noqa: RUF009 - a literal cannot change
        "auto",
        "layers that do not fit on the GPU: cpu (the CPU runs them), stream (each step copies them there), or auto: "
        "whichever is faster for gpu_offload_users",
    )
    gpu_offload_users: int | None = option(
        None, "number of concurrent requests that gpu_offload auto assumes; default: max_num_seqs"
    )
    gpu_memory: float | int | str | None = option(
        None, "GPU memory to use: a fraction, such as 0.8, or a size, such as '20GiB'; default: all that is free"
    )
    max_model_len: int | None = option(
        None, "maximum tokens per request, prompt plus answer; default: the model's limit, or as many as fit in memory"
    )
    max_num_seqs: int = option(64, "maximum number of sequences that run at once")
    max_num_batched_tokens: int | None = option(
        None, "maximum tokens computed in one step; lower makes streams smoother; default: 512, on a GPU 2048"
    )
    max_itl: int = option(
        200,
        "target milliseconds between tokens of a stream: a maximum while long prompts run, else a mean; 0: no limit",
    )
    kv_cache_memory: int | str | None = option(
        None, "memory for the KV cache, in bytes or as '2GiB'; default: at most half of the free memory"
    )
    kv_dtype: KVDtype = option(  # noqa: RUF009 - a literal cannot change
        "float16",
        "number type of the KV cache: float16, int8 (fits 1.9 times as many tokens) or, on a GPU, fp8 (twice as many)",
    )
    deterministic: bool = option(
        False,
        "make answers independent of batching on a GPU too (slower); on the CPU they always are",
    )
    block_size: int = option(16, "tokens per KV cache block")
    enable_prefix_caching: bool = option(True, "reuse the KV cache of earlier prompts with the same prefix")
    speculation: SpeculationMode = option(  # noqa: RUF009 - a literal cannot change
        "auto",
        "draft upcoming tokens from the text so far and verify several per step where that is faster; answers stay "
        "the same: ngram, off, or auto (ngram on the CPU)",
    )
    draft_model: str | None = option(
        None,
        "draft model: a small one with the same vocabulary, an EAGLE-3 head or a Gemma 4 assistant",
    )
    speculative_config: dict[str, Any] | str | None = option(  # noqa: RUF009 - None cannot change
        None,
        "speculation settings as JSON with vLLM's keys: method (ngram, draft_model, eagle3, mtp), model, revision, "
        "num_speculative_tokens, "
        "prompt_lookup_min, prompt_lookup_max",
    )
    enable_lora: bool = option(False, "allow LoRA adapters; each request can name one")
    lora_modules: dict[str, str] | str | None = option(  # noqa: RUF009 - None cannot change
        None,
        "adapters to load at startup, as NAME=PATH, separated by spaces: PEFT folders or GGUF "
        "files; PATH:SCALE multiplies the effect",
    )
    default_lora: str | None = option(None, "adapter of lora_modules for requests that name none")
    max_loras: int = option(8, "maximum number of different adapters in a step")
    max_lora_rank: int = option(64, "highest rank of an adapter")
    max_cpu_loras: int = option(
        64, "adapters to keep in memory; the least recently used are dropped and read again when needed"
    )
    pack_cache: bool | None = option(
        None,
        "keep packed weights on disk; later starts map them and share their memory; default: written in the background "
        "after the first answer, in at most a tenth of the free disk space",
    )
    pack_cache_size: int | str = option("32GiB", "maximum disk space for the packed weights of all models")
    prompt_cache_dir: str | None = option(
        None,
        "folder that stores the KV cache of prompts, to reuse it for prompts with the same prefix, even after a "
        "restart; the files reveal the prompts",
    )
    prompt_cache_size: int | str = option("10GiB", "maximum disk space for the stored prompts of a model")
    host_cache_memory: int | str | None = option(
        None, "main memory for blocks evicted from a GPU's KV cache, such as '16GiB'; they are copied back when needed"
    )
    prompt_cache_private: bool = option(False, "also store prompts of requests with a cache_salt or an API key")
    mmproj: str | None = option(
        None,
        "file with the vision encoder of a GGUF model; none: text only; default: the one *mmproj*.gguf "
        "next to the model",
    )
    image_max_tokens: int | None = option(
        None,
        "maximum tokens per image; larger images are scaled down to fit; default: the model's own limit, on the CPU "
        "at most 1024",
    )
    media_cache_size: int | str = option("256MiB", "memory for caching the encodings of images")
    pdf_as: PdfAs = option(  # noqa: RUF009 - a literal cannot change
        "auto",
        "how to read PDF documents in conversations: pages (as images), text, or auto: pages for models that see, text "
        "for others; pdf_as in a part of a message takes precedence",
    )
    num_threads: int = option(0, "compute threads; 0: one per core available to this process")
    tensor_parallel_size: int = option(
        1, "processes on this machine that compute each layer together, each with part of its weights"
    )
    pipeline_parallel_size: int = option(
        1, "consecutive stages to split the layers into, each with its own tensor_parallel_size processes"
    )
    enable_expert_parallel: bool = option(
        False, "give each of the tensor_parallel_size processes whole experts instead of a part of every expert"
    )
    nnodes: int = option(1, "machines to spread the stages of pipeline_parallel_size over evenly")
    node_rank: int = option(0, "index of this machine among nnodes; 0 answers requests")
    master: str | None = option(None, "HOST:PORT of the machine with node_rank 0; other machines connect to it")
    distributed_executor: DistributedExecutor = option(  # noqa: RUF009 - a literal cannot change
        "processes",
        "how to start ranks: processes (on this machine and the others of nnodes), or ray (actors on nnodes of a Ray "
        "cluster; needs octavo[ray])",
    )
    data_parallel_size: int = option(
        1,
        "replicas behind one `octavo serve` address, each with its own processes, memory and share of the cores",
    )
    generation_config: str = option(
        "auto",
        "sampling values for requests that set none: auto (recommended by the model's authors), none (neutral "
        "values), or the path of a generation_config.json",
    )
    system_prompt: str | None = option(None, "system message for conversations without one")
    chat_template: str | None = option(None, "Jinja template, or a file with one, to replace the model's chat template")
    override_generation_config: str | None = option(
        None, f"values that override generation_config, as a JSON object with any of {', '.join(SAMPLING_DEFAULTS)}"
    )

    def __post_init__(self) -> None:
        for name in ("model", "backend", "generation_config"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise UsageError(f"{name} must be a name, not {value!r}")
        for name in (
            "enable_prefix_caching",
            "enable_expert_parallel",
            "pack_cache",
            "trust_remote_code",
            "deterministic",
            "prompt_cache_private",
            "enable_lora",
        ):
            if not isinstance(value := getattr(self, name), bool) and (name, value) != ("pack_cache", None):
                raise UsageError(f"{name} must be True or False, not {value!r}")
        if isinstance(self.override_generation_config, Mapping):  # as in vLLM's Python API
            object.__setattr__(self, "override_generation_config", json.dumps(self.override_generation_config))
        self.sampling_overrides  # noqa: B018 - raises
        parse_bytes("pack_cache_size", self.pack_cache_size)
        parse_bytes("prompt_cache_size", self.prompt_cache_size)
        if self.host_cache_memory is not None:
            parse_bytes("host_cache_memory", self.host_cache_memory)
        if self.prompt_cache_dir is not None and not (isinstance(self.prompt_cache_dir, str) and self.prompt_cache_dir):
            raise UsageError(f"prompt_cache_dir must be the path of a folder, not {self.prompt_cache_dir!r}")
        _check_kv_dtype(self.kv_dtype)
        _check_loading(self)
        check_integer("max_num_seqs", self.max_num_seqs, 1, 4096)
        if self.max_num_batched_tokens is not None:
            check_integer("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**20)
        check_integer("max_itl", self.max_itl, 0, 3_600_000)
        check_integer("block_size", self.block_size, 1, 1024)
        _check_device(self)
        if self.block_size != 8 and self.block_size % 16 and self.backend != "reference":
            raise UsageError(f"block_size is {self.block_size}; it must be 8 or a multiple of 16")
        check_integer("num_threads", self.num_threads, 0, 1024)
        _check_processes(self)
        SpeculativeConfig.of(self)  # raises
        check_integer("max_loras", self.max_loras, 1, 1024)
        check_integer("max_lora_rank", self.max_lora_rank, 1, 4096)
        check_integer("max_cpu_loras", self.max_cpu_loras, 1, 65536)
        _check_conversation(self)
        if self.max_model_len is not None:
            check_integer("max_model_len", self.max_model_len, 2, 2**30)
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs {self.max_num_seqs}; "
                "a step must have room for one token of every sequence: raise the first or lower the second"
            )
        if self.kv_cache_memory is not None:
            parse_bytes("kv_cache_memory", self.kv_cache_memory)
        if self.mmproj is not None and (not isinstance(self.mmproj, str) or not self.mmproj):
            raise UsageError(f"mmproj must be the path of a file, or none, not {self.mmproj!r:.80}")
        if self.image_max_tokens is not None:
            check_integer("image_max_tokens", self.image_max_tokens, 1, 2**20)
        parse_bytes("media_cache_size", self.media_cache_size)
        check_pdf_as(self.pdf_as)

    @property
    def takes_adapters(self) -> bool:
        """True if requests may use adapters."""
        return self.enable_lora or bool(self.lora_modules)

    @property
    def adapters(self) -> dict[str, tuple[str, float]]:
        """The adapters of `lora_modules`, checked: name -> path and scale."""
        given = self.lora_modules or {}
        if isinstance(given, str):
            words = [word.partition("=") for word in given.split()]
            if wrong := next((name + mark for name, mark, path in words if not (name and path)), None):
                raise UsageError(f"lora_modules has {wrong!r:.80}; write NAME=PATH, several separated by spaces")
            given = {name: path for name, _, path in words}
        if not isinstance(given, Mapping) or not all(isinstance(x, str) and x for pair in given.items() for x in pair):
            raise UsageError(f"lora_modules is {given!r:.80}; give a mapping of names to paths, or NAME=PATH")
        return {name: scaled_path(path) for name, path in given.items()}

    @property
    def template_text(self) -> str | None:
        """The text of `chat_template`. Raises UsageError if its file cannot be read."""
        given = self.chat_template
        if given is None or "{{" in given or "{%" in given:
            return given
        try:
            return Path(os.path.expanduser(given)).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"chat_template is {given!r:.80}, neither a Jinja template nor a file: {error}") from error

    @property
    def num_ranks(self) -> int:
        """Number of processes that make up one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_here(self) -> range:
        """Ranks on the machine with this `node_rank`; rank 0 is on the first machine."""
        count = self.num_ranks // self.nnodes
        return range(self.node_rank * count, (self.node_rank + 1) * count)

    @property
    def kv_cache_bytes(self) -> int | None:
        """`kv_cache_memory` as a number."""
        return None if self.kv_cache_memory is None else parse_bytes("kv_cache_memory", self.kv_cache_memory)

    @property
    def sampling_overrides(self) -> dict[str, SamplingValue]:
        """`override_generation_config` as fields of `SamplingParams`, checked."""
        return {} if self.override_generation_config is None else _read_sampling(self.override_generation_config)

    @property
    def num_gpu_layers(self) -> int | None:
        """`gpu_layers` as a number; None means auto."""
        return None if self.gpu_layers == "auto" else int(self.gpu_layers)

    @property
    def gpu_memory_part(self) -> float | int | None:
        """`gpu_memory` in bytes as an int, or a fraction of the GPU's memory as a float; None means all free memory."""
        return None if self.gpu_memory is None else _part_of_memory(self.gpu_memory)

    @property
    def pack_cache_bytes(self) -> int:
        """`pack_cache_size` as a number."""
        return parse_bytes("pack_cache_size", self.pack_cache_size)

    @property
    def prompt_cache_bytes(self) -> int:
        """`prompt_cache_size` as a number."""
        return parse_bytes("prompt_cache_size", self.prompt_cache_size)

    @property
    def media_cache_bytes(self) -> int:
        """`media_cache_size` as a number."""
        return parse_bytes("media_cache_size", self.media_cache_size)

    @classmethod
    def resolve(cls, model: str, options: dict[str, Any]) -> EngineConfig:
        """Make a configuration from keyword arguments. Raises UsageError for an unknown argument, with a suggestion."""
        options = in_our_words(options)
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise UsageError(f"there is no option {name!r}; {advice_on(name, known)}")
        return cls(model=model, **options)


def scaled_path(text: str) -> tuple[str, float]:
    """Split `PATH:SCALE` into path and scale; the scale defaults to 1. Raises UsageError if the scale is not finite."""
    path, _, scale = text.rpartition(":")
    try:
        number = float(scale)
    except ValueError:
        return text, 1.0
    if not path:
        return text, 1.0
    if not math.isfinite(number):
        raise UsageError(f"{text!r:.100}: the scale of an adapter must be a finite number")
    return path, number


def parse_bytes(name: str, value: int | str) -> int:
    """Parse a size such as `2147483648`, `"2GiB"` or `"2 GB"`. Raises UsageError if it is not one."""
    if isinstance(value, str):
        text = value.strip().lower().replace(" ", "")
        digits = text.rstrip("kmgib")
        unit = text[len(digits) :]
        try:
            number = float(digits) * _SIZE_UNITS[unit] if digits.isascii() else -1.0
        except (ValueError, KeyError, OverflowError):
            number = -1.0
        if not 0 < number < 2**63:
            raise UsageError(f"{name} is {value!r}; write a size in bytes, or with a unit, such as '2GiB' or '500MB'")
        return int(number)
    return check_integer(name, value, 1, 2**63 - 1)


def _read_sampling(text: str) -> dict[str, SamplingValue]:
    from octavo.sampling_params import SamplingParams  # imported here because most configurations override nothing

    where = "override_generation_config"
    try:
        values = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{where} is {text!r:.80}, which is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f'{where} is {text!r:.80}; write an object, such as {{"temperature": 0.2}}')
    if unknown := [name for name in values if name not in SAMPLING_DEFAULTS]:
        raise UsageError(f"{where} has {unknown[0]!r:.80}; it may have {', '.join(SAMPLING_DEFAULTS)}")
    values = {name: value for name, value in values.items() if value is not None}
    try:
        params = SamplingParams(**values)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    return {name: getattr(params, name) for name in values}


def _check_conversation(config: EngineConfig) -> None:
    """Check the options for the system prompt, template and adapter."""
    adapters = config.adapters  # raises
    if config.default_lora is not None and config.default_lora not in adapters:
        known = ", ".join(adapters) or "none"
        raise UsageError(f"default_lora is {config.default_lora!r:.80}; it must be one of lora_modules: {known}")
    for name in ("chat_template", "system_prompt"):
        if not isinstance(value := getattr(config, name), str | None):
            raise UsageError(f"{name} must be a string, not {value!r:.80}")
    config.template_text  # noqa: B018 - raises


def _check_device(config: EngineConfig) -> None:
    """Check the options that choose where to compute."""
    device, backend, layers = config.device, config.backend, config.gpu_layers
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d{1,3})?", str(device)):
        raise UsageError(f"device is {device!r}; it must be cpu, cuda, or one of several GPUs, such as cuda:1")
    if device is not None and backend != "auto":
        raise UsageError(f"device {device} and backend {backend} both select where to compute; give one of them")
    if layers != "auto":
        try:
            number = layers if isinstance(layers, int) and not isinstance(layers, bool) else int(str(layers))
        except ValueError:
            number = -1
        if not 0 <= number < 2**31:
            raise UsageError(f"gpu_layers is {layers!r}; it must be 0 or more layers, or auto")
    config.gpu_memory_part  # noqa: B018 - raises
    if config.gpu_offload_users is not None:
        check_integer("gpu_offload_users", config.gpu_offload_users, 1, 4096)
    if config.gpu_offload not in get_args(Offload):
        raise UsageError(f"gpu_offload is {config.gpu_offload!r}; it must be auto, cpu or stream")
    given = {"gpu_layers": layers not in ("auto", 0, "0"), "gpu_memory": config.gpu_memory is not None}
    if device is not None and device.startswith("cuda") and config.num_ranks > 1 and config.data_parallel_size == 1:
        if given["gpu_layers"] or config.gpu_offload != "auto":
            raise UsageError("gpu_layers and gpu_offload work only with a single process; ranks run all layers on GPUs")
        return
    given["gpu_offload"] = config.gpu_offload != "auto"
    name = next((name for name, is_given in given.items() if is_given), None)
    if name is not None and (
        device == "cpu" or backend in ("cpu", "reference") or config.num_ranks * config.data_parallel_size > 1
    ):
        where = (
            "several processes"
            if config.num_ranks * config.data_parallel_size > 1
            else "device cpu"
            if device
            else f"backend {backend}"
        )
        raise UsageError(f"{name} needs a GPU, but with {where} everything runs on the CPU; leave one of them out")


def _part_of_memory(value: float | str) -> float | int:
    """Parse a number of bytes, or a fraction as a float. Raises UsageError."""
    try:
        number = float(value)
    except ValueError:
        with contextlib.suppress(UsageError):
            return parse_bytes("gpu_memory", str(value))
        number = -1.0
    if 0 < number <= 1:
        return number
    if number.is_integer() and 1 < number < 2**63:
        return int(number)
    raise UsageError(
        f"gpu_memory is {value!r}; write a fraction of the GPU's memory above 0 and up to 1, or a size such as '20GiB'"
    )


def _check_kv_dtype(value: object) -> None:
    if value in ("bfloat16", "bf16"):
        raise UsageError(f"kv_dtype {value!r} is not supported: float16 takes no more memory and is more precise")
    if value not in KV_DTYPES:
        raise UsageError(f"kv_dtype is {value!r}; it must be {', '.join(KV_DTYPES[:-1])} or {KV_DTYPES[-1]}")


def _check_processes(config: EngineConfig) -> None:
    """Check the options for ranks, machines and replicas."""
    check_integer("tensor_parallel_size", config.tensor_parallel_size, 1, 64)
    check_integer("pipeline_parallel_size", config.pipeline_parallel_size, 1, 64)
    check_integer("nnodes", config.nnodes, 1, 64)
    check_integer("node_rank", config.node_rank, 0, config.nnodes - 1)
    check_integer("data_parallel_size", config.data_parallel_size, 1, 64)
    if config.distributed_executor == "ray":
        _check_ray(config)
    elif config.distributed_executor != "processes":
        raise UsageError(f"distributed_executor is {config.distributed_executor!r}; it must be processes or ray")
    elif config.nnodes > 1 and config.master is None:
        raise UsageError("nnodes needs master, the HOST:PORT of the machine with node_rank 0")
    if config.pipeline_parallel_size % config.nnodes:
        raise UsageError(
            f"pipeline_parallel_size is {config.pipeline_parallel_size}, which {config.nnodes} nodes cannot share "
            "evenly; the ranks of a stage are on one machine, and each machine needs the same number of stages"
        )
    if config.enable_expert_parallel and config.tensor_parallel_size == 1:
        raise UsageError(
            "enable_expert_parallel distributes experts over ranks, but tensor_parallel_size is 1; raise it, or "
            "leave enable_expert_parallel out"
        )
    if config.data_parallel_size > 1 and config.nnodes > 1:
        raise UsageError(
            f"data_parallel_size is {config.data_parallel_size} with nnodes {config.nnodes}; replicas share one "
            "machine: leave one of the two out, or put a server per machine behind a load balancer"
        )
    if config.num_ranks * config.data_parallel_size > 1:
        what = "several ranks run" if config.num_ranks > 1 else "several replicas run"
        takes_torch = config.num_ranks > 1 and config.data_parallel_size == 1
        if config.backend not in ("auto", "cpu") and not (takes_torch and config.backend.startswith("torch")):
            raise UsageError(f"{what} on the backend cpu, not on {config.backend}; leave out backend")
        if config.device not in (None, "cpu") and not takes_torch:
            raise UsageError(f"{what} on the cpu, not on {config.device}; leave out device")


def _check_ray(config: EngineConfig) -> None:
    if config.num_ranks == 1:
        raise UsageError(
            "distributed_executor ray needs more than one rank; give tensor_parallel_size or pipeline_parallel_size"
        )
    for name, value in (("node_rank", config.node_rank), ("master", config.master)):
        if value:
            raise UsageError(f"{name} is {value!r} with distributed_executor ray, which sets it itself; leave it out")
    if config.data_parallel_size > 1:
        raise UsageError(
            f"data_parallel_size is {config.data_parallel_size} with distributed_executor ray; Ray Serve runs "
            "replicas (octavo.ray.serve): leave one of the two out"
        )


def _check_loading(config: EngineConfig) -> None:
    """Check the options for loading weights."""
    if config.dtype not in get_args(WeightDtype):
        raise UsageError(f"dtype is {config.dtype!r}; it must be {', '.join(get_args(WeightDtype)[:-1])} or bfloat16")
    if config.quantization is not None and config.quantization not in get_args(Quantization):
        raise UsageError(
            f"quantization is {config.quantization!r}; it must be {', '.join(get_args(Quantization)[:-1])} or fp8, for "
            "an unquantized model; quantized models need no option"
        )
    if config.revision is not None and not (isinstance(config.revision, str) and config.revision):
        raise UsageError(f"revision must be a branch, tag or commit of the hub, not {config.revision!r}")


def check_pdf_as(value: object) -> PdfAs:
    """Return the value. Raises UsageError unless it is one of `PdfAs`."""
    if value not in get_args(PdfAs):
        raise UsageError(
            f"pdf_as is {value!r:.80}; it must be auto, pages or text", param="pdf_as", code="invalid_value"
        )
    return cast(PdfAs, value)


def is_read_as_text(pdf_as: PdfAs, *, sees: bool) -> bool:
    """Return whether the model reads a PDF document as text instead of as page images.

    sees: whether the model accepts images.
    """
    return pdf_as == "text" or (pdf_as == "auto" and not sees)


def check_integer(name: str, value: object, low: int, high: int) -> int:
    """Return the value. Raises UsageError if it is not an integer or out of range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} must be an integer, not {value!r}")
    if not low <= value <= high:
        raise UsageError(f"{name} is {value}; it must be from {low} to {high}")
    return value
