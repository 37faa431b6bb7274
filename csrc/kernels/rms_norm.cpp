#include "elementwise.h"
#include "norms.h"

namespace octavo {
namespace {

void rms_norm(const Args& args, const Step&, Worker& worker) {
    const View& x = args.inputs[0];
    const int64_t group = args.weights[0].size;
    const Range groups = share(x.rows * (x.cols / group), worker);
    for (int64_t i = groups.begin; i < groups.end; ++i)
        rms_norm_group(args.output.data + i * group, x.data + i * group, args.weights[0].data, group, args.floats[0]);
}

}  // namespace
OCTAVO_KERNEL(rms_norm);
}  // namespace octavo
