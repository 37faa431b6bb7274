#include "bindings_step.h"

namespace nb = nanobind;

namespace octavo {
namespace {

template <typename T, size_t N>
using MutableArray = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

template <typename T, size_t N>
T* writable(nb::handle owner, const char* name, size_t rows) {
    MutableArray<T, N> array;
    if (!nb::try_cast(owner.attr(name), array, false) || array.shape(0) != rows)
        throw nb::value_error((std::string(name) + " of the output has the wrong type or length").c_str());
    return array.data();  // the owner keeps it alive
}

// Compressed rows: starts from 0, never falls, ends with the number of entries.
void check_starts(const char* name, const Array<int32_t, 1>& starts, size_t entries) {
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
      slot_mapping_(read_array<int32_t>(batch, "slot_mapping", token_ids_.shape(0))),
      logits_indices_(read_array<int32_t, 1>(batch, "logits_indices")),
      block_tables_(read_array<int32_t, 2>(batch, "block_tables")),
      block_copies_(read_array<int32_t, 2>(batch, "block_copies")) {
    if (query_start_loc_.shape(0) == 0)
        throw nb::value_error("query_start_loc is empty; it has one entry more than there are requests");
    seq_lens_ = read_array<int32_t>(batch, "seq_lens", query_start_loc_.shape(0) - 1);
    if (block_tables_.shape(0) != seq_lens_.shape(0)) throw nb::value_error("block_tables must have one row a request");
    if (block_copies_.shape(1) != 2) throw nb::value_error("block_copies must be [copies, 2]: source, destination");
    for (const size_t n : {token_ids_.shape(0), block_tables_.shape(1), seq_lens_.shape(0), logits_indices_.shape(0),
                           2 * block_copies_.shape(0)})
        if (n > INT32_MAX) throw nb::value_error("an array of the batch has more than 2^31 - 1 entries");
}

Step StepArrays::step() const {
    Step s{};
    s.num_tokens = static_cast<int32_t>(token_ids_.shape(0));
    s.num_requests = static_cast<int32_t>(seq_lens_.shape(0));
    s.num_outputs = static_cast<int32_t>(logits_indices_.shape(0));
    s.token_ids = token_ids_.data();
    s.positions = positions_.data();
    s.query_start_loc = query_start_loc_.data();
    s.seq_lens = seq_lens_.data();
    s.block_tables = block_tables_.data();
    s.block_table_stride = static_cast<int32_t>(block_tables_.shape(1));
    s.slot_mapping = slot_mapping_.data();
    s.logits_indices = logits_indices_.data();
    s.block_copies = block_copies_.data();
    s.num_block_copies = static_cast<int32_t>(block_copies_.shape(0));
    return s;
}

SamplingArrays::SamplingArrays(nb::handle sampling, size_t rows, int32_t vocab)
    : temperature_(read_array<float>(sampling, "temperature", rows)),
      top_p_(read_array<float>(sampling, "top_p", rows)),
      min_p_(read_array<float>(sampling, "min_p", rows)),
      typical_p_(read_array<float>(sampling, "typical_p", rows)),
      repetition_penalty_(read_array<float>(sampling, "repetition_penalty", rows)),
      presence_penalty_(read_array<float>(sampling, "presence_penalty", rows)),
      frequency_penalty_(read_array<float>(sampling, "frequency_penalty", rows)),
      bias_values_(read_array<float, 1>(sampling, "bias_values")),
      top_k_(read_array<int32_t>(sampling, "top_k", rows)),
      target_(read_array<int32_t>(sampling, "target", rows)),
      num_logprobs_(read_array<int32_t>(sampling, "num_logprobs", rows)),
      history_start_(read_array<int32_t>(sampling, "history_start", rows + 1)),
      history_ids_(read_array<int32_t, 1>(sampling, "history_ids")),
      history_counts_(read_array<int32_t>(sampling, "history_counts", history_ids_.shape(0))),
      bias_start_(read_array<int32_t>(sampling, "bias_start", rows + 1)),
      bias_ids_(read_array<int32_t>(sampling, "bias_ids", bias_values_.shape(0))),
      seed_(read_array<uint64_t>(sampling, "seed", rows)),
      counter_(read_array<uint64_t>(sampling, "counter", rows)) {
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
    b.temperature = temperature_.data();
    b.top_k = top_k_.data();
    b.top_p = top_p_.data();
    b.min_p = min_p_.data();
    b.typical_p = typical_p_.data();
    b.repetition_penalty = repetition_penalty_.data();
    b.presence_penalty = presence_penalty_.data();
    b.frequency_penalty = frequency_penalty_.data();
    b.seed = seed_.data();
    b.counter = counter_.data();
    b.target = target_.data();
    b.num_logprobs = num_logprobs_.data();
    b.history_start = history_start_.data();
    b.history_ids = history_ids_.data();
    b.history_counts = history_counts_.data();
    b.bias_start = bias_start_.data();
    b.bias_ids = bias_ids_.data();
    b.bias_values = bias_values_.data();
    b.allowed_mask = allowed_mask_.is_valid() ? allowed_mask_.data() : nullptr;
    return b;
}

StepOutput read_step_output(nb::handle output, nb::handle errors, size_t rows) {
    StepOutput o{};
    o.token_ids = writable<int32_t, 1>(output, "token_ids", rows);
    o.logprobs = writable<float, 1>(output, "logprobs", rows);
    o.ranks = writable<int32_t, 1>(output, "ranks", rows);
    o.top_ids = writable<int32_t, 2>(output, "top_ids", rows);
    o.top_logprobs = writable<float, 2>(output, "top_logprobs", rows);
    MutableArray<int32_t, 2> top_ids;
    MutableArray<float, 2> top_logprobs;
    nb::try_cast(output.attr("top_ids"), top_ids, false);
    nb::try_cast(output.attr("top_logprobs"), top_logprobs, false);
    if (top_ids.shape(1) != top_logprobs.shape(1)) throw nb::value_error("top_ids and top_logprobs differ in shape");
    o.num_top = static_cast<int32_t>(top_ids.shape(1));
    MutableArray<int32_t, 1> error_array;
    if (!nb::try_cast(errors, error_array, false) || error_array.shape(0) != rows)
        throw nb::value_error("errors must be int32 with one entry an output row");
    o.errors = error_array.data();
    return o;
}

}  // namespace octavo
