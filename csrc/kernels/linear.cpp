// Linear, HeadLinear, Logits, FusedLinear, MoE and their variants with adapters: one product with different operands,
// compiled once.
#include "linear_product.h"
#include "moe.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Linear, (x), (weight, bias), (), ());
OCTAVO_SIGNATURE(HeadLinear, (x), (weight), (), ());
OCTAVO_SIGNATURE(Logits, (x), (weight, bias), (), (softcap, scale));
OCTAVO_SIGNATURE_WITH_TUPLES(FusedLinear, (x, residual), (norm), (kind), (eps), (weights, biases));
OCTAVO_SIGNATURE_WITH_TUPLES(AdaptedLinear, (x, slots, residual), (norm), (kind, heads, num_slots, max_rank, is_head),
                             (eps, softcap, scale), (weights, biases));

template <typename F>
Product plain_operands(const Args& args) {
    return {args.weights + F::weight,
            args.weights + F::bias,
            1,
            args.inputs[F::x],
            args.output,
            nullptr,
            nullptr,
            0.0f,
            KIND_NONE,
            1.0f,
            0.0f};
}

Product head_linear_operands(const Args& args) {
    const Weight* const weight = args.weights + HeadLinear::weight;
    Product p = plain_product(weight, nullptr, 1, args.inputs[HeadLinear::x], args.output);
    p.heads = p.x.cols / weight->packed->k;
    return p;
}

Product logits_operands(const Args& args) {
    Product p = plain_operands<Logits>(args);
    p.softcap = args.floats[Logits::softcap];
    p.scale = args.floats[Logits::scale];
    return p;
}

template <typename F>
Product fused_operands(const Args& args) {
    const int32_t n = args.tuple_length;
    return {args.tuples + F::weights * n,
            args.tuples + F::biases * n,
            n,
            args.inputs[F::x],
            args.output,
            args.inputs[F::residual].data,
            args.weights[F::norm].data,
            args.floats[F::eps],
            args.ints[F::kind],
            1.0f,
            0.0f};
}

// The operands of an AdaptedLinear. The product points to `rows`.
struct AdaptedOperands {
    AdapterRows rows;
    Product product;

    explicit AdaptedOperands(const Args& args)
        : rows{args.low_ranks,
               args.tuple_length,
               args.tuple_length,
               static_cast<int32_t>(args.ints[AdaptedLinear::max_rank]),
               static_cast<int32_t>(args.ints[AdaptedLinear::heads]),
               args.tuples[0].packed->k,
               args.inputs[AdaptedLinear::slots].data,
               nullptr,
               args.inputs[AdaptedLinear::x].rows,
               nullptr},
          product(fused_operands<AdaptedLinear>(args)) {
        product.scale = args.floats[AdaptedLinear::scale];
        product.softcap = args.floats[AdaptedLinear::softcap];
        product.heads = rows.heads;
        product.adapters = &rows;
        rows.inner =
            reinterpret_cast<float*>(static_cast<uint8_t*>(args.shared_scratch) + product_scratch(product).shared);
    }
    AdaptedOperands(const AdaptedOperands&) = delete;
    AdaptedOperands& operator=(const AdaptedOperands&) = delete;
};

void linear(const Args& args, const Step&, Worker& worker) {
    run_product(plain_operands<Linear>(args), args.shared_scratch, worker);
}
ScratchSizes linear_scratch(const Args& largest, const Step&, int32_t) {
    return product_scratch(plain_operands<Linear>(largest));
}

void head_linear(const Args& args, const Step&, Worker& worker) {
    run_product(head_linear_operands(args), args.shared_scratch, worker);
}
ScratchSizes head_linear_scratch(const Args& largest, const Step&, int32_t) {
    return product_scratch(head_linear_operands(largest));
}

void logits(const Args& args, const Step&, Worker& worker) {
    run_product(logits_operands(args), args.shared_scratch, worker);
}
ScratchSizes logits_scratch(const Args& largest, const Step&, int32_t) {
    return product_scratch(logits_operands(largest));
}

void fused_linear(const Args& args, const Step&, Worker& worker) {
    run_product(fused_operands<FusedLinear>(args), args.shared_scratch, worker);
}
ScratchSizes fused_linear_scratch(const Args& largest, const Step&, int32_t) {
    return product_scratch(fused_operands<FusedLinear>(largest));
}

void adapted_linear(const Args& args, const Step&, Worker& worker) {
    const AdaptedOperands operands(args);
    run_product(operands.product, args.shared_scratch, worker);
}
ScratchSizes adapted_linear_scratch(const Args& largest, const Step&, int32_t) {
    const AdaptedOperands operands(largest);
    ScratchSizes sizes = product_scratch(operands.product);
    sizes.shared += static_cast<size_t>(operands.rows.inner_bytes());
    return sizes;
}

void moe(const Args& args, const Step&, Worker& worker) { run_moe(MoeOperands(args), args.shared_scratch, worker); }
ScratchSizes moe_scratch(const Args& largest, const Step&, int32_t) { return moe_scratch_sizes(MoeOperands(largest)); }

void adapted_moe(const Args& args, const Step& step, Worker& worker) { moe(args, step, worker); }
ScratchSizes adapted_moe_scratch(const Args& largest, const Step& limits, int32_t workers) {
    return moe_scratch(largest, limits, workers);
}

bool is_product(const Weight& weight, const Weight& bias, const View& x, const View& out) {
    return is_matrix(weight, out.cols, x.cols) && is_vector_or_absent(bias, out.cols);
}

bool linear_fits(const Args& args) {
    return is_product(args.weights[Linear::weight], args.weights[Linear::bias], args.inputs[Linear::x], args.output) &&
           has_rows_of(args.inputs[Linear::x], args.output);
}

bool logits_fits(const Args& args) {
    return is_product(args.weights[Logits::weight], args.weights[Logits::bias], args.inputs[Logits::x], args.output) &&
           has_rows_of(args.inputs[Logits::x], args.output);
}

bool head_linear_fits(const Args& args) {
    const PackedWeight* const weight = args.weights[HeadLinear::weight].packed;
    const View& x = args.inputs[HeadLinear::x];
    if (!weight || x.cols <= 0 || x.cols % weight->k != 0) return false;
    const int32_t heads = x.cols / weight->k;
    return weight->n % heads == 0 && weight->n / heads % PANEL_COLS == 0 && has_cols(args.output, weight->n) &&
           has_rows_of(x, args.output);
}

bool fused_linear_fits(const Args& args) {
    const View &x = args.inputs[FusedLinear::x], &residual = args.inputs[FusedLinear::residual];
    const int32_t n = args.tuple_length;
    const int64_t kind = args.ints[FusedLinear::kind];
    int64_t cols = 0;
    for (int32_t i = 0; i < n; ++i) {
        const Weight& weight = args.tuples[FusedLinear::weights * n + i];
        if (!weight.packed || weight.packed->k != x.cols) return false;
        if (!is_vector_or_absent(args.tuples[FusedLinear::biases * n + i], weight.packed->n)) return false;
        cols += weight.packed->n;
    }
    if (kind != KIND_NONE && (n != 2 || !is_activation(kind) || args.tuples[0].packed->n * 2 != cols)) return false;
    return n > 0 && has_cols(args.output, kind == KIND_NONE ? cols : cols / 2) && has_rows_of(x, args.output) &&
           (is_absent(residual) || is_like(residual, args.output)) &&
           is_vector_or_absent(args.weights[FusedLinear::norm], x.cols);
}

bool adapted_linear_fits(const Args& args) {
    const View &x = args.inputs[AdaptedLinear::x], &residual = args.inputs[AdaptedLinear::residual];
    const int32_t n = args.tuple_length;
    const int64_t kind = args.ints[AdaptedLinear::kind], heads = args.ints[AdaptedLinear::heads];
    int64_t cols = 0;
    if (n < 1 || heads < 1 || (heads > 1 && n > 1)) return false;
    for (int32_t i = 0; i < n; ++i) {
        const PackedWeight* const weight = args.tuples[AdaptedLinear::weights * n + i].packed;
        if (!weight || weight->k * heads != x.cols || (heads > 1 && weight->n % (heads * PANEL_COLS) != 0))
            return false;
        if (!is_vector_or_absent(args.tuples[AdaptedLinear::biases * n + i], weight->n)) return false;
        cols += weight->n;
    }
    if (kind != KIND_NONE && (n != 2 || !is_activation(kind) || args.tuples[0].packed->n * 2 != cols)) return false;
    return args.low_ranks && is_within(args.ints[AdaptedLinear::num_slots], 1, 1 << 16) &&
           is_within(args.ints[AdaptedLinear::max_rank], 1, 1 << 16) && !x.is_image &&
           has_cols(args.output, kind == KIND_NONE ? cols : cols / 2) && has_rows_of(x, args.output) &&
           has_cols(args.inputs[AdaptedLinear::slots], 1) && has_rows_of(args.inputs[AdaptedLinear::slots], x) &&
           (is_absent(residual) || is_like(residual, args.output)) &&
           is_vector_or_absent(args.weights[AdaptedLinear::norm], x.cols);
}

}  // namespace
OCTAVO_KERNEL_WITH_SCRATCH(linear, Linear, linear_scratch);
OCTAVO_KERNEL_WITH_SCRATCH(head_linear, HeadLinear, head_linear_scratch);
OCTAVO_KERNEL_WITH_SCRATCH(logits, Logits, logits_scratch);
OCTAVO_KERNEL_WITH_SCRATCH(fused_linear, FusedLinear, fused_linear_scratch);
OCTAVO_KERNEL_WITH_SCRATCH(adapted_linear, AdaptedLinear, adapted_linear_scratch);
OCTAVO_KERNEL_WITH_SCRATCH(moe, Moe, moe_scratch);
OCTAVO_KERNEL_WITH_SCRATCH(adapted_moe, AdaptedMoe, adapted_moe_scratch);
}  // namespace octavo
