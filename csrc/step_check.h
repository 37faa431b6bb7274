// Checks the arrays of a step before any kernel sees them: a wrong batch is an error, never an invalid read.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace octavo {

// Limits of a domain: its maximum number of rows, and what a step must specify for them.
struct DomainLimits {
    std::string name;
    std::string starts;  // the name of that array
    int32_t rows = 0;
    int32_t components = 0;  // components that a position must have; 0: positions are optional
    bool has_starts = false;
    std::vector<int32_t> groups;  // cache groups; if there are any, DomainRows::lengths and slots are required
};

// An index array: `width` rows of `source` for each row of `domain`. keeps: -1 is none, and a step may omit the array.
struct IndexLimits {
    std::string name;  // for messages
    std::string key;   // in DomainRows::indices of octavo/batch.py
    int32_t domain = 0;
    int32_t source = 0;
    int32_t width = 1;
    bool keeps = false;
};

struct StepLimits {
    int32_t tokens = 0;
    int32_t requests = 0;
    int32_t token_types = 0;  // types are below this; 0: no operation reads them
    int32_t outputs = 0;
    int32_t logits_rows = 0;  // rows among `outputs` whose logits are held at once; 0: all
    int32_t model_len = 0;    // largest sequence length
    int32_t vocab_size = 0;   // token ids are below this
    int32_t num_blocks = 0;   // in the paged cache; 0: not allocated
    int32_t block_size = 0;
    int32_t cache_groups = 0;           // groups of layers, each with its own block tables
    bool has_states = false;            // operations with a StateCache
    int32_t num_states = 0;             // slots
    std::vector<DomainLimits> domains;  // by domain number
    std::vector<IndexLimits> indices;   // by index number; the first is output_indices

    // Whether the layers of a group cache tokens rather than the rows of a further domain.
    bool is_of_tokens(int32_t group) const {
        for (const DomainLimits& domain : domains)
            for (const int32_t other : domain.groups)
                if (other == group) return false;
        return true;
    }
};

// Returns the problem of the step, with array, index, value and limit, or an empty string. All array lengths except
// DomainRows::starts must already have been checked against the counts.
std::string check_step(const Step& step, const StepLimits& limits);

}  // namespace octavo
