// Sampling of tokens from rows of logits. src/octavo/backends/sampling.py defines the results.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel.h"

namespace octavo {

// One element of the dtype SAMPLING_ROW in octavo/batch.py; `SAMPLING_ROW_FIELDS` is compared with it on import.
struct SamplingRow {
    float temperature;
    int32_t top_k;
    float top_p;
    float min_p;
    float typical_p;
    float repetition_penalty;
    float presence_penalty;
    float frequency_penalty;
    uint64_t seed;
    uint64_t counter;
    int32_t target;
    int32_t num_logprobs;
};

struct SamplingRowField {
    const char* name;
    const char* type;  // in numpy's notation
    size_t offset;
};

constexpr SamplingRowField SAMPLING_ROW_FIELDS[] = {
    {"temperature", "<f4", offsetof(SamplingRow, temperature)},
    {"top_k", "<i4", offsetof(SamplingRow, top_k)},
    {"top_p", "<f4", offsetof(SamplingRow, top_p)},
    {"min_p", "<f4", offsetof(SamplingRow, min_p)},
    {"typical_p", "<f4", offsetof(SamplingRow, typical_p)},
    {"repetition_penalty", "<f4", offsetof(SamplingRow, repetition_penalty)},
    {"presence_penalty", "<f4", offsetof(SamplingRow, presence_penalty)},
    {"frequency_penalty", "<f4", offsetof(SamplingRow, frequency_penalty)},
    {"seed", "<u8", offsetof(SamplingRow, seed)},
    {"counter", "<u8", offsetof(SamplingRow, counter)},
    {"target", "<i4", offsetof(SamplingRow, target)},
    {"num_logprobs", "<i4", offsetof(SamplingRow, num_logprobs)},
};

// Mirrors SamplingBatch in octavo/batch.py, with the same names. R rows.
struct SamplingBatch {
    const SamplingRow* rows;       // [R]
    const int32_t* history_start;  // [R + 1]
    const int32_t* history_ids;
    const int32_t* history_counts;
    const int32_t* bias_start;  // [R + 1]
    const int32_t* bias_ids;
    const float* bias_values;
    const uint32_t* allowed_mask;  // [R, ceil(vocab / 32)] or null
};

// Mirrors StepOutput in octavo/batch.py, with the same names. Every element is written.
struct StepOutput {
    int32_t* token_ids;   // [R]; 0 where `errors` is not 0
    float* logprobs;      // [R]
    int32_t* ranks;       // [R]
    int32_t* top_ids;     // [R, num_top]
    float* top_logprobs;  // [R, num_top]
    int32_t num_top;      // the largest num_logprobs in the batch, at least 0
    int32_t* errors;      // [R]; the ROW_* codes of sampling.py, for its raise_row_errors
};

struct Exchange;

// Rows of one step whose logits are contiguous.
struct SamplingTask {
    const float* logits;  // [end_row - first_row, vocab], not changed
    int32_t first_row;    // in the batch and the output
    int32_t end_row;
    int32_t vocab;
    SamplingBatch batch;
    StepOutput output;
    const Exchange* exchange;  // of the ranks that share these logits; null: a single rank
};

// As above, on one of several ranks, each of which has a part of the logits. The first rank samples from the best
// candidates of each (sample_plan.h) or, for rows for which they do not suffice, from all logits.
struct PartsTask {
    SamplingTask task;    // logits: [end_row - first_row, part], this rank's; vocab: total; output: the first rank's
    int32_t part, first;  // number of logits on this rank, and their first token
    Exchange* exchange;
    KernelFn gather;   // the AllGather kernel
    float* gathered;   // [end_row - first_row, vocab]
    uint8_t* is_open;  // [rows of the batch], used by workers: candidates did not suffice
};

// Scratch that each worker needs to sample from `vocab` logits.
size_t sampling_scratch_bytes(int32_t vocab);

// Samples the rows of the task. All workers must call it; they share the rows by worker.index. sample_kernel: the
// registered kernel "sample" for the instruction set to use.
void sample_rows(KernelFn sample_kernel, const SamplingTask& task, Worker& worker);

// Additional scratch to sample with `num_ranks` ranks.
size_t parts_scratch_bytes(int32_t vocab, int32_t num_ranks);

// Whether no row of the batch can be sampled from candidates. All logits are then gathered first.
bool needs_all_logits(const SamplingBatch& batch, int32_t num_rows, const Exchange& exchange);

// Samples the rows of the task together with all other ranks. sample_kernel: the kernel "sample_parts".
void sample_parts(KernelFn sample_kernel, PartsTask& task, Worker& worker);

}  // namespace octavo
