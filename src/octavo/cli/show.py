"""`octavo show`: describe a model from its headers."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from octavo import env
from octavo.cli.command import HeadedCommand
from octavo.cli.completion import complete_model
from octavo.cli.options import Options, with_model_options
from octavo.cli.terminal import find_headers, write, write_facts, write_json, write_note, write_table
from octavo.config import EngineConfig
from octavo.engine.loading.progress_bar import size
from octavo.errors import OctavoError

if TYPE_CHECKING:
    from octavo.adapters.description import AdapterFacts
    from octavo.graph.cost import ExpertCost
    from octavo.loader.checkpoint import Checkpoint

# Facts about the origin of a model, by the last word of their metadata key, and their labels in the text.
_ORIGIN = {"name": "name", "organization": "made by", "size_label": "size label", "license": "licence"}


@click.command(cls=HeadedCommand)
@click.argument("model", shell_complete=complete_model)
@click.option("--json", "as_json", is_flag=True, help="write JSON")
@with_model_options
def show(*, model: str, as_json: bool, engine_options: Options) -> None:
    """Describe a model: architecture, sizes, context and licence.

    MODEL is a path, a hub id or a short name. Only the headers of its files are read; for a model that is not on this
    machine, only these are downloaded. MODEL may also be the path of a LoRA adapter; this shows its ranks,
    modules and size.
    """
    from octavo.loader.checkpoint import open_checkpoint
    from octavo.loader.named_models import find

    if (adapter := _adapter(model)) is not None:
        write_json(asdict(adapter)) if as_json else _write_adapter(adapter)
        return

    EngineConfig.resolve(model, engine_options)  # reports errors before a download
    with (
        find_headers(model, engine_options) as (path, place, options),
        closing(open_checkpoint(path)) as checkpoint,
    ):
        description = describe(checkpoint, EngineConfig.resolve(model, options))
        description["path"] = place or description["path"]
    named = find(model)
    if as_json:
        own = {} if named is None else {"made_from": named.model, "made_with": named.options}
        write_json({**description, **own})
        return
    if named is not None:
        settings = {name.replace("_", " "): str(value) for name, value in named.options.items()}
        write_facts({"name": named.name, "made from": named.model, **settings})
    _write(description)


def _adapter(model: str) -> AdapterFacts | None:
    path = env.user_path(model)
    if not path.exists():
        return None
    from octavo.adapters.description import describe_adapter

    return describe_adapter(path)


def _write_adapter(adapter: AdapterFacts) -> None:
    ranks = ", ".join(f"{rank} ({count} modules)" for rank, count in adapter.ranks.items()) or "none"
    scaled = "" if adapter.alpha is None else f"; alpha {adapter.alpha:g}" + " (rsLoRA)" * adapter.use_rslora
    tokens = ", ".join(map(str, adapter.invocation_tokens))
    write_facts(
        {
            "path": adapter.path,
            "adapter": f"LoRA ({adapter.format})",
            "trained for": adapter.base or "not stated",
            "rank": ranks + scaled,
            "modules": ", ".join(f"{count} {name}" for name, count in adapter.modules.items()),
            "size": f"{adapter.num_parameters:,} parameters, {size(adapter.file_bytes)}",
            **({"activated by tokens": tokens} if tokens else {}),
            **({"not supported": adapter.problem} if adapter.problem else {}),
        }
    )


def describe(checkpoint: Checkpoint, engine: EngineConfig) -> dict[str, Any]:
    """Return facts by their names in the JSON output, with sizes in bytes and lengths in tokens.

    Raises OctavoError for options that do not fit the model.
    """
    from octavo.loader.generation_config import sampling_defaults

    held = _in_memory(checkpoint, engine)
    num_parameters = checkpoint.num_parameters
    config, defaults = checkpoint.config, sampling_defaults(checkpoint)
    files = {tensor.file for tensor in checkpoint.file.tensors.values()}
    num_weights: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for weight in checkpoint.stored:
        num_weights[weight.type_name] += math.prod(weight.shape)
        num_bytes[weight.type_name] += weight.nbytes
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "quantization": checkpoint.quantization,
        "architecture": checkpoint.architecture,
        **{name: checkpoint.file.metadata.get(f"general.{name}") for name in _ORIGIN},
        "file_bytes": sum(file.stat().st_size for file in files),
        "num_parameters": num_parameters,
        "num_active_parameters": num_parameters - (held.experts.inactive_parameters if held.experts else 0),
        "experts": asdict(held.experts) if held.experts else None,
        "bits_per_weight": checkpoint.bits_per_weight,
        "formats": {name: {"weights": num_weights[name], "bytes": n} for name, n in num_bytes.most_common()},
        "context_length": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "tokenizer": _tokenizer_kind(checkpoint),
        "has_chat_template": _has_chat_template(checkpoint),
        "default_sampling_params": defaults.values,
        "default_sampling_source": defaults.source,
        "kv_format": held.kv_format,
        "kv_bytes_per_token": held.kv_bytes_per_token,
        "in_memory": held.matrices,
        "bytes_read_per_token": sum(matrix["bytes_read_per_token"] for matrix in held.matrices),
        "images": _images(checkpoint, engine),
        "providers": held.providers,
        "warnings": held.warnings,
    }


def parameters(total: int, active: int, experts: ExpertCost | None) -> str:
    """Return a model's parameter count and, for a mixture of experts, the count used per token."""
    if experts is None:
        return f"{total:,}"
    return f"{total:,}, {active:,} used per token ({experts.num_active} of {experts.num_experts} experts)"


def experts_read(experts: ExpertCost) -> str:
    """Describe how many bytes of experts are read per token."""
    return f"{size(experts.bytes_read)} of {size(experts.num_bytes)}"


@dataclass(frozen=True, slots=True)
class _InMemory:
    """A model as the engine holds it in memory.

    matrices: facts about each format
    experts: facts about a mixture of experts
    kv_format, kv_bytes_per_token: format and size of the KV cache
    warnings: notes on unexpected sizes and costs, or the reason why the model cannot be loaded
    providers: the kernel library chosen for each kind of operation on a GPU
    """

    matrices: list[dict[str, Any]]
    experts: ExpertCost | None
    kv_format: str | None
    kv_bytes_per_token: int | None
    warnings: list[str]
    providers: list[str]


def _in_memory(checkpoint: Checkpoint, engine: EngineConfig) -> _InMemory:
    from octavo.backends import get_backend
    from octavo.engine.loading.model_graph import model_sizes
    from octavo.engine.loading.weight_notes import size_notes
    from octavo.graph.cost import expert_cost, weight_bytes_read
    from octavo.graph.ops.base import StepSizes
    from octavo.quantization.packed import DENSE_TYPES, group_of

    try:
        sizes = model_sizes(checkpoint, engine, checkpoint.config.max_position_embeddings)
    except OctavoError as error:
        if engine.quantization is not None:
            raise
        return _InMemory([], None, None, None, [f"the model cannot be loaded: {error}"], [])
    read = weight_bytes_read(sizes.graph, StepSizes(1, 1, 1, 1, sizes.kv_element_bytes), sizes.weights)
    quantized_products = get_backend("cpu").describe().products
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for parameter, matrix in sizes.matrices.items():
        entry = found.setdefault(
            (matrix.type_name, matrix.packed_as),
            {
                "format": matrix.type_name,
                "bits_per_weight": 0.0,
                "group": group_of(matrix.type_name),
                "kernel": matrix.packed_as,
                "products": "float32" if matrix.packed_as in DENSE_TYPES else quantized_products,
                "weights": 0,
                "bytes": 0,
                "bytes_read_per_token": 0,
            },
        )
        entry["weights"] += math.prod(parameter.shape)
        entry["bits_per_weight"] += 8 * matrix.stored_bytes  # divided below
        entry["bytes"] += matrix.packed_bytes
        entry["bytes_read_per_token"] += read[parameter]
    for entry in found.values():
        entry["bits_per_weight"] = round(entry["bits_per_weight"] / entry["weights"], 4)
    return _InMemory(
        matrices=sorted(found.values(), key=lambda entry: -entry["bytes"]),
        experts=expert_cost(sizes.graph, sizes.weights),
        kv_format=sizes.cache.format,
        kv_bytes_per_token=sizes.cache.token_bytes,
        warnings=size_notes(engine, sizes),
        providers=list(sizes.providers),
    )


def _tokenizer_kind(checkpoint: Checkpoint) -> str | None:
    if checkpoint.format == "gguf":
        names = [checkpoint.file.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre")]
        return ", ".join(name for name in names if isinstance(name, str)) or None
    files = ("tokenizer.json", "tiktoken.model")
    return next((file for file in files if (checkpoint.path.parent / file).is_file()), None)


def _has_chat_template(checkpoint: Checkpoint) -> bool:
    from octavo.tokenizer.template_files import read_directory_templates, read_gguf_templates

    if checkpoint.format == "gguf":
        return read_gguf_templates(checkpoint.file.metadata) is not None
    return read_directory_templates(checkpoint.path.parent) is not None


def _write(facts: dict[str, Any]) -> None:
    from octavo.graph.cost import ExpertCost

    experts = ExpertCost(**facts["experts"]) if facts["experts"] else None
    kind = (facts["format"], facts["quantization"])
    sampling = ", ".join(f"{name} {value:g}" for name, value in facts["default_sampling_params"].items())
    write_facts(
        {
            "path": facts["path"],
            "architecture": f"{facts['architecture']} ({', '.join(filter(None, kind))})",
            **{label: facts[name] or "not stated" for name, label in _ORIGIN.items()},
            "parameters": parameters(facts["num_parameters"], facts["num_active_parameters"], experts),
            **({"experts": f"a token reads {experts_read(experts)}"} if experts else {}),
            "size": f"{size(facts['file_bytes'])}, {facts['bits_per_weight']:.2f} bits per weight",
            "context": f"{facts['context_length']:,} tokens",
            "vocabulary": f"{facts['vocab_size']:,} tokens ({facts['tokenizer'] or 'no tokenizer'})",
            "layers": f"{facts['num_layers']}, hidden size {facts['hidden_size']}",
            "heads": f"{facts['num_heads']}, {facts['num_kv_heads']} for keys and values, {facts['head_dim']} wide",
            **({"KV cache": _cache(facts)} if facts["kv_format"] else {}),
            **({"images": _image_facts(facts["images"])} if facts["images"] else {}),
            "chat template": "yes" if facts["has_chat_template"] else "no",
            "sampling": f"{sampling or 'temperature 1'} ({facts['default_sampling_source']})",
        }
    )
    for line in facts["providers"]:
        write_note(f"\nkernels: {line}")
    for warning in facts["warnings"]:
        write_note(f"\nwarning: {warning}")
    _write_table(facts)


def _images(checkpoint: Checkpoint, engine: EngineConfig) -> dict[str, Any] | None:
    """Return facts about the vision encoder, or None."""
    from octavo.engine.loading.encoder import image_needs

    needs = image_needs(engine, checkpoint)
    return None if needs is None else asdict(needs)


def _image_facts(images: dict[str, Any]) -> str:
    return (
        f"yes, an encoder of {size(images['weight_bytes'])}; 1024 x 1024 pixels take {images['square_tokens']:,} tokens"
    )


def _cache(facts: dict[str, Any]) -> str:
    return f"{facts['kv_format']}, {size(facts['kv_bytes_per_token'])} per token"


def _write_table(facts: dict[str, Any]) -> None:
    """Write a table of the matrices as the engine holds them, or as stored in the file if it cannot load them."""
    write("\n")
    if not facts["in_memory"]:
        found = facts["formats"].items()
        rows = [{"format": name, "weights": f"{x['weights']:,}", "bytes": size(x["bytes"])} for name, x in found]
        write_table(rows, right=("weights", "bytes"))
        return
    rows = [
        {
            "format": entry["format"],
            "bits": f"{entry['bits_per_weight']:.2f}",
            "group": str(entry["group"]),
            "kernel": entry["kernel"],
            "products": entry["products"],
            "weights": f"{entry['weights']:,}",
            "in memory": size(entry["bytes"]),
            "read/token": size(entry["bytes_read_per_token"]),
        }
        for entry in facts["in_memory"]
    ]
    if len(rows) > 1:
        total = {"format": "all", "in memory": size(sum(entry["bytes"] for entry in facts["in_memory"]))}
        rows.append(dict.fromkeys(rows[0], "") | total | {"read/token": size(facts["bytes_read_per_token"])})
    write_table(rows, right=("bits", "weights", "in memory", "read/token"))
