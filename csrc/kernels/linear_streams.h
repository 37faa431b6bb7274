// Walks over the packed units of a panel with vectors: prefetches what comes next, and looks up vectors of grids.
#pragma once

#include "kernel.h"
#include "linear_grid.h"

namespace octavo {
namespace {

// How far ahead of the current unit the packed stream is prefetched.
#if defined(OCTAVO_ISA_amx) || defined(OCTAVO_ISA_avx512vnni)
constexpr int PREFETCH_BYTES = 8192;
#elif defined(OCTAVO_ISA_avx512)
constexpr int PREFETCH_BYTES = 2048;
#elif defined(OCTAVO_ISA_avx2)
constexpr int PREFETCH_BYTES = 1536;
#elif defined(OCTAVO_NEON)
constexpr int PREFETCH_BYTES = 1024;
#else
constexpr int PREFETCH_BYTES = 0;
#endif
// In a small cache, half of that distance already evicts the activations of a few rows.
inline int prefetch_bytes() {
#if defined(OCTAVO_ISA_avx512vnni)
    if (has_small_cache()) return PREFETCH_BYTES / 2;
#endif
    return PREFETCH_BYTES;
}
// The scalar kernel looks up one value at a time.
#if defined(__AVX2__) || defined(OCTAVO_NEON)
constexpr bool LOOKS_UP_VECTORS = true;
#else
constexpr bool LOOKS_UP_VECTORS = false;
#endif

template <typename F>
struct StreamedUnits : UnitCursor<F> {
    StreamedUnits(const Panel& panel, int first, int count)
        : UnitCursor<F>(panel, first, count), ahead_(prefetch_bytes()) {}
    // Always inlined: GCC drops calls of functions that do nothing but prefetch.
    __attribute__((always_inline)) void prefetch() const { fetch_unit(this->codes() + ahead_); }
    // Prefetches the size of a unit, with its share of a header. locality: 3 is the L1 cache, 2 the L2 cache.
    template <int locality = 3>
    static __attribute__((always_inline)) void fetch_unit(const uint8_t* at) {
        constexpr int BYTES = F::is_grouped ? F::unit_bytes : F::block_bytes / (F::units > 0 ? F::units : 1);
        for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(at + i, 0, locality);
    }

  private:
    int ahead_;
};

template <typename F, bool IsGrid = F::is_grid && LOOKS_UP_VECTORS>
struct PackedUnits : StreamedUnits<F> {
    using StreamedUnits<F>::StreamedUnits;
};

#if defined(__AVX2__) || defined(OCTAVO_NEON)
// The vectors of a unit are looked up when the walk reaches it. Their indices are computed one unit earlier, so that no
// lookup waits for them.
template <typename F>
struct PackedUnits<F, true> : StreamedUnits<F> {
    PackedUnits(const Panel& panel, int first, int count)
        : StreamedUnits<F>(panel, first, count), grid_(panel.type.table) {
        grid_indices<F>(this->codes(), indices_[0]);
        look_up_unit();
    }
    const uint8_t* vectors(int quad) const { return vectors_ + QUAD_BYTES * quad; }
    void next() {
        StreamedUnits<F>::next();
        current_ ^= 1;
        if (!this->is_done()) look_up_unit();
    }

  private:
    void look_up_unit() {
        if (const uint8_t* const codes = this->next_codes()) grid_indices<F>(codes, indices_[current_ ^ 1]);
        look_up<F>(grid_, this->codes(), indices_[current_], vectors_);
    }
    const int8_t* grid_;
    int current_ = 0;
    alignas(64) uint16_t indices_[2][INDICES];
    alignas(64) uint8_t vectors_[PANEL_COLS * UNIT_K];
};
#endif

}  // namespace
}  // namespace octavo
