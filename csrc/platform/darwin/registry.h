// Lists of constants as sections of a Mach-O file. Its linker defines the bounds of sections on request. A section name
// has at most 16 characters.
#pragma once

#define OCTAVO_LISTED(name) __attribute__((used, section("__DATA,oct_" #name)))

#define OCTAVO_LIST(type, name)                                                        \
    extern const type octavo_start_##name[] __asm("section$start$__DATA$oct_" #name);  \
    extern const type octavo_stop_##name[] __asm("section$end$__DATA$oct_" #name);     \
    static inline const type* octavo_first_of_##name() { return octavo_start_##name; } \
    static inline const type* octavo_end_of_##name() { return octavo_stop_##name; }
