// Shared code of element-wise kernels, which divide their work into runs of 16-float chunks.
#pragma once

#include "kernel.h"
#include "simd.h"

namespace octavo {
namespace {

// One worker's part of `total`, half-open and contiguous. Sizes differ by at most one.
struct Range {
    int64_t begin, end;
};
inline Range share(int64_t total, const Worker& worker) {
    return {total * worker.index / worker.count, total * (worker.index + 1) / worker.count};
}

// out[i] = f(i-th chunk) over all of `out`; load(p, n) reads n lanes of an operand.
template <typename F>
inline void map_elements(const View& out, const Worker& worker, F f) {
    const int64_t size = static_cast<int64_t>(out.rows) * out.cols;
    const Range chunks = share((size + 15) / 16, worker);
    const int64_t end = chunks.end * 16 < size ? chunks.end * 16 : size;
    int64_t i = chunks.begin * 16;
    for (; i + 16 <= end; i += 16) store(out.data + i, f([i](const float* p) { return load(p + i); }));
    if (i < end) {
        const int n = static_cast<int>(end - i);
        store_partial(out.data + i, f([i, n](const float* p) { return load_partial(p + i, n); }), n);
    }
}

}  // namespace
}  // namespace octavo
