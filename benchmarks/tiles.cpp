// What a product of AMX tiles costs, and what giving tiles up after their last use saves, on a core whose other
// hardware thread is idle and on one where it is busy. Each loop runs for some microseconds. Additions timed just before
// and after it show which of the two it was: a busy second thread halves their speed.
//
//     g++ -O2 -march=sapphirerapids benchmarks/tiles.cpp -o tiles && taskset -c 1 ./tiles
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define TILE_INSTRUCTION(name, ...) asm volatile(name : : __VA_ARGS__ : "memory")

namespace {

constexpr int UNITS = 16, TILE_BYTES = 1024, GROUPS = 32, PANELS = 16, ROW_UNITS = 48, PRODUCTS = 600, TURNS = 400;

template <int tile>
void load(const uint8_t* from) {
    TILE_INSTRUCTION("tileloadd (%0,%1,1), %%tmm%c2", "r"(from), "r"(int64_t{64}), "i"(tile));
}
template <int tile>
void load_once(const uint8_t* from) {
    TILE_INSTRUCTION("tileloaddt1 (%0,%1,1), %%tmm%c2", "r"(from), "r"(int64_t{64}), "i"(tile));
}
template <int tile>
void store(uint8_t* to) {
    TILE_INSTRUCTION("tilestored %%tmm%c2, (%0,%1,1)", "r"(to), "r"(int64_t{64}), "i"(tile));
}
template <int tile>
void zero() {
    TILE_INSTRUCTION("tilezero %%tmm%c0", "i"(tile));
}
template <int c, int a, int b>
void dot() {
    TILE_INSTRUCTION("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0", "i"(c), "i"(a), "i"(b));
}

void configure() {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } configuration;
    asm volatile("ldtilecfg %0" : : "m"(configuration));
}

// Rows of activations and panels of weights, everything in tiles of 1 KiB.
struct Memory {
    uint8_t *rows, *weights, *sums;
    const uint8_t* unit(int group, int u) const { return rows + (group * ROW_UNITS + u) * TILE_BYTES; }
    const uint8_t* weight(int panel, int u) const { return weights + (panel * UNITS + u) * TILE_BYTES; }
};

// One product after another of two groups with two panels in the L1 cache.
template <bool gives_up>
void two_by_two(const Memory& m) {
    for (int i = 0; i < PRODUCTS; i += 4) {
        load<4>(m.rows);
        load<6>(m.weights);
        dot<0, 4, 6>();
        load<7>(m.weights + TILE_BYTES);
        dot<1, 4, 7>();
        if constexpr (gives_up) zero<4>();
        load<5>(m.rows + TILE_BYTES);
        dot<2, 5, 6>();
        if constexpr (gives_up) zero<6>();
        dot<3, 5, 7>();
        if constexpr (gives_up) zero<5>(), zero<7>();
    }
}
void one_by_two(const Memory& m) {
    for (int i = 0; i < PRODUCTS; i += 2) {
        load<4>(m.rows);
        load<6>(m.weights);
        dot<0, 4, 6>();
        zero<6>();
        load<6>(m.weights + TILE_BYTES);
        dot<1, 4, 6>();
        zero<6>(), zero<4>();
    }
}

// The products of a prompt: 512 rows, sixteen panels, pieces of UNITS units, activations from the L2 cache.
template <bool gives_up, int Units>
void prompt_two_by_two(const Memory& m) {
    for (int first = 0; first + Units <= ROW_UNITS; first += Units)
        for (int p = 0; p < PANELS; p += 2) {
            uint8_t *c0 = m.sums + p * GROUPS * TILE_BYTES, *c1 = c0 + GROUPS * TILE_BYTES;
            for (int g = 0; g < GROUPS; g += 2, c0 += 2 * TILE_BYTES, c1 += 2 * TILE_BYTES) {
                load<0>(c0), load<1>(c1), load<2>(c0 + TILE_BYTES), load<3>(c1 + TILE_BYTES);
                for (int u = 0; u < Units; ++u) {
                    load<4>(m.unit(g, first + u));
                    load<6>(m.weight(0, u));
                    dot<0, 4, 6>();
                    load<7>(m.weight(1, u));
                    dot<1, 4, 7>();
                    if constexpr (gives_up) zero<4>();
                    load<5>(m.unit(g + 1, first + u));
                    dot<2, 5, 6>();
                    if constexpr (gives_up) zero<6>();
                    dot<3, 5, 7>();
                    if constexpr (gives_up) zero<5>(), zero<7>();
                }
                store<0>(c0), store<1>(c1), store<2>(c0 + TILE_BYTES), store<3>(c1 + TILE_BYTES);
            }
        }
}
void prompt_one_by_two(const Memory& m) {
    for (int first = 0; first + UNITS <= ROW_UNITS; first += UNITS)
        for (int p = 0; p < PANELS; p += 2) {
            uint8_t *c0 = m.sums + p * GROUPS * TILE_BYTES, *c1 = c0 + GROUPS * TILE_BYTES;
            for (int g = 0; g < GROUPS; ++g, c0 += TILE_BYTES, c1 += TILE_BYTES) {
                load<0>(c0), load<1>(c1);
                for (int u = 0; u < UNITS; ++u) {
                    load_once<4>(m.unit(g, first + u));
                    load<6>(m.weight(0, u));
                    dot<0, 4, 6>();
                    zero<6>();
                    load<6>(m.weight(1, u));
                    dot<1, 4, 6>();
                    zero<6>(), zero<4>();
                }
                store<0>(c0), store<1>(c1);
            }
        }
}

// Ticks of the time stamp counter for one of independent additions.
double ticks_of_additions() {
    constexpr int ROUNDS = 500;
    uint64_t a = 0, b = 0, c = 0, d = 0;
    const uint64_t start = __rdtsc();
    for (int i = 0; i < ROUNDS; ++i)
        asm volatile("lea 1(%0),%0; lea 1(%1),%1; lea 1(%2),%2; lea 1(%3),%3" : "+r"(a), "+r"(b), "+r"(c), "+r"(d));
    return static_cast<double>(__rdtsc() - start) / (4 * ROUNDS);
}
// Ticks for a cycle of the core: a chain of multiplications, three cycles each.
double ticks_of_cycle() {
    constexpr int ROUNDS = 20000;
    uint64_t x = 3;
    const uint64_t start = __rdtsc();
    for (int i = 0; i < ROUNDS; ++i) asm volatile("imul %0, %0" : "+r"(x));
    return static_cast<double>(__rdtsc() - start) / (3 * ROUNDS);
}

struct Loop {
    const char* name;
    void (*run)(const Memory&);
    double products;
    std::vector<double> alone, shared;
};

double median(std::vector<double>& x) {
    if (x.size() < 5) return 0;
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

}  // namespace

int main() {
    constexpr int PERMIT_AMX = 0x1023, TILE_DATA = 18;
    if (syscall(SYS_arch_prctl, PERMIT_AMX, TILE_DATA) != 0) return fputs("no AMX here\n", stderr), 1;
    const auto numbers = [](size_t bytes) {
        uint8_t* const memory = static_cast<uint8_t*>(aligned_alloc(4096, bytes));
        for (size_t i = 0; i < bytes; i += 2) {
            const uint16_t value = static_cast<uint16_t>(0x3f80 + (rand() & 0x807f));  // 1 to 2, either sign
            memcpy(memory + i, &value, 2);
        }
        return memory;
    };
    const Memory m = {numbers(GROUPS * ROW_UNITS * TILE_BYTES), numbers(2 * UNITS * TILE_BYTES),
                      numbers(PANELS * GROUPS * TILE_BYTES)};
    constexpr double ALL = double{GROUPS} * PANELS * ROW_UNITS;
    Loop loops[] = {
        {"L1: 2 x 2 tiles", two_by_two<false>, PRODUCTS, {}, {}},
        {"L1: 2 x 2, given up", two_by_two<true>, PRODUCTS, {}, {}},
        {"L1: 1 x 2, given up", one_by_two, PRODUCTS, {}, {}},
        {"prompt: 2 x 2, 12 units", prompt_two_by_two<false, 12>, ALL, {}, {}},
        {"prompt: 2 x 2, 16 units, given up", prompt_two_by_two<true, 16>, ALL, {}, {}},
        {"prompt: 1 x 2, 16 units, given up, rows past L1", prompt_one_by_two, ALL, {}, {}},
    };
    double additions[2] = {1e9, 0};
    for (int i = 0; i < 20000; ++i) additions[0] = std::min(additions[0], ticks_of_additions());
    const double cycle = ticks_of_cycle();
    for (int turn = 0; turn < TURNS; ++turn)
        for (Loop& loop : loops) {
            configure();
            const double before = ticks_of_additions();
            const uint64_t start = __rdtsc();
            loop.run(m);
            const double ticks = static_cast<double>(__rdtsc() - start) / loop.products;
            const double after = ticks_of_additions(), limit = 1.25 * additions[0];
            if (before < limit && after < limit) loop.alone.push_back(ticks / cycle);
            if (before > limit && after > limit) loop.shared.push_back(ticks / cycle);
        }
    printf("%-50s %20s %20s\n", "cycles a product, median (turns)", "thread beside idle", "busy");
    for (Loop& loop : loops) {
        const size_t alone = loop.alone.size(), shared = loop.shared.size();
        printf("%-50s %13.1f (%4zu) %13.1f (%4zu)\n", loop.name, median(loop.alone), alone, median(loop.shared),
               shared);
    }
}
