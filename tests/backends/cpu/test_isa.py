"""Instruction sets: what is found, which kernels are taken, that none leaks, and the emulated wide ones."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.backends.cpu import _native, _native_tests
from tests.support.scripts import load_script

ROOT = Path(__file__).parents[3]
WIDE = """
#include <immintrin.h>
static __attribute__((noinline, used)) void f(float* x) { _mm256_storeu_ps(x, _mm256_setzero_ps()); }
"""


def load_checker():
    return load_script(ROOT / "tools" / "check_isa.py")


def compile_object(folder: Path, level: str, source: str, *flags: str) -> None:
    target = folder / f"kernels_{level}.dir"
    target.mkdir(parents=True)
    (target / "x.cpp").write_text(source)
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler, "the native library needs a C++ compiler, and so does this test"
    subprocess.run([compiler, "-O2", *flags, "-c", str(target / "x.cpp"), "-o", str(target / "x.cpp.o")], check=True)


@pytest.fixture
def objects(tmp_path):
    """A folder with a blameless object of base and of scalar."""
    compile_object(tmp_path, "scalar", "static int x __attribute__((used)) = 1;")
    (tmp_path / "_native.dir").mkdir()
    shutil.copy(tmp_path / "kernels_scalar.dir" / "x.cpp.o", tmp_path / "_native.dir")
    return tmp_path


def test_what_is_detected_is_what_the_system_reports():
    flags = Path("/proc/cpuinfo").read_text().split()
    known = _native.known_isas()
    assert known == ["scalar", "avx2", "avx512", "avx512vnni", "amx"]
    emulated = "avx512f" not in flags and _native.detected_isa() == "amx"
    if not emulated and "flags" in flags:
        assert (_native.detected_isa() != "scalar") == all(f in flags for f in ("avx2", "fma", "f16c", "bmi2"))
        assert (known.index(_native.detected_isa()) >= 2) == ("avx512bw" in flags)


def test_every_kernel_has_a_scalar_variant_and_the_best_one_is_taken():
    known = _native.known_isas()
    assert {"rms_norm", "embedding", "fused_linear", "fused_attention", "sample"} <= set(_native.kernel_names())
    # Two loops measure instructions that only one level has.
    for kernel in set(_native.kernel_names()) - {"ceiling_bf16", "ceiling_tile_read"}:
        assert _native_tests.kernel_isa(kernel, "scalar") == "scalar"
        taken = [known.index(_native_tests.kernel_isa(kernel, level) or "") for level in known]
        assert taken == sorted(taken)
        assert all(t <= i for i, t in enumerate(taken))
    assert _native_tests.kernel_isa("rms_norm", "avx512") == "avx512"
    assert _native_tests.kernel_isa("no_such_operation", "amx") is None


def test_checker_accepts_objects_that_keep_their_level(objects, capsys):
    compile_object(objects, "avx2", WIDE, "-mavx2")
    assert load_checker().main([str(objects)]) == 0
    assert "3 objects hold no instruction above their level" in capsys.readouterr().out


def test_checker_finds_wide_registers(tmp_path, objects, capsys):
    (objects / "kernels_scalar.dir" / "x.cpp.o").unlink()
    compile_object(tmp_path / "more", "scalar", WIDE, "-mavx2")
    assert load_checker().main([str(tmp_path)]) == 1
    assert "an instruction of avx2 in an object of scalar" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["octavo_base", "_native", "_native_tests", "_json_text", "kernel_agreement"])
def test_checker_finds_wide_instructions_in_objects_for_any_machine(target, objects, capsys):
    compile_object(objects, "avx2", WIDE, "-mavx2")
    (objects / f"{target}.dir").mkdir(exist_ok=True)
    shutil.move(objects / "kernels_avx2.dir" / "x.cpp.o", objects / f"{target}.dir" / "x.cpp.o")
    assert load_checker().main([str(objects)]) == 1
    assert "an instruction of avx2 in an object of base" in capsys.readouterr().out


def test_checker_finds_functions_that_the_linker_could_merge(objects, capsys):
    compile_object(objects, "avx2", "inline int f(int x) { return x; } int (*p)(int) = f;", "-mavx2")
    assert load_checker().main([str(objects)]) == 1
    assert "which the linker may merge" in capsys.readouterr().out


def test_checker_wants_objects(tmp_path):
    assert load_checker().main([str(tmp_path)]) == 2


@pytest.mark.slow
def test_wide_kernels_give_the_same_bits_under_emulation():
    """Builds the library with AVX-512, VNNI and AMX over SIMDe (libsimde-dev) and runs this folder's tests on it."""
    build = ROOT / "build" / "emulated"
    options = ["-DOCTAVO_EMULATE_AVX512=ON", "-DOCTAVO_INPLACE=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run(["cmake", "-S", str(ROOT), "-B", str(build), *options], check=True)
    subprocess.run(["cmake", "--build", str(build), "-j2"], check=True)
    plugin = ["-p", "tests.support.emulated_native", "--native-build", str(build)]
    subprocess.run([sys.executable, "-m", "pytest", *plugin, "tests/backends/cpu"], cwd=ROOT, check=True)
