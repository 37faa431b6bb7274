#include "isa.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "platform/features.h"
#include "platform/registry.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

OCTAVO_LIST(octavo::KernelEntry, kernels)

namespace octavo {
namespace {

#if defined(__aarch64__)
constexpr const char* ISA_NAMES[NUM_ISAS] = {"scalar", "neon", "dotprod", "i8mm"};
#else
constexpr const char* ISA_NAMES[NUM_ISAS] = {"scalar", "avx2", "avx512", "avx512vnni", "amx"};
#endif

[[maybe_unused]] bool has_bits(uint64_t value, uint64_t bits) { return (value & bits) == bits; }

[[maybe_unused]] constexpr uint64_t bit(int i) { return uint64_t{1} << i; }

#if defined(__x86_64__) && !defined(OCTAVO_EMULATE_AVX512)

struct Registers {
    unsigned eax, ebx, ecx, edx;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
    Registers r{};
    if (!__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx)) r = {};
    return r;
}

uint64_t read_xcr0() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (static_cast<uint64_t>(high) << 32) | low;
}

Isa detect() {
    const Registers leaf1 = cpuid(1, 0), leaf7 = cpuid(7, 0);
    constexpr uint64_t OSXSAVE = bit(27), AVX = bit(28), F16C = bit(29), FMA = bit(12), POPCNT = bit(23);
    if (!has_bits(leaf1.ecx, OSXSAVE | AVX | F16C | FMA | POPCNT)) return Isa::scalar;
    const uint64_t xcr0 = read_xcr0();
    constexpr uint64_t BMI1 = bit(3), AVX2 = bit(5), BMI2 = bit(8);
    if (!has_bits(xcr0, bit(1) | bit(2)) || !has_bits(leaf7.ebx, BMI1 | AVX2 | BMI2)) return Isa::scalar;
    constexpr uint64_t AVX512 = bit(16) | bit(17) | bit(28) | bit(30) | bit(31);  // F DQ CD BW VL
    if (!has_bits(xcr0, bit(5) | bit(6) | bit(7)) || !has_bits(leaf7.ebx, AVX512)) return Isa::avx2;
    constexpr uint64_t VNNI = bit(11);
    if (!has_bits(leaf7.ecx, VNNI)) return Isa::avx512;
    constexpr uint64_t AMX = bit(22) | bit(23) | bit(24) | bit(25);  // BF16, AVX512-FP16, TILE, INT8
    constexpr uint64_t VBMI = bit(1), GFNI = bit(8), AVX512_BF16 = bit(5);
    const bool amx = has_bits(xcr0, bit(17) | bit(18)) && has_bits(leaf7.edx, AMX) &&
                     has_bits(leaf7.ecx, VBMI | GFNI) && has_bits(cpuid(7, 1).eax, AVX512_BF16) &&
                     platform::allow_tiles();
    return amx ? Isa::amx : Isa::avx512vnni;
}

bool detect_many_chains() {
    constexpr unsigned GENUINE_INTEL = 0x756e6547;  // ebx of leaf 0
    return cpuid(0, 0).ebx == GENUINE_INTEL;
}

bool detect_fast_products() {
    constexpr unsigned AUTHENTIC_AMD = 0x68747541, ZEN_5 = 0x1a;  // ebx of leaf 0; family
    const unsigned signature = cpuid(1, 0).eax, family = (signature >> 8 & 15) + (signature >> 20 & 255);
    return cpuid(0, 0).ebx == AUTHENTIC_AMD && family >= ZEN_5;
}

#elif defined(__aarch64__)

bool detect_fast_products() { return false; }
bool detect_many_chains() { return false; }

Isa detect() {
    const platform::ArmFeatures found = platform::arm_features();
    if (!found.simd) return Isa::scalar;
    if (!found.dot_products) return Isa::neon;
    return found.int8_matrices ? Isa::i8mm : Isa::dotprod;
}

#elif defined(OCTAVO_EMULATE_AVX512)
Isa detect() { return Isa::amx; }
// Tests cover every kind of loop: a single panel takes the second kind, fewer rows the plain one.
bool detect_fast_products() { return true; }
bool detect_many_chains() { return true; }
#else
Isa detect() { return Isa::scalar; }
bool detect_fast_products() { return false; }
bool detect_many_chains() { return false; }
#endif

// A compiler without float16 instructions (GCC before 12) builds no AMX kernels. That level then does not exist, and no
// thread configures tiles for it.
Isa highest_built(Isa level) {
    int i = static_cast<int>(level);
    const auto is_built = [&i](const KernelEntry& e) { return std::strcmp(e.isa, ISA_NAMES[i]) == 0; };
    while (i > 0 && std::none_of(octavo_first_of_kernels(), octavo_end_of_kernels(), is_built)) --i;
    return static_cast<Isa>(i);
}

}  // namespace

const char* isa_name(Isa isa) { return ISA_NAMES[static_cast<int>(isa)]; }

Isa parse_isa(const std::string& name) {
    std::string known;
    for (int i = 0; i < NUM_ISAS; ++i) {
        if (name == ISA_NAMES[i]) return static_cast<Isa>(i);
        known += (i ? ", " : "") + std::string(ISA_NAMES[i]);
    }
    throw std::invalid_argument("instruction set '" + name + "' is unknown; known: " + known);
}

Isa detect_isa() {
    static const Isa detected = highest_built(detect());
    return detected;
}

bool starts_products_like_loads() {
    static const bool detected = detect_fast_products();
    return detected;
}

bool needs_many_chains() {
    static const bool detected = detect_many_chains();
    return detected;
}

bool has_small_cache() {
    static const size_t bytes = platform::level1_data_bytes();  // 0 if unknown
    return bytes > 0 && bytes <= 32 << 10;
}

const KernelEntry* find_kernel(const std::string& name, Isa level) {
    for (int i = static_cast<int>(level); i >= 0; --i)
        for (const KernelEntry* e = octavo_first_of_kernels(); e != octavo_end_of_kernels(); ++e)
            if (name == e->name && std::strcmp(e->isa, ISA_NAMES[i]) == 0) return e;
    return nullptr;
}

std::vector<std::string> kernel_names() {
    std::vector<std::string> names;
    for (const KernelEntry* e = octavo_first_of_kernels(); e != octavo_end_of_kernels(); ++e)
        names.emplace_back(e->name);
    std::sort(names.begin(), names.end());
    names.erase(std::unique(names.begin(), names.end()), names.end());
    return names;
}

bool uses_tiles([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
    return isa == Isa::amx;
#else
    return false;
#endif
}

#if defined(__x86_64__) && !defined(OCTAVO_EMULATE_AVX512)

void load_tile_configuration() {
    struct alignas(64) TileConfiguration {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes_per_row[16];
        uint8_t rows[16];
    };
    TileConfiguration configuration{};
    configuration.palette = 1;
    for (int i = 0; i < 8; ++i) {
        configuration.bytes_per_row[i] = 64;
        configuration.rows[i] = 16;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(configuration) : "memory");
}

void release_tiles() { __asm__ volatile("tilerelease" ::: "memory"); }

#else

void load_tile_configuration() {}
void release_tiles() {}

#endif

}  // namespace octavo
