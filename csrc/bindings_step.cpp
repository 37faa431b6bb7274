#include "bindings_step.h"

#include <nanobind/stl/string.h>

namespace nb = nanobind;

namespace octavo {
namespace {

// An output array, kept alive by the output object.
template <typename T, size_t N>
Buffer<T, N> writable(nb::handle array, const char* name, size_t rows) {
    Buffer<T, N> buffer(array, name, true);
    if (buffer.shape(0) != rows)
        throw nb::value_error(
            ("the output's " + std::string(name) + " must have " + std::to_string(rows) + " rows").c_str());
    return buffer;
}

// Checks the row starts of a compressed sparse array: from 0, never decreasing, ending with the number of entries.
void check_starts(const char* name, const Buffer<int32_t, 1>& starts, size_t entries) {
    int32_t previous = 0;
    bool valid = starts.data()[0] == 0;
    for (size_t i = 1; i < starts.shape(0); ++i) {
        valid = valid && starts.data()[i] >= previous;
        previous = starts.data()[i];
    }
    if (!valid || static_cast<size_t>(previous) != entries)
        throw nb::value_error(
            (std::string(name) + " must rise from 0 to the number of entries, " + std::to_string(entries)).c_str());
}

}  // namespace

StepArrays::StepArrays(nb::handle batch)
    : token_ids_(read_array<int32_t, 1>(batch, "token_ids")),
      positions_(read_array<int32_t>(batch, "positions", token_ids_.shape(0))),
      query_start_loc_(read_array<int32_t, 1>(batch, "query_start_loc")),
      logits_indices_(read_array<int32_t, 1>(batch, "logits_indices")),
      hidden_indices_(read_array<int32_t, 1>(batch, "hidden_indices")),
      slot_mapping_(read_array<int32_t, 2>(batch, "slot_mapping")),
      block_copies_(read_array<int32_t, 2>(batch, "block_copies")),
      block_tables_(read_array<int32_t, 3>(batch, "block_tables")) {
    if (query_start_loc_.shape(0) == 0)
        throw nb::value_error("query_start_loc is empty; it must have one more entry than there are requests");
    seq_lens_ = read_array<int32_t>(batch, "seq_lens", query_start_loc_.shape(0) - 1);
    if (block_tables_.shape(1) != seq_lens_.shape(0))
        throw nb::value_error("block_tables must have one row per request");
    if (slot_mapping_.shape(0) != block_tables_.shape(0) || slot_mapping_.shape(1) != token_ids_.shape(0))
        throw nb::value_error(("slot_mapping must be [" + std::to_string(block_tables_.shape(0)) + " cache groups, " +
                               std::to_string(token_ids_.shape(0)) + " tokens]")
                                  .c_str());
    if (block_copies_.shape(1) != 2) throw nb::value_error("block_copies must be [copies, 2]: source, destination");
    read_states(batch);
    if (const nb::object types = nb::getattr(batch, "token_types", nb::none()); !types.is_none())
        token_types_ = read_array<int32_t>(batch, "token_types", token_ids_.shape(0));
    for (const size_t n :
         {token_ids_.shape(0), block_tables_.shape(2), block_tables_.size(), slot_mapping_.size(),
          logits_indices_.shape(0) + hidden_indices_.shape(0), block_copies_.size(), state_copies_.size()})
        if (n > INT32_MAX) throw nb::value_error("an array of the batch has more than 2^31 - 1 entries");
    if (hidden_indices_.shape(0) == 0) return;
    output_indices_.assign(logits_indices_.data(), logits_indices_.data() + logits_indices_.shape(0));
    output_indices_.insert(output_indices_.end(), hidden_indices_.data(),
                           hidden_indices_.data() + hidden_indices_.shape(0));
}

// Without states in the graph there are no slots, and nothing else to read.
void StepArrays::read_states(nb::handle batch) {
    if (batch.attr("state_slots").is_none()) return;
    state_slots_ = read_array<int32_t>(batch, "state_slots", seq_lens_.shape(0));
    state_copies_ = read_array<int32_t, 2>(batch, "state_copies");
    if (state_copies_.shape(1) != 2) throw nb::value_error("state_copies must be [copies, 2]: source, destination");
    if (batch.attr("state_saves").is_none()) return;
    state_saves_ = read_array<int32_t, 3>(batch, "state_saves");
    if (state_saves_.shape(0) != seq_lens_.shape(0) || state_saves_.shape(1) > INT16_MAX || state_saves_.shape(2) != 2)
        throw nb::value_error("state_saves must be [requests, saves, 2]: tokens, slot");
    num_state_saves_ = static_cast<int32_t>(state_saves_.shape(1));
}

Step StepArrays::step() const {
    Step s{};
    s.num_tokens = static_cast<int32_t>(token_ids_.shape(0));
    s.num_requests = static_cast<int32_t>(seq_lens_.shape(0));
    s.num_logits = static_cast<int32_t>(logits_indices_.shape(0));
    s.num_outputs = s.num_logits + static_cast<int32_t>(hidden_indices_.shape(0));
    s.token_ids = token_ids_.data();
    s.positions = positions_.data();
    s.token_types = token_types_.data();
    s.query_start_loc = query_start_loc_.data();
    s.seq_lens = seq_lens_.data();
    s.block_tables = block_tables_.data();
    s.block_table_stride = static_cast<int32_t>(block_tables_.shape(2));
    s.num_cache_groups = static_cast<int32_t>(block_tables_.shape(0));
    s.slot_mapping = slot_mapping_.data();
    s.output_indices = output_indices_.empty() ? logits_indices_.data() : output_indices_.data();
    s.block_copies = block_copies_.data();
    s.num_block_copies = static_cast<int32_t>(block_copies_.shape(0));
    s.state_slots = state_slots_.data();
    s.state_saves = state_saves_.data();
    s.num_state_saves = num_state_saves_;
    s.state_copies = state_copies_.data();
    s.num_state_copies = static_cast<int32_t>(state_copies_.shape(0));
    return s;
}

FurtherRows::FurtherRows(const DomainList& rows, const StepLimits& limits, Step& step)
    : domains_(limits.domains.size() - FIRST_FURTHER_DOMAIN), indices_(limits.indices.size() - 1) {
    for (const auto& [number, object] : rows) {
        const std::string& name = limits.domains.at(number).name;
        const size_t count = nb::cast<size_t>(object.attr("count"));
        if (count > INT32_MAX) throw nb::value_error((name + " have more than 2^31 - 1 rows").c_str());
        const nb::object starts = object.attr("starts"), positions = object.attr("positions");
        DomainRows found{static_cast<int32_t>(count), 0, nullptr, nullptr, 0};
        if (!positions.is_none() && count > 0) {
            positions_.emplace_back(positions, (name + ".positions").c_str());
            if (positions_.back().shape(1) != count || positions_.back().shape(0) > INT32_MAX)
                throw nb::value_error((name + ".positions must have " + std::to_string(count) + " columns").c_str());
            found.positions = positions_.back().data();
            found.components = static_cast<int32_t>(positions_.back().shape(0));
        }
        if (number == DOMAIN_TOKENS) {
            step.token_components = found.positions;
            step.num_token_components = found.components;
        } else if (number >= FIRST_FURTHER_DOMAIN) {
            if (!starts.is_none()) {
                arrays_.emplace_back(starts, (name + ".starts").c_str());
                const size_t entries = arrays_.back().shape(0);
                if (entries == 0 || entries > INT32_MAX) throw nb::value_error((name + ".starts is empty").c_str());
                found.starts = arrays_.back().data();
                found.num_sequences = static_cast<int32_t>(entries) - 1;
            }
            read_cached(name, object, step, found);
            domains_.at(number - FIRST_FURTHER_DOMAIN) = found;
        }
        read_indices(number, object, found.count, limits);
    }
    step.further = domains_.data();
    step.indices = indices_.data();
}

// For a domain with caches.
void FurtherRows::read_cached(const std::string& name, nb::handle rows, const Step& step, DomainRows& found) {
    if (const nb::object lengths = rows.attr("lengths"); !lengths.is_none()) {
        arrays_.emplace_back(lengths, (name + ".lengths").c_str());
        if (arrays_.back().shape(0) != static_cast<size_t>(step.num_requests))
            throw nb::value_error((name + ".lengths must have one entry per request").c_str());
        found.lengths = arrays_.back().data();
    }
    const nb::object slots = rows.attr("slots");
    if (slots.is_none() || found.count == 0) return;
    positions_.emplace_back(slots, (name + ".slots").c_str());
    if (positions_.back().shape(0) != static_cast<size_t>(step.num_cache_groups) ||
        positions_.back().shape(1) != static_cast<size_t>(found.count))
        throw nb::value_error((name + ".slots must be [" + std::to_string(step.num_cache_groups) + " cache groups, " +
                               std::to_string(found.count) + " rows]")
                                  .c_str());
    found.slots = positions_.back().data();
}

// Reads the arrays of a domain that the program uses.
void FurtherRows::read_indices(int32_t domain, nb::handle rows, int32_t count, const StepLimits& limits) {
    const nb::object arrays = rows.attr("indices");
    for (size_t i = 1; i < limits.indices.size(); ++i) {
        const IndexLimits& limit = limits.indices[i];
        if (limit.domain != domain) continue;
        const nb::object array = arrays.attr("get")(limit.key);
        if (array.is_none()) continue;
        arrays_.emplace_back(array, limit.name.c_str());
        if (arrays_.back().shape(0) != static_cast<size_t>(count) * limit.width || arrays_.back().size() > INT32_MAX)
            throw nb::value_error((limit.name + " has " + std::to_string(arrays_.back().shape(0)) +
                                   " entries, must have " + std::to_string(limit.width) + " for each of " +
                                   std::to_string(count) + " rows")
                                      .c_str());
        indices_[i - 1] = arrays_.back().data();
    }
}

TokenSources::TokenSources(nb::handle batch, nb::handle earlier_tokens, Step& step)
    : rows_(read_array<int32_t>(batch, "token_sources", step.num_tokens)),
      output_(nb::borrow(earlier_tokens), "earlier_tokens"),
      tokens_(step.token_ids, step.token_ids + step.num_tokens) {
    const int32_t count = static_cast<int32_t>(output_.shape(0));
    for (int32_t i = 0; i < step.num_tokens; ++i) {
        const int32_t row = rows_.data()[i];
        if (row < -1 || row >= count)
            throw nb::value_error(("token_sources[" + std::to_string(i) + "] is " + std::to_string(row) +
                                   "; the previous step has rows 0 to " + std::to_string(count - 1))
                                      .c_str());
    }
    step.token_ids = tokens_.data();
}

BlockArrays::BlockArrays(nb::handle moved, const char* name, bool writable)
    : block_ids_(read_array<int32_t, 1>(moved, "block_ids")) {
    const nb::object data = nb::getattr(moved, "data");
    const int flags = PyBUF_STRIDES | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(data.ptr(), &data_, flags) != 0) {
        PyErr_Clear();
        throw nb::value_error(
            ("data of " + std::string(name) + " must be " + (writable ? "a writable" : "an") + " array of bytes")
                .c_str());
    }
    const bool are_bytes = data_.ndim == 2 && data_.format && std::strcmp(data_.format, "B") == 0;
    if (are_bytes && static_cast<size_t>(data_.shape[0]) == block_ids_.shape(0) && block_ids_.shape(0) <= INT32_MAX &&
        data_.strides[0] >= 0 && (data_.strides[1] == 1 || data_.shape[1] == 0))
        return;
    PyBuffer_Release(&data_);
    throw nb::value_error(("data of " + std::string(name) + " must be uint8 [" + std::to_string(block_ids_.shape(0)) +
                           ", bytes per block] with contiguous rows")
                              .c_str());
}

BlockBytes BlockArrays::blocks() const {
    return {block_ids_.data(), static_cast<char*>(data_.buf), static_cast<size_t>(data_.shape[1]),
            static_cast<size_t>(data_.strides[0]), static_cast<int32_t>(block_ids_.shape(0))};
}

SamplingRows::SamplingRows(nb::handle array, size_t count) {
    // The dtype object of octavo.batch itself. It stays valid because the module lives as long as the interpreter.
    static const nb::handle dtype = nb::object(nb::module_::import_("octavo.batch").attr("SAMPLING_ROW")).release();
    const nb::object found = nb::getattr(array, "dtype", nb::none());
    const bool is_known = found.is(dtype) || found.equal(dtype);
    if (!is_known || PyObject_GetBuffer(array.ptr(), &buffer_, PyBUF_ND) != 0) {
        PyErr_Clear();
        throw nb::value_error("rows must be a contiguous array of SAMPLING_ROW");
    }
    if (buffer_.ndim == 1 && static_cast<size_t>(buffer_.shape[0]) == count) return;
    const std::string problem = buffer_.ndim == 1 ? std::to_string(buffer_.shape[0]) + " entries, must have "
                                                  : std::to_string(buffer_.ndim) + " dimensions, must be a vector of ";
    PyBuffer_Release(&buffer_);
    throw nb::value_error(("rows has " + problem + std::to_string(count)).c_str());
}

void check_sampling_row(nb::handle dtype) {
    const auto fail = [](const std::string& what) {
        throw nb::import_error(("octavo.batch.SAMPLING_ROW and csrc/sampling.h differ: " + what +
                                "; change both and rebuild the native module")
                                   .c_str());
    };
    const nb::dict fields = nb::cast<nb::dict>(dtype.attr("fields").attr("copy")());
    for (const SamplingRowField& expected : SAMPLING_ROW_FIELDS) {
        if (!fields.contains(expected.name)) fail("there is no field " + std::string(expected.name));
        const nb::tuple found = nb::cast<nb::tuple>(fields[expected.name]);
        const std::string type = nb::cast<std::string>(found[0].attr("str"));
        const size_t offset = nb::cast<size_t>(found[1]);
        if (type != expected.type || offset != expected.offset)
            fail(std::string(expected.name) + " is " + type + " at byte " + std::to_string(offset) + ", must be " +
                 expected.type + " at byte " + std::to_string(expected.offset));
    }
    const size_t itemsize = nb::cast<size_t>(dtype.attr("itemsize"));
    if (fields.size() != std::size(SAMPLING_ROW_FIELDS) || itemsize != sizeof(SamplingRow))
        fail(std::to_string(fields.size()) + " fields in " + std::to_string(itemsize) + " bytes, must be " +
             std::to_string(std::size(SAMPLING_ROW_FIELDS)) + " in " + std::to_string(sizeof(SamplingRow)));
}

SamplingArrays::SamplingArrays(nb::handle sampling, size_t rows, int32_t vocab)
    : rows_(nb::object(sampling.attr("rows")), rows),
      history_start_(read_array<int32_t>(sampling, "history_start", rows + 1)),
      history_ids_(read_array<int32_t, 1>(sampling, "history_ids")),
      history_counts_(read_array<int32_t>(sampling, "history_counts", history_ids_.shape(0))),
      bias_start_(read_array<int32_t>(sampling, "bias_start", rows + 1)),
      bias_ids_(read_array<int32_t, 1>(sampling, "bias_ids")),
      bias_values_(read_array<float>(sampling, "bias_values", bias_ids_.shape(0))) {
    check_starts("history_start", history_start_, history_ids_.shape(0));
    check_starts("bias_start", bias_start_, bias_ids_.shape(0));
    if (sampling.attr("allowed_mask").is_none()) return;
    allowed_mask_ = read_array<uint32_t, 2>(sampling, "allowed_mask");
    const size_t words = (static_cast<size_t>(vocab) + 31) / 32;
    if (allowed_mask_.shape(0) != rows || allowed_mask_.shape(1) != words)
        throw nb::value_error(
            ("allowed_mask must be [" + std::to_string(rows) + ", " + std::to_string(words) + "]").c_str());
}

SamplingBatch SamplingArrays::batch() const {
    SamplingBatch b{};
    b.rows = rows_.data();
    b.history_start = history_start_.data();
    b.history_ids = history_ids_.data();
    b.history_counts = history_counts_.data();
    b.bias_start = bias_start_.data();
    b.bias_ids = bias_ids_.data();
    b.bias_values = bias_values_.data();
    b.allowed_mask = allowed_mask_.data();
    return b;
}

StepOutput read_step_output(nb::handle output, nb::handle errors, size_t rows) {
    const auto read = [&](const char* name) { return nb::object(output.attr(name)); };
    const auto top_ids = writable<int32_t, 2>(read("top_ids"), "top_ids", rows);
    const auto top_logprobs = writable<float, 2>(read("top_logprobs"), "top_logprobs", rows);
    if (top_ids.shape(1) != top_logprobs.shape(1))
        throw nb::value_error("top_ids and top_logprobs must have the same shape");
    StepOutput o{};
    o.token_ids = writable<int32_t, 1>(read("token_ids"), "token_ids", rows).data();
    o.logprobs = writable<float, 1>(read("logprobs"), "logprobs", rows).data();
    o.ranks = writable<int32_t, 1>(read("ranks"), "ranks", rows).data();
    o.top_ids = top_ids.data();
    o.top_logprobs = top_logprobs.data();
    o.num_top = static_cast<int32_t>(top_ids.shape(1));
    o.errors = writable<int32_t, 1>(errors, "errors", rows).data();
    return o;
}

}  // namespace octavo
