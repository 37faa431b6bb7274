// Times of a program's operations.
#include <stdexcept>

#include "program.h"

namespace octavo {

void Program::start_profile() {
    if (closed()) throw std::runtime_error("the executor is closed");
    clocked_.assign(pool_->count(), std::vector<Clocked>(records_.size() + 1));
}

std::vector<Program::Timing> Program::profile() const {
    std::vector<Timing> timings;
    if (clocked_.empty()) return timings;
    for (size_t i = 0; i <= records_.size(); ++i) {
        const bool is_finale = i == records_.size();
        Timing timing{is_finale ? "sampling: sample" : records_[i]->spec.label,
                      is_finale ? "sample" : records_[i]->spec.kernel, clocked_[0][i].calls, clocked_[0][i].nanoseconds,
                      0};
        for (const auto& of_worker : clocked_) timing.busy_nanoseconds += of_worker[i].busy_nanoseconds;
        timings.push_back(std::move(timing));
    }
    return timings;
}

}  // namespace octavo
