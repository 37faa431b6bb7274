#!/usr/bin/env python3
"""Manage the second stage of `.ci/run`: parts that few changes touch, and the contents with which they last passed.

    python tools/ci_parts.py due [--all]        list the parts that have to run, one per line
    python tools/ci_parts.py tests PART...      list the paths of their tests
    python tools/ci_parts.py extras PART...     list the extras that they need
    python tools/ci_parts.py elsewhere          print the pytest options with which the gate skips all parts
    python tools/ci_parts.py passed PART...     record that they passed in their current state

A part is due if the digest of its files and requirements differs from the one in `.ci/passed.json`. That record is a
file in the repository and does not depend on commits, so a clone without history has it too. Whoever changes a part
commits the record that the run wrote. Forgetting to commit it costs another run of the part but never skips a test.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]
PASSED = Path(".ci/passed.json")


@dataclass(frozen=True)
class Part:
    """A part of the tests.

    tests: paths to run with pytest, if it uses pytest.
    files: the files under test, as git patterns.
    extras: requirements in addition to the environment of the gate.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()


PARTS = {
    "native": Part((".ci/native", "csrc", "CMakeLists.txt", "cmake", "tests/backends/cpu/kernel_agreement*")),
    "systems": Part(
        (
            ".ci/systems",
            "csrc",
            "CMakeLists.txt",
            "cmake",
            "tests/platform/*.cpp",
            "tests/backends/cpu/kernel_agreement*",
        ),
        extras=("systems",),
    ),
    "triton": Part(
        (
            "src/octavo/backends/torch/kernels",
            "tests/support/kernel_cases.py",
            "tests/support/cross_compile.py",
            "benchmarks/gpu*.py",
        ),
        ("tests/backends/torch/kernels", "tests/benchmarks/test_gpu.py"),
    ),
    "pages": Part(
        ("src/octavo/server/web", "tests/support/browser.py", "tests/support/chat_page.py"),
        ("tests/server/test_web_*.py",),
    ),
    "clients": Part(("src/octavo/server/protocols", "src/octavo/server/http"), ("tests/server/clients",)),
    "docs": Part(
        (
            "docs",
            "mkdocs.yml",
            "tools/docs_site.py",
            "tools/file_sentences.py",
            "tools/python_facts.py",
            "src/octavo/cli",
            "src/octavo/config.py",
            "src/octavo/server/config.py",
            "src/octavo/server/endpoints",
            "src/octavo/server/protocols",
            "src/octavo/llm.py",
            "src/octavo/async_llm.py",
        ),
        ("tests/docs_site",),
        ("docs",),
    ),
    "judges": Part(
        (
            "src/octavo/compress",
            "src/octavo/quantization",
            "src/octavo/loader",
            "src/octavo/quality",
            "src/octavo/adapters",
            "src/octavo/graph/adapters.py",
            "src/octavo/graph/ops/low_rank.py",
            "src/octavo/graph/ops/adapted.py",
            "src/octavo/graph/ops/adapted_moe.py",
            "src/octavo/backends/cpu/adapters.py",
            "src/octavo/backends/torch/adapters.py",
            "csrc/kernels/adapter_rows.h",
            "csrc/kernels/linear_adapted.h",
            "examples/peft_json_habit.py",
            "src/octavo/finetune",
            "src/octavo/models/towers",
            "src/octavo/media/families",
        ),
        (
            "tests/adapters/test_peft_judge.py",
            "tests/adapters/test_experts.py",
            "tests/adapters/test_llama_cpp.py",
            "tests/examples/test_peft_json_habit.py",
            "tests/compress/test_merge.py",
            "tests/engine/test_mtmd_judge.py",
            "tests/finetune",
            "tests/compress/test_checkpoint_types.py",
            "tests/compress/test_checkpoint_memory.py",
            "tests/quantization/test_checkpoint_libraries.py",
            "tests/quality/test_tasks.py",
            "tests/quality/test_comparison.py",
        ),
        ("judges", "eval", "report"),
    ),
    "further_clients": Part(
        ("src/octavo/server/protocols", "src/octavo/server/http"), ("tests/server/further_clients",), ("clients",)
    ),
}


def digest(part: Part) -> str:
    """Return a digest of the part's requirements and files, including files that git does not track yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *part.files, *part.tests],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    names = sorted({name for name in listed.split("\0") if name and (ROOT / name).is_file()})
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    total = hashlib.sha256(json.dumps([project["optional-dependencies"][extra] for extra in part.extras]).encode())
    for name in names:
        total.update(f"{name}\0{hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}\0".encode())
    return total.hexdigest()[:16]


def read_passed() -> dict[str, str]:
    path = ROOT / PASSED
    return json.loads(path.read_text()) if path.exists() else {}


def due(everything: bool) -> list[str]:
    passed = read_passed()
    return [name for name, part in PARTS.items() if everything or passed.get(name) != digest(part)]


def record(names: list[str]) -> None:
    passed = {name: value for name, value in read_passed().items() if name in PARTS}
    passed.update({name: digest(PARTS[name]) for name in names})
    (ROOT / PASSED).write_text(json.dumps(passed, indent=2, sort_keys=True) + "\n")


def test_paths(names: list[str]) -> list[str]:
    patterns = [pattern for name in names for pattern in PARTS[name].tests]
    return [str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("due").add_argument("--all", action="store_true")
    commands.add_parser("elsewhere")
    for command in ("tests", "extras", "passed"):
        commands.add_parser(command).add_argument("part", nargs="+", choices=PARTS)
    chosen = parser.parse_args(arguments)
    if chosen.command == "due":
        lines = due(chosen.all)
    elif chosen.command == "tests":
        lines = test_paths(chosen.part)
    elif chosen.command == "extras":
        lines = [extra for name in chosen.part for extra in PARTS[name].extras]
    elif chosen.command == "elsewhere":
        lines = [f"--ignore={path}" for path in test_paths(list(PARTS))]
    else:
        record(chosen.part)
        lines = []
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
