// The limits of the machine: loops that only read, multiply-add or wait at barriers. They are not graph operations;
// octavo.bench.ceilings runs them through KernelRun and divides their work by the time.
//
// output [workers, 16]: each worker stores in [0] the work of one repetition (bytes, multiply-adds or barriers), and in
// [1] a value that depends on all of it, so that the compiler cannot remove the loop.
#include "kernel.h"
#include "shapes.h"
#include "simd.h"

#if defined(OCTAVO_ISA_amx)
#include "amx_tiles.h"
#endif

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Ceiling, (), (), (repetitions), ());
OCTAVO_SIGNATURE(CeilingOfMemory, (memory), (), (repetitions), ());

// Hides `value` from the optimizer, which can then neither hoist nor merge computations that use it.
template <typename T>
inline void forget(T& value) {
#if defined(OCTAVO_NEON)
    __asm__ volatile("" : "+w"(value));
#elif defined(OCTAVO_EMULATE_AVX512) || !defined(__AVX2__)
    __asm__ volatile("" : : "r"(&value) : "memory");
#else
    __asm__ volatile("" : "+x"(value));
#endif
}

void leave(const Args& args, const Worker& worker, double work, float result) {
    float* const row = args.output.data + static_cast<size_t>(worker.index) * args.output.cols;
    row[0] = static_cast<float>(work);
    row[1] = result;
}

// memory [workers, floats, a multiple of 128]: every worker reads its own row.
void ceiling_read(const Args& args, const Step&, Worker& worker) {
    const View& memory = args.inputs[CeilingOfMemory::memory];
    const float* const begin = memory.data + static_cast<size_t>(worker.index) * memory.cols;
    F32x16 sums[4] = {broadcast(0), broadcast(0), broadcast(0), broadcast(0)};
    for (int64_t i = 0; i < args.ints[Ceiling::repetitions]; ++i)
        for (const float* p = begin; p < begin + memory.cols; p += 128)
            for (int j = 0; j < 8; ++j) sums[j % 4] = max(sums[j % 4], load(p + 16 * j));
    leave(args, worker, 4.0 * memory.cols, reduce_max(max(max(sums[0], sums[1]), max(sums[2], sums[3]))));
}

void ceiling_float(const Args& args, const Step&, Worker& worker) {
    constexpr int CHAINS = 5;  // two registers each on AVX2: enough to hide the latency, few enough for 16 registers
    F32x16 sums[CHAINS];
    for (F32x16& sum : sums) sum = broadcast(0);
    const F32x16 x = broadcast(1.0f), y = broadcast(1e-9f);
    for (int64_t i = 0; i < args.ints[Ceiling::repetitions]; ++i)
        for (F32x16& sum : sums) sum = fma(x, y, sum);
    for (int c = 1; c < CHAINS; ++c) sums[0] = sums[0] + sums[c];
    leave(args, worker, 16.0 * CHAINS, reduce_add(sums[0]));
}

void ceiling_barrier(const Args& args, const Step&, Worker& worker) {
    for (int64_t i = 0; i < args.ints[Ceiling::repetitions]; ++i) worker.barrier();
    leave(args, worker, 1, 0);
}

#if defined(OCTAVO_ISA_amx)

constexpr double TILE_PRODUCTS = 16 * 16 * 64;  // byte products in one instruction

struct alignas(64) Tile {
    uint8_t bytes[1024] = {};
};

// Four chains of tile products, enough to hide the latency.
template <typename Product>
void run_tiles(const Args& args, const Worker& worker, double work, Product product) {
    Tile tile;
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    tile_load<4>(tile.bytes, 64);
    tile_load<5>(tile.bytes, 64);
    for (int64_t i = 0; i < args.ints[Ceiling::repetitions]; ++i) product();
    tile_store<0>(tile.bytes, 64);
    leave(args, worker, work, tile.bytes[0]);
}

void ceiling_int8(const Args& args, const Step&, Worker& worker) {
    run_tiles(args, worker, 4 * TILE_PRODUCTS, [] {
        tile_dot_signed_unsigned<0, 4, 5>();
        tile_dot_signed_unsigned<1, 4, 5>();
        tile_dot_signed_unsigned<2, 4, 5>();
        tile_dot_signed_unsigned<3, 4, 5>();
    });
}

void ceiling_bf16(const Args& args, const Step&, Worker& worker) {
    run_tiles(args, worker, 2 * TILE_PRODUCTS, [] {
        tile_dot_bf16<0, 4, 5>();
        tile_dot_bf16<1, 4, 5>();
        tile_dot_bf16<2, 4, 5>();
        tile_dot_bf16<3, 4, 5>();
    });
}

// memory [workers, floats, a multiple of 1024]: like ceiling_read, but into tiles.
void ceiling_tile_read(const Args& args, const Step&, Worker& worker) {
    const View& memory = args.inputs[CeilingOfMemory::memory];
    const float* const begin = memory.data + static_cast<size_t>(worker.index) * memory.cols;
    for (int64_t i = 0; i < args.ints[Ceiling::repetitions]; ++i)
        for (const float* p = begin; p < begin + memory.cols; p += 1024) {
            tile_load<0>(p, 64);
            tile_load<1>(p + 256, 64);
            tile_load<2>(p + 512, 64);
            tile_load<3>(p + 768, 64);
        }
    leave(args, worker, 4.0 * memory.cols, 0);
}

#else

// Adds one instruction's products to `sum`, as the linear kernels of this level do.
#if defined(__AVX512VNNI__)
using Bytes = __m512i;
inline Bytes filled(char x) { return _mm512_set1_epi8(x); }
inline void multiply_add(Bytes& sum, Bytes a, Bytes b) { sum = _mm512_dpbusd_epi32(sum, a, b); }
#elif defined(__AVX512BW__)
using Bytes = __m512i;
inline Bytes filled(char x) { return _mm512_set1_epi8(x); }
inline void multiply_add(Bytes& sum, Bytes a, Bytes b) { sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(a, b)); }
#elif defined(__AVX2__)
using Bytes = __m256i;
inline Bytes filled(char x) { return _mm256_set1_epi8(x); }
inline void multiply_add(Bytes& sum, Bytes a, Bytes b) { sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b)); }
#elif defined(OCTAVO_NEON)
using Bytes = int8x16_t;
inline Bytes filled(char x) { return vdupq_n_s8(static_cast<int8_t>(x)); }
#if defined(OCTAVO_ISA_i8mm)
inline void multiply_add(Bytes& sum, Bytes a, Bytes b) {
    sum = vreinterpretq_s8_s32(vmmlaq_s32(vreinterpretq_s32_s8(sum), a, b));
}
#elif defined(OCTAVO_ISA_dotprod)
inline void multiply_add(Bytes& sum, Bytes a, Bytes b) {
    sum = vreinterpretq_s8_s32(vdotq_s32(vreinterpretq_s32_s8(sum), a, b));
}
#else
inline void multiply_add(Bytes& sum, Bytes a, Bytes b) {
    sum = vreinterpretq_s8_s16(vmlal_s8(vreinterpretq_s16_s8(sum), vget_low_s8(a), vget_low_s8(b)));
}
#endif
#else
struct Bytes {
    int8_t v[16];
};
inline Bytes filled(char x) {
    Bytes r;
    for (int8_t& lane : r.v) lane = x;
    return r;
}
inline void multiply_add(Bytes& sum, Bytes a, Bytes b) {
    for (int i = 0; i < 16; ++i) sum.v[i] = static_cast<int8_t>(sum.v[i] + a.v[i] * b.v[i]);
}
#endif

// Products per instruction.
#if defined(OCTAVO_ISA_i8mm)
constexpr int PRODUCTS = 2 * sizeof(Bytes);
#elif defined(OCTAVO_ISA_neon)
constexpr int PRODUCTS = sizeof(Bytes) / 2;
#else
constexpr int PRODUCTS = sizeof(Bytes);
#endif

// Enough chains to hide the latency and few enough for registers; an array of them would be kept in memory.
void ceiling_int8(const Args& args, const Step&, Worker& worker) {
#if defined(__AVX512F__) || defined(OCTAVO_NEON)
    constexpr bool HAS_MANY_REGISTERS = true;
#else
    constexpr bool HAS_MANY_REGISTERS = false;
#endif
    Bytes a = filled(1), s0 = filled(0), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0;
    Bytes s8 = s0, s9 = s0, s10 = s0, s11 = s0;
    const Bytes b = a;
    const auto next = [&](Bytes& sum) __attribute__((always_inline)) {
        forget(a);
        multiply_add(sum, a, b);
        forget(sum);
    };
    for (int64_t i = 0; i < args.ints[Ceiling::repetitions]; ++i) {
        next(s0), next(s1), next(s2), next(s3), next(s4), next(s5), next(s6), next(s7);
        if (HAS_MANY_REGISTERS) next(s8), next(s9), next(s10), next(s11);
    }
    leave(args, worker, (HAS_MANY_REGISTERS ? 12 : 8) * PRODUCTS, 0);
}

#endif

bool fits_ceiling(const Args& args) { return args.ints[Ceiling::repetitions] >= 0 && args.output.cols >= 2; }

bool fits_ceiling_of_memory(const Args& args) {
    const View& memory = args.inputs[CeilingOfMemory::memory];
    return fits_ceiling(args) && memory.cols > 0 && memory.cols % 128 == 0 && has_rows_of(memory, args.output);
}

bool ceiling_float_fits(const Args& args) { return fits_ceiling(args); }
bool ceiling_barrier_fits(const Args& args) { return fits_ceiling(args); }
bool ceiling_int8_fits(const Args& args) { return fits_ceiling(args); }
bool ceiling_read_fits(const Args& args) { return fits_ceiling_of_memory(args); }
#if defined(OCTAVO_ISA_amx)
bool ceiling_bf16_fits(const Args& args) { return fits_ceiling(args); }
bool ceiling_tile_read_fits(const Args& args) { return fits_ceiling_of_memory(args); }
#endif

}  // namespace

OCTAVO_KERNEL(ceiling_read, CeilingOfMemory);
OCTAVO_KERNEL(ceiling_float, Ceiling);
OCTAVO_KERNEL(ceiling_barrier, Ceiling);
OCTAVO_KERNEL(ceiling_int8, Ceiling);
#if defined(OCTAVO_ISA_amx)
OCTAVO_KERNEL(ceiling_bf16, Ceiling);
OCTAVO_KERNEL(ceiling_tile_read, CeilingOfMemory);
#endif

}  // namespace octavo
