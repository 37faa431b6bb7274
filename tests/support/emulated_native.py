"""A pytest plugin that runs the tests with another build of the native library.

cmake -S . -B build/emulated -G Ninja -DOCTAVO_EMULATE_AVX512=ON && ninja -C build/emulated
pytest -p tests.support.emulated_native --native-build build/emulated tests/backends/cpu
"""

import importlib.util
import sys
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native-build", required=True, help="the folder with the modules to load")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    build = Path(early_config.known_args_namespace.native_build)
    for module in ("_native", "_native_tests"):  # the second takes classes of the first
        name = f"octavo.backends.cpu.{module}"
        assert name not in sys.modules, "the installed library is loaded already"
        (path,) = build.glob(f"{module}.*so")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
