"""The kernels for 64-bit ARM: cross-compiled, and compared with the scalar ones under an emulator."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOOLS = {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user", "cmake": "cmake"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def build() -> Path:
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (Debian's package {package})")
    folder = ROOT / "build" / "aarch64"
    toolchain = ROOT / "cmake" / "aarch64.cmake"
    options = [f"-DCMAKE_TOOLCHAIN_FILE={toolchain}", "-DOCTAVO_AGREEMENT=ON"]
    subprocess.run(["cmake", "-S", str(ROOT), "-B", str(folder), *options], check=True)
    subprocess.run(["cmake", "--build", str(folder), "-j2"], check=True)
    return folder


@pytest.mark.parametrize(("processor", "level"), [("cortex-a57", "neon"), ("neoverse-n1", "dotprod"), ("max", "i8mm")])
def test_kernels_agree_with_the_scalar_ones(build: Path, processor: str, level: str) -> None:
    command = ["qemu-aarch64", "-cpu", processor, str(build / "kernel_agreement"), level]
    result = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"instruction set: {level}\n" in result.stdout
    assert "kernels agree" in result.stdout


def test_objects_hold_no_instruction_above_their_level(build: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "check_isa.py"), str(build)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
