// Checks the arrays of a step before any kernel sees them: a wrong batch is an error, never a wild read.
#pragma once

#include <string>

#include "kernel.h"

namespace octavo {

struct StepLimits {
    int32_t tokens = 0;
    int32_t requests = 0;
    int32_t outputs = 0;
    int32_t logits_rows = 0;  // of the logits among `outputs` whose logits are held at once; 0: all
    int32_t model_len = 0;    // largest sequence length
    int32_t vocab_size = 0;   // token ids are below this
    int32_t num_blocks = 0;   // of the paged cache; 0: none allocated
    int32_t block_size = 0;
    int32_t cache_groups = 0;  // groups of layers, each with its own block tables
    bool has_states = false;   // operations with a StateCache
    int32_t num_states = 0;    // slots
};

// The problem of the step, with array, index, value and limit; empty if there is none.
// Array lengths have been checked against the counts before.
std::string check_step(const Step& step, const StepLimits& limits);

}  // namespace octavo
