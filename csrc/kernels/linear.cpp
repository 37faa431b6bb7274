// Linear, Logits, FusedLinear and MoE: one product with different operands around it, compiled once.
#include "linear_product.h"
#include "moe.h"

namespace octavo {
namespace {

Product linear_operands(const Args& args) {
    return {args.weights, args.weights + 1, 1,    args.inputs[0], args.output, nullptr,
            nullptr,      0.0f,             KIND_NONE, 1.0f,      0.0f};
}

// floats: softcap, scale
Product logits_operands(const Args& args) {
    Product p = linear_operands(args);
    p.softcap = args.floats[0];
    p.scale = args.floats[1];
    return p;
}

// inputs: x, residual; ints: number of weights, of biases, kind; floats: eps
Product fused_linear_operands(const Args& args) {
    const int32_t n = static_cast<int32_t>(args.ints[0]);
    return {args.weights,
            args.weights + n,
            n,
            args.inputs[0],
            args.output,
            args.inputs[1].data,
            args.weights[2 * n].data,
            args.floats[0],
            args.ints[2],
            1.0f,
            0.0f};
}

void linear(const Args& args, const Step&, Worker& worker) {
    run_product(linear_operands(args), args.shared_scratch, worker);
}
ScratchSizes linear_scratch(const Args& largest, const Step&, int32_t) {
    return product_scratch(linear_operands(largest));
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

// ints: top_k, kind, scoring, normalize; floats: routed_scale
void moe(const Args& args, const Step&, Worker& worker) {
    const MoeOperands m(args);
    if (m.x.rows == 0) return;
    const MoeScratch scratch(m, static_cast<int64_t>(moe_product_scratch(m).shared), args.shared_scratch);
    MoeRun run(m, scratch, worker);
    run.route();
    for (int32_t e = 0; e < m.experts; ++e) run.run_expert(e);
}
ScratchSizes moe_scratch(const Args& largest, const Step&, int32_t) {
    const MoeOperands m(largest);
    ScratchSizes sizes = moe_product_scratch(m);
    sizes.shared = static_cast<size_t>(MoeScratch::bytes(m, static_cast<int64_t>(sizes.shared)));
    return sizes;
}

}  // namespace
OCTAVO_KERNEL_WITH_SCRATCH(linear, linear_scratch);
OCTAVO_KERNEL_WITH_SCRATCH(logits, logits_scratch);
OCTAVO_KERNEL_WITH_SCRATCH(fused_linear, fused_linear_scratch);
OCTAVO_KERNEL_WITH_SCRATCH(moe, moe_scratch);
}  // namespace octavo
