// The interface of a kernel: one function per operation, compiled once per instruction set.
//
// A kernel file defines `static void name(const Args&, const Step&, Worker&)` in an unnamed namespace
// and `static bool name_fits(const Args&)`, and registers both with OCTAVO_KERNEL(name, signature). All workers of the
// pool call the kernel at the same time (SPMD); it divides its work by worker.index and worker.count. The executor puts
// a barrier between two records of a program, so a kernel may read everything that earlier records wrote.
//
// Kernel files must not include the STL or headers with inline functions of external linkage. The linker keeps only one
// copy of such a function, possibly one with instructions that this CPU lacks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "platform/registry.h"

namespace octavo {

// Whether a core can start as many 512-bit products (vpdpbusd) as loads per cycle, judged by its model (isa.cpp).
bool starts_products_like_loads();

// Whether the L1 data cache has at most 32 KiB (isa.cpp).
bool has_small_cache();

// Whether a core needs more than eight chains of 512-bit products to hide their latency, judged by its maker (isa.cpp).
bool needs_many_chains();

// The rows of a domain in one step (octavo/batch.py, same names).
struct DomainRows {
    int32_t count;
    int32_t num_sequences;
    const int32_t* starts;     // [num_sequences + 1], or null if there are none
    const int32_t* positions;  // [components, count], or null if there are none
    int32_t components;        // for tokens, 1 stands for all components
    // For a domain with caches: how many cached rows each sequence has, and where each new row is written.
    const int32_t* lengths = nullptr;  // [num_requests]
    const int32_t* slots = nullptr;    // [num_cache_groups, count]
};

// Domain numbers. The domains that every step has come first; the rest follow in the order of their programs.
enum Domain : int32_t { DOMAIN_TOKENS, DOMAIN_OUTPUTS, DOMAIN_LOGITS, FIRST_FURTHER_DOMAIN };

// The arrays of one step (octavo/batch.py, same names). Its functions are inlined for the same reason as in Worker.
struct Step {
    int32_t num_tokens;
    int32_t num_requests;
    int32_t num_outputs;  // rows of logits, then rows of hidden states
    int32_t num_logits;
    const int32_t* token_ids;        // [num_tokens]
    const int32_t* positions;        // [num_tokens]
    const int32_t* token_types;      // [num_tokens], or null if all are 0
    const int32_t* query_start_loc;  // [num_requests + 1]
    const int32_t* seq_lens;         // [num_requests]
    const int32_t* block_tables;     // [num_cache_groups, num_requests, block_table_stride]
    int32_t block_table_stride;
    int32_t num_cache_groups;
    const int32_t* slot_mapping;    // [num_cache_groups, num_tokens]
    const int32_t* output_indices;  // [num_outputs]
    const int32_t* block_copies;    // [num_block_copies, 2]
    int32_t num_block_copies;
    const int32_t* state_slots;   // [num_requests], or null if the graph has no states
    const int32_t* state_saves;   // [num_requests, num_state_saves, 2] (tokens, slot), or null if none is saved
    int32_t num_state_saves;      // maximum per request
    const int32_t* state_copies;  // [num_state_copies, 2]
    int32_t num_state_copies;
    const DomainRows* further;        // rows of the domains from FIRST_FURTHER_DOMAIN on
    const int32_t* const* indices;    // index arrays after the first (output_indices); null if the step lacks one
    const int32_t* token_components;  // [num_token_components, num_tokens], or null if tokens rotate by `positions`
    int32_t num_token_components;

    __attribute__((always_inline)) DomainRows domain(int32_t number) const {
        if (number >= FIRST_FURTHER_DOMAIN) return further[number - FIRST_FURTHER_DOMAIN];
        if (number == DOMAIN_OUTPUTS) return {num_outputs, 0, nullptr, nullptr, 0};
        if (number == DOMAIN_LOGITS) return {num_logits, 0, nullptr, nullptr, 0};
        if (token_components)
            return {num_tokens, num_requests, query_start_loc, token_components, num_token_components};
        return {num_tokens, num_requests, query_start_loc, positions, 1};
    }
    __attribute__((always_inline)) const int32_t* index(int64_t number) const {
        return number == 0 ? output_indices : indices[number - 1];
    }
};

// A float32 matrix [rows, cols] in the workspace, rows contiguous.
struct View {
    float* data;
    int32_t rows;  // in this step
    int32_t cols;
    bool is_image = false;           // holds an image for products (linear_image.h or linear_image_bf16.h), not floats
    int32_t domain = DOMAIN_TOKENS;  // the domain that the rows belong to
};

// Kernels may read this many bytes past the end of an image.
constexpr size_t IMAGE_SLACK_BYTES = 1024;

// The paged cache of one layer: blocks of keys and values, one after the other. kernels/attention.cpp decides the
// layout inside a block, and thereby block_bytes.
struct LayerCache {
    void* data;
    size_t block_bytes;
    int32_t block_size;  // tokens
    int32_t group;       // index of the layer's block tables and slots
};

// The states of one operation: floats for each slot, in the operation's own layout. The kernel that computes the first
// token of a sequence (position 0) starts from zeros.
struct StateSlots {
    float* data;
    size_t stride;  // floats between neighbouring slots
};

struct PackedWeight;  // packed_weight.h: a matrix packed for the linear kernels

// A weight as a kernel sees it: packed (matrices) or plain float32 (norms, biases, tables).
struct Weight {
    const PackedWeight* packed;  // null if plain
    const float* data;           // null if packed or absent
    int64_t size;                // floats
};

// What an adapter turns the product with a weight [heads * out, in] into: gain * (W x) + scale * B (A x). A and B are
// bfloat16 in panels of 16 columns, the last one padded with zeros (octavo/backends/cpu/adapters.py). For an embedding
// table, both are rows of float16 (kernels/adapted_embedding.cpp). For the stacked experts of a mixture, each expert
// has its own A, B and gain, one expert after the other, with B and gain in `stack_panels(out)` panels.
struct LowRank {
    const uint16_t* a = nullptr;  // [heads, rank / 16, in, 16]; null: B reads x directly, and its rank is `in`
    const uint16_t* b = nullptr;  // [heads * out / 16, rank, 16]; null: there is no low-rank part
    const float* gain = nullptr;  // per column, in whole panels; null: all are 1
    int32_t rank = 0;
    float scale = 0.0f;
};

// Panels of 16 columns needed for the columns of one matrix [n, k] of a stack, which may begin inside a panel.
constexpr int64_t stack_panels(int64_t n) { return n % 16 == 0 ? n / 16 : n / 16 + 2; }

// The operands of one record: an operation's fields (octavo/graph/ops), flattened depth first by their declared types.
// A kernel lists their names with OCTAVO_SIGNATURE and reads `args.floats[RmsNorm::eps]`. When a record is added, the
// names are compared with the fields of the operation, so that a moved field is an error instead of a wrong operand.
//   Value                    one input; None: a view with data null
//   Parameter, tuple of      one weight: plain float32 if it has one dimension or is declared plain, else packed
//     floats or ints         as [product of the leading dimensions, last dimension]; None: all zero
//   tuple of Parameters      one tuple of weights (None among them: all zero)
//   int, bool                one int; None: 0
//   IndexArray, RowDomain      one int, its number for Step::index or Step::domain
//   float                    one float; None: 0
//   str                      one int, the index in Kind; None: 0
//   a nested dataclass       its fields in place; None: as if each of its fields were None
// After its own fields, an operation with a cache has the int kv_type (KvType in kv_cache.h) and the weight key_mean:
// the average of the keys (plain, [num_kv_heads * head_dim]), absent unless the type is int8.
enum Kind : int64_t {
    KIND_NONE,
    KIND_SILU,
    KIND_GELU,
    KIND_GELU_TANH,
    KIND_RELU,
    KIND_RELU2,
    KIND_SIGMOID,
    KIND_TANH,
    KIND_QUICK_GELU,
    KIND_BELOW_ZERO,
    KIND_SOFTMAX,
    KIND_SPARSEMIXER,
};

struct Args {
    const View* inputs;
    View output;
    const Weight* weights;
    const Weight* tuples;  // [tuples, tuple_length]
    int32_t tuple_length;
    const int64_t* ints;  // static attributes: ints, bools and enumerations
    const float* floats;  // static attributes: floats
    LayerCache* cache;    // null except for attention
    StateSlots* state;    // null except for operations with a StateCache
    // [num_slots, tuple_length], null except for operations with adapters: the adapter of each slot for each weight.
    const LowRank* low_ranks;
    void* shared_scratch;  // one region for all workers, of the size that the record asked for
};

// Operand names as OCTAVO_SIGNATURE writes them, "(a, b)". signature.h parses them.
struct KernelSignature {
    const char* inputs;
    const char* weights;
    const char* ints;
    const char* floats;
    const char* tuples;
};

// Its functions are inlined: otherwise the linker could use one instruction set's copy for another.
struct Worker {
    int32_t index;
    int32_t count;
    void* scratch;         // private to this worker, 64-byte aligned
    size_t scratch_bytes;  // at least what the record asked for
    void* pool;
    // Items taken by the workers since the last barrier, which resets it to zero. Null outside a pool.
    int64_t* taken;
    // Waits for all workers inside a kernel. Every worker must call it the same number of times.
    void (*barrier_fn)(Worker&);
    __attribute__((always_inline)) void barrier() {
        if (count > 1)
            barrier_fn(*this);
        else if (taken)
            *taken = 0;
    }
    // Takes the next of `total` items, [begin, return), from the workers' shared counter: half a fair share of the
    // remaining items, but at least `least`, so that the slowest worker delays the rest only briefly. begin >= total:
    // no items are left. Only one such loop may run between two barriers.
    __attribute__((always_inline)) int64_t take(int64_t total, int64_t least, int64_t* begin) {
        int64_t first = __atomic_load_n(taken, __ATOMIC_RELAXED), last = 0;
        do {
            const int64_t part = (total - first) / (2 * count);
            last = first + (part > least ? part : least);
            if (last > total) last = total;
            if (first >= total) break;
        } while (!__atomic_compare_exchange_n(taken, &first, last, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
        *begin = first;
        return last;
    }
};

using KernelFn = void (*)(const Args&, const Step&, Worker&);

// Bytes that a kernel needs in addition to its operands. Queried once, when a program is compiled.
struct ScratchSizes {
    size_t per_worker;
    size_t shared;
};
// `limits` is a Step with the largest counts; views carry the largest number of rows.
using ScratchFn = ScratchSizes (*)(const Args& largest, const Step& limits, int32_t num_workers);

// Bytes of one block of `block_size` tokens in the layer's cache. Called at scalar level, so it must be the same on all
// instruction sets. An operation that has this function gets its own LayerCache.
using CacheFn = size_t (*)(const Args& args, int32_t block_size);

// Whether the shapes of a record's operands match each other and its integers, on which all memory accesses depend.
// Views carry the largest row counts. Each kernel has one, NAME_fits (kernels/shapes.h), called when a record is added.
using FitsFn = bool (*)(const Args& largest);

// The alignment fixes the distance between entries in the section, independent of the compiler's own alignment.
struct alignas(64) KernelEntry {
    const char* name;
    const char* isa;
    KernelFn run;
    FitsFn fits;
    ScratchFn scratch;  // null: none
    CacheFn cache;      // null: none
    const KernelSignature* signature;
    bool keeps_state;
};

}  // namespace octavo

// Defines a struct `type` with each operand's index among operands of its kind, named after the operation's field:
// OCTAVO_SIGNATURE(RmsNorm, (x), (weight), (), (eps)) for inputs, weights, ints and floats. Use an unnamed namespace.
#define OCTAVO_NAMES_(...) __VA_ARGS__
#define OCTAVO_SIGNATURE_WITH_TUPLES(type, inputs_, weights_, ints_, floats_, tuples_)                       \
    struct type {                                                                                            \
        enum Input { OCTAVO_NAMES_ inputs_ };                                                                \
        enum WeightIndex { OCTAVO_NAMES_ weights_ };                                                         \
        enum Int { OCTAVO_NAMES_ ints_ };                                                                    \
        enum Float { OCTAVO_NAMES_ floats_ };                                                                \
        enum Tuple { OCTAVO_NAMES_ tuples_ };                                                                \
        static constexpr octavo::KernelSignature signature{#inputs_, #weights_, #ints_, #floats_, #tuples_}; \
    }
#define OCTAVO_SIGNATURE(type, inputs_, weights_, ints_, floats_) \
    OCTAVO_SIGNATURE_WITH_TUPLES(type, inputs_, weights_, ints_, floats_, ())

// The linker collects the entries of all files (platform/registry.h), so there is no list to edit and no startup code.
#define OCTAVO_STRINGIFY_(x) #x
#define OCTAVO_STRINGIFY(x) OCTAVO_STRINGIFY_(x)
#define OCTAVO_KERNEL_ENTRY_(name, type, scratch, cache, keeps_state) \
    OCTAVO_LISTED(kernels)                                            \
    static const octavo::KernelEntry octavo_entry_##name = {          \
        #name, OCTAVO_STRINGIFY(OCTAVO_ISA), name, name##_fits, scratch, cache, &type::signature, keeps_state}
#define OCTAVO_KERNEL_WITH_CACHE(name, type, scratch, cache) OCTAVO_KERNEL_ENTRY_(name, type, scratch, cache, false)
#define OCTAVO_KERNEL_WITH_SCRATCH(name, type, scratch) OCTAVO_KERNEL_WITH_CACHE(name, type, scratch, nullptr)
#define OCTAVO_KERNEL_WITH_STATE(name, type) OCTAVO_KERNEL_ENTRY_(name, type, nullptr, nullptr, true)
#define OCTAVO_KERNEL(name, type) OCTAVO_KERNEL_WITH_SCRATCH(name, type, nullptr)
