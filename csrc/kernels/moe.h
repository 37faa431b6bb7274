// Mixture of experts: router, choice of experts, and the experts one after the other, each a gated product and a
// product over the rows that chose it. A row adds its experts in increasing order, so it does not depend on others.
#pragma once

#include "linear_product.h"
#include "moe_routing.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Moe, (x), (router, gate, up, down, router_bias, selection_bias, gate_bias, up_bias, down_bias),
                 (top_k, scoring, normalize, num_groups, top_groups, group_best, kind), (scale, limit, up_offset));

struct MoeOperands {
    View x, out;
    Weight router, gate, up, down, router_bias, gate_bias, up_bias, down_bias;
    int32_t experts, intermediate, top_k;
    int64_t kind;
    float limit, up_offset;
    Routing routing;

    explicit MoeOperands(const Args& args)
        : x(args.inputs[Moe::x]),
          out(args.output),
          router(args.weights[Moe::router]),
          gate(args.weights[Moe::gate]),
          up(args.weights[Moe::up]),
          down(args.weights[Moe::down]),
          router_bias(args.weights[Moe::router_bias]),
          gate_bias(args.weights[Moe::gate_bias]),
          up_bias(args.weights[Moe::up_bias]),
          down_bias(args.weights[Moe::down_bias]),
          experts(router.packed->n),
          intermediate(down.packed->k),
          top_k(int32(args, Moe::top_k)),
          kind(args.ints[Moe::kind]),
          limit(args.floats[Moe::limit]),
          up_offset(args.floats[Moe::up_offset]),
          routing{experts,
                  top_k,
                  args.ints[Moe::scoring],
                  args.ints[Moe::normalize] != 0,
                  args.floats[Moe::scale],
                  int32(args, Moe::num_groups),
                  int32(args, Moe::top_groups),
                  int32(args, Moe::group_best),
                  args.weights[Moe::selection_bias].data} {}

  private:
    static int32_t int32(const Args& args, int i) { return static_cast<int32_t>(args.ints[i]); }
};

// The panels that hold the rows [expert * n, (expert + 1) * n) of a packed matrix, and the columns to skip in front.
struct ExpertWeight {
    PackedWeight packed;
    int32_t skip;
};
inline ExpertWeight expert_weight(const Weight& w, int32_t expert, int32_t n) {
    const int64_t first = static_cast<int64_t>(expert) * n, panel = first / PANEL_COLS;
    PackedWeight p = *w.packed;
    p.data += panel * p.panel_bytes;
    if (p.num_orders > 1) {
        p.order += static_cast<int64_t>(expert) * p.k;
        p.order_id += expert;
        p.num_orders = 1;
    }
    const int32_t skip = static_cast<int32_t>(first - panel * PANEL_COLS);
    p.n = skip + n;
    return {p, skip};
}

// The biases of an expert, with the columns in front that are skipped: numbers of the expert before.
inline Weight expert_bias(const Weight& table, int32_t expert, int32_t n, int32_t skip) {
    if (!table.data) return table;
    return {nullptr, table.data + static_cast<int64_t>(expert) * n - skip, skip + n};
}

inline Product plain_product(const Weight* weights, const Weight* biases, int32_t count, View x, View out) {
    return {weights, biases, count, x, out, nullptr, nullptr, 0.0f, KIND_NONE, 1.0f, 0.0f};
}
inline Product gated_product(const MoeOperands& m, const Weight* weights, const Weight* biases, View x, View out) {
    Product p = plain_product(weights, biases, 2, x, out);
    p.gate_kind = m.kind;
    p.gate_limit = m.limit;
    p.up_offset = m.up_offset;
    return p;
}

// The data that all workers share. `rows` is the largest number an expert can get: all of them.
struct MoeScratch {
    void* product;
    float* scores;                      // [rows, experts]
    float *rank, *groups;               // [rows, experts]
    int32_t* best;                      // [rows, experts]
    int32_t* chosen;                    // [rows, top_k], increasing
    float* weights;                     // [rows, top_k]
    float *x, *hidden, *aligned, *out;  // [rows, ...] of one expert; hidden and out with skipped columns

    static int64_t bytes(const MoeOperands& m, int64_t product_bytes) {
        MoeScratch s{};
        return s.place(m, product_bytes, nullptr);
    }
    MoeScratch(const MoeOperands& m, int64_t product_bytes, void* memory) : MoeScratch() {
        place(m, product_bytes, static_cast<uint8_t*>(memory));
    }

  private:
    MoeScratch() = default;
    int64_t place(const MoeOperands& m, int64_t product_bytes, uint8_t* base) {
        const int64_t rows = m.x.rows;
        int64_t at = 0;
        const auto take = [&](int64_t size) {
            uint8_t* const piece = base + at;
            at += align64(size);
            return piece;
        };
        const auto floats = [&](int64_t cols) { return reinterpret_cast<float*>(take(rows * cols * 4)); };
        product = take(product_bytes);
        scores = floats(m.experts);
        rank = floats(m.experts);
        groups = floats(m.experts);
        best = reinterpret_cast<int32_t*>(take(rows * m.experts * 4));
        chosen = reinterpret_cast<int32_t*>(take(rows * m.top_k * 4));
        weights = floats(m.top_k);
        x = floats(m.x.cols);
        hidden = floats(m.intermediate + PANEL_COLS);
        aligned = floats(m.intermediate);
        out = floats(m.out.cols + PANEL_COLS);
        return at;
    }
};

class MoeRun {
  public:
    MoeRun(const MoeOperands& m, const MoeScratch& s, Worker& worker) : m_(m), s_(s), worker_(worker) {}

    void route() {
        const View scores = {s_.scores, m_.x.rows, m_.experts};
        run_product(plain_product(&m_.router, &m_.router_bias, 1, m_.x, scores), s_.product, worker_);
        worker_.barrier();
        const Range rows = share(m_.x.rows, worker_);
        for (int64_t r = rows.begin; r < rows.end; ++r) {
            const int64_t at = r * m_.experts;
            choose_experts(m_.routing, s_.scores + at, {s_.rank + at, s_.groups + at, s_.best + at},
                           s_.chosen + r * m_.top_k, s_.weights + r * m_.top_k);
            __builtin_memset(m_.out.data + r * m_.out.cols, 0, sizeof(float) * m_.out.cols);
        }
        worker_.barrier();
    }

    void run_expert(int32_t expert) {
        const int32_t count = gather(expert);
        if (count == 0) return;
        worker_.barrier();
        const ExpertWeight gate = expert_weight(m_.gate, expert, m_.intermediate);
        const ExpertWeight up = expert_weight(m_.up, expert, m_.intermediate);
        const ExpertWeight down = expert_weight(m_.down, expert, m_.out.cols);
        const Weight gate_up[2] = {{&gate.packed, nullptr, 0}, {&up.packed, nullptr, 0}};
        const Weight gate_up_bias[2] = {expert_bias(m_.gate_bias, expert, m_.intermediate, gate.skip),
                                        expert_bias(m_.up_bias, expert, m_.intermediate, up.skip)};
        const Weight last = {&down.packed, nullptr, 0};
        const Weight last_bias = expert_bias(m_.down_bias, expert, m_.out.cols, down.skip);
        const View x = {s_.x, count, m_.x.cols}, hidden = {s_.hidden, count, gate.packed.n};
        run_product(gated_product(m_, gate_up, gate_up_bias, x, hidden), s_.product, worker_);
        worker_.barrier();
        const View aligned = {align(hidden, gate.skip), count, m_.intermediate};
        const View out = {s_.out, count, down.packed.n};
        run_product(plain_product(&last, &last_bias, 1, aligned, out), s_.product, worker_);
        worker_.barrier();
        scatter(expert, down.packed.n, down.skip);
        worker_.barrier();
    }

  private:
    // The weight of an expert in a row; null if it was not chosen.
    const float* chosen_weight(int64_t row, int32_t expert) const {
        for (int32_t i = 0; i < m_.top_k; ++i)
            if (s_.chosen[row * m_.top_k + i] == expert) return s_.weights + row * m_.top_k + i;
        return nullptr;
    }

    // Copies the rows that chose the expert next to each other, worker by worker. Returns their number.
    int32_t gather(int32_t expert) {
        int32_t count = 0;
        for (int64_t r = 0; r < m_.x.rows; ++r) {
            if (!chosen_weight(r, expert)) continue;
            if (count % worker_.count == worker_.index)
                __builtin_memcpy(s_.x + static_cast<int64_t>(count) * m_.x.cols, m_.x.data + r * m_.x.cols,
                                 sizeof(float) * m_.x.cols);
            ++count;
        }
        return count;
    }

    // The rows of `hidden` without skipped columns.
    float* align(View hidden, int32_t skip) {
        if (skip == 0) return hidden.data;
        const Range rows = share(hidden.rows, worker_);
        for (int64_t r = rows.begin; r < rows.end; ++r)
            __builtin_memcpy(s_.aligned + r * m_.intermediate, hidden.data + r * hidden.cols + skip,
                             sizeof(float) * m_.intermediate);
        worker_.barrier();
        return s_.aligned;
    }

    void scatter(int32_t expert, int32_t stride, int32_t skip) {
        int64_t i = 0;
        for (int64_t r = 0; r < m_.x.rows; ++r) {
            const float* const weight = chosen_weight(r, expert);
            if (!weight) continue;
            const float* const y = s_.out + i++ * stride + skip;
            if (i % worker_.count != worker_.index) continue;
            float* const out = m_.out.data + r * m_.out.cols;
            for (int32_t c = 0; c < m_.out.cols; c += 16) {
                const int lanes = m_.out.cols - c < 16 ? m_.out.cols - c : 16;
                store_partial(out + c,
                              fma(broadcast(*weight), load_partial(y + c, lanes), load_partial(out + c, lanes)), lanes);
            }
        }
    }

    const MoeOperands& m_;
    const MoeScratch& s_;
    Worker& worker_;
};

// Scratch of the largest product that an expert or the router can need.
inline ScratchSizes moe_product_scratch(const MoeOperands& m) {
    const Weight gate_up[2] = {m.gate, m.up};
    const View hidden = {nullptr, m.x.rows, m.intermediate};
    const ScratchSizes sizes[3] = {product_scratch(plain_product(&m.router, nullptr, 1, m.x, m.out)),
                                   product_scratch(gated_product(m, gate_up, nullptr, m.x, hidden)),
                                   product_scratch(plain_product(&m.down, nullptr, 1, hidden, m.out))};
    ScratchSizes largest = {0, 0};
    for (const ScratchSizes& s : sizes) {
        largest.per_worker = s.per_worker > largest.per_worker ? s.per_worker : largest.per_worker;
        largest.shared = s.shared > largest.shared ? s.shared : largest.shared;
    }
    return largest;
}

}  // namespace
}  // namespace octavo
