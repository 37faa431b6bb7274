// The operands of a fused product, a worker's scratch memory, and the activations, normalized and quantized.
#pragma once

#include "activations.h"
#include "adapter_rows.h"
#include "elementwise.h"
#include "kernel.h"
#include "linear_dense.h"
#include "norms.h"

#if defined(OCTAVO_ISA_amx)
#include "linear_dense_amx.h"
#elif defined(OCTAVO_ISA_avx512vnni) || defined(OCTAVO_ISA_avx512)
#include "linear_avx512.h"
#elif defined(OCTAVO_ISA_avx2)
#include "linear_avx2.h"
#elif defined(OCTAVO_NEON)
#include "linear_neon.h"
#else
#include "linear_scalar.h"
#endif

namespace octavo {
namespace {

constexpr int ADDED_ROWS = 128, ADDED_PANELS = 16;  // of adapters' sums at once
constexpr int FEW_ROWS = 8;  // up to this many rows, every worker prepares its own activations without a barrier

// One fused product. Everything except `weights` may be absent.
struct Product {
    const Weight* weights;
    const Weight* biases;  // one per weight
    int32_t num_weights;
    View x, out;
    const float* residual;
    const float* norm;  // RMSNorm weight
    float eps;
    int64_t gate_kind;  // KIND_NONE: outputs side by side
    float scale, softcap;
    float gate_limit = 0.0f, up_offset = 0.0f;  // for experts (octavo/graph/ops/moe.py); 0: none
    bool limits_activated = false;              // whether the limit applies to gates after their activation
    // If greater than one, the only weight consists of this many stacked matrices. Each reads one head's columns, an
    // equal part of x, and writes that head's columns of `out`, in whole panels.
    int32_t heads = 1;
    const AdapterRows* adapters = nullptr;  // null: no row has one

    int32_t k() const { return x.cols / heads; }
};

inline uint64_t order_id(const PackedWeight& w) { return w.order ? *w.order_id : 0; }

// Weights with the same order of columns share an image of the activations. The weights of several experts never share
// one, as far as scratch sizes are concerned. Returns whether weight i is the first to use its image. image: that of
// weight i.
inline bool has_new_image(const Product& p, int i, int& image) {
    const PackedWeight& w = *p.weights[i].packed;
    image = 0;
    for (int j = 0; j < i; ++j) {
        const PackedWeight& other = *p.weights[j].packed;
        int earlier;
        if (is_dense(other.type->traits) || !has_new_image(p, j, earlier)) continue;
        const bool is_known = w.num_orders <= 1 && other.num_orders <= 1;
        if (is_known && w.num_orders == other.num_orders && order_id(w) == order_id(other)) return false;
        ++image;
    }
    return !is_dense(w.type->traits);
}

// The requirements that the weights of a product share.
struct ProductNeeds {
    int images = 0;
    bool normed_rows = false;
    explicit ProductNeeds(const Product& p) {
        if (p.x.is_image) return;
        for (int i = 0; i < p.num_weights; ++i) {
            int image;
            images += has_new_image(p, i, image) * p.heads;
            normed_rows |= (is_dense(p.weights[i].packed->type->traits) || p.adapters) && p.norm;
        }
    }
    // Bytes for the prepared activations: the int8 images, then normalized float rows.
    static int64_t image_bytes(const Product& p, int64_t rows) { return align64(Image::bytes(rows, p.k())); }
    int64_t bytes(const Product& p, int64_t rows) const {
        return images * image_bytes(p, rows) + (normed_rows ? align64(rows * p.x.cols * 4) : 0);
    }
};

inline bool has_dense(const Product& p) {
    for (int i = 0; i < p.num_weights; ++i)
        if (is_dense(p.weights[i].packed->type->traits)) return true;
    return false;
}

// A worker's private scratch.
struct ProductScratch {
    uint8_t* activations;  // for FEW_ROWS
    float* row;            // one normalized row
    uint8_t* tiles;        // unpacked units
    uint8_t* dense;        // activations for panels of floats
    int32_t* terms[2];     // for BLOCK_ROWS; for two alternating types (gate and up)
    float* sums[2];        // [panels in a run][rows][16], at most KEPT_ROWS x 16
    float* added;          // [panels][rows][16], what adapters add
    float* inner_rows;     // [ADDED_ROWS, inner numbers] for adapters

    static int64_t bytes(const Product& p) {
        ProductScratch s{};
        return s.place(p, nullptr);
    }
    explicit ProductScratch(const Product& p, void* memory) : ProductScratch() {
        place(p, static_cast<uint8_t*>(memory));
    }

  private:
    ProductScratch() = default;
    int64_t place(const Product& p, uint8_t* base) {
        int64_t at = 0;
        const auto take = [&](int64_t size) {
            uint8_t* const piece = base + at;
            at += align64(size);
            return piece;
        };
        activations = take(ProductNeeds(p).bytes(p, FEW_ROWS));
        row = reinterpret_cast<float*>(take(p.x.cols * 4));
        tiles = take(UNPACKED_BYTES);
        dense = take(has_dense(p) || p.adapters ? DENSE_BYTES : 0);
        added = reinterpret_cast<float*>(take(p.adapters ? ADDED_ROWS * ADDED_PANELS * PANEL_COLS * 4 : 0));
        inner_rows = reinterpret_cast<float*>(take(p.adapters ? ADDED_ROWS * p.adapters->width() * 4 : 0));
        for (int i = 0; i < 2; ++i) {
            terms[i] = reinterpret_cast<int32_t*>(take(terms_bytes(p.k())));
            sums[i] = reinterpret_cast<float*>(take(KEPT_ROWS * PANEL_COLS * 4));
        }
        return at;
    }
};

// The activations of a step, ready for the products.
struct Activations {
    Image first_image;
    int64_t image_bytes;
    const float* dense;  // rows of x, or normalized rows
    int64_t stride;      // between dense rows

    Image image(int i) const { return {first_image.data + i * image_bytes, first_image.rows, first_image.units}; }
};

// Normalizes and quantizes the rows [begin, end).
inline void prepare_rows(const Product& p, const ProductNeeds& needs, const Activations& a, float* row, int32_t begin,
                         int32_t end) {
    const int64_t k = p.x.cols;
    for (int32_t i = begin; i < end; ++i) {
        const float* source = p.x.data + i * k;
        if (p.norm) {
            float* const normed = needs.normed_rows ? const_cast<float*>(a.dense) + i * k : row;
            rms_norm_group(normed, source, p.norm, k, p.eps);
            source = normed;
        }
        for (int j = 0, image; j < p.num_weights; ++j) {
            if (!has_new_image(p, j, image)) continue;
            const PackedWeight& w = *p.weights[j].packed;
            for (int h = 0; h < p.heads; ++h)
                a.image(image + h).quantize_row(source + h * p.k(), i, w.num_orders > 1 ? w.order + h * w.k : w.order);
        }
    }
}

inline Image image_of(const View& x) { return {reinterpret_cast<uint8_t*>(x.data), x.rows, x.cols / UNIT_K}; }

inline Activations prepare(const Product& p, const ProductScratch& scratch, void* shared, Worker& worker) {
    if (p.x.is_image) return {image_of(p.x), 0, nullptr, 0};
    const ProductNeeds needs(p);
    const int32_t rows = p.x.rows;
    const bool few = rows <= FEW_ROWS;
    uint8_t* const base = few ? scratch.activations : static_cast<uint8_t*>(shared);
    const int64_t image_bytes = needs.image_bytes(p, rows);
    float* const normed = reinterpret_cast<float*>(base + needs.images * image_bytes);
    const Activations a{{base, rows, p.k() / UNIT_K}, image_bytes, needs.normed_rows ? normed : p.x.data, p.x.cols};
    if (few) {
        prepare_rows(p, needs, a, scratch.row, 0, rows);
    } else if (needs.images > 0 || needs.normed_rows) {
        const Range part = share(rows, worker);
        prepare_rows(p, needs, a, scratch.row, static_cast<int32_t>(part.begin), static_cast<int32_t>(part.end));
        worker.barrier();
    }
    return a;
}

struct RowBlock {
    int32_t first, count;  // first is a multiple of ROW_GROUP
};

// Consecutive panels of one weight.
struct PanelRun {
    const PackedWeight& weight;
    Image image;  // of the activations, in the weight's order of columns
    int image_index;
    int32_t first;
    int count;
    int32_t head;

    const uint8_t* data(int i) const { return weight.data + (first + i) * weight.panel_bytes; }
};

// Where the sums of a run of panels are stored, and where their results are written.
struct SumsPlace {
    float* sums;
    int slot;          // one of the two that are kept at a time (gate and up)
    const float* out;  // the first row of the first panel; null: unknown
    int64_t out_stride;
};

// Clears rows of 16 sums.
inline void zero_sums(float* sums, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) store(sums + r * PANEL_COLS, broadcast(0.0f));
}

}  // namespace
}  // namespace octavo
