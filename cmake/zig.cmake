# Toolchain file: builds for macOS and Windows on any machine, with the compiler that `pip install ziglang` provides.
# OCTAVO_ZIG: path of the compiler; by default that of the Python package. OCTAVO_ZIG_TARGET: aarch64-macos, x86_64-macos or x86_64-windows-gnu.
if(NOT OCTAVO_ZIG)
  find_program(OCTAVO_PYTHON NAMES python3 python REQUIRED)
  execute_process(COMMAND ${OCTAVO_PYTHON} -c "import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).with_name('zig').as_posix())"
                  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE OCTAVO_ZIG COMMAND_ERROR_IS_FATAL ANY)
endif()
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES OCTAVO_ZIG OCTAVO_ZIG_TARGET)
if(OCTAVO_ZIG_TARGET MATCHES "macos")
  set(CMAKE_SYSTEM_NAME Darwin)
else()
  set(CMAKE_SYSTEM_NAME Windows)
endif()
string(REGEX REPLACE "-.*" "" CMAKE_SYSTEM_PROCESSOR "${OCTAVO_ZIG_TARGET}")
set(CMAKE_CXX_COMPILER "${OCTAVO_ZIG}" c++ -target ${OCTAVO_ZIG_TARGET})
set(CMAKE_CXX_COMPILER_TARGET "")
# The host's archiver may support only ELF.
set(CMAKE_CXX_ARCHIVE_CREATE "\"${OCTAVO_ZIG}\" ar qc <TARGET> <LINK_FLAGS> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "\"${OCTAVO_ZIG}\" ranlib <TARGET>")
set(CMAKE_OSX_SYSROOT "" CACHE STRING "" FORCE)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
