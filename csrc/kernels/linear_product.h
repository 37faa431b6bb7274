// A fused product of some rows of activations with one or several packed weights:
//     [norm of x] -> products side by side, or kind(gate) * up -> + bias, scale, soft cap -> + residual
// Work is shared out as (block of rows, panel) pairs, contiguous for each worker.
#pragma once

#include "activations.h"
#include "elementwise.h"
#include "kernel.h"
#include "linear_dense.h"
#include "linear_image.h"
#include "norms.h"

#if defined(OCTAVO_ISA_amx)
#include "linear_amx.h"
#elif defined(OCTAVO_ISA_avx512vnni) || defined(OCTAVO_ISA_avx512)
#include "linear_avx512.h"
#elif defined(OCTAVO_ISA_avx2)
#include "linear_avx2.h"
#else
#include "linear_scalar.h"
#endif

namespace octavo {
namespace {

constexpr int FEW_ROWS = 8;      // up to so many rows every worker prepares its own activations: no barrier
constexpr int BLOCK_ROWS = 128;  // activations of a block stay in the L2 cache
constexpr int TILE_UNITS = 16;   // units that are unpacked at once: they stay in the L1 cache
constexpr int LANES = 2;         // panels that walk over k together

// One fused product. Everything but `weights` may be absent.
struct Product {
    const Weight* weights;
    const Weight* biases;  // one a weight
    int32_t num_weights;
    View x, out;
    const float* residual;
    const float* norm;  // RMSNorm weight
    float eps, weight_offset;
    int64_t gate_kind;  // KIND_NONE: side by side
    float scale, softcap;
};

constexpr int64_t align64(int64_t n) { return (n + 63) / 64 * 64; }

// What the weights of a product need in common.
struct ProductNeeds {
    bool quantized = false, normed_rows = false;
    explicit ProductNeeds(const Product& p) {
        for (int i = 0; i < p.num_weights; ++i) {
            const bool dense = is_dense(p.weights[i].packed->type);
            quantized |= !dense;
            normed_rows |= dense && p.norm;
        }
    }
    // Bytes of the prepared activations: the int8 image, then normed float rows.
    int64_t image_bytes(const Product& p, int64_t rows) const {
        return quantized ? align64(Image::bytes(rows, p.x.cols)) : 0;
    }
    int64_t bytes(const Product& p, int64_t rows) const {
        return image_bytes(p, rows) + (normed_rows ? align64(rows * p.x.cols * 4) : 0);
    }
};

constexpr int64_t tile_bytes() {
    const int64_t wide = sizeof(UnitTile<WeightType::Q8_0>), halves = sizeof(UnitTile<WeightType::Q2_K>);
    return align64(wide > halves ? wide : halves) * TILE_UNITS;
}

// The private scratch of a worker.
struct ProductScratch {
    uint8_t* activations;   // of FEW_ROWS
    float* row;             // one normed row
    int32_t* terms[LANES];  // of BLOCK_ROWS
    uint8_t* tiles[LANES];
    float* sums[LANES];  // [BLOCK_ROWS][16]

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
        for (int i = 0; i < LANES; ++i) {
            terms[i] = reinterpret_cast<int32_t*>(take(static_cast<int64_t>(BLOCK_ROWS) * (p.x.cols / UNIT_K) * 8));
            tiles[i] = take(tile_bytes());
            sums[i] = reinterpret_cast<float*>(take(BLOCK_ROWS * PANEL_COLS * 4));
        }
        return at;
    }
};

// The activations of a step, ready for the products.
struct Activations {
    Image image;
    const float* dense;  // rows of x or normed rows, [rows, k]
};

// Normalizes and quantizes the rows [begin, end).
inline void prepare_rows(const Product& p, const Activations& a, float* row, int32_t begin, int32_t end) {
    const ProductNeeds needs(p);
    const int64_t k = p.x.cols;
    for (int32_t i = begin; i < end; ++i) {
        const float* source = p.x.data + i * k;
        if (p.norm) {
            float* const normed = needs.normed_rows ? const_cast<float*>(a.dense) + i * k : row;
            rms_norm_group(normed, source, p.norm, k, p.eps, p.weight_offset);
            source = normed;
        }
        if (needs.quantized) a.image.quantize_row(source, i);
    }
}

inline Activations prepare(const Product& p, const ProductScratch& scratch, void* shared, Worker& worker) {
    const ProductNeeds needs(p);
    const int32_t rows = p.x.rows;
    const bool few = rows <= FEW_ROWS;
    uint8_t* const base = few ? scratch.activations : static_cast<uint8_t*>(shared);
    float* const normed = reinterpret_cast<float*>(base + needs.image_bytes(p, rows));
    const Activations a{{base, rows, p.x.cols / UNIT_K}, needs.normed_rows ? normed : p.x.data};
    if (few) {
        prepare_rows(p, a, scratch.row, 0, rows);
    } else if (needs.quantized || needs.normed_rows) {
        const Range part = share(rows, worker);
        prepare_rows(p, a, scratch.row, static_cast<int32_t>(part.begin), static_cast<int32_t>(part.end));
        worker.barrier();
    }
    return a;
}

struct RowBlock {
    int32_t first, count;  // first is a multiple of ROW_GROUP
};

// The terms of a block depend on the type of the weight only: kept until either changes.
struct TermsKey {
    WeightType type = WeightType::F32;
    int32_t first = -1;
};

// Panels that walk over k together: they share the activations in the L1 cache.
struct PanelPair {
    const uint8_t* data[LANES];
    int count;
    int64_t step;  // bytes from a panel to the one that its lane takes next
};

inline void prefetch_bytes(const uint8_t* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// sums[lane + i] += activations of the block * panels.data[i]
template <WeightType T>
void accumulate_quantized(const PanelPair& panels, const Image& image, RowBlock block, const ProductScratch& s,
                          int lane) {
    const int32_t* const terms = s.terms[lane];
    const int32_t first_group = block.first / ROW_GROUP;
    const auto terms_of = [&](int32_t g, int32_t unit, int rows) {
        return terms + (static_cast<int64_t>(g) * ROW_GROUP * image.units + unit * rows) * TERM_COUNT<T>;
    };
    if (image.rows <= PACKED_ROWS) {
        for (int i = 0; i < panels.count; ++i)
            for (int32_t g = 0; g * ROW_GROUP < block.count; ++g) {
                const ImageGroup a = image.group(g);
                multiply_packed<T>(panels.data[i], image.units, a, terms_of(g, 0, a.rows),
                                   s.sums[lane + i] + g * ROW_GROUP * PANEL_COLS);
            }
        return;
    }
    constexpr int64_t PIECE_BYTES =
        static_cast<int64_t>(TILE_UNITS) / Format<T>::layout.units() * Format<T>::layout.block_bytes();
    for (int32_t u0 = 0; u0 < image.units; u0 += TILE_UNITS) {
        const int units = image.units - u0 < TILE_UNITS ? image.units - u0 : TILE_UNITS;
        for (int i = 0; i < panels.count; ++i) {
            UnitCursor<T> cursor(panels.data[i], u0);
            UnitTile<T>* const tiles = reinterpret_cast<UnitTile<T>*>(s.tiles[lane + i]);
            for (int u = 0; u < units; ++u, cursor.next()) unpack_unit<T>(cursor, tiles[u]);
            // The next piece comes from memory while this one is multiplied.
            const bool last = u0 + TILE_UNITS >= image.units;
            prefetch_bytes(last ? panels.data[i] + panels.step : cursor.header, PIECE_BYTES);
        }
        for (int32_t g = 0; g * ROW_GROUP < block.count; ++g) {
            const ImageGroup a = image.group(first_group + g);
            for (int i = 0; i < panels.count; ++i)
                multiply_tiles<T>(reinterpret_cast<UnitTile<T>*>(s.tiles[lane + i]), units, a.from(u0),
                                  terms_of(g, u0, a.rows), s.sums[lane + i] + g * ROW_GROUP * PANEL_COLS);
        }
    }
}

// One worker's part of a product.
class ProductRun {
  public:
    ProductRun(const Product& p, const ProductScratch& s, const Activations& a) : p_(p), s_(s), a_(a) {}

    // Items are (block of rows, panel); a worker takes those whose cost begins in its share.
    void run(const Worker& worker) {
        const int32_t blocks = (p_.x.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        int64_t cost = 0;
        for (int i = 0; i < num_columns(); ++i) cost += num_panels(*p_.weights[i].packed) * panel_cost(i);
        const Range part = share(cost * blocks, worker);
        for (int32_t b = 0; b < blocks; ++b) {
            const int32_t first = b * BLOCK_ROWS;
            block_ = {first, p_.x.rows - first < BLOCK_ROWS ? p_.x.rows - first : BLOCK_ROWS};
            run_block({part.begin - b * cost, part.end - b * cost});
        }
    }

  private:
    bool gated() const { return p_.gate_kind != KIND_NONE; }
    int32_t num_columns() const { return gated() ? 1 : p_.num_weights; }

    // Few rows: bytes to read. Many rows: products, of which bytes take twice as many as smaller codes.
    int64_t panel_cost(int i) const {
        int64_t cost = 0;
        for (int j = i; j < (gated() ? p_.num_weights : i + 1); ++j) {
            const PackedWeight& w = *p_.weights[j].packed;
            if (p_.x.rows <= PACKED_ROWS)
                cost += w.panel_bytes / 64;
            else
                cost += w.type == WeightType::Q8_0 || is_dense(w.type) ? 2 : 1;
        }
        return cost;
    }

    // The panels whose cost begins in [range.begin, range.end), counted from the first panel of the block.
    void run_block(Range range) {
        int64_t begin = 0;
        int32_t column = 0;
        for (int i = 0; i < num_columns(); ++i) {
            const PackedWeight& w = *p_.weights[i].packed;
            const int64_t cost = panel_cost(i), panels = num_panels(w);
            const Range mine = {first_at(range.begin - begin, cost, panels), first_at(range.end - begin, cost, panels)};
            run_panels(i, static_cast<int32_t>(mine.begin), static_cast<int32_t>(mine.end), column);
            begin += cost * panels;
            column += w.n;
        }
    }

    static int64_t first_at(int64_t at, int64_t cost, int64_t panels) {
        if (at <= 0) return 0;
        const int64_t panel = (at + cost - 1) / cost;
        return panel < panels ? panel : panels;
    }

    static const uint8_t* panel_data(const PackedWeight& w, int32_t panel) { return w.data + panel * w.panel_bytes; }

    void run_panels(int i, int32_t begin, int32_t end, int32_t column) {
        const int step = gated() ? 1 : LANES;
        for (int32_t panel = begin; panel < end; panel += step) {
            const int count = end - panel < step ? 1 : step;
            clear_sums();
            prefetch_output(column + panel * PANEL_COLS, count);
            if (gated()) {
                accumulate_gated(panel);
                finish_gated(panel);
            } else {
                const PackedWeight& w = *p_.weights[i].packed;
                const PanelPair panels = {
                    {panel_data(w, panel), panel_data(w, panel + 1)}, count, count * w.panel_bytes};
                accumulate(w, panels, 0);
                for (int lane = 0; lane < count; ++lane) finish(i, panel + lane, column, s_.sums[lane]);
            }
        }
    }

    void accumulate_gated(int32_t panel) {
        const PackedWeight &gate = *p_.weights[0].packed, &up = *p_.weights[1].packed;
        const uint8_t *gate_data = panel_data(gate, panel), *up_data = panel_data(up, panel);
        if (gate.type == up.type) return accumulate(gate, {{gate_data, up_data}, 2, gate.panel_bytes}, 0);
        accumulate(gate, {{gate_data, nullptr}, 1, gate.panel_bytes}, 0);
        accumulate(up, {{up_data, nullptr}, 1, up.panel_bytes}, 1);
    }

    // Many rows lie far apart: by the time they are written their cache lines are here.
    void prefetch_output(int32_t column, int panels) const {
        if (block_.count <= FEW_ROWS) return;
        for (int32_t r = 0; r < block_.count; ++r)
            for (int i = 0; i < panels; ++i)
                __builtin_prefetch(
                    p_.out.data + static_cast<int64_t>(block_.first + r) * p_.out.cols + column + i * PANEL_COLS, 1, 2);
    }

    void clear_sums() {
        for (int lane = 0; lane < LANES; ++lane)
            for (int32_t r = 0; r < block_.count; ++r) store(s_.sums[lane] + r * PANEL_COLS, broadcast(0.0f));
    }
    // sums[lane ...] += activations of the block * panels of w
    void accumulate(const PackedWeight& w, const PanelPair& panels, int lane) {
        if (is_dense(w.type)) {
            const DenseRows rows = {a_.dense + static_cast<int64_t>(block_.first) * w.k, w.k, block_.count};
            for (int i = 0; i < panels.count; ++i)
                multiply_dense_panel(w.type, panels.data[i], w.k, rows, s_.sums[lane + i]);
            return;
        }
        with_quantized_type(w.type, [&](auto tag) {
            constexpr WeightType T = decltype(tag)::type;
            if (keys_[lane].type != T || keys_[lane].first != block_.first) {
                int32_t* out = s_.terms[lane];
                for (int32_t g = 0; g * ROW_GROUP < block_.count; ++g)
                    out = write_terms<T>(a_.image.group(block_.first / ROW_GROUP + g), a_.image.units, out);
                keys_[lane] = {T, block_.first};
            }
            accumulate_quantized<T>(panels, a_.image, block_, s_, lane);
        });
    }

    static int lanes_of(const PackedWeight& w, int32_t panel) {
        const int32_t left = w.n - panel * PANEL_COLS;
        return left < PANEL_COLS ? left : PANEL_COLS;
    }

    // Calls f(index of the row in the block, its sums + bias of weight i) and writes what it returns.
    template <typename F>
    void write_rows(int i, int32_t panel, int32_t column, const F& f) const {
        const int lanes = lanes_of(*p_.weights[i].packed, panel);
        const int64_t stride = p_.out.cols;
        const int64_t at = block_.first * stride + column + panel * PANEL_COLS;
        float* out = p_.out.data + at;
        const float* residual = p_.residual ? p_.residual + at : nullptr;
        for (int32_t r = 0; r < block_.count; ++r, out += stride) {
            F32x16 y = f(r);
            if (lanes == PANEL_COLS) {
                if (residual) y = y + load(residual + r * stride);
                store(out, y);
            } else {
                if (residual) y = y + load_partial(residual + r * stride, lanes);
                store_partial(out, y, lanes);
            }
        }
    }

    // Reads rows of sums with the bias of weight i.
    struct BiasedSums {
        const float* sums;
        F32x16 bias;
        bool biased;
        F32x16 operator()(int32_t r) const {
            const F32x16 y = load(sums + r * PANEL_COLS);
            return biased ? y + bias : y;
        }
    };
    BiasedSums biased_sums(int i, int32_t panel, const float* sums) const {
        const float* const bias = p_.biases ? p_.biases[i].data : nullptr;
        if (!bias) return {sums, broadcast(0.0f), false};
        return {sums, load_partial(bias + panel * PANEL_COLS, lanes_of(*p_.weights[i].packed, panel)), true};
    }

    void finish(int i, int32_t panel, int32_t column, const float* sums) const {
        const BiasedSums rows = biased_sums(i, panel, sums);
        if (p_.scale == 1.0f && p_.softcap == 0.0f) return write_rows(i, panel, column, rows);
        const F32x16 scale = broadcast(p_.scale), cap = broadcast(p_.softcap);
        if (p_.softcap == 0.0f) return write_rows(i, panel, column, [&](int32_t r) { return rows(r) * scale; });
        write_rows(i, panel, column, [&](int32_t r) { return cap * tanh(rows(r) * scale / cap); });
    }

    void finish_gated(int32_t panel) const {
        const BiasedSums gate = biased_sums(0, panel, s_.sums[0]), up = biased_sums(1, panel, s_.sums[1]);
        with_activation(p_.gate_kind, [&](auto activation) {
            write_rows(0, panel, 0, [&](int32_t r) { return activation(gate(r)) * up(r); });
        });
    }

    const Product& p_;
    const ProductScratch& s_;
    const Activations& a_;
    RowBlock block_{};
    TermsKey keys_[LANES];
};

inline void run_product(const Product& p, void* shared, Worker& worker) {
    if (p.x.rows == 0) return;
    const ProductScratch scratch(p, worker.scratch);
    const Activations a = prepare(p, scratch, shared, worker);
    ProductRun(p, scratch, a).run(worker);
}

// `p` with the largest number of rows.
inline ScratchSizes product_scratch(const Product& p) {
    const int64_t rows = p.x.rows;
    return {static_cast<size_t>(ProductScratch::bytes(p)),
            static_cast<size_t>(rows > FEW_ROWS ? ProductNeeds(p).bytes(p, rows) : 0)};
}

}  // namespace
}  // namespace octavo
