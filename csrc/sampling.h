// How rows of logits become tokens, in native code. The meaning is src/octavo/backends/sampling.py.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel.h"

namespace octavo {

// octavo/batch.py SamplingBatch, same names. R rows.
struct SamplingBatch {
    const float* temperature;         // [R]
    const int32_t* top_k;             // [R]
    const float* top_p;               // [R]
    const float* min_p;               // [R]
    const float* typical_p;           // [R]
    const float* repetition_penalty;  // [R]
    const float* presence_penalty;    // [R]
    const float* frequency_penalty;   // [R]
    const uint64_t* seed;             // [R]
    const uint64_t* counter;          // [R]
    const int32_t* target;            // [R]
    const int32_t* num_logprobs;      // [R]
    const int32_t* history_start;     // [R + 1]
    const int32_t* history_ids;
    const int32_t* history_counts;
    const int32_t* bias_start;  // [R + 1]
    const int32_t* bias_ids;
    const float* bias_values;
    const uint32_t* allowed_mask;  // [R, ceil(vocab / 32)] or null
};

// octavo/batch.py StepOutput, same names; every element is written.
struct StepOutput {
    int32_t* token_ids;   // [R]; 0 where `errors` is not 0
    float* logprobs;      // [R]
    int32_t* ranks;       // [R]
    int32_t* top_ids;     // [R, num_top]
    float* top_logprobs;  // [R, num_top]
    int32_t num_top;      // the largest num_logprobs of the batch, at least 0
    int32_t* errors;      // [R]; the ROW_* codes of sampling.py, for its raise_row_errors
};

// All rows of one step.
struct SamplingTask {
    const float* logits;  // [num_rows, vocab], not changed
    int32_t num_rows;
    int32_t vocab;
    SamplingBatch batch;
    StepOutput output;
};

// Scratch that each worker needs to sample from `vocab` logits.
size_t sampling_scratch_bytes(int32_t vocab);

// Samples all rows. Every worker calls it; they share the rows out by worker.index.
// sample_kernel: the registered kernel "sample" of the instruction set to run on.
void sample_rows(KernelFn sample_kernel, const SamplingTask& task, Worker& worker);

}  // namespace octavo
