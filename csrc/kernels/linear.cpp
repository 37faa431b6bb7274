// Linear, HeadLinear, Logits, FusedLinear and MoE: one product with different operands around it, compiled once.
#include "linear_product.h"
#include "moe.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Linear, (x), (weight, bias), (), ());
OCTAVO_SIGNATURE(HeadLinear, (x), (weight), (), ());
OCTAVO_SIGNATURE(Logits, (x), (weight, bias), (), (softcap, scale));
OCTAVO_SIGNATURE_WITH_TUPLES(FusedLinear, (x, residual), (norm), (kind), (eps), (weights, biases));

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

Product fused_linear_operands(const Args& args) {
    const int32_t n = args.tuple_length;
    return {args.tuples + FusedLinear::weights * n,
            args.tuples + FusedLinear::biases * n,
            n,
            args.inputs[FusedLinear::x],
            args.output,
            args.inputs[FusedLinear::residual].data,
            args.weights[FusedLinear::norm].data,
            args.floats[FusedLinear::eps],
            args.ints[FusedLinear::kind],
            1.0f,
            0.0f};
}

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
    run_product(fused_linear_operands(args), args.shared_scratch, worker);
}
ScratchSizes fused_linear_scratch(const Args& largest, const Step&, int32_t) {
    return product_scratch(fused_linear_operands(largest));
}

void moe(const Args& args, const Step&, Worker& worker) { run_moe(MoeOperands(args), args.shared_scratch, worker); }
ScratchSizes moe_scratch(const Args& largest, const Step&, int32_t) { return moe_scratch_sizes(MoeOperands(largest)); }

}  // namespace
OCTAVO_KERNEL_WITH_SCRATCH(linear, Linear, linear_scratch);
OCTAVO_KERNEL_WITH_SCRATCH(head_linear, HeadLinear, head_linear_scratch);
OCTAVO_KERNEL_WITH_SCRATCH(logits, Logits, logits_scratch);
OCTAVO_KERNEL_WITH_SCRATCH(fused_linear, FusedLinear, fused_linear_scratch);
OCTAVO_KERNEL_WITH_SCRATCH(moe, Moe, moe_scratch);
}  // namespace octavo
