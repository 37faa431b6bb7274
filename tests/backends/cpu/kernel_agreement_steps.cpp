// The operations that depend on a step: its requests, its cache, its states and its options of sampling.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kernel_agreement.h"
#include "kv_cache.h"
#include "sampling.h"

namespace octavo {
namespace {

// A batch of two requests over blocks in a mixed order, `first` tokens of each at once and then one by one.
struct Batch {
    std::vector<int32_t> positions, starts, lengths, tables, slots;
    Step step{};

    Batch(int32_t begin, int32_t end, int32_t block_size) {
        constexpr int32_t REQUESTS = 2;
        const int32_t stride = 128 / block_size;
        for (int32_t r = 0; r < REQUESTS; ++r) {
            starts.push_back(r * (end - begin));
            lengths.push_back(end);
            for (int32_t b = 0; b < stride; ++b) tables.push_back((stride - 1 - b) * REQUESTS + r);
            for (int32_t p = begin; p < end; ++p) {
                positions.push_back(p);
                slots.push_back(tables[r * stride + p / block_size] * block_size + p % block_size);
            }
        }
        starts.push_back(REQUESTS * (end - begin));
        step.num_tokens = starts.back();
        step.num_requests = step.num_outputs = step.num_logits = REQUESTS;
        step.positions = positions.data();
        step.query_start_loc = starts.data();
        step.seq_lens = lengths.data();
        step.block_tables = tables.data();
        step.block_table_stride = stride;
        step.slot_mapping = slots.data();
        step.num_cache_groups = 1;
    }
};

// Whether all numbers differ by less than 2^-13 of the largest.
bool are_close(const Floats& expected, const Floats& found) {
    float largest = 0.0f, apart = 0.0f;
    for (size_t i = 0; i < expected.size; ++i) {
        if (!std::isfinite(expected.data()[i]) || !std::isfinite(found.data()[i])) return false;
        largest = std::max(largest, std::fabs(expected.data()[i]));
        apart = std::max(apart, std::fabs(expected.data()[i] - found.data()[i]));
    }
    return apart <= std::ldexp(largest, -13);
}

// A cache of 128 tokens for each of two requests and for each level that this machine has. The last of the call's ints
// is the type of the cache.
struct LevelCaches {
    std::vector<Memory> memory;
    std::vector<LayerCache> layers;

    LevelCaches(const Call& call, int32_t block_size) {
        Args args{};
        args.ints = call.ints.data();
        const size_t bytes = kernel_of(call, Isa::scalar).cache(args, block_size);
        for (int level = 0; level <= static_cast<int>(detect_isa()); ++level) {
            memory.emplace_back(bytes * 2 * 128 / block_size);
            layers.push_back({memory.back().data(), bytes, block_size, 0});
        }
    }
};

// Runs the call on the cache of each level. Compares outputs and caches with those of the scalar level.
void compare_on_caches(Judge& judge, const Call& call, LevelCaches& caches, const std::string& what) {
    const Matrix expected = run(call, Isa::scalar, 1, call.rows, &caches.layers[0]);
    for (size_t level = 1; level < caches.layers.size(); ++level) {
        const Matrix output = run(call, static_cast<Isa>(level), 1 + call.rows % 3, call.rows, &caches.layers[level]);
        // With a float16 cache AMX has an arithmetic of its own.
        const bool own = uses_tiles(static_cast<Isa>(level)) && call.kernel != "latent_attention" &&
                         static_cast<KvType>(call.ints.back()) == KvType::float16;
        judge.check(call.kernel, static_cast<int>(level), what, expected.values.data(),
                    (own && are_close(expected.values, output.values) ? expected : output).values.data(),
                    output.values.size);
        Memory &scalar = caches.memory[0], &found = caches.memory[level];
        judge.check(call.kernel, static_cast<int>(level), what + ", cache", reinterpret_cast<float*>(scalar.data()),
                    reinterpret_cast<float*>(found.data()), scalar.size() / sizeof(float));
    }
}

// Prompt, then one token, each on the cache that the step before left.
void compare_attention(Judge& judge, Random& random, Call& call, int32_t head_dim, int32_t block_size) {
    const Batch steps[] = {{0, 45, block_size}, {45, 46, block_size}, {46, 100, block_size}, {100, 101, block_size}};
    LevelCaches caches(call, block_size);
    const std::string what = std::to_string(head_dim) + " dimensions, blocks of " + std::to_string(block_size);
    for (const Batch& batch : steps) {
        call.step = call.limits = batch.step;
        call.limits.block_table_stride = 128;  // as a limit: tokens of a sequence
        call.rows = batch.step.num_tokens;
        call.cols = 4 * head_dim;
        if (call.kernel == "latent_attention")
            call.inputs =
                matrices(random_matrix(random, call.rows, 4 * head_dim), random_matrix(random, call.rows, 4 * 16),
                         random_matrix(random, call.rows, head_dim), random_matrix(random, call.rows, 16));
        else if (call.kernel == "attention")
            call.inputs =
                matrices(random_matrix(random, call.rows, 4 * head_dim), random_matrix(random, call.rows, 2 * head_dim),
                         random_matrix(random, call.rows, 2 * head_dim));
        else
            call.inputs = matrices(random_matrix(random, call.rows, 8 * head_dim));
        compare_on_caches(judge, call, caches, what);
    }
}

// Queries of two requests over the rows of another domain: one step that writes these, and one that only reads them.
void compare_cross(Judge& judge, Random& random, int32_t head_dim, int32_t block_size, KvType type) {
    Call call;
    call.kernel = "cross_attention";
    call.weights = {Operand{}, type == KvType::int8 ? random_vector(random, 2 * head_dim) : Operand{}};
    call.ints = {4, 2, head_dim, 0, 0, FIRST_FURTHER_DOMAIN, static_cast<int64_t>(type)};
    call.floats = {0.125f, block_size == 32 ? 20.0f : 0.0f};
    call.cols = 4 * head_dim;
    const Batch written(0, 45, block_size);
    LevelCaches caches(call, block_size);
    const std::string what = std::to_string(head_dim) + " dimensions, blocks of " + std::to_string(block_size);
    for (const int32_t num_tokens : {7, 1}) {
        const Batch batch(0, num_tokens, block_size);
        const bool writes = num_tokens > 1;
        const int32_t count = writes ? written.step.num_tokens : 0;
        const DomainRows domain = {
            count, 2, nullptr, nullptr, 0, written.lengths.data(), writes ? written.slots.data() : nullptr};
        call.step = batch.step;
        call.step.further = &domain;
        call.limits = call.step;
        call.limits.num_tokens = written.step.num_tokens;
        call.limits.block_table_stride = 128;  // as a limit: tokens of a sequence
        call.rows = batch.step.num_tokens;
        call.inputs = matrices(random_matrix(random, call.rows, 4 * head_dim),
                               writes ? random_matrix(random, count, 2 * head_dim) : Matrix(),
                               writes ? random_matrix(random, count, 2 * head_dim) : Matrix());
        compare_on_caches(judge, call, caches, what);
    }
}

// Three steps on states that the one before left: the second starts in the middle of a chunk and keeps two copies of
// the state within it, the third starts from the later one. `size`: floats of the state of one of four slots.
void compare_state(Judge& judge, Random& random, Call& call, const std::vector<int32_t>& input_cols, size_t size,
                   const std::string& what) {
    const int32_t slots[] = {2, 0, 3, 0};
    const int32_t saves[] = {4, 1, 9, 3, 0, -1, 0, -1};
    Batch steps[] = {{0, 21, 16}, {21, 40, 16}, {30, 41, 16}};
    std::vector<Floats> memory;
    for (int level = 0; level <= static_cast<int>(detect_isa()); ++level) memory.emplace_back(4 * size);
    for (int i = 0; i < 3; ++i) {
        call.step = steps[i].step;
        call.step.state_slots = slots + (i == 2 ? 2 : 0);
        call.step.state_saves = i == 1 ? saves : nullptr;
        call.step.num_state_saves = i == 1 ? 2 : 0;
        call.rows = call.step.num_tokens;
        call.inputs.clear();
        for (const int32_t cols : input_cols) call.inputs.push_back(random_matrix(random, call.rows, cols));
        StateSlots scalar{memory[0].data(), size};
        const Matrix expected = run(call, Isa::scalar, 1, call.rows, nullptr, &scalar);
        for (int level = 1; level <= static_cast<int>(detect_isa()); ++level) {
            StateSlots state{memory[level].data(), size};
            const Matrix output = run(call, static_cast<Isa>(level), 1 + (i + level) % 3, call.rows, nullptr, &state);
            judge.check(call.kernel, level, what, expected.values.data(), output.values.data(), output.values.size);
            judge.check(call.kernel, level, what + ", state", memory[0].data(), memory[level].data(), 4 * size);
        }
    }
}

void compare_states(Judge& judge, Random& random) {
    for (const int32_t cols : {1, 31, 64})
        for (const int32_t taps : {2, 4}) {
            Call call;
            call.kernel = "short_conv";
            call.cols = cols;
            call.weights = {random_vector(random, cols * taps), random_vector(random, cols)};
            call.ints = {0, taps == 2 ? KIND_NONE : KIND_SILU};
            compare_state(judge, random, call, {cols}, static_cast<size_t>(cols) * (taps - 1),
                          std::to_string(cols) + " columns, " + std::to_string(taps) + " taps");
        }
    for (const int32_t cols : {48, 23}) {
        Call call;
        call.kernel = "channel_scan";
        call.cols = cols;
        call.weights = {random_vector(random, 12 * cols), random_vector(random, cols)};
        for (int i = 0; i < 12 * cols; ++i) call.weights[0].plain->data()[i] = -1.0f - call.weights[0].plain->data()[i];
        call.ints = {0};
        compare_state(judge, random, call, {cols, cols, 12, 12}, static_cast<size_t>(12) * cols,
                      std::to_string(cols) + " columns");
    }
    for (const int32_t cols : {48, 23}) {
        Call call;
        call.kernel = "real_gated_recurrence";
        call.cols = cols;
        call.weights = {random_vector(random, cols), random_vector(random, cols), random_vector(random, cols)};
        for (int i = 0; i < cols; ++i) call.weights[0].plain->data()[i] = 1.0f + call.weights[0].plain->data()[i];
        call.ints = {0};
        call.floats = {8.0f};
        compare_state(judge, random, call, {cols, cols, cols}, static_cast<size_t>(cols),
                      std::to_string(cols) + " columns");
    }
    for (const int32_t dim : {16, 40}) {  // three heads
        Call call;
        call.kernel = "diagonal_delta_rule";
        call.cols = 3 * dim;
        call.weights = {random_vector(random, 3)};
        for (int i = 0; i < 3; ++i) call.weights[0].plain->data()[i] = -1.0f - call.weights[0].plain->data()[i];
        call.ints = {24, dim, dim == 16, 0};
        compare_state(judge, random, call, {72, 72, 3 * dim, 72, 72, 72, 3}, static_cast<size_t>(3) * 24 * dim,
                      "values of " + std::to_string(dim));
    }
    for (const int32_t dim : {16, 40}) {  // three key heads, six value heads
        Call call;
        call.kernel = "gated_delta_rule";
        call.cols = 6 * dim;
        call.weights = {random_vector(random, 6), random_vector(random, 6)};
        for (int i = 0; i < 6; ++i) call.weights[0].plain->data()[i] = -1.0f - call.weights[0].plain->data()[i];
        call.ints = {3, 6, 24, dim, dim == 16, 0};
        call.floats = {1e-6f};
        compare_state(judge, random, call, {6 * 24 + 6 * dim, 6, 6}, static_cast<size_t>(6) * 24 * dim,
                      "values of " + std::to_string(dim));
        call.kernel = "selective_scan";
        call.weights.insert(call.weights.begin() + 1, random_vector(random, 6));
        call.ints = {6, dim, 2, 24, 0};
        call.floats = {};
        compare_state(judge, random, call, {6 * dim + 4 * 24, 6}, static_cast<size_t>(6) * 24 * dim,
                      "heads of " + std::to_string(dim));
    }
}

void compare_positions(Judge& judge, Random& random) {
    for (const int32_t head_dim : {64, 80, 96}) {
        const Operand frequencies = random_vector(random, head_dim / 2 - 3);
        const Batch batch(70, 90, 16);
        Call call;
        call.kernel = "rope";
        call.rows = batch.step.num_tokens;
        call.cols = 3 * head_dim;
        call.step = batch.step;
        call.inputs = matrices(random_matrix(random, call.rows, call.cols));
        call.weights = {frequencies, Operand{}};
        call.ints = {head_dim};
        call.floats = {1.2f};
        judge.compare(call, std::to_string(head_dim) + " dimensions");
        const Operand axes = random_vector(random, head_dim / 2 - 3);
        for (int32_t i = 0; i < head_dim / 2 - 3; ++i) axes.plain->data()[i] = static_cast<float>(i % 2);
        std::vector<int32_t> components(static_cast<size_t>(2 * call.rows));
        for (int32_t& component : components) component = random.below(5000);
        call.step.token_components = components.data();
        call.step.num_token_components = 2;
        call.weights = {frequencies, axes};
        judge.compare(call, std::to_string(head_dim) + " dimensions, two components");
        // The last of the ints is the type of the cache, the last of the weights what int8 takes off keys.
        for (const int32_t block_size : {8, 16, 32}) {
            Call latent;
            latent.kernel = "latent_attention";
            latent.weights = {block_size == 8 ? random_vector(random, 4) : Operand{}, random_vector(random, 5),
                              Operand{}};
            latent.ints = {0, 4, 1, head_dim + 16, block_size == 16 ? 37 : 0, head_dim, 20, 1, block_size == 16, 0, 0};
            latent.floats = {0.125f, block_size == 32 ? 20.0f : 0.0f};
            compare_attention(judge, random, latent, head_dim, block_size);
        }
        for (const int64_t kv_type : {0, 1})
            for (const int32_t block_size : {8, 16, 32}) {
                const int64_t window = block_size == 16 ? 37 : 0;
                Call plain;
                plain.kernel = "attention";
                plain.weights = {block_size == 8 ? random_vector(random, 4) : Operand{}, Operand{}, Operand{},
                                 block_size == 16 ? Operand{} : random_vector(random, 4 * 61)};
                plain.ints = {0, 4, 2, head_dim, window, 0, 1, 0, window > 0 && head_dim > 64, 0, kv_type};
                plain.floats = {0.125f, block_size == 32 ? 20.0f : 0.0f};
                Call fused;
                fused.kernel = "fused_attention";
                fused.weights = {Operand{},
                                 random_vector(random, 5),
                                 frequencies,
                                 Operand{},
                                 random_vector(random, 4),
                                 random_vector(random, head_dim),
                                 random_vector(random, head_dim),
                                 block_size == 16 ? random_vector(random, 4 * 9) : Operand{}};
                fused.ints = {0, 4, 2, head_dim, window, 0, 20, 3, window > 0, 0, 1, 1, block_size > 8, kv_type};
                fused.floats = {0.125f, 0.0f, 1.0f, 1e-6f};
                for (Call* call : {&plain, &fused})
                    call->weights.push_back(kv_type == 1 ? random_vector(random, 2 * head_dim) : Operand{});
                for (Call* call : {&plain, &fused}) compare_attention(judge, random, *call, head_dim, block_size);
                compare_cross(judge, random, head_dim, block_size, static_cast<KvType>(kv_type));
            }
    }
}

// Sampled tokens with all filters and penalties, as floats of their bits side by side.
std::vector<float> sample(Isa level, const Matrix& logits, int num_top) {
    const size_t rows = static_cast<size_t>(logits.rows);
    std::vector<SamplingRow> options;
    std::vector<int32_t> history_start, bias_start;
    std::vector<int32_t> ids, counts;
    std::vector<float> bias;
    for (size_t r = 0; r <= rows; ++r) {
        history_start.push_back(static_cast<int32_t>(ids.size()));
        bias_start.push_back(static_cast<int32_t>(bias.size()));
        if (r == rows) break;
        SamplingRow row{};
        row.temperature = r % 5 ? 0.3f * static_cast<float>(r % 7) + 0.2f : 0.0f;
        row.top_k = r % 3 == 1 ? 40 : 0;
        row.top_p = r % 3 ? 0.9f : 1.0f;
        row.min_p = r % 4 ? 0.0f : 0.01f;
        row.typical_p = r % 6 ? 1.0f : 0.8f;
        row.repetition_penalty = r % 2 ? 1.3f : 1.0f;
        row.presence_penalty = row.frequency_penalty = r % 2 ? 0.25f : 0.0f;
        row.seed = 7;
        row.counter = 100 + r;
        row.target = -1;
        row.num_logprobs = num_top;
        options.push_back(row);
        for (int i = 0; i < 5; ++i) {
            ids.push_back(static_cast<int32_t>(11 * r) + i);
            counts.push_back(i % 3);
            bias.push_back(static_cast<float>(i) * 0.5f);
        }
    }
    std::vector<int32_t> tokens(rows), ranks(rows), top_ids(rows * num_top), errors(rows);
    std::vector<float> logprobs(rows), top_logprobs(rows * num_top);
    SamplingTask task{};
    task.logits = logits.values.data();
    task.end_row = logits.rows;
    task.vocab = logits.cols;
    task.batch = {options.data(),    history_start.data(), ids.data(),  counts.data(),
                  bias_start.data(), ids.data(),           bias.data(), nullptr};
    task.output = {tokens.data(),       logprobs.data(), ranks.data(), top_ids.data(),
                   top_logprobs.data(), num_top,         errors.data()};
    PoolOptions pool_options;
    pool_options.count = 2;
    ThreadPool pool(pool_options);
    pool.reserve_scratch(sampling_scratch_bytes(logits.cols));
    const KernelFn kernel = find_kernel("sample", level)->run;
    run_on(pool, [&](Worker& worker) { sample_rows(kernel, task, worker); });
    std::vector<float> all = logprobs;
    all.insert(all.end(), top_logprobs.begin(), top_logprobs.end());
    for (const std::vector<int32_t>* list : {&tokens, &ranks, &top_ids, &errors})
        for (const int32_t i : *list) all.push_back(static_cast<float>(i));
    return all;
}

void compare_sampling(Judge& judge, Random& random) {
    for (const int32_t vocab : {7 * 48, 5003}) {
        const Matrix logits = random_matrix(random, 24, vocab, 12.0f);
        const std::vector<float> expected = sample(Isa::scalar, logits, 4);
        for (int level = 1; level <= static_cast<int>(detect_isa()); ++level)
            judge.check("sample", level, std::to_string(vocab) + " logits", expected.data(),
                        sample(static_cast<Isa>(level), logits, 4).data(), expected.size());
    }
}

}  // namespace

void compare_steps(Judge& judge, Random& random) {
    compare_states(judge, random);
    compare_positions(judge, random);
    compare_sampling(judge, random);
}

}  // namespace octavo
