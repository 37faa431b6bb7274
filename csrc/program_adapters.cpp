// A program's slots for adapters: their sizes and contents.
#include <algorithm>
#include <stdexcept>

#include "packed_weight.h"
#include "program.h"

namespace octavo {
namespace {

constexpr int64_t MAX_SLOTS = 1 << 16;

size_t padded(int64_t size) { return static_cast<size_t>((size + 15) / 16 * 16); }

// Whether an adapter's panels match the sizes of its weight. stacked: the number of experts stacked in the weight; 0:
// not a stack.
bool fits_product(const Program::AdapterPart& part, const PackedWeight& weight, int64_t heads, int64_t stacked) {
    const auto rank = static_cast<size_t>(part.low_rank.rank);
    const size_t copies = static_cast<size_t>(std::max(heads, stacked));
    const size_t a_size = copies * static_cast<size_t>(weight.k) * padded(part.low_rank.rank);
    const size_t cols =
        stacked ? copies * static_cast<size_t>(stack_panels(weight.n / stacked) * PANEL_COLS) : padded(weight.n);
    const bool is_whole = part.a_size == 0 && part.low_rank.rank == weight.k && heads == 1 && !stacked;
    return (part.a_size == a_size || is_whole) && part.b_size == cols * rank &&
           (part.gain_size == 0 || part.gain_size == cols);
}

// Whether an adapter's rows match the sizes of an embedding table.
bool fits_table(const Program::AdapterPart& part, const PackedWeight& table) {
    const size_t rows = static_cast<size_t>(table.n), cols = padded(table.k);
    const bool is_whole = part.b_size == 0 && part.a_size == rows * cols;
    const bool has_factors = part.a_size == rows * padded(part.low_rank.rank) &&
                             part.b_size == static_cast<size_t>(part.low_rank.rank) * cols;
    return (is_whole || has_factors) && (part.gain_size == 0 || part.gain_size == cols);
}

}  // namespace

// Allocates room in an operation for the adapters of all slots.
void Program::make_slots(Record& record) {
    const int64_t slots = record.spec.int_of("num_slots");
    if (slots < 1 || slots > MAX_SLOTS)
        throw std::invalid_argument(record.spec.label + ": " + std::to_string(slots) +
                                    " slots for adapters, must be from 1 to " + std::to_string(MAX_SLOTS));
    record.low_ranks.resize(static_cast<size_t>(slots) * record.args.tuple_length);
    record.args.low_ranks = record.low_ranks.data();
}

void Program::check_slot(int32_t slot) const {
    for (const auto& record : records_) {
        if (record->low_ranks.empty()) continue;
        const int64_t slots = record->spec.int_of("num_slots");
        if (slot < 0 || slot >= slots)
            throw std::invalid_argument("adapter slot " + std::to_string(slot) + ", must be from 0 to " +
                                        std::to_string(slots - 1));
    }
}

void Program::check_part(const AdapterPart& part) const {
    const bool is_known = part.record >= 0 && static_cast<size_t>(part.record) < records_.size();
    const Record* const record = is_known ? records_[part.record].get() : nullptr;
    if (!record || record->low_ranks.empty() || part.weight < 0 || part.weight >= record->args.tuple_length)
        throw std::invalid_argument("an adapter cannot change weight " + std::to_string(part.weight) + " of record " +
                                    std::to_string(part.record));
    const PackedWeight& weight = *record->args.tuples[part.weight].packed;
    const int64_t rank = part.low_rank.rank, most = record->spec.int_of("max_rank");
    if (rank < 1 || (rank > most && part.low_rank.a && part.low_rank.b))
        throw std::invalid_argument(record->spec.label + ": an adapter of rank " + std::to_string(rank) +
                                    ", must be from 1 to " + std::to_string(most));
    // All weights of a mixture are stacks, except the first one, the router.
    const bool is_stack = record->spec.kernel == "adapted_moe" && part.weight > 0;
    const int64_t down = record->args.tuples[record->args.tuple_length - 1].packed->n;
    const bool fits = record->spec.kernel == "add_to_embedding"
                          ? fits_table(part, weight)
                          : fits_product(part, weight, std::max<int64_t>(record->spec.int_of("heads"), 1),
                                         is_stack ? down / record->args.output.cols : 0);
    if (!fits)
        throw std::invalid_argument(record->spec.label + ": the factors of an adapter of rank " + std::to_string(rank) +
                                    " have " + std::to_string(part.a_size) + " and " + std::to_string(part.b_size) +
                                    " numbers, its gain has " + std::to_string(part.gain_size) + ": they do not fit [" +
                                    std::to_string(weight.n) + ", " + std::to_string(weight.k) + "]");
}

void Program::set_adapter(int32_t slot, const std::vector<AdapterPart>& parts) {
    check_slot(slot);
    for (const AdapterPart& part : parts) check_part(part);
    for (const auto& record : records_) {
        const size_t count = record->args.tuple_length;
        if (!record->low_ranks.empty()) std::fill_n(record->low_ranks.data() + slot * count, count, LowRank{});
    }
    for (const AdapterPart& part : parts) {
        Record& record = *records_[part.record];
        record.low_ranks[static_cast<size_t>(slot) * record.args.tuple_length + part.weight] = part.low_rank;
    }
}

}  // namespace octavo
