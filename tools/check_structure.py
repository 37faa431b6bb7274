#!/usr/bin/env python3
"""Check the structure of the repository: imports, function lengths, plain docstrings, a first sentence in every file.

Run it from anywhere: `python tools/check_structure.py`. It prints every violation and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.file_sentences import silent_files  # noqa: E402
from tools.python_facts import python_facts, walk  # noqa: E402

PACKAGE = ROOT / "src" / "octavo"
LONG_FILE_LINES = 500  # the report names longer files but does not fail
MAX_FUNCTION_LINES = {"src": 60, "csrc": 60, "tests": 70, "tools": 60, "benchmarks": 60}
MAX_PARAMETERS = 8

# Leaf modules: values that everything may import and that import only each other.
LEAVES = {
    "errors",
    "env",
    "batch",
    "sampling_params",
    "outputs",
    "config",
    "speculative_config",
    "image_layout",
    "prompt",
    "generation_request",
    "lora_request",
    "unknown_options",
    "platform",
    "__version__",
}
# room -> rooms it may import, besides itself and the leaves.
ALLOWED: dict[str, set[str]] = {
    "graph": set(),
    "media": {"confined_process"},
    "models": {"graph", "media"},
    "quantization": {"models"},
    "backends": {"graph", "quantization"},
    "loader": {"quantization", "models", "graph", "media"},
    "adapters": {"graph", "models", "quantization", "loader", "backends"},
    "tokenizer": {"loader", "confined_process"},
    "distributed": {"graph", "backends"},
    "engine": {
        "graph",
        "models",
        "media",
        "quantization",
        "backends",
        "loader",
        "tokenizer",
        "adapters",
        "distributed",
    },
    "core": {"engine", "loader", "tokenizer"},
    "confined_process": set(),
    "private_database": set(),
    "batches": {"private_database"},
    "server": {"batches", "private_database", "core", "engine", "loader", "tokenizer", "media", "adapters"},
    "llm": {"engine", "loader", "tokenizer", "media"},
    "async_llm": {"engine", "loader", "tokenizer", "llm"},
    "bench": {"engine", "llm", "async_llm", "loader", "backends", "graph", "distributed"},
    "compress": {"adapters", "quantization", "backends", "graph", "media", "models", "loader", "tokenizer", "engine"},
    "finetune": {
        "adapters",
        "compress",
        "engine",
        "loader",
        "tokenizer",
        "models",
        "graph",
        "backends",
        "quantization",
    },
    "quality": {"bench", "compress", "engine", "loader", "tokenizer", "backends"},
    "cli": {
        "adapters",
        "compress",
        "finetune",
        "quality",
        "engine",
        "llm",
        "async_llm",
        "bench",
        "batches",
        "ray",
        "core",
        "server",
        "loader",
        "tokenizer",
        "media",
        "models",
        "graph",
        "backends",
        "quantization",
    },
    "ray": {"llm", "server", "core", "engine", "batches"},
    "__init__": {"llm", "async_llm"},
    "__main__": {"cli"},
}
# The same inside the server. Modules outside rooms may be imported by everyone except these.
SERVER_ROOMS: dict[str, set[str]] = {
    "http": {"errors", "config"},
    "observability": set(),
    "tool_parsers": set(),
    "models": {"errors", "config", "tool_parsers", "observability"},
    "reasoning": {"tool_parsers"},
    "generation": {"errors", "admission", "server_state", "models", "tool_parsers", "reasoning"},
    "protocols": {
        "errors",
        "server_state",
        "models",
        "http",
        "generation",
        "reasoning",
        "event_log",
        "response_store",
        "config",
    },
}
# No protocol's folder imports another protocol's, except where a product accepts another product's requests.
PROTOCOLS = PACKAGE / "server" / "protocols"
PROTOCOL_BORROWS = {"llama_cpp": {"openai"}}
# Room of the engine -> rooms and single modules that it may import. All other modules connect the rooms.
ENGINE_ROOMS: dict[str, set[str]] = {
    "kv": {"request", "schedule"},
    "consumers": {"request"},
    "texts": {"consumers"},
    "encoding": {"metrics"},
    "loading": {"kv", "encoding", "limits"},
    "ranks": {"loading"},
}
ROOMS_INSIDE = {"server": SERVER_ROOMS, "engine": ENGINE_ROOMS}
PURE_PYTHON = {"engine/scheduler.py", "engine/kv/block_pool.py", "engine/kv/kv_cache.py", "engine/request.py"}
BACKEND_MODULES = ("backends.cpu", "backends.reference")  # other packages import only octavo.backends
TORCH_ROOMS = ("backends/torch/", "distributed/")


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def check_imports() -> Iterator[str]:
    for path in package_files():
        relative = path.relative_to(PACKAGE).as_posix()
        room = room_of(path)
        allowed = ALLOWED.get(room, set()) | LEAVES | {room}
        if room not in ALLOWED and room not in LEAVES:
            yield f"{relative}: room {room!r} is not in tools/check_structure.py"
        for line, module in python_facts(path.read_text()).imports:
            where = f"{relative}:{line}"
            if module.startswith("."):
                yield f"{where}: relative import; write octavo.{module.lstrip('.')}"
            top, _, rest = module.partition(".")
            if top == "octavo" and rest and rest.split(".")[0] not in allowed:
                yield f"{where}: {room} must not import {module}"
            if (inner := _inner_room(module, path)) is not None:
                yield f"{where}: {inner} must not import {module}"
            if top in {"torch", "triton"} and not relative.startswith(TORCH_ROOMS):
                yield f"{where}: {top} is imported outside {', '.join(TORCH_ROOMS)}"
            if rest.startswith(BACKEND_MODULES) and room != "backends":
                yield f"{where}: {module} is a backend; ask octavo.backends.get_backend"
            if rest.endswith("._native_tests"):
                yield f"{where}: {module} is no part of a wheel; only tests and benchmarks import it"
            if top in {"pickle", "marshal", "shelve", "dill", "cloudpickle", "transformers"}:
                yield f"{where}: {top} is never imported by the package"
            if relative in PURE_PYTHON and top in {"numpy", "torch"}:
                yield f"{where}: {relative} is pure Python"


def _inner_room(module: str, path: Path) -> str | None:
    """Return the part of the server or the engine that this file is in, if it must not import the module."""
    parts, names = path.relative_to(PACKAGE).parts, module.split(".")
    rooms = ROOMS_INSIDE.get(parts[0], {})
    if len(parts) < 2 or parts[1] not in rooms or names[:2] != ["octavo", parts[0]] or len(names) < 3:
        return None
    return None if names[2] in rooms[parts[1]] | {parts[1]} else f"{parts[0]}/{parts[1]}"


def check_cycles() -> Iterator[str]:
    """Check that no module of the engine imports itself through others, not even inside a function."""
    files = {
        "octavo." + path.relative_to(PACKAGE).as_posix().removesuffix(".py").replace("/", "."): path
        for path in package_files()
        if room_of(path) == "engine"
    }
    needs = {name: python_facts(path.read_text()).runtime_imports & files.keys() for name, path in files.items()}
    while leaves := [name for name, wanted in needs.items() if not wanted & needs.keys()]:
        for name in leaves:
            del needs[name]
    for name in sorted(needs):
        # The modules that remain are in a cycle or import one that is.
        if name in (found := _reached(needs, name)):
            others = ", ".join(sorted(other for other in found - {name} if name in _reached(needs, other)))
            yield f"{files[name].relative_to(PACKAGE).as_posix()}: {name} imports itself through {others}"


def _reached(needs: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for name in needs.get(waiting.pop(), set()) - found:
            found.add(name)
            waiting.append(name)
    return found


# A file without these words is not parsed again.
_WATCHED = re.compile(r"\b(environ|getenv|putenv|print|eval|exec)\b")


def check_calls() -> Iterator[str]:
    for path in package_files():
        relative, text = path.relative_to(PACKAGE).as_posix(), path.read_text()
        if not _WATCHED.search(text):
            continue
        for node in walk(ast.parse(text)):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in {"environ", "getenv", "putenv"}
                and relative != "env.py"
            ):
                yield f"{relative}:{node.lineno}: only env.py reads the environment"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id == "print":
                    yield f"{relative}:{node.lineno}: print in the library"
                if node.func.id in {"eval", "exec"}:
                    yield f"{relative}:{node.lineno}: {node.func.id} is never called"


# Only octavo/platform contains differences between systems.
SYSTEM_MODULES = {"fcntl", "resource", "ctypes", "msvcrt", "termios", "pwd", "_winapi"}
SYSTEM_NAMES = re.compile(
    r"\bsys\.platform\b|\bos\.name\b|[\"'](/proc|/sys|/dev/shm)\b|\bos\.(memfd_|eventfd|sched_|pread|pwrite|posix_|fork\b)"
)


def check_systems() -> Iterator[str]:
    for path in package_files():
        relative, text = path.relative_to(PACKAGE).as_posix(), path.read_text()
        if room_of(path) == "platform":
            continue
        for line, module in python_facts(text).imports:
            if module in SYSTEM_MODULES:
                yield f"{relative}:{line}: {module} is of some systems; octavo.platform has what differs"
        for found in SYSTEM_NAMES.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            yield f"{relative}:{line}: {found.group()} is of some systems; octavo.platform has what differs"


def python_files() -> list[Path]:
    roots = [PACKAGE, ROOT / "tests", ROOT / "tools", ROOT / "benchmarks"]
    return sorted(p for root in roots for p in root.rglob("*.py"))


def check_python_budgets() -> Iterator[str]:
    for path in python_files():
        relative = path.relative_to(ROOT).as_posix()
        budget = MAX_FUNCTION_LINES[path.relative_to(ROOT).parts[0]]
        for found in python_facts(path.read_text()).definitions:
            if found.kind is not ast.FunctionDef:
                continue
            where = f"{relative}:{found.line}: {found.name}"
            if found.num_lines > budget:
                yield f"{where} has {found.num_lines} lines, the budget is {budget}"
            # A command's parameters are its options; a kernel's are pointers, strides and constants.
            is_free = found.is_kernel or relative.startswith("src/octavo/cli/")
            if found.num_parameters > MAX_PARAMETERS and not is_free:
                yield f"{where} has {found.num_parameters} parameters, the budget is {MAX_PARAMETERS}"


def cpp_functions(text: str) -> Iterator[tuple[int, int]]:
    """Yield (first line, length) of every brace block that opens after a `)` outside of any other function."""
    code = re.sub(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', lambda m: " " * len(m.group()), text)
    code = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group()), code, flags=re.S)
    depth, inside = 0, None
    for i, c in enumerate(code):
        if c == "{":
            before = code[:i].rstrip()
            if inside is None and re.search(r"\)\s*(const|noexcept|override|->[^;{}]*)*\s*$", before):
                inside = (depth, code.count("\n", 0, i) + 1)
            depth += 1
        elif c == "}":
            depth -= 1
            if inside is not None and depth == inside[0]:
                yield inside[1], code.count("\n", 0, i) + 2 - inside[1]
                inside = None


def check_cpp_budgets() -> Iterator[str]:
    for path in sorted([*ROOT.glob("csrc/**/*.cpp"), *ROOT.glob("csrc/**/*.h")]):
        relative = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        for line, length in cpp_functions(text):
            if length > (budget := MAX_FUNCTION_LINES["csrc"]):
                yield f"{relative}:{line}: a function of {length} lines, the budget is {budget}"


def check_sentences() -> Iterator[str]:
    """Check that every source file begins with a docstring or comment that describes the file."""
    for path in silent_files(ROOT):
        yield f"{path.relative_to(ROOT).as_posix()}: begin with a sentence that says what the file holds"


# A docstring is a noun phrase ("Cached tokens of a prompt") or an imperative, not a clause that begins with "what".
_RIDDLE = re.compile(r"(what|who|whom|whose|whether|how|which|why)\b", re.IGNORECASE)


def check_prose() -> Iterator[str]:
    for path in python_files():
        relative = path.relative_to(ROOT).as_posix()
        for definition in python_facts(path.read_text()).definitions:
            if found := _RIDDLE.match(definition.docstring):
                where = f"{relative}:{definition.line}"
                yield f"{where}: the docstring opens with {found.group()!r}; say what the thing is"


# A test waits for a condition (tests/support/waiting.py). A line that needs time itself gives the reason.
_TIMED_WAIT = re.compile(r"\b(time|asyncio)\.sleep\((?!0[,)])|\bwait_for_timeout\(|\bnot \w+\.wait\(|\bTimer\(")
_REASON = re.compile(r"# timed: \w")


def check_timed_waits() -> Iterator[str]:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if (found := _TIMED_WAIT.search(line)) and not _REASON.search(line):
                where = f"{path.relative_to(ROOT).as_posix()}:{number}"
                yield f"{where}: {found.group()} waits for a time; wait_until a condition, or add `# timed: REASON`"


# Request and response models have the names that their protocol's documentation uses.
PROTOCOL_ROOMS = ("server/protocols/", "server/endpoints/")
# Each model or format file has a class of this name; the loader looks for it.
NAMES_OF_AN_INTERFACE = {"models/": "Config", "quantization/checkpoints/": "Format"}


def defined_names(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every class and type alias defined in the module itself, except private names."""
    facts = python_facts(text)
    for found in facts.definitions:
        if found.kind is ast.ClassDef and not found.name.startswith("_"):
            yield found.line, found.name
    for line, name in facts.variables:
        if re.fullmatch(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*", name):
            yield line, name


def check_names() -> Iterator[str]:
    """Check that no two classes or aliases share a name."""
    places: dict[str, str] = {}
    for path in package_files():
        relative = path.relative_to(PACKAGE).as_posix()
        if relative.startswith(PROTOCOL_ROOMS):
            continue
        for line, name in defined_names(path.read_text()):
            if any(relative.startswith(room) and name == shared for room, shared in NAMES_OF_AN_INTERFACE.items()):
                continue
            where = f"{relative}:{line}"
            if name in places:
                yield f"{where}: {name} is the name of something else in {places[name]}; one of them needs another"
            places.setdefault(name, where)


# CMakeLists.txt compiles only linear.cpp and ceilings.cpp for these levels, and attention.cpp for amx.
_PRODUCT_LEVELS = re.compile(
    r"OCTAVO_ISA_(amx|avx512vnni|dotprod|i8mm)|__AVX512VNNI__|__ARM_FEATURE_(DOTPROD|MATMUL_INT8)"
)
_PRODUCT_KERNELS = re.compile(r"(linear|ceilings|amx_tiles)")


def check_product_levels() -> Iterator[str]:
    for path in sorted((ROOT / "csrc" / "kernels").iterdir()):
        if _PRODUCT_KERNELS.match(path.name):
            continue
        text = path.read_text()
        if path.name.startswith("attention"):
            text = text.replace("OCTAVO_ISA_amx", "")
        if found := _PRODUCT_LEVELS.search(text):
            yield f"csrc/kernels/{path.name}: {found.group()}, but only products are compiled for that level"


def long_files() -> Iterator[str]:
    """Yield a question about each long file.

    This is not a check: some ideas need the space, and a limit would only make lines denser.
    """
    for path in [*python_files(), *sorted([*ROOT.glob("csrc/**/*.cpp"), *ROOT.glob("csrc/**/*.h")])]:
        if (lines := path.read_text().count("\n")) > LONG_FILE_LINES:
            yield f"{path.relative_to(ROOT).as_posix()} has {lines} lines: does it hold more than one idea?"


CHECKS = {
    "imports": check_imports,
    "cycles": check_cycles,
    "calls": check_calls,
    "systems": check_systems,
    "names": check_names,
    "python budgets": check_python_budgets,
    "C++ budgets": check_cpp_budgets,
    "product levels": check_product_levels,
    "sentences": check_sentences,
    "prose": check_prose,
    "timed waits": check_timed_waits,
}


def main() -> int:
    failures = 0
    for name, check in CHECKS.items():
        problems = list(check())
        failures += len(problems)
        print(f"{name}: {'ok' if not problems else f'{len(problems)} violations'}")
        for problem in problems:
            print(f"  {problem}")
    for question in long_files():
        print(f"long file: {question}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
