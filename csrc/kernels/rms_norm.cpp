#include "elementwise.h"
#include "norms.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(RmsNorm, (x), (weight), (group), (eps));

void rms_norm(const Args& args, const Step&, Worker& worker) {
    const View& x = args.inputs[RmsNorm::x];
    const Weight& weight = args.weights[RmsNorm::weight];
    const float eps = args.floats[RmsNorm::eps];
    const int64_t wanted = args.ints[RmsNorm::group], group = wanted ? wanted : weight.size;
    const Range groups = share(x.rows * (x.cols / group), worker);
    for (int64_t i = groups.begin; i < groups.end; ++i)
        rms_norm_group(args.output.data + i * group, x.data + i * group,
                       weight.data ? weight.data + i * group % weight.size : nullptr, group, eps);
}

bool rms_norm_fits(const Args& args) {
    const View& x = args.inputs[RmsNorm::x];
    const Weight& weight = args.weights[RmsNorm::weight];
    const int64_t wanted = args.ints[RmsNorm::group], group = wanted ? wanted : weight.size;
    const bool has_weight = is_absent(weight) || (is_vector(weight, weight.size) && weight.size % group == 0);
    return group > 0 && x.cols % group == 0 && is_like(x, args.output) && has_weight &&
           (is_absent(weight) || x.cols % weight.size == 0);
}

}  // namespace
OCTAVO_KERNEL(rms_norm, RmsNorm);
}  // namespace octavo
