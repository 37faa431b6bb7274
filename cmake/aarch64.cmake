# Toolchain file: cross-compiles for 64-bit ARM with Debian's g++-aarch64-linux-gnu. Programs are linked statically, so
# that an emulator needs no ARM libraries.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
