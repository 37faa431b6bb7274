// Lists of constants as sections of a PE file. The linker sorts the parts of a section by the letter after the dollar
// sign, so the bounds are two constants that sort before and after all entries.
#pragma once

#define OCTAVO_LISTED(name) __attribute__((used, section("oct_" #name "$b")))

#define OCTAVO_LIST(type, name)                                                                                        \
    struct alignas(type) octavo_bound_of_##name {                                                                      \
        char bytes[sizeof(type)];                                                                                      \
    };                                                                                                                 \
    __attribute__((used, section("oct_" #name "$a"))) static const octavo_bound_of_##name octavo_a_##name{};           \
    __attribute__((used, section("oct_" #name "$c"))) static const octavo_bound_of_##name octavo_c_##name{};           \
    static inline const type* octavo_first_of_##name() { return reinterpret_cast<const type*>(&octavo_a_##name + 1); } \
    static inline const type* octavo_end_of_##name() { return reinterpret_cast<const type*>(&octavo_c_##name); }
