"""Every check of tools/check_structure.py passes, and fails on a violation."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.scripts import load_script
from tools.python_facts import python_facts, walk

ROOT = Path(__file__).resolve().parent.parent
structure = load_script(ROOT / "tools" / "check_structure.py")


@pytest.mark.parametrize("name", list(structure.CHECKS))
def test_structure(name: str) -> None:
    assert list(structure.CHECKS[name]()) == []


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository to break."""
    package = tmp_path / "src" / "octavo"
    for folder in (
        package / "graph",
        package / "engine" / "loading",
        package / "engine" / "ranks",
        package / "server" / "http",
        tmp_path / "csrc",
        tmp_path / "docs",
        tmp_path / "tests",
    ):
        folder.mkdir(parents=True)
    monkeypatch.setattr(structure, "ROOT", tmp_path)
    monkeypatch.setattr(structure, "PACKAGE", package)
    return tmp_path


@pytest.mark.parametrize(
    ("check", "path", "text", "message"),
    [
        ("imports", "src/octavo/graph/a.py", "import octavo.engine.engine\n", "must not import octavo.engine"),
        (
            "imports",
            "src/octavo/server/http/a.py",
            "import octavo.server.server_state\n",
            "must not import octavo.server",
        ),
        (
            "imports",
            "src/octavo/engine/loading/a.py",
            "def f():\n    import octavo.engine.ranks.b\n",
            "engine/loading must not import octavo.engine.ranks.b",
        ),
        ("cycles", "src/octavo/engine/a.py", "import octavo.engine.a\n", "octavo.engine.a imports itself"),
        ("imports", "src/octavo/graph/a.py", "def f():\n    import torch\n", "torch is imported outside"),
        ("imports", "src/octavo/graph/a.py", "from . import b\n", "relative import"),
        ("imports", "src/octavo/graph/a.py", "import pickle\n", "pickle is never imported"),
        ("imports", "src/octavo/engine/a.py", "import octavo.backends.cpu.weights\n", "octavo.backends.cpu.weights is"),
        ("imports", "src/octavo/engine/a.py", "from octavo.backends import reference\n", "reference is a backend"),
        ("imports", "src/octavo/engine/scheduler.py", "import numpy as np\n", "pure Python"),
        ("calls", "src/octavo/graph/a.py", "import os\nx = os.environ\n", "only env.py"),
        ("calls", "src/octavo/graph/a.py", "print(1)\n", "print in the library"),
        ("calls", "src/octavo/graph/a.py", "eval('1')\n", "eval is never called"),
        ("names", "src/octavo/graph/a.py", "class A: ...\nclass B:\n    class A: ...\n", "A is the name of something"),
        ("names", "src/octavo/graph/a.py", "class Sizes: ...\nSizes = list[int]\n", "Sizes is the name of something"),
        ("python budgets", "src/octavo/graph/a.py", "def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
        ("python budgets", "src/octavo/graph/a.py", "def f(a, b, c, d, e, f, g, h, i): ...\n", "9 parameters"),
        ("C++ budgets", "csrc/a.cpp", "int f(int a) {\n" + "a++;\n" * 60 + "}\n", "a function of 62 lines"),
        ("sentences", "csrc/a.cpp", "int x;\n", "csrc/a.cpp: begin with a sentence"),
        ("prose", "src/octavo/a.py", '"""What a step costs."""\n', "opens with 'What'"),
        ("timed waits", "tests/test_a.py", "time.sleep(1)  # a moment\n", "test_a.py:1: time.sleep("),  # timed: a text
        ("timed waits", "tests/test_a.py", "assert not done.wait(1)\n", "not done.wait( waits"),  # timed: a text
    ],
)
def test_violations_are_found(repository: Path, check: str, path: str, text: str, message: str) -> None:
    (repository / path).write_text(text)
    assert any(message in problem for problem in structure.CHECKS[check]())


def test_a_timed_wait_with_a_reason_is_none_of_them(repository: Path) -> None:
    (repository / "tests" / "test_a.py").write_text("time.sleep(1)  # timed: a slow disk\nawait asyncio.sleep(0)\n")
    assert [*structure.check_timed_waits()] == []


def test_cycles_inside_functions_are_found_and_those_of_types_are_none(repository: Path) -> None:
    rooms = repository / "src" / "octavo" / "engine"
    (rooms / "load.py").write_text("from octavo.engine.ranks import a\n")
    (rooms / "ranks" / "a.py").write_text("def f():\n    from octavo.engine.ranks.b import g\n")
    (rooms / "ranks" / "b.py").write_text("if TYPE_CHECKING:\n    from octavo.engine.ranks.a import f\n")
    assert [*structure.check_cycles()] == []
    (rooms / "ranks" / "b.py").write_text("def g():\n    from octavo.engine.ranks.a import f\n")
    assert [*structure.check_cycles()] == [
        "engine/ranks/a.py: octavo.engine.ranks.a imports itself through octavo.engine.ranks.b",
        "engine/ranks/b.py: octavo.engine.ranks.b imports itself through octavo.engine.ranks.a",
    ]


def test_the_walk_visits_the_nodes_of_the_standard_library_in_its_order() -> None:
    plain = (ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop)
    for path in (Path(__file__), ROOT / "tools" / "check_structure.py", ROOT / "src" / "octavo" / "llm.py"):
        tree = ast.parse(path.read_text())
        assert [*walk(tree)] == [node for node in ast.walk(tree) if not isinstance(node, plain)]


def test_definitions_and_imports_in_every_kind_of_block_are_found() -> None:
    text = (
        "try:\n    import a\nexcept A:\n    def f():\n        import b\nelse:\n    class C: ...\n"
        "match x:\n    case 1:\n        async def g(): ...\nif TYPE_CHECKING:\n    from c import d\n"
    )
    facts = python_facts(text)
    assert [definition.name for definition in facts.definitions] == ["", "C", "f", "g"]
    assert sorted(facts.imports) == [(2, "a"), (5, "b"), (12, "c")]
    assert facts.runtime_imports == {"a", "b"}


@pytest.mark.parametrize(("path", "line"), [("src/octavo/graph/a.py", "x = 1\n"), ("csrc/a.cpp", "int x;\n")])
def test_long_files_are_questions(repository: Path, path: str, line: str) -> None:
    (repository / path).write_text(line * 501)
    assert [*structure.long_files()] == [f"{path} has 501 lines: does it hold more than one idea?"]
    assert not [problem for name in ("python budgets", "C++ budgets") for problem in structure.CHECKS[name]()]


def test_the_classes_of_parameters_are_rarely_told_apart() -> None:
    """Members that all of them have say what is wanted of a request; a test of the class is for what only one has."""
    pattern = re.compile(r"isinstance\([^)]*\b(SamplingParams|BeamSearchParams)\b")
    found = [path.name for path in structure.package_files() if pattern.search(path.read_text())]
    assert sum(len(pattern.findall(path.read_text())) for path in structure.package_files()) <= 4, found
