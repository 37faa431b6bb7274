#include "step_check.h"

#include <vector>

namespace octavo {
namespace {

std::string wrong(const char* what, int32_t index, int64_t value, const char* rule, int64_t limit) {
    return std::string(what) + "[" + std::to_string(index) + "] is " + std::to_string(value) + ", must be " + rule +
           " " + std::to_string(limit);
}

std::string check_range(const char* what, const int32_t* values, int32_t count, int32_t end) {
    for (int32_t i = 0; i < count; ++i) {
        if (values[i] < 0) return wrong(what, i, values[i], "at least", 0);
        if (values[i] >= end) return wrong(what, i, values[i], "below", end);
    }
    return {};
}

std::string check_count(const char* what, int32_t count, int32_t limit) {
    if (count <= limit) return {};
    return std::to_string(count) + " " + what + " in one step, the executor was compiled for at most " +
           std::to_string(limit);
}

std::string check_requests(const Step& s, const StepLimits& limits) {
    if (s.query_start_loc[0] != 0) return wrong("query_start_loc", 0, s.query_start_loc[0], "equal to", 0);
    if (s.query_start_loc[s.num_requests] != s.num_tokens)
        return wrong("query_start_loc", s.num_requests, s.query_start_loc[s.num_requests], "the number of tokens,",
                     s.num_tokens);
    if (s.num_cache_groups < limits.cache_groups)
        return "block_tables have " + std::to_string(s.num_cache_groups) + " cache groups, the graph takes " +
               std::to_string(limits.cache_groups);
    const int64_t table_tokens = static_cast<int64_t>(s.block_table_stride) * limits.block_size;
    for (int32_t r = 0; r < s.num_requests; ++r) {
        const int32_t begin = s.query_start_loc[r], end = s.query_start_loc[r + 1];
        if (end < begin || end > s.num_tokens) return wrong("query_start_loc", r + 1, end, "at least", begin);
        const int32_t length = s.seq_lens[r];
        if (length < end - begin) return wrong("seq_lens", r, length, "at least the request's tokens,", end - begin);
        if (length > limits.model_len) return wrong("seq_lens", r, length, "at most", limits.model_len);
        if (length > table_tokens) return wrong("seq_lens", r, length, "at most what block_tables hold,", table_tokens);
        const int32_t blocks = (length + limits.block_size - 1) / limits.block_size;
        for (int64_t g = 0; g < s.num_cache_groups; ++g) {
            const int32_t* table = s.block_tables + (g * s.num_requests + r) * s.block_table_stride;
            std::string error = check_range("block_tables row", table, blocks, limits.num_blocks);
            if (!error.empty()) return "request " + std::to_string(r) + ": " + error;
        }
        for (int32_t t = begin; t < end; ++t)
            if (s.positions[t] != length - (end - t))
                return wrong("positions", t, s.positions[t],
                             "consecutive and end with the sequence:", length - (end - t));
    }
    return {};
}

// Slots exist, and no two sequences write to one.
std::string check_states(const Step& s, const StepLimits& limits) {
    if (!s.state_slots) return "state_slots is None, but the graph has operations with states";
    std::string error = check_range("state_slots", s.state_slots, s.num_requests, limits.num_states);
    if (error.empty()) error = check_range("state_copies", s.state_copies, 2 * s.num_state_copies, limits.num_states);
    std::vector<bool> written(static_cast<size_t>(limits.num_states));
    for (int32_t r = 0; r < s.num_requests && error.empty(); ++r) {
        const int32_t tokens = s.query_start_loc[r + 1] - s.query_start_loc[r];
        const int32_t saved = s.state_saves ? s.state_saves[2 * r + 1] : -1;
        if (saved >= limits.num_states) return wrong("state_saves row", r, saved, "below", limits.num_states);
        if (saved >= 0 && (s.state_saves[2 * r] < 1 || s.state_saves[2 * r] > tokens))
            return wrong("state_saves row", r, s.state_saves[2 * r], "from 1 to the request's tokens,", tokens);
        for (const int32_t slot : {s.state_slots[r], saved}) {
            if (slot < 0) continue;
            if (written[slot])
                return wrong("state_slots", r, slot, "one that no other sequence writes to, below", limits.num_states);
            written[slot] = true;
        }
    }
    return error;
}

}  // namespace

std::string check_step(const Step& s, const StepLimits& limits) {
    std::string error = check_count("tokens", s.num_tokens, limits.tokens);
    if (error.empty()) error = check_count("requests", s.num_requests, limits.requests);
    if (error.empty()) error = check_count("output rows", s.num_outputs, limits.outputs);
    if (error.empty()) error = check_range("token_ids", s.token_ids, s.num_tokens, limits.vocab_size);
    if (error.empty()) error = check_range("logits_indices", s.output_indices, s.num_logits, s.num_tokens);
    if (error.empty())
        error =
            check_range("hidden_indices", s.output_indices + s.num_logits, s.num_outputs - s.num_logits, s.num_tokens);
    if (error.empty()) error = check_range("block_copies", s.block_copies, 2 * s.num_block_copies, limits.num_blocks);
    if (error.empty() && limits.num_blocks > 0) {
        const int64_t slots = static_cast<int64_t>(limits.num_blocks) * limits.block_size;
        const int32_t count = s.num_tokens * s.num_cache_groups;
        for (int32_t t = 0; t < count && error.empty(); ++t)
            if (s.slot_mapping[t] < 0 || s.slot_mapping[t] >= slots)
                error = wrong("slot_mapping", t, s.slot_mapping[t], "from 0 to below", slots);
        if (error.empty()) error = check_requests(s, limits);
        if (error.empty() && limits.has_states) error = check_states(s, limits);
    }
    return error;
}

}  // namespace octavo
