// AdapterSlots stores each token's adapter slot as a number.
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(AdapterSlots, (), (), (index), ());

void adapter_slots(const Args& args, const Step& step, Worker& worker) {
    if (worker.index > 0) return;
    const int32_t* const slots = step.index(args.ints[AdapterSlots::index]);
    for (int32_t r = 0; r < args.output.rows; ++r) args.output.data[r] = slots ? static_cast<float>(slots[r]) : -1.0f;
}

bool adapter_slots_fits(const Args& args) { return has_cols(args.output, 1); }

}  // namespace
OCTAVO_KERNEL(adapter_slots, AdapterSlots);
}  // namespace octavo
