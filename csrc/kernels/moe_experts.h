// The operands of a mixture of experts, its experts as products, and its rows grouped by expert.
#pragma once

#include "linear_product.h"
#include "moe_routing.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Moe, (x, router_x),
                 (router, gate, up, down, router_bias, selection_bias, gate_bias, up_bias, down_bias, expert_scale),
                 (top_k, scoring, normalize, num_groups, top_groups, group_best, on_input, num_identities, kind,
                  first_expert, adds_identities, limits_activated),
                 (scale, jitter, limit, up_offset));
// A Moe with adapters for the router, gate, up and down weights, each of which is listed once.
OCTAVO_SIGNATURE_WITH_TUPLES(AdaptedMoe, (x, router_x, slots),
                             (router, gate, up, down, router_bias, selection_bias, gate_bias, up_bias, down_bias,
                              expert_scale),
                             (top_k, scoring, normalize, num_groups, top_groups, group_best, on_input, num_identities,
                              kind, first_expert, adds_identities, limits_activated, num_slots, max_rank),
                             (scale, jitter, limit, up_offset), (weights));
// The operands of both can therefore be read in the same way.
static_assert(static_cast<int>(Moe::router_x) == static_cast<int>(AdaptedMoe::router_x) &&
                  static_cast<int>(Moe::expert_scale) == static_cast<int>(AdaptedMoe::expert_scale) &&
                  static_cast<int>(Moe::limits_activated) == static_cast<int>(AdaptedMoe::limits_activated) &&
                  static_cast<int>(Moe::up_offset) == static_cast<int>(AdaptedMoe::up_offset),
              "the operands of Moe come first");

bool moe_fits(const Args& args) {
    const View &x = args.inputs[Moe::x], &router_x = args.inputs[Moe::router_x], &out = args.output;
    const auto weight = [&args](int index) -> const Weight& { return args.weights[index]; };
    const PackedWeight *const router = weight(Moe::router).packed, *const down = weight(Moe::down).packed;
    if (!router || !down || !is_like(x, out) || down->n % out.cols != 0) return false;
    const int64_t experts = router->n, held = down->n / out.cols, inner = held * down->k,
                  first = args.ints[Moe::first_expert], identities = args.ints[Moe::num_identities];
    const bool has_matrices = router->k == (is_absent(router_x) ? x : router_x).cols &&
                              is_matrix(weight(Moe::gate), inner, x.cols) && is_matrix(weight(Moe::up), inner, x.cols);
    const bool has_vectors =
        is_vector_or_absent(weight(Moe::router_bias), experts) && is_vector_or_absent(weight(Moe::gate_bias), inner) &&
        is_vector_or_absent(weight(Moe::selection_bias), experts) && is_vector_or_absent(weight(Moe::up_bias), inner) &&
        is_vector_or_absent(weight(Moe::expert_scale), experts) &&
        is_vector_or_absent(weight(Moe::down_bias), held * out.cols);
    return has_matrices && has_vectors && (is_absent(router_x) || has_rows_of(router_x, x)) &&
           is_within(args.ints[Moe::top_k], 1, experts) && is_within(identities, 0, experts - 1) &&
           is_within(first, 0, experts - identities - held) && args.ints[Moe::num_groups] >= 0 &&
           is_activation(args.ints[Moe::kind]);
}

struct MoeOperands {
    View x, router_x, out;
    Weight router, router_bias;
    Weight gate_up[2], gate_up_bias[2];
    int num_gate_up;  // 1 if up is its own gate
    Weight down, down_bias;
    int32_t experts, intermediate, top_k;  // experts: all that can be chosen, including identities
    int32_t first_expert, held;            // the experts held here: those of this rank, or all
    int32_t num_identities;                // the last choices, which return the row; 0 if another rank adds them
    int64_t kind;
    float limit, up_offset;
    bool limits_activated;
    Routing routing;
    AdapterRows adapters;  // for the router; null parts: no row has one

    explicit MoeOperands(const Args& args)
        : x(args.inputs[Moe::x]),
          router_x(args.inputs[Moe::router_x].cols ? args.inputs[Moe::router_x] : x),
          out(args.output),
          router(args.weights[Moe::router]),
          router_bias(args.weights[Moe::router_bias]),
          gate_up{args.weights[Moe::gate], args.weights[Moe::up]},
          gate_up_bias{args.weights[Moe::gate_bias], args.weights[Moe::up_bias]},
          num_gate_up(gate_up[0].packed == gate_up[1].packed && gate_up_bias[0].data == gate_up_bias[1].data ? 1 : 2),
          down(args.weights[Moe::down]),
          down_bias(args.weights[Moe::down_bias]),
          experts(router.packed->n),
          intermediate(down.packed->k),
          top_k(int32(args, Moe::top_k)),
          first_expert(int32(args, Moe::first_expert)),
          held(down.packed->n / args.output.cols),
          num_identities(args.ints[Moe::adds_identities] ? int32(args, Moe::num_identities) : 0),
          kind(args.ints[Moe::kind]),
          limit(args.floats[Moe::limit]),
          up_offset(args.floats[Moe::up_offset]),
          limits_activated(args.ints[Moe::limits_activated] != 0),
          routing{experts,
                  top_k,
                  args.ints[Moe::scoring],
                  args.ints[Moe::normalize] != 0,
                  args.floats[Moe::scale],
                  args.floats[Moe::jitter],
                  int32(args, Moe::num_groups),
                  int32(args, Moe::top_groups),
                  int32(args, Moe::group_best),
                  args.ints[Moe::on_input] != 0,
                  args.weights[Moe::selection_bias].data,
                  args.weights[Moe::expert_scale].data},
          adapters{args.low_ranks,
                   args.tuple_length,
                   1,
                   args.low_ranks ? int32(args, AdaptedMoe::max_rank) : 0,
                   1,
                   router_x.cols,
                   args.low_ranks ? args.inputs[AdaptedMoe::slots].data : nullptr,
                   nullptr,
                   x.rows,
                   nullptr} {}

    // The products of a row with the factors A of its adapter: the largest number needed at a time.
    int64_t inner_numbers() const {
        if (!adapters.parts) return 0;
        const AdapterRows x_rows = expert_adapters(1, num_gate_up, x.cols),
                          hidden = expert_adapters(0, 1, intermediate);
        const int64_t of_x = x_rows.row_numbers(), most = of_x > hidden.row_numbers() ? of_x : hidden.row_numbers();
        return most > adapters.row_numbers() ? most : adapters.row_numbers();
    }
    // The adapters for `count` weights from `first` on that read k numbers.
    AdapterRows expert_adapters(int32_t first, int32_t count, int32_t k) const {
        AdapterRows found = adapters;
        found.parts += first;
        found.count = count;
        found.k = k;
        return found;
    }

  private:
    static int32_t int32(const Args& args, int i) { return static_cast<int32_t>(args.ints[i]); }
};

bool adapted_moe_fits(const Args& args) {
    if (!moe_fits(args) || !args.low_ranks || args.inputs[AdaptedMoe::x].is_image) return false;
    const View& slots = args.inputs[AdaptedMoe::slots];
    if (!has_cols(slots, 1) || !has_rows_of(slots, args.inputs[AdaptedMoe::x])) return false;
    const MoeOperands m(args);
    if (args.tuple_length != m.num_gate_up + 2) return false;
    const PackedWeight* const own[4] = {m.router.packed, m.gate_up[0].packed, m.gate_up[1].packed, m.down.packed};
    for (int i = 0; i < args.tuple_length; ++i)
        if (args.tuples[i].packed != own[i + 1 < args.tuple_length ? i : 3]) return false;
    return is_within(args.ints[AdaptedMoe::num_slots], 1, 1 << 16) &&
           is_within(args.ints[AdaptedMoe::max_rank], 1, 1 << 16);
}

// The panels that hold rows [expert * n, (expert + 1) * n) of a packed matrix. `skip`: columns that precede them.
inline PackedWeight expert_panels(const PackedWeight& whole, int32_t expert, int32_t n, int32_t& skip) {
    const int64_t first = static_cast<int64_t>(expert) * n, panel = first / PANEL_COLS;
    PackedWeight p = whole;
    p.data += panel * p.panel_bytes;
    if (p.ranges) p.ranges += panel * PANEL_COLS;
    if (p.num_orders > 1) {
        p.order += static_cast<int64_t>(expert) * p.k;
        p.order_id += expert;
        p.num_orders = 1;
    }
    skip = static_cast<int32_t>(first - panel * PANEL_COLS);
    p.n = skip + n;
    return p;
}

inline Product plain_product(const Weight* weights, const Weight* biases, int32_t count, View x, View out) {
    return {weights, biases, count, x, out, nullptr, nullptr, 0.0f, KIND_NONE, 1.0f, 0.0f};
}

// adapters: those of the rows; without parts if no row has one.
inline Product adapted_product(Product p, const AdapterRows& adapters) {
    if (adapters.parts) p.adapters = &adapters;
    return p;
}

// The matrices of one expert that read the same rows (gate and up, or down alone) as a product.
struct ExpertProduct {
    PackedWeight panels[2];
    Weight weights[2], biases[2];
    int32_t skip = 0;      // columns that precede the expert's
    AdapterRows adapters;  // for its rows
    Product product;

    // rows: those that chose the expert. n: features of its outputs. out: has `skip` extra columns in front.
    ExpertProduct(const Weight* whole, const Weight* bias, int count, int32_t expert, int32_t n, int32_t rows,
                  const AdapterRows& of_rows)
        : adapters(of_rows), product(plain_product(weights, biases, count, {nullptr, rows, whole->packed->k}, {})) {
        for (int i = 0; i < count; ++i) {
            panels[i] = expert_panels(*whole[i].packed, expert, n, skip);
            weights[i] = {&panels[i], nullptr, 0};
            biases[i] = {};
            // The skipped columns read the last biases of the previous expert, which are just as many.
            if (bias[i].data) biases[i] = {nullptr, bias[i].data + static_cast<int64_t>(expert) * n - skip, skip + n};
        }
        adapters.skip = skip;
        product = adapted_product(product, adapters);
    }
    ExpertProduct(const ExpertProduct&) = delete;
    ExpertProduct& operator=(const ExpertProduct&) = delete;
};

// The pairs of a row and a local expert that it chose, sorted by expert, then by row. Expert numbers count from the
// first local expert.
struct MoePairs {
    int32_t* starts;  // [experts + 2]: the first pair of each expert, then the number of pairs
    int32_t* used;    // experts with pairs
    int32_t num_used;
    int32_t* rows;         // [pairs]
    float* weights;        // [pairs]
    float* of_identities;  // [rows]: total weight of the identities that each row chose; null: no identities here

    int32_t count(int32_t expert) const { return starts[expert + 1] - starts[expert]; }

    // chosen, chosen_weights: [num_rows, top_k].
    void sort(const int32_t* chosen, const float* chosen_weights, int32_t num_rows, const MoeOperands& m) {
        // Counted one place after its expert, so that each entry ends up as the end of its expert's pairs.
        for (int32_t e = 0; e < m.experts + 2; ++e) starts[e] = 0;
        const auto is_here = [&](int32_t i) {
            return chosen[i] >= m.first_expert && chosen[i] < m.first_expert + m.held;
        };
        for (int32_t i = 0; i < num_rows * m.top_k; ++i)
            if (is_here(i)) ++starts[chosen[i] - m.first_expert + 2];
        for (int32_t e = 0; e < m.experts; ++e) starts[e + 2] += starts[e + 1];
        for (int32_t i = 0; i < num_rows * m.top_k; ++i) {
            if (!is_here(i)) continue;
            const int32_t pair = starts[chosen[i] - m.first_expert + 1]++;
            rows[pair] = i / m.top_k;
            weights[pair] = chosen_weights[i];
        }
        num_used = 0;
        for (int32_t e = 0; e < m.experts; ++e)
            if (count(e) > 0) used[num_used++] = e;
        for (int32_t r = 0; m.num_identities > 0 && r < num_rows; ++r) {
            of_identities[r] = 0.0f;
            for (int32_t i = r * m.top_k; i < (r + 1) * m.top_k; ++i)
                if (chosen[i] >= m.experts - m.num_identities) of_identities[r] += chosen_weights[i];
        }
    }
};

// The rows of all pairs as one kind of product reads them: int8 images, and floats for dense weights.
struct PairRows {
    uint8_t* images;
    int64_t row_bytes;    // in an image
    int64_t image_bytes;  // distance between the images for gate and up
    const float* dense;   // [pairs, stride]
    int64_t stride;
    int32_t units;
    bool shared_row;  // all pairs share a single row

    static int64_t image_row_bytes(int64_t k) { return align64(k / UNIT_K * ROW_UNIT_BYTES); }

    Activations of(const MoePairs& pairs, int32_t expert) const {
        const int64_t first = shared_row ? 0 : pairs.starts[expert];
        const Image image = {images + first * row_bytes, pairs.count(expert), units};
        return {image, image_bytes, dense + first * stride, stride};
    }
};

}  // namespace
}  // namespace octavo
