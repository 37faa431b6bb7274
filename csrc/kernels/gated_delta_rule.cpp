#include "norms.h"
#include "recurrence.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(GatedDeltaRule, (qkv, beta, alpha), (decay, dt_bias),
                 (num_k_heads, num_v_heads, key_dim, value_dim, is_tiled, index), (eps));

// Factors for a block of tokens, shared by all tiles of a head.
struct DeltaFactors {
    float gate[TOKEN_BLOCK];   // for the state
    float seen[TOKEN_BLOCK];   // for k @ state: the gate divided by the length of k
    float learn[TOKEN_BLOCK];  // for v - k @ state: sigmoid(beta) divided by the length of k
    float out[TOKEN_BLOCK];    // for q @ state: 1 / (length of q * sqrt(key_dim))
};

struct DeltaHead {
    const float *q, *k, *v;  // those of the block's first token
    int64_t stride;          // floats from token to token
    int64_t key_dim;
};

inline DeltaFactors delta_factors(const Args& args, const DeltaHead& h, int64_t head, int64_t first, int count) {
    const float eps = args.floats[GatedDeltaRule::eps];
    const F32x16 dt = read_column(args.inputs[GatedDeltaRule::alpha], first, count, head) +
                      broadcast(args.weights[GatedDeltaRule::dt_bias].data[head]);
    const F32x16 gate = exp(broadcast(args.weights[GatedDeltaRule::decay].data[head]) * softplus(dt));
    float k_inverse[TOKEN_BLOCK] = {}, q_inverse[TOKEN_BLOCK] = {};
    for (int t = 0; t < count; ++t) {
        k_inverse[t] = 1.0f / __builtin_sqrtf(sum_of_squares(h.k + t * h.stride, h.key_dim) + eps);
        q_inverse[t] = 1.0f / __builtin_sqrtf(sum_of_squares(h.q + t * h.stride, h.key_dim) + eps);
    }
    DeltaFactors f;
    store(f.gate, gate);
    store(f.seen, gate * load(k_inverse));
    store(f.learn, sigmoid(read_column(args.inputs[GatedDeltaRule::beta], first, count, head)) * load(k_inverse));
    store(f.out, load(q_inverse) * broadcast(1.0f / __builtin_sqrtf(static_cast<float>(h.key_dim))));
    return f;
}

// Four sums take turns, so that none waits for another.
inline F32x16 add_up(const F32x16* sums) { return (sums[0] + sums[1]) + (sums[2] + sums[3]); }

// Processes one token in one tile.
inline F32x16 delta_step(float* tile, ColumnRange tile_columns, const DeltaHead& h, int t, F32x16 v,
                         const DeltaFactors& f) {
    const float *q = h.q + t * h.stride, *k = h.k + t * h.stride;
    const F32x16 zero = broadcast(0.0f), gate = broadcast(f.gate[t]);
    const ColumnRange columns{0, tile_columns.lanes};
    F32x16 seen[4] = {zero, zero, zero, zero}, out[4] = {zero, zero, zero, zero};
    for (int64_t i = 0; i < h.key_dim; ++i)
        seen[i % 4] = fma(columns.read(tile + i * columns.lanes), broadcast(k[i]), seen[i % 4]);
    const F32x16 learned = (v - add_up(seen) * broadcast(f.seen[t])) * broadcast(f.learn[t]);
    for (int64_t i = 0; i < h.key_dim; ++i) {
        float* const row = tile + i * columns.lanes;
        const F32x16 state = fma(broadcast(k[i]), learned, columns.read(row) * gate);
        columns.write(row, state);
        out[i % 4] = fma(state, broadcast(q[i]), out[i % 4]);
    }
    return add_up(out) * broadcast(f.out[t]);
}

void gated_delta_rule(const Args& args, const Step& step, Worker& worker) {
    const View &qkv = args.inputs[GatedDeltaRule::qkv], &out = args.output;
    const int64_t key_heads = args.ints[GatedDeltaRule::num_k_heads], heads = args.ints[GatedDeltaRule::num_v_heads];
    const int64_t key_dim = args.ints[GatedDeltaRule::key_dim], value_dim = args.ints[GatedDeltaRule::value_dim];
    const HeadState shape{heads, key_dim, value_dim};
    for_each_block(
        shape, args, step, worker,
        [&](int64_t head, int64_t begin, int64_t end, int64_t first, int count, float* state) {
            const float* const row = qkv.data + first * qkv.cols;
            const int64_t key =
                (args.ints[GatedDeltaRule::is_tiled] ? head % key_heads : head / (heads / key_heads)) * key_dim;
            const DeltaHead h{row + key, row + key_heads * key_dim + key,
                              row + 2 * key_heads * key_dim + head * value_dim, qkv.cols, key_dim};
            const DeltaFactors factors = delta_factors(args, h, head, first, count);
            for (int64_t index = begin; index < end; ++index) {
                const ColumnRange columns = shape.columns(index);
                for (int t = 0; t < count; ++t) {
                    const F32x16 v = columns.read(h.v + t * h.stride);
                    const F32x16 result = delta_step(state + shape.offset(head, index), columns, h, t, v, factors);
                    columns.write(out.data + (first + t) * out.cols + head * value_dim, result);
                }
            }
        });
}

bool gated_delta_rule_fits(const Args& args) {
    const View &qkv = args.inputs[GatedDeltaRule::qkv], &beta = args.inputs[GatedDeltaRule::beta];
    const View& alpha = args.inputs[GatedDeltaRule::alpha];
    const int64_t key_heads = args.ints[GatedDeltaRule::num_k_heads], heads = args.ints[GatedDeltaRule::num_v_heads];
    const int64_t key_dim = args.ints[GatedDeltaRule::key_dim], value_dim = args.ints[GatedDeltaRule::value_dim];
    return key_heads > 0 && heads > 0 && key_dim > 0 && heads % key_heads == 0 &&
           has_cols(qkv, 2 * key_heads * key_dim + heads * value_dim) && has_cols(args.output, heads * value_dim) &&
           has_cols(beta, heads) && has_cols(alpha, heads) && has_rows_of(qkv, args.output) && has_rows_of(beta, qkv) &&
           has_rows_of(alpha, qkv) && is_vector(args.weights[GatedDeltaRule::decay], heads) &&
           is_vector(args.weights[GatedDeltaRule::dt_bias], heads);
}

}  // namespace
OCTAVO_KERNEL_WITH_STATE(gated_delta_rule, GatedDeltaRule);
}  // namespace octavo
