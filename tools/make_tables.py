#!/usr/bin/env python3
"""Write the tables of docs/models.md and docs/quantization.md that follow from the code and its tests.

    python tools/make_tables.py [--check]

Run it with the Python environment of the tests. `--check` writes nothing and exits with 1 if a table is out of date. A
table is between the lines `<!-- table NAME, by tools/make_tables.py -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from octavo.backends.cpu.packing import packed_types  # noqa: E402
from octavo.config import EngineConfig  # noqa: E402
from octavo.engine.loading.model_graph import model_sizes  # noqa: E402
from octavo.loader.checkpoint import open_checkpoint  # noqa: E402
from octavo.models import architecture_name, known_architectures  # noqa: E402
from octavo.models._reading import ConfigReader  # noqa: E402
from octavo.quantization.at_load import METHODS, quantized_like  # noqa: E402
from octavo.quantization.ggml import BLOCK_SIZES  # noqa: E402
from octavo.quantization.packed import DENSE_TYPES, WeightInfo, group_of  # noqa: E402
from tests.models import test_other_layouts, test_wrapped  # noqa: E402
from tests.models.test_real_models import REAL_MODELS  # noqa: E402
from tests.quantization.test_checkpoints import tiny_model  # noqa: E402
from tests.support import quantized_checkpoints, tiny_encoder_decoders, tiny_encoders, tiny_models  # noqa: E402
from tests.support.tiny_vision import pairs  # noqa: E402
from tests.test_text_vectors import REAL_ENCODER  # noqa: E402

_SHAPE = (64, 4096)  # shape of the matrix whose bits are counted
_TABLE = re.compile(r"(<!-- table (\w+), by tools/make_tables\.py -->\n)(.*?)(<!-- end of table -->\n)", re.DOTALL)
_RWKV = "rwkv7"  # compared with its definition in numpy (tests/models/test_rwkv7.py)
Cells = Iterable[str]


def tested_architectures() -> Iterable[Cells]:
    """Return each architecture with its names and the configurations that are compared with transformers."""
    modules = known_architectures()
    yield "architecture", "`model_type` and GGUF names", "compared from safetensors", "and from GGUF", "real model"
    tested = {name: modules[tiny_models.config_values(name)["model_type"]] for name in tiny_models.CONFIGS}
    for name, make in tiny_encoders.CONFIGS.items():
        tested[name] = architecture_name(make().model_type, ConfigReader(make().to_dict()))
    tested |= {name: modules[make().model_type] for name, make in tiny_encoder_decoders.CONFIGS.items()}
    tested |= {name: modules[pair.config.model_type] for name, pair in pairs.PAIRS.items()}
    for name, make in test_wrapped.CONFIGS.items():
        if make().model_type in modules:
            tested[name] = modules[make().model_type]
    tested |= {name: modules[name] for name in (*test_other_layouts.LAYOUTS, _RWKV)}
    families = (tiny_models.GGUF_CONFIGS, tiny_encoders.GGUF_CONFIGS, tiny_encoder_decoders.GGUF_CONFIGS)
    with_gguf = {
        _RWKV,
        *test_other_layouts.GGUF_PARTS,
        *test_wrapped.GGUF_NAMES,
        *(name for names in families for name in names),
    }
    for module in sorted({*modules.values()}):
        found = [name for name, architecture in tested.items() if architecture == module]
        names = ", ".join(f"`{name}`" for name in sorted(modules) if modules[name] == module)
        models = [*REAL_MODELS.values(), REAL_ENCODER]
        real = ", ".join(label for architecture, label in models if architecture == module)
        gguf = ", ".join(name for name in found if name in with_gguf)
        yield f"`{module}`", names, ", ".join(found) or "no", gguf or "no", real or "no"


def checkpoint_layouts() -> Iterable[Cells]:
    """Return the tensors of `up_proj` in each layout that the tests write and compare."""
    yield "method", "layout tested", "weight type", "group", "kernel"
    with tempfile.TemporaryDirectory() as folder:
        for name, (config, packer) in quantized_checkpoints.CASES.items():
            quantized_checkpoints.write(tiny_model(), Path(folder), config, packer)
            checkpoint = open_checkpoint(Path(folder))
            sizes = model_sizes(checkpoint, EngineConfig(), 64)
            parameter = next(p for p in sizes.matrices if p.name.endswith("up_proj.weight"))
            info, kernel = checkpoint.weights.info(parameter.name), sizes.matrices[parameter].packed_as
            checkpoint.close()
            type_name, _, group = _described(info)
            yield f"`{config['quant_method']}`", name, type_name, group, _kernel(info.type_name, kernel)


def formats_at_load() -> Iterable[Cells]:
    yield "`--quantization`", "weight type", "bits per weight", "group", "kernel"
    for method in METHODS:
        like = quantized_like(_SHAPE, method)
        yield f"`{method}`", *_described(like), _kernel(like.type_name, packed_types(like.type_name, _SHAPE)[0])


def ggml_types() -> Iterable[Cells]:
    """Return the block types of GGUF files that store weights."""
    yield "type", "bits per weight", "block", "kernel"
    for name, (values, size) in BLOCK_SIZES.items():
        if values > 1 and name not in ("Q8_1", "Q8_K") and name not in DENSE_TYPES:
            kernel = _kernel(name, packed_types(name, _SHAPE)[0])
            yield f"`{name}`", f"{8 * size / values:.4g}", str(values), kernel


def _described(info: WeightInfo) -> tuple[str, str, str]:
    bits = 8 * info.nbytes / math.prod(info.shape)
    return f"`{info.type_name}`", f"{bits:.4g}", group_of(info.type_name)


def _kernel(type_name: str, packed_as: str) -> str:
    return "its own" if packed_as == type_name else f"`{packed_as}`"


TABLES: dict[str, Callable[[], Iterable[Cells]]] = {
    "architectures": tested_architectures,
    "checkpoints": checkpoint_layouts,
    "at_load": formats_at_load,
    "ggml": ggml_types,
}
PAGES = ("docs/models.md", "docs/quantization.md")


def text_of(name: str) -> str:
    """Return a table as Markdown."""
    header, *rows = ([*cells] for cells in TABLES[name]())
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rewritten(text: str) -> str:
    """Return the page with regenerated tables."""
    return _TABLE.sub(lambda match: f"{match[1]}{text_of(match[2])}{match[4]}", text)


def main() -> int:
    old = {ROOT / page: (ROOT / page).read_text() for page in PAGES}
    found = {match[2] for text in old.values() for match in _TABLE.finditer(text)}
    problems = [f"no page has the table {name}" for name in TABLES if name not in found]
    for path, text in old.items():
        new = rewritten(text)
        if new != text and "--check" in sys.argv:
            problems.append(f"{path.relative_to(ROOT)} is out of date: run python tools/make_tables.py")
        elif new != text:
            path.write_text(new)
    print("\n".join(problems) or "tables: ok")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
