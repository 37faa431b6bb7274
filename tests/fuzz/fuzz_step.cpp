// Coverage-guided fuzzing of the check of a step by libFuzzer; docs/fuzzing.md has the command.
//
// An input is the arrays of a step, whose lengths are right, as the bindings have checked. What the check lets through
// is used as kernels use it, on memory of just the size that the limits name.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "step_check.h"

namespace octavo {
namespace {

class Input {
public:
    Input(const uint8_t* data, size_t size) : next(data), end(data + size) {}
    uint8_t byte() { return next < end ? *next++ : 0; }
    int32_t below(int32_t limit) { return byte() % limit; }
    // Mostly near the right value, sometimes anything.
    int32_t near(int64_t right) {
        const int32_t change = byte();
        if (change >= 20) return static_cast<int32_t>(right);
        static constexpr int64_t odd[] = {-1, 0, 1, INT32_MAX, INT32_MIN, 1 << 16};
        return static_cast<int32_t>(change < 6 ? odd[change] : right + change - 12);
    }

private:
    const uint8_t *next, *end;
};

using Array = std::unique_ptr<int32_t[]>;

// An array of its own, so that a read beyond it is seen.
template <typename F>
Array array(int64_t size, const F& value) {
    Array values(new int32_t[static_cast<size_t>(size)]);
    for (int64_t i = 0; i < size; ++i) values[static_cast<size_t>(i)] = value(i);
    return values;
}

struct Sizes {
    int32_t requests, tokens, groups, stride, outputs, logits, copies, state_copies;
    std::vector<int32_t> lengths, query_lengths;
};

StepLimits some_limits(Input& input) {
    StepLimits limits;
    limits.tokens = 24;
    limits.requests = 5;
    limits.token_types = input.below(3);
    limits.outputs = 8;
    limits.model_len = 64;
    limits.vocab_size = 100;
    limits.num_blocks = input.below(4) ? 40 : 0;
    limits.block_size = 4;
    limits.cache_groups = 1 + input.below(2);
    limits.has_states = input.below(2) == 1;
    limits.num_states = 8;
    limits.domains = {{"tokens", "query_start_loc", limits.tokens, 1, true, {}},
                      {"outputs", "", limits.outputs, 0, false, {}},
                      {"logits", "", limits.outputs, 0, false, {}}};
    limits.indices = {{"output_indices", "output_indices", DOMAIN_OUTPUTS, DOMAIN_TOKENS, 1, false}};
    return limits;
}

Sizes some_sizes(Input& input, const StepLimits& limits) {
    Sizes sizes{};
    sizes.requests = input.below(limits.requests + 2);
    for (int32_t r = 0; r < sizes.requests; ++r) {
        sizes.query_lengths.push_back(input.below(6));
        sizes.lengths.push_back(sizes.query_lengths.back() + input.below(20));
        sizes.tokens += sizes.query_lengths.back();
    }
    sizes.groups = input.below(3);
    sizes.stride = input.below(12);
    sizes.outputs = input.below(limits.outputs + 2);
    sizes.logits = sizes.outputs ? input.below(sizes.outputs + 1) : 0;
    sizes.copies = input.below(4);
    sizes.state_copies = input.below(3);
    return sizes;
}

// Writes and reads what a program does for such a step.
void use(const Step& s, const StepLimits& limits) {
    std::vector<int32_t> table(static_cast<size_t>(limits.vocab_size)), rows(static_cast<size_t>(s.num_tokens));
    std::vector<int32_t> cache(static_cast<size_t>(limits.num_blocks) * limits.block_size);
    std::vector<int32_t> states(static_cast<size_t>(limits.num_states));
    int32_t sum = 0;
    const auto read = [&sum](const std::vector<int32_t>& values, int64_t at) {
        if (at < 0 || at >= static_cast<int64_t>(values.size())) std::abort();
        sum += values[static_cast<size_t>(at)];
    };
    for (int32_t t = 0; t < s.num_tokens; ++t) read(table, s.token_ids[t]);
    for (int32_t i = 0; i < s.num_outputs; ++i) read(rows, s.output_indices[i]);
    for (int32_t i = 0; i < 2 * s.num_block_copies; ++i)
        read(cache, static_cast<int64_t>(s.block_copies[i]) * limits.block_size);
    for (int32_t r = 0; r < s.num_requests; ++r) {
        for (int32_t t = s.query_start_loc[r]; t < s.query_start_loc[r + 1]; ++t) {
            read(rows, t);
            if (s.positions[t] < 0 || s.positions[t] >= limits.model_len) std::abort();
        }
        for (int32_t g = 0; limits.num_blocks > 0 && g < limits.cache_groups; ++g)
            for (int32_t p = 0; p < s.seq_lens[r]; ++p) {
                if (p / limits.block_size >= s.block_table_stride) std::abort();
                const int64_t row = static_cast<int64_t>(g) * s.num_requests + r;
                const int64_t block = s.block_tables[row * s.block_table_stride + p / limits.block_size];
                read(cache, block * limits.block_size + p % limits.block_size);
            }
        if (limits.num_blocks > 0 && limits.has_states) read(states, s.state_slots[r]);
    }
    for (int64_t i = 0; limits.num_blocks > 0 && i < static_cast<int64_t>(limits.cache_groups) * s.num_tokens; ++i)
        read(cache, s.slot_mapping[i]);
    if (sum != 0) std::abort();  // the arrays hold zeros; this keeps the reads
}

void check(Input input) {
    const StepLimits limits = some_limits(input);
    const Sizes sizes = some_sizes(input, limits);
    const int32_t R = sizes.requests, T = sizes.tokens, G = sizes.groups;
    int32_t start = 0;
    const Array starts = array(R + 1, [&](int64_t i) { return input.near(start += i ? sizes.query_lengths[i - 1] : 0); });
    const Array lengths = array(R, [&](int64_t i) { return input.near(sizes.lengths[static_cast<size_t>(i)]); });
    std::vector<int32_t> places;
    for (int32_t r = 0; r < R; ++r)
        for (int32_t i = 0; i < sizes.query_lengths[r]; ++i)
            places.push_back(sizes.lengths[r] - sizes.query_lengths[r] + i);
    const Array ids = array(T, [&](int64_t) { return input.near(7); });
    const Array positions = array(T, [&](int64_t i) { return input.near(places[static_cast<size_t>(i)]); });
    const Array types = array(T, [&](int64_t) { return input.near(0); });
    const Array tables = array(static_cast<int64_t>(G) * R * sizes.stride, [&](int64_t i) { return input.near(i % 40); });
    const Array slots = array(static_cast<int64_t>(G) * T, [&](int64_t i) { return input.near(i); });
    const Array outputs = array(sizes.outputs, [&](int64_t i) { return input.near(std::min<int64_t>(i, T - 1)); });
    const Array copies = array(2 * sizes.copies, [&](int64_t i) { return input.near(i); });
    const Array state_slots = array(R, [&](int64_t i) { return input.near(i); });
    const Array saves = array(2 * R, [&](int64_t i) { return input.near(i % 2 ? -1 : 1); });
    const Array state_copies = array(2 * sizes.state_copies, [&](int64_t i) { return input.near(i); });
    Step step{};
    step.num_tokens = T;
    step.num_requests = R;
    step.num_outputs = sizes.outputs;
    step.num_logits = sizes.logits;
    step.token_ids = ids.get();
    step.positions = positions.get();
    step.token_types = input.below(2) ? types.get() : nullptr;
    step.query_start_loc = starts.get();
    step.seq_lens = lengths.get();
    step.block_tables = tables.get();
    step.block_table_stride = sizes.stride;
    step.num_cache_groups = G;
    step.slot_mapping = slots.get();
    step.output_indices = outputs.get();
    step.block_copies = copies.get();
    step.num_block_copies = sizes.copies;
    step.state_slots = input.below(4) ? state_slots.get() : nullptr;
    step.state_saves = input.below(2) ? saves.get() : nullptr;
    step.state_copies = state_copies.get();
    step.num_state_copies = sizes.state_copies;
    if (check_step(step, limits).empty()) use(step, limits);
}

}  // namespace
}  // namespace octavo

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    octavo::check(octavo::Input(data, size));
    return 0;
}
