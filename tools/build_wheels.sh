#!/usr/bin/env bash
# Builds Octavo's wheels for Linux: one for Python 3.12 and newer (stable ABI), one each for 3.10 and 3.11.
#
#   tools/build_wheels.sh [--arch x86_64|aarch64] [--python '3.10 3.11 3.12'] [--out dist] [--local] [--dry-run]
#
# With docker or podman, cibuildwheel builds and tries them in manylinux_2_28 containers (pyproject.toml); another
# processor than this machine's runs under QEMU, which binfmt must know. Without a container engine, or with --local,
# this system's compiler builds them, and auditwheel gives each the oldest manylinux tag that its glibc symbols allow;
# for aarch64 on x86_64 that is Debian's cross compiler (g++-aarch64-linux-gnu), and the wheels are not tried.
set -euo pipefail
cd "$(dirname "$0")/.."

arch=$(uname -m) pythons='3.10 3.11 3.12' out=dist local=false dry_run=false
fail() {
  echo "build_wheels.sh: $1" >&2
  exit 2
}
while [ $# -gt 0 ]; do
  case $1 in
    --arch | --python | --out)
      [ $# -gt 1 ] || fail "$1 needs a value"
      case $1 in --arch) arch=$2 ;; --python) pythons=$2 ;; --out) out=$2 ;; esac
      shift ;;
    --local) local=true ;;
    --dry-run) dry_run=true ;;
    -h | --help)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
      exit ;;
    *) fail "unknown argument $1; --help lists them" ;;
  esac
  shift
done
case $arch in x86_64 | aarch64) ;; *) fail "--arch $arch: x86_64 or aarch64" ;; esac
for python in $pythons; do
  case $python in 3.10 | 3.11 | 3.12) ;; *) fail "--python $python: 3.10, 3.11 or 3.12 (for 3.12 and newer)" ;; esac
done

run() {
  echo "+ $*"
  $dry_run || "$@"
}
engine=
for candidate in docker podman; do
  if ! $local && "$candidate" info >/dev/null 2>&1; then engine=${engine:-$candidate}; fi
done

if [ -n "$engine" ]; then
  names=$(for python in $pythons; do printf 'cp%s-* ' "${python/./}"; done)
  run env CIBW_CONTAINER_ENGINE="$engine" CIBW_BUILD="${names% }" \
    python3 -m cibuildwheel --platform linux --archs "$arch" --output-dir "$out"
  exit
fi

cross=()
if [ "$arch" != "$(uname -m)" ]; then
  [ "$arch" = aarch64 ] || fail "--arch $arch needs docker or podman: this machine is $(uname -m)"
  compiler=aarch64-linux-gnu-g++
  $dry_run || command -v $compiler >/dev/null || fail "--arch $arch needs docker, podman or $compiler, and there is none"
  # The headers are those of this machine's Python; pyconfig.h says the same on both, which have the same sizes of types.
  cross=(_PYTHON_HOST_PLATFORM=linux-aarch64 CMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64.cmake")
fi
raw=$(mktemp -d)
trap 'rm -rf "$raw"' EXIT
for python in $pythons; do
  # The C++ library goes into the wheel: a system may have an older one.
  builder="python$python" options=()
  if [ ${#cross[@]} != 0 ]; then
    # The tools of the build run here; pip would take those of the other processor.
    run "$builder" -m venv "$raw/venv$python"
    builder="$raw/venv$python/bin/python" options=(--no-build-isolation)
    run "$builder" -m pip install -q 'scikit-build-core>=0.10' 'nanobind>=2.4' 'cmake>=3.26' ninja
    cross[2]=SETUPTOOLS_EXT_SUFFIX=".cpython-${python/./}-aarch64-linux-gnu.so"
  fi
  run env LDFLAGS='-static-libstdc++ -static-libgcc' "${cross[@]}" \
    "$builder" -m pip wheel --no-deps -C cmake.define.OCTAVO_NATIVE_TESTS=OFF "${options[@]}" -w "$raw" .
done
for wheel in "$raw"/*.whl; do
  run python3 -m auditwheel repair -w "$out" "$wheel"
done
