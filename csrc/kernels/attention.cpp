// Attention: paged, causal, grouped heads; queries and keys come ready for the dot product.
// FusedAttention: the same on q, k and v side by side, with per-head norms and rope. In one file: the bulk of the
// code is common to both and is compiled once.
#include "attention_schedule.h"

namespace octavo {
namespace {

// The weight after those of the operation, if there is one.
const float* key_offset_of(const Args& args, int32_t weights) {
    return args.num_weights > weights ? args.weights[weights].data : nullptr;
}

AttentionTask plain_task(const Args& args) {
    const View &q = args.inputs[0], &k = args.inputs[1], &v = args.inputs[2];
    const Weight &slopes = args.weights[0], &sinks = args.weights[1];
    AttentionTask task{};
    task.shape = attention_shape(args, slopes, sinks);
    task.kv_type = kv_type_of(args);
    task.in.q = q.data;
    task.in.k = k.data;
    task.in.v = v.data;
    task.in.q_stride = q.cols;
    task.in.k_stride = k.cols;
    task.in.v_stride = v.cols;
    task.in.key_offset = key_offset_of(args, 2);
    task.output = args.output;
    task.cache = args.cache;
    return task;
}

AttentionTask fused_task(const Args& args) {
    const View& qkv = args.inputs[0];
    const Weight &slopes = args.weights[0], &frequencies = args.weights[1], &sinks = args.weights[2];
    AttentionTask task{};
    task.shape = attention_shape(args, slopes, sinks);
    task.kv_type = kv_type_of(args);
    const int32_t q_cols = task.shape.num_heads * task.shape.head_dim;
    const int32_t k_cols = task.shape.num_kv_heads * task.shape.head_dim;
    task.in.q = qkv.data;
    task.in.k = qkv.data + q_cols;
    task.in.v = qkv.data + q_cols + k_cols;
    task.in.q_stride = task.in.k_stride = task.in.v_stride = qkv.cols;
    task.in.rope = {frequencies.data, frequencies.data ? static_cast<int32_t>(frequencies.size) : 0,
                    args.floats[FLOAT_ATTENTION_FACTOR]};
    task.in.q_norm = args.weights[3].data;
    task.in.k_norm = args.weights[4].data;
    task.in.key_offset = key_offset_of(args, 5);
    task.in.eps = args.floats[FLOAT_EPS];
    task.output = args.output;
    task.cache = args.cache;
    return task;
}

ScratchSizes attention_scratch(const Args& largest, const Step& limits, int32_t num_workers) {
    return attention_scratch_sizes(plain_task(largest), limits, num_workers);
}

void attention(const Args& args, const Step& step, Worker& worker) {
    run_attention(plain_task(args), step, worker, args.shared_scratch);
}

ScratchSizes fused_attention_scratch(const Args& largest, const Step& limits, int32_t num_workers) {
    return attention_scratch_sizes(fused_task(largest), limits, num_workers);
}

void fused_attention(const Args& args, const Step& step, Worker& worker) {
    run_attention(fused_task(args), step, worker, args.shared_scratch);
}

}  // namespace

OCTAVO_KERNEL_WITH_CACHE(attention, attention_scratch, attention_cache_bytes);
OCTAVO_KERNEL_WITH_CACHE(fused_attention, fused_attention_scratch, attention_cache_bytes);

}  // namespace octavo
