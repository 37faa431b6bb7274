// Attention: paged, causal, with grouped heads. Queries and keys arrive ready for the dot product.
// FusedAttention: the same for q, k and v side by side, with per-head norms and rope.
// LatentAttention: all heads share one key per token, whose first columns are also its value.
// CrossAttention: attends to all cached keys of a sequence from another domain, which the step may lack.
// They are in one file because they share most of their code, which is then compiled once.
#include "attention_schedule.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(Attention, (q, k, v), (alibi_slopes, query_scales, sinks, distance_bias, key_mean),
                 (layer, num_heads, num_kv_heads, head_dim, window, value_dim, scale_length, scale_offset, chunked,
                  sees_spans, kv_type),
                 (scale, softcap));
OCTAVO_SIGNATURE(FusedAttention, (qkv),
                 (alibi_slopes, query_scales, frequencies, axes, sinks, q_norm, k_norm, distance_bias, key_mean),
                 (layer, num_heads, num_kv_heads, head_dim, window, value_dim, scale_length, scale_offset, chunked,
                  sees_spans, norms_q, norms_k, norms_v, kv_type),
                 (scale, softcap, attention_factor, eps));

OCTAVO_SIGNATURE(LatentAttention, (q, q_rope, latent, k_rope), (alibi_slopes, query_scales, key_mean),
                 (layer, num_heads, num_kv_heads, head_dim, window, value_dim, scale_length, scale_offset, chunked,
                  sees_spans, kv_type),
                 (scale, softcap));

OCTAVO_SIGNATURE(CrossAttention, (q, k, v), (alibi_slopes, key_mean),
                 (num_heads, num_kv_heads, head_dim, window, layer, domain, kv_type), (scale, softcap));

constexpr int32_t LATENT_HEADS = 32;  // heads that share one conversion of keys; workers split the rest

void set_distance_bias(const Weight& weight, AttentionShape& shape) {
    shape.distance_bias = weight.data;
    shape.distance_bias_size = weight.data ? static_cast<int64_t>(weight.size) : 0;
}

AttentionTask plain_task(const Args& args) {
    const View &q = args.inputs[Attention::q], &k = args.inputs[Attention::k], &v = args.inputs[Attention::v];
    AttentionTask task = attention_task<Attention>(args);
    task.in.q = q.data;
    task.in.k = k.data;
    task.in.v = v.data;
    task.in.q_stride = q.cols;
    task.in.k_stride = k.cols;
    task.in.v_stride = v.cols;
    task.writes = k.data != nullptr;
    task.shape.sinks = args.weights[Attention::sinks].data;
    set_distance_bias(args.weights[Attention::distance_bias], task.shape);
    return task;
}

AttentionTask fused_task(const Args& args) {
    const View& qkv = args.inputs[FusedAttention::qkv];
    const Weight& frequencies = args.weights[FusedAttention::frequencies];
    AttentionTask task = attention_task<FusedAttention>(args);
    const int32_t q_cols = task.shape.num_heads * task.shape.head_dim;
    const int32_t k_cols = task.shape.num_kv_heads * task.shape.head_dim;
    task.in.q = qkv.data;
    task.in.k = qkv.data + q_cols;
    task.in.v = qkv.data + q_cols + k_cols;
    task.in.q_stride = task.in.k_stride = task.in.v_stride = qkv.cols;
    task.in.rope = {frequencies.data, frequencies.data ? static_cast<int32_t>(frequencies.size) : 0,
                    args.floats[FusedAttention::attention_factor], args.weights[FusedAttention::axes].data};
    task.writes = qkv.cols > q_cols;
    task.in.q_norm = {args.ints[FusedAttention::norms_q] != 0, args.weights[FusedAttention::q_norm].data};
    task.in.k_norm = {args.ints[FusedAttention::norms_k] != 0, args.weights[FusedAttention::k_norm].data};
    task.in.v_norm = {args.ints[FusedAttention::norms_v] != 0, nullptr};
    task.in.eps = args.floats[FusedAttention::eps];
    task.shape.sinks = args.weights[FusedAttention::sinks].data;
    set_distance_bias(args.weights[FusedAttention::distance_bias], task.shape);
    return task;
}

AttentionTask latent_task(const Args& args) {
    const View &q = args.inputs[LatentAttention::q], &latent = args.inputs[LatentAttention::latent];
    AttentionTask task = attention_task<LatentAttention>(args);
    AttentionShape& s = task.shape;
    s.latent = true;
    s.group = s.num_heads < LATENT_HEADS ? s.num_heads : LATENT_HEADS;
    while (s.num_heads % s.group) --s.group;
    s.num_kv_heads = s.num_heads / s.group;
    task.writes = true;
    task.in.q = q.data;
    task.in.k = latent.data;
    task.in.q_stride = q.cols;
    task.in.k_stride = latent.cols;
    task.in.q_rope = args.inputs[LatentAttention::q_rope].data;
    task.in.k_rope = args.inputs[LatentAttention::k_rope].data;
    return task;
}

KvDims cross_dims(const Args& args) {
    const auto dim = [&args](int index) { return static_cast<int32_t>(args.ints[index]); };
    return {dim(CrossAttention::num_kv_heads), dim(CrossAttention::head_dim), dim(CrossAttention::head_dim)};
}

AttentionTask cross_task(const Args& args) {
    using F = CrossAttention;
    const View &q = args.inputs[F::q], &k = args.inputs[F::k], &v = args.inputs[F::v];
    const KvDims dims = cross_dims(args);
    AttentionTask task{};
    AttentionShape& s = task.shape;
    s.num_heads = static_cast<int32_t>(args.ints[F::num_heads]);
    s.num_kv_heads = dims.heads;
    s.group = s.num_heads / s.num_kv_heads;
    s.head_dim = s.value_dim = dims.key;
    s.padded_dim = kv_padded_dim(dims.value);
    s.sees_all = true;
    s.scale = args.floats[F::scale];
    s.softcap = args.floats[F::softcap];
    s.scale_length = 1;
    task.kv_type = kv_type_of<F>(args);
    task.in.q = q.data;
    task.in.k = k.data;
    task.in.v = v.data;
    task.in.q_stride = q.cols;
    task.in.k_stride = k.cols;
    task.in.v_stride = v.cols;
    task.in.key_offset = args.weights[F::key_mean].data;
    task.writes = k.data != nullptr;
    task.output = args.output;
    task.cache = args.cache;
    return task;
}

ScratchSizes cross_attention_scratch(const Args& largest, const Step& limits, int32_t num_workers) {
    return attention_scratch_sizes(cross_task(largest), limits, num_workers);
}

void cross_attention(const Args& args, const Step& step, Worker& worker) {
    const DomainRows rows = step.domain(static_cast<int32_t>(args.ints[CrossAttention::domain]));
    run_cross_attention(cross_task(args), step, rows, worker, args.shared_scratch);
}

size_t cross_cache_bytes(const Args& args, int32_t block_size) {
    return kv_block_bytes(kv_type_of<CrossAttention>(args), cross_dims(args), block_size);
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

ScratchSizes latent_attention_scratch(const Args& largest, const Step& limits, int32_t num_workers) {
    return attention_scratch_sizes(latent_task(largest), limits, num_workers);
}

void latent_attention(const Args& args, const Step& step, Worker& worker) {
    run_attention(latent_task(args), step, worker, args.shared_scratch);
}

size_t latent_cache_bytes(const Args& args, int32_t block_size) {
    const int32_t key_dim = static_cast<int32_t>(args.ints[LatentAttention::head_dim]);
    return kv_block_bytes(KvType::float16, {1, key_dim, 0}, block_size);
}

// Checks the head sizes, and the operands that all attention operations share.
template <typename F>
bool has_attention_shape(const Args& args) {
    const int64_t heads = args.ints[F::num_heads], kv_heads = args.ints[F::num_kv_heads], dim = args.ints[F::head_dim];
    if (!is_within(kv_heads, 1, heads) || heads % kv_heads != 0 || dim <= 0 || args.ints[F::value_dim] < 0)
        return false;
    return args.ints[F::window] >= 0 && args.ints[F::scale_length] > 0 && args.ints[F::scale_offset] >= 0 &&
           is_within(args.ints[F::kv_type], 0, static_cast<int64_t>(KvType::int8)) &&
           is_vector_or_absent(args.weights[F::alibi_slopes], heads) &&
           is_vector_or_absent(args.weights[F::key_mean], kv_heads * dim);
}

bool attention_fits(const Args& args) {
    const View &q = args.inputs[Attention::q], &k = args.inputs[Attention::k], &v = args.inputs[Attention::v];
    if (!has_attention_shape<Attention>(args)) return false;
    const KvDims dims = kv_dims_of<Attention>(args);
    const int64_t heads = args.ints[Attention::num_heads];
    const bool has_keys = has_cols(k, static_cast<int64_t>(dims.heads) * dims.key) &&
                          has_cols(v, static_cast<int64_t>(dims.heads) * dims.value) && has_rows_of(k, v);
    return has_cols(q, heads * dims.key) && has_cols(args.output, heads * dims.value) && has_rows_of(q, args.output) &&
           (has_keys || (is_absent(k) && is_absent(v))) && is_vector_or_absent(args.weights[Attention::sinks], heads) &&
           is_distance_bias_or_absent(args.weights[Attention::distance_bias], heads);
}

bool fused_attention_fits(const Args& args) {
    using F = FusedAttention;
    const View& qkv = args.inputs[F::qkv];
    if (!has_attention_shape<F>(args)) return false;
    const KvDims dims = kv_dims_of<F>(args);
    const int64_t heads = args.ints[F::num_heads], kv_heads = dims.heads;
    return (has_cols(qkv, heads * dims.key) || has_cols(qkv, (heads + kv_heads) * dims.key + kv_heads * dims.value)) &&
           has_cols(args.output, heads * dims.value) && has_rows_of(qkv, args.output) &&
           is_within(args.weights[F::frequencies].size, 0, dims.key / 2) &&
           is_vector_or_absent(args.weights[F::axes], args.weights[F::frequencies].size) &&
           is_vector_or_absent(args.weights[F::q_norm], dims.key) &&
           is_vector_or_absent(args.weights[F::k_norm], dims.key) &&
           is_vector_or_absent(args.weights[F::sinks], heads) &&
           is_distance_bias_or_absent(args.weights[F::distance_bias], heads);
}

bool latent_attention_fits(const Args& args) {
    using F = LatentAttention;
    const View &q = args.inputs[F::q], &q_rope = args.inputs[F::q_rope];
    const View &latent = args.inputs[F::latent], &k_rope = args.inputs[F::k_rope];
    if (!has_attention_shape<F>(args)) return false;
    const KvDims dims = kv_dims_of<F>(args);
    const int64_t heads = args.ints[F::num_heads], rope = dims.key - dims.value;
    return dims.heads == 1 && rope > 0 && dims.value % 16 == 0 && has_cols(latent, dims.value) &&
           has_cols(k_rope, rope) && has_cols(q, heads * dims.value) && has_cols(q_rope, heads * rope) &&
           is_like(q, args.output) && has_rows_of(q, q_rope) && has_rows_of(q, latent) && has_rows_of(q, k_rope);
}

bool cross_attention_fits(const Args& args) {
    using F = CrossAttention;
    const View &q = args.inputs[F::q], &k = args.inputs[F::k], &v = args.inputs[F::v];
    const int64_t heads = args.ints[F::num_heads], kv_heads = args.ints[F::num_kv_heads], dim = args.ints[F::head_dim];
    if (!is_within(kv_heads, 1, heads) || heads % kv_heads != 0 || dim <= 0) return false;
    const bool has_keys =
        has_cols(k, kv_heads * dim) && is_like(v, k) && k.domain == args.ints[F::domain] && v.domain == k.domain;
    return has_cols(q, heads * dim) && is_like(q, args.output) && (has_keys || (is_absent(k) && is_absent(v))) &&
           args.ints[F::window] == 0 && is_absent(args.weights[F::alibi_slopes]) &&
           is_within(args.ints[F::kv_type], 0, static_cast<int64_t>(KvType::int8)) &&
           is_vector_or_absent(args.weights[F::key_mean], kv_heads * dim);
}

}  // namespace

OCTAVO_KERNEL_WITH_CACHE(attention, Attention, attention_scratch, attention_cache_bytes<Attention>);
OCTAVO_KERNEL_WITH_CACHE(fused_attention, FusedAttention, fused_attention_scratch,
                         attention_cache_bytes<FusedAttention>);
OCTAVO_KERNEL_WITH_CACHE(cross_attention, CrossAttention, cross_attention_scratch, cross_cache_bytes);
OCTAVO_KERNEL_WITH_CACHE(latent_attention, LatentAttention, latent_attention_scratch, latent_cache_bytes);

}  // namespace octavo
