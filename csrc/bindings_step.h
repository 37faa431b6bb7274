// The arrays of one step as they come from Python: read without conversion, checked, and kept alive while it runs.
#pragma once

#include "bindings.h"
#include "program.h"
#include "sampling.h"

namespace octavo {

// Mirrors octavo.batch.Batch. The constructor throws ValueError naming the array whose type or length is wrong;
// check_step checks the values.
class StepArrays {
  public:
    explicit StepArrays(nanobind::handle batch);
    Step step() const;

  private:
    void read_states(nanobind::handle batch);

    Buffer<int32_t, 1> token_ids_, positions_, token_types_, query_start_loc_, seq_lens_, logits_indices_,
        hidden_indices_;
    std::vector<int32_t> output_indices_;  // logits and hidden-state indices, if there are any of the latter
    Buffer<int32_t, 2> slot_mapping_, block_copies_, state_copies_;
    Buffer<int32_t, 3> state_saves_;
    int32_t num_state_saves_ = 0;
    Buffer<int32_t, 1> state_slots_;
    Buffer<int32_t, 3> block_tables_;
};

// The rows of domains that are not yet part of the step: octavo.batch.DomainRows by domain number.
using DomainList = std::vector<std::pair<int32_t, nanobind::object>>;

// Keeps those rows alive.
class FurtherRows {
  public:
    // Sets the rows in `step`, whose pointers then point into this object. Throws ValueError naming the array whose
    // type or length is wrong.
    FurtherRows(const DomainList& rows, const StepLimits& limits, Step& step);

  private:
    void read_cached(const std::string& name, nanobind::handle rows, const Step& step, DomainRows& found);
    void read_indices(int32_t domain, nanobind::handle rows, int32_t count, const StepLimits& limits);

    std::vector<DomainRows> domains_;
    std::vector<const int32_t*> indices_;
    std::vector<Buffer<int32_t, 1>> arrays_;
    std::vector<Buffer<int32_t, 2>> positions_;  // and slots
};

// Batch.token_sources and the tokens of the previous step, kept alive. That step may still be writing them.
class TokenSources {
  public:
    // Throws ValueError for a row that the previous step does not have. `step` reads its tokens from here from now on.
    TokenSources(nanobind::handle batch, nanobind::handle earlier_tokens, Step& step);
    EarlierTokens earlier_tokens() { return {rows_.data(), output_.data(), tokens_.data()}; }

  private:
    Buffer<int32_t, 1> rows_, output_;
    std::vector<int32_t> tokens_;
};

// Mirrors octavo.batch.BlockBytes and keeps it alive. The constructor throws ValueError for arrays of another type or
// shape, and for read-only memory if `writable` is set.
class BlockArrays {
  public:
    BlockArrays(nanobind::handle moved, const char* name, bool writable);
    BlockArrays(const BlockArrays&) = delete;
    BlockArrays& operator=(const BlockArrays&) = delete;
    ~BlockArrays() { PyBuffer_Release(&data_); }
    BlockBytes blocks() const;

  private:
    Buffer<int32_t, 1> block_ids_;
    Py_buffer data_{};
};

// A contiguous array of dtype SAMPLING_ROW, kept alive.
class SamplingRows {
  public:
    // Throws ValueError unless it has `count` elements of that dtype.
    SamplingRows(nanobind::handle array, size_t count);
    ~SamplingRows() { PyBuffer_Release(&buffer_); }
    SamplingRows(const SamplingRows&) = delete;
    SamplingRows& operator=(const SamplingRows&) = delete;
    const SamplingRow* data() const { return static_cast<const SamplingRow*>(buffer_.buf); }

  private:
    Py_buffer buffer_{};
};

// Throws ImportError naming the first field in which a numpy dtype differs from `SamplingRow`.
void check_sampling_row(nanobind::handle dtype);

// Mirrors octavo.batch.SamplingBatch, checked in the same way. `rows` is the length of Batch.logits_indices.
class SamplingArrays {
  public:
    SamplingArrays(nanobind::handle sampling, size_t rows, int32_t vocab);
    SamplingBatch batch() const;

  private:
    SamplingRows rows_;
    Buffer<int32_t, 1> history_start_, history_ids_, history_counts_, bias_start_, bias_ids_;
    Buffer<float, 1> bias_values_;
    Buffer<uint32_t, 2> allowed_mask_;
};

// Mirrors octavo.batch.StepOutput: arrays that the sampler fills. `errors` has one int32 per row.
StepOutput read_step_output(nanobind::handle output, nanobind::handle errors, size_t rows);

}  // namespace octavo
