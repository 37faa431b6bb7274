"""The kernels of all instruction sets of this machine against the scalar ones, and added rows of the weight types."""

import shutil
import subprocess
from pathlib import Path

import pytest

from octavo.backends.cpu import _native

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("source", ["kernel_agreement.cpp", "kernel_agreement_steps.cpp"])
def test_the_program_still_compiles(source: str) -> None:
    """It is built for slow tests and other processors alone, and would fall behind the interfaces that it uses."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    path = Path(__file__).with_name(source)
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{ROOT / 'csrc'}", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_all_instruction_sets_agree_and_added_weight_types_run_on_the_compiled_kernels() -> None:
    folder = ROOT / "build" / "agreement"
    subprocess.run(["cmake", "-S", str(ROOT), "-B", str(folder), "-DOCTAVO_AGREEMENT=ON"], check=True)
    subprocess.run(["cmake", "--build", str(folder), "-j2"], check=True)
    command = [str(folder / "kernel_agreement"), _native.detected_isa()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "kernels agree" in result.stdout
