"""A pytest plugin that runs the tests on another build of the native library.

cmake -S . -B build/emulated -G Ninja -DOCTAVO_EMULATE_AVX512=ON && ninja -C build/emulated
pytest -p tests.support.emulated_native --native-module build/emulated/_native*.so tests/backends/cpu
"""

import importlib.util
import sys

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native-module", required=True, help="the _native module to load")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    name = "octavo.backends.cpu._native"
    assert name not in sys.modules, "the installed library is loaded already"
    spec = importlib.util.spec_from_file_location(name, early_config.known_args_namespace.native_module)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
