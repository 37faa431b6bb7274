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
Array array(int64_t size, F value) {
    Array values(new int32_t[static_cast<size_t>(size)]);
    for (int64_t i = 0; i < size; ++i) values[static_cast<size_t>(i)] = value(i);
    return values;
}

struct Sizes {
    int32_t requests, tokens, groups, stride, outputs, logits, copies, state_saves, state_copies, rows;
    std::vector<int32_t> lengths, query_lengths, row_counts;  // of each request
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
    if (input.below(2)) {  // a domain with the last group's cache, and tokens that take rows of it
        limits.domains.push_back({"rows", "rows.starts", 12, 3, true, {}});
        if (limits.cache_groups == 2) limits.domains.back().groups = {1};
        limits.indices.push_back({"rows of tokens", "rows", DOMAIN_TOKENS, FIRST_FURTHER_DOMAIN, 2, true});
    }
    return limits;
}

Sizes some_sizes(Input& input, const StepLimits& limits) {
    Sizes sizes{};
    sizes.requests = input.below(limits.requests + 2);
    for (int32_t r = 0; r < sizes.requests; ++r) {
        sizes.query_lengths.push_back(input.below(6));
        sizes.lengths.push_back(sizes.query_lengths.back() + input.below(20));
        sizes.tokens += sizes.query_lengths.back();
        sizes.row_counts.push_back(input.below(4));
        sizes.rows += sizes.row_counts.back();
    }
    sizes.groups = input.below(3);
    sizes.stride = input.below(12);
    sizes.outputs = input.below(limits.outputs + 2);
    sizes.logits = sizes.outputs ? input.below(sizes.outputs + 1) : 0;
    sizes.copies = input.below(4);
    sizes.state_saves = input.below(4);
    sizes.state_copies = input.below(3);
    return sizes;
}

// Writes the states that a program writes for such a step: each once.
void use_states(const Step& s, const StepLimits& limits) {
    std::vector<int32_t> writes(static_cast<size_t>(limits.num_states));
    for (int32_t r = 0; r < s.num_requests; ++r) {
        if (writes.at(static_cast<size_t>(s.state_slots[r]))++) std::abort();
        for (int32_t i = 0; i < s.num_state_saves; ++i) {
            const int32_t* const save = s.state_saves + 2 * (static_cast<int64_t>(s.num_state_saves) * r + i);
            if (save[1] >= 0 && writes.at(static_cast<size_t>(save[1]))++) std::abort();
            if (save[1] >= 0 && (save[0] < 1 || save[0] > s.query_start_loc[r + 1] - s.query_start_loc[r]))
                std::abort();
        }
    }
    for (int32_t i = 0; i < 2 * s.num_state_copies; ++i) writes.at(static_cast<size_t>(s.state_copies[i]));
}

// Reads the rows of the further domain as those of sequences, and those that tokens take.
void use_rows(const Step& s, const StepLimits& limits) {
    const DomainRows rows = s.domain(FIRST_FURTHER_DOMAIN);
    const std::vector<int32_t> values(static_cast<size_t>(rows.count));
    for (int32_t r = 0; rows.starts && r < rows.num_sequences; ++r)
        for (int32_t i = rows.starts[r]; i < rows.starts[r + 1]; ++i) values.at(static_cast<size_t>(i));
    const IndexLimits& index = limits.indices[1];
    const int32_t* const taken = s.index(1);
    for (int32_t i = 0; taken && i < index.width * s.num_tokens; ++i)
        if (taken[i] != -1) values.at(static_cast<size_t>(taken[i]));
}

// Writes and reads what a program does for such a step.
void use(const Step& s, const StepLimits& limits) {
    std::vector<int32_t> table(static_cast<size_t>(limits.vocab_size)), rows(static_cast<size_t>(s.num_tokens));
    std::vector<int32_t> cache(static_cast<size_t>(limits.num_blocks) * limits.block_size);
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
        for (int32_t g = 0; limits.num_blocks > 0 && g < limits.cache_groups; ++g) {
            const int32_t length = limits.is_of_tokens(g) ? s.seq_lens[r] : s.further[0].lengths[r];
            for (int32_t p = 0; p < length; ++p) {
                if (p / limits.block_size >= s.block_table_stride) std::abort();
                const int64_t row = static_cast<int64_t>(g) * s.num_requests + r;
                const int64_t block = s.block_tables[row * s.block_table_stride + p / limits.block_size];
                read(cache, block * limits.block_size + p % limits.block_size);
            }
        }
    }
    for (int32_t g = 0; limits.num_blocks > 0 && g < limits.cache_groups; ++g) {
        const bool is_of_tokens = limits.is_of_tokens(g);
        const int32_t count = is_of_tokens ? s.num_tokens : s.further[0].count;
        const int32_t* const slots = is_of_tokens ? s.slot_mapping : s.further[0].slots;
        for (int32_t i = 0; i < count; ++i) read(cache, slots[static_cast<int64_t>(g) * count + i]);
    }
    if (limits.num_blocks > 0 && limits.has_states) use_states(s, limits);
    if (limits.indices.size() > 1) use_rows(s, limits);
    if (sum != 0) std::abort();  // the arrays hold zeros; this keeps the reads
}

// The arrays of the further domain and of the rows of it that tokens take.
struct Further {
    Further(Input& input, const Sizes& sizes)
        : starts(array(sizes.requests + 1,
                       [&, start = 0](int64_t i) mutable {
                           return input.near(start += i ? sizes.row_counts[static_cast<size_t>(i - 1)] : 0);
                       })),
          lengths(
              array(sizes.requests, [&](int64_t i) { return input.near(sizes.row_counts[static_cast<size_t>(i)]); })),
          slots(array(static_cast<int64_t>(sizes.groups) * sizes.rows, [&](int64_t i) { return input.near(i); })),
          taken(array(2 * sizes.tokens, [&](int64_t i) { return input.near(i % 3 ? -1 : sizes.rows - 1); })) {
        rows = {sizes.rows, sizes.requests, input.below(8) ? starts.get() : nullptr, slots.get(), 3};
        rows.lengths = input.below(8) ? lengths.get() : nullptr;
        rows.slots = input.below(8) ? slots.get() : nullptr;
        indices[0] = input.below(4) ? taken.get() : nullptr;
    }
    Array starts, lengths, slots, taken;
    DomainRows rows{};
    const int32_t* indices[1];
};

void check(Input input) {
    const StepLimits limits = some_limits(input);
    const Sizes sizes = some_sizes(input, limits);
    const int32_t R = sizes.requests, T = sizes.tokens, G = sizes.groups;
    int32_t start = 0;
    const Array starts =
        array(R + 1, [&](int64_t i) { return input.near(start += i ? sizes.query_lengths[i - 1] : 0); });
    const Array lengths = array(R, [&](int64_t i) { return input.near(sizes.lengths[static_cast<size_t>(i)]); });
    std::vector<int32_t> places;
    for (int32_t r = 0; r < R; ++r)
        for (int32_t i = 0; i < sizes.query_lengths[r]; ++i)
            places.push_back(sizes.lengths[r] - sizes.query_lengths[r] + i);
    const Array ids = array(T, [&](int64_t) { return input.near(7); });
    const Array positions = array(T, [&](int64_t i) { return input.near(places[static_cast<size_t>(i)]); });
    const Array types = array(T, [&](int64_t) { return input.near(0); });
    const Array tables =
        array(static_cast<int64_t>(G) * R * sizes.stride, [&](int64_t i) { return input.near(i % 40); });
    const Array slots = array(static_cast<int64_t>(G) * T, [&](int64_t i) { return input.near(i); });
    const Array outputs = array(sizes.outputs, [&](int64_t i) { return input.near(std::min<int64_t>(i, T - 1)); });
    const Array copies = array(2 * sizes.copies, [&](int64_t i) { return input.near(i); });
    const Array state_slots = array(R, [&](int64_t i) { return input.near(i); });
    const int32_t N = sizes.state_saves;
    const Array saves = array(2 * R * N, [&](int64_t i) {
        const int64_t number = i / 2 % N;
        return input.near(i % 2 ? (number < 2 ? R + i / 2 % 8 : -1) : number + 1);
    });
    const Array state_copies = array(2 * sizes.state_copies, [&](int64_t i) { return input.near(i); });
    const Further further(input, sizes);
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
    step.num_state_saves = input.below(2) ? N : 0;
    step.state_saves = step.num_state_saves > 0 ? saves.get() : nullptr;
    step.state_copies = state_copies.get();
    step.num_state_copies = sizes.state_copies;
    step.further = &further.rows;
    step.indices = further.indices;
    if (check_step(step, limits).empty()) use(step, limits);
}

}  // namespace
}  // namespace octavo

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    octavo::check(octavo::Input(data, size));
    return 0;
}
