#include "recurrence.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(DiagonalDeltaRule, (q, k, v, read, erase, gate, beta), (decay),
                 (key_dim, value_dim, reads_decayed, index), ());

constexpr int64_t MOST_ROWS = 256;  // rows of a state: `MOST_ROWS` in octavo/graph/ops/recurrence.py

// A head's vectors and gates for a block of tokens, from the first token on.
struct DiagonalHead {
    const float *q, *k, *read, *erase;
    int64_t stride;  // floats from token to token
    int64_t key_dim;
    bool reads_decayed;
    float gates[TOKEN_BLOCK * MOST_ROWS];  // [count, key_dim], factors for the rows of the state
    float beta[TOKEN_BLOCK];
};

inline void fill_gates(const Args& args, int64_t head, int64_t first, int count, DiagonalHead& h) {
    const View& gate = args.inputs[DiagonalDeltaRule::gate];
    const float* const decay = args.weights[DiagonalDeltaRule::decay].data;
    const F32x16 slope = broadcast(decay ? decay[head] : 1.0f);
    for (int t = 0; t < count; ++t)
        for (int64_t i = 0; i < h.key_dim; i += 16) {
            const ColumnRange rows{i, static_cast<int>(h.key_dim - i < 16 ? h.key_dim - i : 16)};
            const F32x16 x = rows.read(gate.data + (first + t) * gate.cols + head * h.key_dim);
            rows.write(h.gates + t * h.key_dim, exp(decay ? slope * softplus(x) : x));
        }
    const View& beta = args.inputs[DiagonalDeltaRule::beta];
    store(h.beta, beta.data ? sigmoid(read_column(beta, first, count, head)) : broadcast(1.0f));
}

// Processes one token in one tile.
inline F32x16 diagonal_step(float* tile, int lanes, const DiagonalHead& h, int t, F32x16 v) {
    const float *q = h.q + t * h.stride, *k = h.k + t * h.stride;
    const float *read = h.read + t * h.stride, *erase = h.erase + t * h.stride, *gates = h.gates + t * h.key_dim;
    const ColumnRange columns{0, lanes};
    const F32x16 zero = broadcast(0.0f);
    F32x16 seen[4] = {zero, zero, zero, zero}, out[4] = {zero, zero, zero, zero};
    for (int64_t i = 0; i < h.key_dim; ++i) {
        const F32x16 row = columns.read(tile + i * lanes);
        seen[i % 4] = fma(h.reads_decayed ? row * broadcast(gates[i]) : row, broadcast(read[i]), seen[i % 4]);
    }
    const F32x16 removed = ((seen[0] + seen[1]) + (seen[2] + seen[3])) * broadcast(-h.beta[t]);
    const F32x16 added = v * broadcast(h.beta[t]);
    for (int64_t i = 0; i < h.key_dim; ++i) {
        float* const row = tile + i * lanes;
        const F32x16 kept = fma(broadcast(erase[i]), removed, columns.read(row) * broadcast(gates[i]));
        const F32x16 state = fma(broadcast(k[i]), added, kept);
        columns.write(row, state);
        out[i % 4] = fma(state, broadcast(q[i]), out[i % 4]);
    }
    return (out[0] + out[1]) + (out[2] + out[3]);
}

void diagonal_delta_rule(const Args& args, const Step& step, Worker& worker) {
    const View &v = args.inputs[DiagonalDeltaRule::v], &out = args.output;
    const int64_t key_dim = args.ints[DiagonalDeltaRule::key_dim], value_dim = args.ints[DiagonalDeltaRule::value_dim];
    const HeadState shape{v.cols / value_dim, key_dim, value_dim};
    DiagonalHead h;
    h.key_dim = key_dim;
    h.stride = args.inputs[DiagonalDeltaRule::q].cols;
    h.reads_decayed = args.ints[DiagonalDeltaRule::reads_decayed] != 0;
    for_each_block(shape, args, step, worker,
                   [&](int64_t head, int64_t begin, int64_t end, int64_t first, int count, float* state) {
                       const int64_t offset = first * h.stride + head * key_dim;
                       h.q = args.inputs[DiagonalDeltaRule::q].data + offset;
                       h.k = args.inputs[DiagonalDeltaRule::k].data + offset;
                       h.read = args.inputs[DiagonalDeltaRule::read].data + offset;
                       h.erase = args.inputs[DiagonalDeltaRule::erase].data + offset;
                       fill_gates(args, head, first, count, h);
                       for (int64_t index = begin; index < end; ++index) {
                           const ColumnRange columns = shape.columns(index);
                           float* const tile = state + shape.offset(head, index);
                           for (int t = 0; t < count; ++t) {
                               const int64_t row = (first + t) * v.cols + head * value_dim;
                               columns.write(out.data + row,
                                             diagonal_step(tile, columns.lanes, h, t, columns.read(v.data + row)));
                           }
                       }
                   });
}

bool diagonal_delta_rule_fits(const Args& args) {
    const View &q = args.inputs[DiagonalDeltaRule::q], &v = args.inputs[DiagonalDeltaRule::v];
    const View& beta = args.inputs[DiagonalDeltaRule::beta];
    const int64_t key_dim = args.ints[DiagonalDeltaRule::key_dim], value_dim = args.ints[DiagonalDeltaRule::value_dim];
    if (key_dim <= 0 || key_dim > MOST_ROWS || value_dim <= 0 || v.cols % value_dim != 0) return false;
    const int64_t heads = v.cols / value_dim;
    const int vectors[] = {DiagonalDeltaRule::k, DiagonalDeltaRule::read, DiagonalDeltaRule::erase,
                           DiagonalDeltaRule::gate};
    for (const int input : vectors)
        if (!is_like(args.inputs[input], q)) return false;
    return has_cols(q, heads * key_dim) && has_rows_of(q, v) && is_like(args.output, v) &&
           (!beta.cols || (has_cols(beta, heads) && has_rows_of(beta, v))) &&
           is_vector_or_absent(args.weights[DiagonalDeltaRule::decay], heads);
}

}  // namespace
OCTAVO_KERNEL_WITH_STATE(diagonal_delta_rule, DiagonalDeltaRule);
}  // namespace octavo
