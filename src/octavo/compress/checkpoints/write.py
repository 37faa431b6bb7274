"""Writes the folder of a quantized checkpoint: tensors, configuration, and the accompanying files."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

from octavo.backends.layers import Tokens
from octavo.compress.checkpoints.methods import QuantizationMethod
from octavo.compress.checkpoints.quantization_plan import QuantizationPlan
from octavo.compress.checkpoints.quantize_layers import LayerQuantizer, StepReport
from octavo.compress.checkpoints.workplace import WORK, Workplace
from octavo.compress.encode import Encoding, encode, plain
from octavo.compress.to_safetensors import config_of_folder
from octavo.errors import ModelWriteError
from octavo.loader.atomic_file import check_free_space, write_text
from octavo.loader.atomic_folder import AtomicFolder
from octavo.loader.checkpoint import QUANTIZATION_FILES
from octavo.loader.safetensors_writer import SafeTensor, write_model
from octavo.loader.tensor_files import TensorFiles
from octavo.loader.tensor_names import TensorName
from octavo.quantization.packed import DENSE_TYPES
from octavo.tokenizer.template_files import named_template_paths

VERSION = 5
"""Version of work that a later run may continue. Increase it when a formula changes."""

_COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_MAX_COPIED_BYTES = 1 << 28
_NOT_COPIED = ("config.json", *QUANTIZATION_FILES)


@dataclass(frozen=True, slots=True)
class Result:
    """The written checkpoint.

    nbytes: size of all tensors.
    unseen: matrices of experts that no token chose.
    resumed: number of layers that an earlier run had finished.
    """

    nbytes: int
    unseen: Sequence[str]
    resumed: int


def quantize_checkpoint(
    plan: QuantizationPlan,
    method: QuantizationMethod,
    texts: Sequence[Tokens],
    destination: Path,
    *,
    max_shard_bytes: int | None,
    report: StepReport,
) -> Result:
    """Write the checkpoint. It appears under its name once it is complete, and replaces anything that has this name.

    If an earlier run for the same result was killed, its work is continued.

    Raises ModelWriteError naming file or tensor. If at least one layer is finished by then, the unfinished work stays
    in `DESTINATION.partial`.
    """
    with AtomicFolder(destination) as folder:
        place = Workplace(folder, _identity(plan, method, texts))
        resumed = place.num_finished()
        quantizer = LayerQuantizer(plan, method, texts, place, report)
        try:
            check_free_space(folder.partial, 2 * _expected_bytes(plan, method))
            quantizer.run()
            folder.clear(kept=WORK)  # shards of a run that was killed here, perhaps of another size
            nbytes = _assemble(plan, place, folder.partial, max_shard_bytes)
            _copy_others(plan.checkpoint.path.parent, folder.partial)
            _write_config(plan, method, folder.partial)
            place.remove()
            folder.publish()
        except BaseException:
            if place.num_finished() == 0:
                folder.remove()
            raise
    return Result(nbytes, quantizer.unseen, resumed)


def _identity(plan: QuantizationPlan, method: QuantizationMethod, texts: Sequence[Tokens]) -> dict[str, object]:
    """Return everything that the result depends on."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.tobytes())
        digest.update(b".")
    paths = [*plan.checkpoint.file.paths, plan.checkpoint.path.parent / "config.json"]
    files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return {
        "version": VERSION,
        "files": files,
        "method": asdict(method),
        "matrices": [list(layer) for layer in plan.matrices],
        "texts": digest.hexdigest(),
    }


def _expected_bytes(plan: QuantizationPlan, method: QuantizationMethod) -> int:
    """Estimate the size of the tensors."""
    taken = {*plan.names}
    infos = plan.checkpoint.file.tensors.values()
    whole = sum(info.nbytes for info in infos if info.name not in taken)
    numbers = sum(shape[0] * shape[1] for shape in map(plan.shape, taken))
    return whole + numbers * method.form.bits // 8


def _assemble(plan: QuantizationPlan, place: Workplace, folder: Path, max_shard_bytes: int | None) -> int:
    """Write the changed and unchanged tensors in the order of the layers, and return their size in bytes."""
    source, taken = plan.checkpoint.file, {*plan.names}
    with ExitStack() as opened:
        files = [opened.enter_context(closing(place.open_layer(i))) for i in range(len(plan.layers))]
        pool = opened.enter_context(ThreadPoolExecutor(1, "copy"))
        found = {name: _copied(source, name, pool) for name in source.tensors if name not in taken}
        found |= {name: _made(file, name) for file in files for name in file.tensors}
        tensors = [found[name] for name in sorted(found, key=_order)]
        write_model(folder, tensors, max_shard_bytes)
    return sum(tensor.nbytes for tensor in tensors)


def _copied(file: TensorFiles, name: str, pool: ThreadPoolExecutor) -> SafeTensor:
    """Return a tensor of the source, unchanged, for writing.

    Producing the bytes of a float tensor raises ModelWriteError if a number is NaN or infinite.
    """
    info, weight = file.tensors[name], file.source(name)
    if info.type_name not in DENSE_TYPES or not info.shape:
        return _made(file, name)
    encoding = Encoding(name, info.shape, lambda: plain(weight.make()), info.type_name)
    return SafeTensor(name, info.type_name, info.shape, lambda: next(encode([encoding], pool, 1)))


def _made(file: TensorFiles, name: str) -> SafeTensor:
    info = file.tensors[name]
    return SafeTensor(name, info.type_name, info.shape, lambda: [file.array(name)])


def _order(name: str) -> tuple[int, str]:
    numbers = TensorName.parse(name).numbers
    return (numbers[0] if numbers else -1), name


def _copy_others(source: Path, folder: Path) -> None:
    """Copy the tokenizer, the chat template, the sampling defaults and other files next to the weights, but no code."""
    for path in [*sorted(source.iterdir()), *named_template_paths(source)]:
        is_index = path.name.endswith(".index.json")
        if path.suffix not in _COPIED or path.name in _NOT_COPIED or is_index or not path.is_file():
            continue
        copy = folder / path.relative_to(source)
        try:
            if (size := path.stat().st_size) > _MAX_COPIED_BYTES:
                raise ModelWriteError(f"{path}: {size:,} bytes, too many for a file next to a model; move it elsewhere")
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
        except OSError as error:
            raise ModelWriteError(f"{copy}: {error.strerror}") from error


def _write_config(plan: QuantizationPlan, method: QuantizationMethod, folder: Path) -> None:
    """Write config.json. This is done last, because without it the folder is not a model."""
    config = config_of_folder(plan.checkpoint)
    config["quantization_config"] = method.config(plan.skipped_modules)
    write_text(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
