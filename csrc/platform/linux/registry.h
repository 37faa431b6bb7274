// Lists of constants as sections of an ELF file. Its linker defines the bounds of every section.
#pragma once

#define OCTAVO_LISTED(name) __attribute__((used, retain, section("octavo_" #name)))

#define OCTAVO_LIST(type, name)                                                          \
    extern "C" {                                                                         \
    extern const type __start_octavo_##name[] __attribute__((visibility("hidden")));     \
    extern const type __stop_octavo_##name[] __attribute__((visibility("hidden")));      \
    }                                                                                    \
    static inline const type* octavo_first_of_##name() { return __start_octavo_##name; } \
    static inline const type* octavo_end_of_##name() { return __stop_octavo_##name; }
