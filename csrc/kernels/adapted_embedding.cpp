// AddToEmbedding: changes the embedding rows of each token by the token's adapter.
#include "elementwise.h"
#include "packed_weight.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE_WITH_TUPLES(AddToEmbedding, (y, slots), (), (has_all, first, total, num_slots, max_rank), (),
                             (weights));

constexpr int32_t LANES = 16;

inline int64_t whole_lanes(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

// Computes one row: gain * y + scale * (row of A) B. Without a B, A is a full table, whose row replaces the product.
void add_to_row(const LowRank& part, int32_t row, int32_t cols, const float* y, float* out) {
    const int64_t padded = whole_lanes(cols), width = part.b ? whole_lanes(part.rank) : padded;
    const uint16_t* const a = part.a + row * width;
    const F32x16 scale = broadcast(part.scale);
    for (int32_t c = 0; c < cols; c += LANES) {
        const int lanes = cols - c < LANES ? cols - c : LANES;
        F32x16 value = load_partial(y + c, lanes), sum = part.b ? broadcast(0.0f) : load_f16(a + c);
        for (int32_t j0 = 0; part.b && j0 < part.rank; j0 += LANES) {
            float factors[LANES];
            store(factors, load_f16(a + j0));
            const int32_t count = part.rank - j0 < LANES ? part.rank - j0 : LANES;
            for (int32_t j = 0; j < count; ++j)
                sum = fma(load_f16(part.b + (j0 + j) * padded + c), broadcast(factors[j]), sum);
        }
        if (part.gain) value = value * load(part.gain + c);
        store_partial(out + c, fma(sum, scale, value), lanes);
    }
}

void add_to_embedding(const Args& args, const Step& step, Worker& worker) {
    const View &y = args.inputs[AddToEmbedding::y], &slots = args.inputs[AddToEmbedding::slots];
    const PackedWeight& table = *args.tuples[0].packed;
    const bool has_all = args.ints[AddToEmbedding::has_all] != 0;
    const int64_t first = args.ints[AddToEmbedding::first], total = args.ints[AddToEmbedding::total];
    const Range own = share(y.rows, worker);
    for (int64_t r = own.begin; r < own.end; ++r) {
        const float* const from = y.data + r * y.cols;
        float* const out = args.output.data + r * y.cols;
        const int64_t id = step.token_ids[r], row = (has_all || id < (total ? total : table.n) ? id : 0) - first;
        const LowRank* const part = slots.data[r] < 0 ? nullptr : args.low_ranks + static_cast<int64_t>(slots.data[r]);
        if (part && part->a && row >= 0 && row < table.n)
            add_to_row(*part, static_cast<int32_t>(row), y.cols, from, out);
        else if (out != from)
            __builtin_memcpy(out, from, sizeof(float) * y.cols);
    }
}

bool add_to_embedding_fits(const Args& args) {
    const View &y = args.inputs[AddToEmbedding::y], &slots = args.inputs[AddToEmbedding::slots];
    const PackedWeight* const table = args.tuple_length == 1 ? args.tuples[0].packed : nullptr;
    return table && table->k == y.cols && is_like(y, args.output) && has_cols(slots, 1) && has_rows_of(slots, y) &&
           y.domain == DOMAIN_TOKENS && args.low_ranks && is_within(args.ints[AddToEmbedding::num_slots], 1, 1 << 16) &&
           args.ints[AddToEmbedding::first] >= 0;
}

}  // namespace
OCTAVO_KERNEL(add_to_embedding, AddToEmbedding);
}  // namespace octavo
