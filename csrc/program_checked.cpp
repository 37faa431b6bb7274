// Checked mode: outputs are poisoned before each record and must be finite afterwards.
#include <cmath>
#include <cstring>

#include "program.h"

namespace octavo {

// Worker 0 poisons and checks while the other workers wait. The step ends with the first faulty record.
void Program::walk_checked(PendingStep& pending, Worker& worker, size_t first) {
    for (size_t i = first, count = num_parts(pending); i < count && pending.error_.empty() && !is_broken(); ++i) {
        const Part part = part_of(pending, i);
        if (part.record == records_.size()) {
            run_finale(pending, part, worker);
        } else {
            const Record& record = *records_[part.record];
            View out = record.args.output;
            if (out.data && values_[record.spec.output].domain == DOMAIN_LOGITS)
                out.rows = part.end_row - part.first_row;
            if (worker.index == 0) poison(out);
            worker.barrier();
            run_record(pending, part, worker);
            worker.barrier();
            if (worker.index == 0) pending.error_ = check_finite(record, out);
        }
        if (i + 1 < count) pool_->boundary(worker, i + 2);
    }
}

// All bits set is NaN, so check_finite finds any element that the kernel does not write.
void Program::poison(const View& out) {
    if (out.data) std::memset(out.data, 0xff, sizeof(float) * out.rows * out.cols);
}

// The problem with the record's output, or an empty string.
std::string Program::check_finite(const Record& record, const View& out) {
    const int64_t size = static_cast<int64_t>(out.rows) * out.cols;
    for (int64_t i = 0; i < size; ++i)
        if (!std::isfinite(out.data[i]))
            return record.spec.label + " (" + record.spec.kernel + ", " + record.kernel->isa + ") gave " +
                   std::to_string(out.data[i]) + " at row " + std::to_string(i / out.cols) + ", column " +
                   std::to_string(i % out.cols);
    return {};
}

}  // namespace octavo
