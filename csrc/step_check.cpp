#include "step_check.h"

#include <algorithm>
#include <vector>

namespace octavo {
namespace {

std::string wrong(const char* what, int32_t index, int64_t value, const char* rule, int64_t limit) {
    return std::string(what) + "[" + std::to_string(index) + "] is " + std::to_string(value) + ", must be " + rule +
           " " + std::to_string(limit);
}

std::string check_range(const char* what, const int32_t* values, int32_t count, int32_t end, int32_t first = 0) {
    for (int32_t i = 0; i < count; ++i) {
        if (values[i] < first) return wrong(what, i, values[i], "at least", first);
        if (values[i] >= end) return wrong(what, i, values[i], "below", end);
    }
    return {};
}

std::string check_count(const char* what, int32_t count, int32_t limit) {
    if (count <= limit) return {};
    return std::to_string(count) + " " + what + " in one step, the executor was compiled for at most " +
           std::to_string(limit);
}

// Checks the row starts of sequences: from 0, never decreasing, ending with the number of rows.
std::string check_starts(const char* what, const DomainRows& rows) {
    if (!rows.starts) return rows.count == 0 ? std::string() : std::string("the step has no ") + what;
    if (rows.starts[0] != 0) return wrong(what, 0, rows.starts[0], "equal to", 0);
    for (int32_t i = 0; i < rows.num_sequences; ++i)
        if (rows.starts[i + 1] < rows.starts[i])
            return wrong(what, i + 1, rows.starts[i + 1], "at least", rows.starts[i]);
    const int32_t last = rows.starts[rows.num_sequences];
    return last == rows.count ? std::string()
                              : wrong(what, rows.num_sequences, last, "the number of rows,", rows.count);
}

std::string check_domain(const DomainRows& rows, const DomainLimits& limit, bool is_tokens) {
    std::string error = check_count(limit.name.c_str(), rows.count, limit.rows);
    if (error.empty() && limit.has_starts) error = check_starts(limit.starts.c_str(), rows);
    const int32_t components = rows.positions ? rows.components : 0;
    const bool is_one = is_tokens && components == 1;
    if (error.empty() && rows.count > 0 && components < limit.components && !is_one)
        return limit.name + " have " + std::to_string(components) + " components per position, the graph reads " +
               std::to_string(limit.components);
    return error;
}

std::string check_index(const Step& s, int32_t number, const IndexLimits& limit) {
    const int32_t* const values = s.index(number);
    const int32_t count = s.domain(limit.domain).count * limit.width, end = s.domain(limit.source).count;
    if (!values) return limit.keeps || count == 0 ? std::string() : "the step has no " + limit.name;
    if (number > 0) return check_range(limit.name.c_str(), values, count, end, limit.keeps ? -1 : 0);
    std::string error = check_range("logits_indices", values, s.num_logits, end);
    return error.empty() ? check_range("hidden_indices", values + s.num_logits, count - s.num_logits, end) : error;
}

// Checks every domain and every index array, including those that all steps have.
std::string check_domains(const Step& s, const StepLimits& limits) {
    std::string error;
    for (size_t i = 0; i < limits.domains.size() && error.empty(); ++i)
        error = check_domain(s.domain(static_cast<int32_t>(i)), limits.domains[i], i == DOMAIN_TOKENS);
    for (size_t i = 0; i < limits.indices.size() && error.empty(); ++i)
        error = check_index(s, static_cast<int32_t>(i), limits.indices[i]);
    return error;
}

std::string check_table(const Step& s, const StepLimits& limits, int32_t group, int32_t request, int32_t length) {
    const int32_t blocks = (length + limits.block_size - 1) / limits.block_size;
    const int64_t row = static_cast<int64_t>(group) * s.num_requests + request;
    std::string error =
        check_range("block_tables row", s.block_tables + row * s.block_table_stride, blocks, limits.num_blocks);
    return error.empty() ? error : "request " + std::to_string(request) + ": " + error;
}

std::string check_slots(const char* what, const int32_t* slots, int32_t count, const StepLimits& limits) {
    const int64_t end = static_cast<int64_t>(limits.num_blocks) * limits.block_size;
    for (int32_t t = 0; t < count; ++t)
        if (slots[t] < 0 || slots[t] >= end) return wrong(what, t, slots[t], "from 0 to below", end);
    return {};
}

// Checks where the rows of a domain are cached.
std::string check_cached(const Step& s, const DomainRows& rows, const DomainLimits& limit, const StepLimits& limits) {
    if (limit.groups.empty() || limits.num_blocks == 0) return {};
    const std::string lengths = limit.name + ".lengths", slots = limit.name + ".slots";
    if (!rows.lengths) return lengths + " are missing";
    if (rows.count > 0 && !rows.slots) return slots + " are missing";
    const int64_t table_tokens = static_cast<int64_t>(s.block_table_stride) * limits.block_size;
    std::string error = check_range(lengths.c_str(), rows.lengths, s.num_requests,
                                    static_cast<int32_t>(std::min<int64_t>(table_tokens, INT32_MAX - 1)) + 1);
    for (size_t i = 0; i < limit.groups.size() && error.empty(); ++i) {
        const int32_t group = limit.groups[i];
        if (group >= s.num_cache_groups) return "block_tables have no cache group " + std::to_string(group);
        for (int32_t r = 0; r < s.num_requests && error.empty(); ++r)
            error = check_table(s, limits, group, r, rows.lengths[r]);
        if (error.empty() && rows.count > 0)
            error =
                check_slots(slots.c_str(), rows.slots + static_cast<int64_t>(group) * rows.count, rows.count, limits);
    }
    return error;
}

// Checks the blocks of one sequence.
std::string check_blocks(const Step& s, const StepLimits& limits, int32_t request) {
    const int64_t table_tokens = static_cast<int64_t>(s.block_table_stride) * limits.block_size;
    const int32_t length = s.seq_lens[request];
    if (length > table_tokens)
        return wrong("seq_lens", request, length, "at most the tokens in its block_tables,", table_tokens);
    std::string error;
    for (int32_t g = 0; g < s.num_cache_groups && error.empty(); ++g)
        if (limits.is_of_tokens(g)) error = check_table(s, limits, g, request, length);
    return error;
}

std::string check_requests(const Step& s, const StepLimits& limits) {
    if (limits.num_blocks > 0 && s.num_cache_groups < limits.cache_groups)
        return "block_tables have " + std::to_string(s.num_cache_groups) + " cache groups, the graph takes " +
               std::to_string(limits.cache_groups);
    for (int32_t r = 0; r < s.num_requests; ++r) {
        const int32_t begin = s.query_start_loc[r], end = s.query_start_loc[r + 1];
        const int32_t length = s.seq_lens[r];
        if (length < end - begin) return wrong("seq_lens", r, length, "at least the request's tokens,", end - begin);
        if (length > limits.model_len) return wrong("seq_lens", r, length, "at most", limits.model_len);
        std::string error = limits.num_blocks > 0 ? check_blocks(s, limits, r) : std::string();
        if (!error.empty()) return error;
        for (int32_t t = begin; t < end; ++t)
            if (s.positions[t] != length - (end - t))
                return wrong("positions", t, s.positions[t],
                             "consecutive and end with the sequence:", length - (end - t));
    }
    return {};
}

// Checks a request's saves, whose token counts must be ascending.
std::string check_saves(const Step& s, const StepLimits& limits, int32_t request, const int32_t* saves) {
    const int32_t tokens = s.query_start_loc[request + 1] - s.query_start_loc[request];
    int32_t before = 0;
    for (int32_t i = 0; i < s.num_state_saves; ++i) {
        const int32_t count = saves[2 * i], slot = saves[2 * i + 1];
        if (slot < 0) continue;
        if (slot >= limits.num_states) return wrong("state_saves row", request, slot, "below", limits.num_states);
        if (count < 1 || count > tokens)
            return wrong("state_saves row", request, count, "from 1 to the request's tokens,", tokens);
        if (count <= before) return wrong("state_saves row", request, count, "ascending, above", before);
        before = count;
    }
    return {};
}

// Checks that slots exist, and that no two sequences write to the same one.
std::string check_states(const Step& s, const StepLimits& limits) {
    if (!s.state_slots) return "state_slots is None, but the graph has operations with states";
    std::string error = check_range("state_slots", s.state_slots, s.num_requests, limits.num_states);
    if (error.empty()) error = check_range("state_copies", s.state_copies, 2 * s.num_state_copies, limits.num_states);
    std::vector<bool> written(static_cast<size_t>(limits.num_states));
    const auto write = [&](int32_t request, int32_t slot) {
        if (written[slot])
            error =
                wrong("state_slots", request, slot, "one that no other sequence writes to, below", limits.num_states);
        written[slot] = true;
    };
    for (int32_t r = 0; r < s.num_requests && error.empty(); ++r) {
        write(r, s.state_slots[r]);
        const int32_t* const saves = s.state_saves ? s.state_saves + 2 * int64_t{s.num_state_saves} * r : nullptr;
        if (saves && error.empty()) error = check_saves(s, limits, r, saves);
        for (int32_t i = 0; saves && error.empty() && i < s.num_state_saves; ++i)
            if (saves[2 * i + 1] >= 0) write(r, saves[2 * i + 1]);
    }
    return error;
}

}  // namespace

std::string check_step(const Step& s, const StepLimits& limits) {
    std::string error = check_domains(s, limits);
    if (error.empty()) error = check_count("requests", s.num_requests, limits.requests);
    if (error.empty()) error = check_range("token_ids", s.token_ids, s.num_tokens, limits.vocab_size);
    if (error.empty() && s.token_types && limits.token_types > 0)
        error = check_range("token_types", s.token_types, s.num_tokens, limits.token_types);
    if (error.empty()) error = check_range("block_copies", s.block_copies, 2 * s.num_block_copies, limits.num_blocks);
    if (error.empty() && limits.num_blocks > 0) {
        for (int32_t g = 0; g < s.num_cache_groups && error.empty(); ++g)
            if (limits.is_of_tokens(g))
                error = check_slots("slot_mapping", s.slot_mapping + static_cast<int64_t>(g) * s.num_tokens,
                                    s.num_tokens, limits);
        for (size_t i = 0; i < limits.domains.size() && error.empty(); ++i)
            error = check_cached(s, s.domain(static_cast<int32_t>(i)), limits.domains[i], limits);
    }
    if (error.empty()) error = check_requests(s, limits);
    if (error.empty() && limits.num_blocks > 0 && limits.has_states) error = check_states(s, limits);
    return error;
}

}  // namespace octavo
