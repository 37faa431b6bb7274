// Prototype of products with sparse weights, for benchmarks/sparse.py, which compiles it. Not a part of Octavo.
//
// A row of weights is a stream of groups of 64. Each has two float16 scales (of 32 weights each; not for bf16), for
// sparse forms a bitmap of 64 bits, and the codes of the weights that are there. Two of four need as many bits as a
// bitmap (two places of two bits), so both kinds of sparsity are one form. Weights are spread to their places and
// multiplied with zeros between them: no instruction here multiplies two of four.

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int GROUP = 64;
constexpr int MAX_COLUMNS = 16384;
constexpr int W_ROWS = 4, X_ROWS = 4;  // of a tile

uint64_t read_bits(const uint8_t*& p) {
    uint64_t bits;
    std::memcpy(&bits, p, sizeof bits);
    p += sizeof bits;
    return bits;
}

__m512i read64(const uint8_t* p) { return _mm512_loadu_si512(p); }

__m256i nibbles(__m128i codes) {
    const __m128i low = _mm_and_si128(codes, _mm_set1_epi8(15));
    const __m128i high = _mm_and_si128(_mm_srli_epi16(codes, 4), _mm_set1_epi8(15));
    return _mm256_sub_epi8(_mm256_set_m128i(high, low), _mm256_set1_epi8(8));
}

struct Dense8 {
    static __m512i take(const uint8_t*& p) {
        const __m512i codes = read64(p);
        p += 64;
        return codes;
    }
};

// TWO_OF_FOUR: half of each group is there, so that the next one does not wait for a count of bits.
template <bool TWO_OF_FOUR>
struct Sparse8 {
    static __m512i take(const uint8_t*& p) {
        const uint64_t bits = read_bits(p);
        const __m512i codes = _mm512_maskz_expand_epi8(bits, read64(p));
        p += TWO_OF_FOUR ? GROUP / 2 : __builtin_popcountll(bits);
        return codes;
    }
};

struct Dense4 {
    static __m512i take(const uint8_t*& p) {
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        p += 32;
        const __m256i low = _mm256_and_si256(codes, _mm256_set1_epi8(15));
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), _mm256_set1_epi8(15));
        const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        return _mm512_sub_epi8(both, _mm512_set1_epi8(8));
    }
};

struct Sparse4 {  // two of four
    static __m512i take(const uint8_t*& p) {
        const uint64_t bits = read_bits(p);
        const __m256i codes = nibbles(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        p += 16;
        return _mm512_maskz_expand_epi8(bits, _mm512_castsi256_si512(codes));
    }
};

struct DenseBf16 {
    static void take(const uint8_t*& p, __m512i* w) {
        w[0] = read64(p);
        w[1] = read64(p + 64);
        p += 128;
    }
};

template <bool TWO_OF_FOUR>
struct SparseBf16 {
    static void take(const uint8_t*& p, __m512i* w) {
        const uint64_t bits = read_bits(p);
        for (int half = 0; half < 2; ++half) {
            const auto mask = static_cast<uint32_t>(bits >> (32 * half));
            w[half] = _mm512_maskz_expand_epi16(mask, read64(p));
            p += TWO_OF_FOUR ? GROUP / 2 : 2 * __builtin_popcount(mask);
        }
    }
};

struct Task {
    const uint8_t* weights;  // of all copies, one after another
    const int64_t* offsets;  // of each row in a copy, and the size of a copy
    int64_t copies, n, k, rows;
    const uint8_t* x;       // [rows, k]: int8 codes plus 128, or bf16
    const float* x_scales;  // [rows, k / 32]
    float* out;             // [n, rows], of the last copy
};

// Two scales of 32 weights, each for the eight sums of its weights.
__m512 spread(__m128 two) {
    const __m512i places = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    return _mm512_permutexvar_ps(places, _mm512_castps128_ps512(two));
}

__m128 load_two(const float* p) { return _mm_castpd_ps(_mm_load_sd(reinterpret_cast<const double*>(p))); }

__m128 read_scales(const uint8_t*& p) {
    int32_t two;
    std::memcpy(&two, p, sizeof two);
    p += sizeof two;
    return _mm_cvtph_ps(_mm_cvtsi32_si128(two));
}

// The part of the products that is due to the 128 that x has too much.
__m512i excess(__m512i w) { return _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(-128), w); }

template <class Form>
float one_row(const Task& t, const uint8_t* p) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < t.k; k += GROUP) {
        const __m128 scales = _mm_mul_ps(read_scales(p), load_two(t.x_scales + k / 32));
        const __m512i w = Form::take(p);
        const __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), read64(t.x + k), w);
        sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(dot, excess(w))), spread(scales), sum);
    }
    return _mm512_reduce_add_ps(sum);
}

template <class Form>
float one_row_bf16(const Task& t, const uint8_t* p) {
    __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t k = 0; k < t.k; k += GROUP) {
        __m512i w[2];
        Form::take(p, w);
        for (int half = 0; half < 2; ++half) {
            const __m512i x = read64(t.x + 2 * k + 64 * half);
            sum[half] = _mm512_dpbf16_ps(sum[half], (__m512bh)x, (__m512bh)w[half]);
        }
    }
    return _mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1]));
}

// W_ROWS rows of weights are spread once, then multiplied with all rows of x.
template <class Form>
void many_rows(const Task& t, const uint8_t* copy, int64_t begin, int64_t end) {
    alignas(64) static thread_local uint8_t w[W_ROWS][MAX_COLUMNS];
    alignas(64) static thread_local float scales[W_ROWS][MAX_COLUMNS / 32];
    for (int64_t first = begin; first < end; first += W_ROWS) {
        for (int r = 0; r < W_ROWS; ++r) {
            const uint8_t* p = copy + t.offsets[first + r];
            for (int64_t k = 0; k < t.k; k += GROUP) {
                _mm_storel_pi(reinterpret_cast<__m64*>(&scales[r][k / 32]), read_scales(p));
                _mm512_store_si512(&w[r][k], Form::take(p));
            }
        }
        for (int64_t row = 0; row < t.rows; row += X_ROWS) {
            __m512 sums[W_ROWS][X_ROWS] = {};
            for (int64_t k = 0; k < t.k; k += GROUP) {
                __m512i x[X_ROWS];
                __m512 x_scales[X_ROWS];
                for (int c = 0; c < X_ROWS; ++c) {
                    x[c] = read64(t.x + (row + c) * t.k + k);
                    x_scales[c] = spread(load_two(t.x_scales + (row + c) * (t.k / 32) + k / 32));
                }
                for (int r = 0; r < W_ROWS; ++r) {
                    const __m512i codes = _mm512_load_si512(&w[r][k]);
                    const __m512i start = _mm512_sub_epi32(_mm512_setzero_si512(), excess(codes));
                    const __m512 scale = spread(load_two(&scales[r][k / 32]));
                    for (int c = 0; c < X_ROWS; ++c) {
                        const __m512 dot = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start, x[c], codes));
                        sums[r][c] = _mm512_fmadd_ps(_mm512_mul_ps(dot, scale), x_scales[c], sums[r][c]);
                    }
                }
            }
            for (int r = 0; r < W_ROWS; ++r)
                for (int c = 0; c < X_ROWS; ++c)
                    t.out[(first + r) * t.rows + row + c] = _mm512_reduce_add_ps(sums[r][c]);
        }
    }
}

template <class Form>
void many_rows_bf16(const Task& t, const uint8_t* copy, int64_t begin, int64_t end) {
    alignas(64) static thread_local uint16_t w[W_ROWS][MAX_COLUMNS];
    for (int64_t first = begin; first < end; first += W_ROWS) {
        for (int r = 0; r < W_ROWS; ++r) {
            const uint8_t* p = copy + t.offsets[first + r];
            for (int64_t k = 0; k < t.k; k += GROUP) {
                __m512i both[2];
                Form::take(p, both);
                _mm512_store_si512(&w[r][k], both[0]);
                _mm512_store_si512(&w[r][k + 32], both[1]);
            }
        }
        for (int64_t row = 0; row < t.rows; row += X_ROWS) {
            __m512 sums[W_ROWS][X_ROWS] = {};
            for (int64_t k = 0; k < t.k; k += 32) {
                __m512i x[X_ROWS];
                for (int c = 0; c < X_ROWS; ++c) x[c] = read64(t.x + 2 * ((row + c) * t.k + k));
                for (int r = 0; r < W_ROWS; ++r) {
                    const __m512i values = _mm512_load_si512(&w[r][k]);
                    for (int c = 0; c < X_ROWS; ++c)
                        sums[r][c] = _mm512_dpbf16_ps(sums[r][c], (__m512bh)x[c], (__m512bh)values);
                }
            }
            for (int r = 0; r < W_ROWS; ++r)
                for (int c = 0; c < X_ROWS; ++c)
                    t.out[(first + r) * t.rows + row + c] = _mm512_reduce_add_ps(sums[r][c]);
        }
    }
}

template <class Form, bool IS_BF16>
void part(const Task& t, int64_t begin, int64_t end) {
    for (int64_t i = 0; i < t.copies; ++i) {
        const uint8_t* copy = t.weights + i * t.offsets[t.n];
        if constexpr (IS_BF16) {
            if (t.rows > 1) many_rows_bf16<Form>(t, copy, begin, end);
            for (int64_t r = begin; t.rows == 1 && r < end; ++r) t.out[r] = one_row_bf16<Form>(t, copy + t.offsets[r]);
        } else {
            if (t.rows > 1) many_rows<Form>(t, copy, begin, end);
            for (int64_t r = begin; t.rows == 1 && r < end; ++r) t.out[r] = one_row<Form>(t, copy + t.offsets[r]);
        }
    }
}

using Part = void (*)(const Task&, int64_t, int64_t);
constexpr Part PARTS[] = {part<Dense8, false>,          part<Sparse8<true>, false>,   part<Sparse8<false>, false>,
                          part<Dense4, false>,          part<Sparse4, false>,         part<DenseBf16, true>,
                          part<SparseBf16<true>, true>, part<SparseBf16<false>, true>};

}  // namespace

// form: a place in PARTS. n is a multiple of 4 times the threads, rows is 1 or a multiple of 4, k a multiple of 64.
extern "C" void product(int form, int threads, const uint8_t* weights, const int64_t* offsets, int64_t copies,
                        int64_t n, int64_t k, int64_t rows, const uint8_t* x, const float* x_scales, float* out) {
    const Task task{weights, offsets, copies, n, k, rows, x, x_scales, out};
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(PARTS[form], task, n * i / threads, n * (i + 1) / threads);
    PARTS[form](task, 0, n / threads);
    for (std::thread& other : others) other.join();
}
