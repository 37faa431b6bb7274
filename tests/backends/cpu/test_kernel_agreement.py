"""The kernels of all instruction sets of this machine against the scalar ones, and added rows of the weight types."""

import subprocess
from pathlib import Path

import pytest

from octavo.backends.cpu import _native

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_all_instruction_sets_agree_and_added_weight_types_run_on_the_compiled_kernels() -> None:
    folder = ROOT / "build" / "agreement"
    subprocess.run(["cmake", "-S", str(ROOT), "-B", str(folder), "-DOCTAVO_AGREEMENT=ON"], check=True)
    subprocess.run(["cmake", "--build", str(folder), "-j2"], check=True)
    command = [str(folder / "kernel_agreement"), _native.detected_isa()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "kernels agree" in result.stdout
