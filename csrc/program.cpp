#include "program.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "kv_cache.h"
#include "pack.h"

namespace octavo {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

int64_t RecordSpec::int_of(const char* name) const {
    const size_t place = std::find(names.ints.begin(), names.ints.end(), name) - names.ints.begin();
    return place < ints.size() ? ints[place] : -1;
}

Program::Program(const ProgramOptions& options, std::vector<ProgramValue> values, size_t workspace_bytes)
    : options_(options), values_(std::move(values)), workspace_bytes_(workspace_bytes) {
    options_.pool.tiles = uses_tiles(options_.isa);
    const std::vector<DomainLimits>& domains = options_.limits.domains;
    if (domains.size() < FIRST_FURTHER_DOMAIN)
        throw std::invalid_argument("a program needs the domains of tokens, outputs and logits");
    for (size_t i = FIRST_FURTHER_DOMAIN; i < domains.size(); ++i)
        most_rows_.push_back({domains[i].rows, 0, nullptr, nullptr, 0});
    const Step largest = largest_step();
    for (const ProgramValue& value : values_) {
        if (value.domain < 0 || static_cast<size_t>(value.domain) >= domains.size())
            throw std::invalid_argument("a value has an unknown domain: " + std::to_string(value.domain));
        const size_t bytes = static_cast<size_t>(held_rows(value, largest)) * value.cols * sizeof(float);
        if (value.cols <= 0 || value.offset % 64 != 0 || value.offset > workspace_bytes ||
            bytes > workspace_bytes - value.offset)
            throw std::invalid_argument("a value is empty, misaligned or outside the workspace");
        if (options_.checked) workspace_.emplace_back(bytes, Pages::guarded);
    }
    if (!options_.checked) workspace_.emplace_back(workspace_bytes + IMAGE_SLACK_BYTES);
    pool_ = std::make_shared<ThreadPool>(options_.pool);
}

// Has only counts. The block table is as wide as if each block held one token.
Step Program::largest_step() const {
    const StepLimits& limits = options_.limits;
    Step step{};
    step.num_tokens = limits.tokens;
    step.num_requests = limits.requests;
    step.num_outputs = step.num_logits = limits.outputs;
    step.block_table_stride = limits.model_len;
    step.further = most_rows_.data();
    return step;
}

int32_t Program::add_weight(const Weight& weight) {
    weights_.push_back(weight);
    return static_cast<int32_t>(weights_.size()) - 1;
}

float* Program::value_data(int32_t value) const {
    if (options_.checked) return reinterpret_cast<float*>(workspace_.at(value).data());
    return reinterpret_cast<float*>(workspace_.at(0).data() + values_.at(value).offset);
}

int32_t Program::value_rows(int32_t value, const Step& step) const {
    return step.domain(values_.at(value).domain).count;
}

// The number of rows of a value that are in memory at once.
int32_t Program::held_rows(const ProgramValue& value, const Step& step) const {
    const int32_t rows = step.domain(value.domain).count, most = options_.limits.logits_rows;
    return value.domain == DOMAIN_LOGITS && most > 0 ? std::min(rows, most) : rows;
}

View Program::make_view(int32_t value, int32_t rows) const {
    if (value < 0) return View{};
    const ProgramValue& found = values_.at(value);
    return View{value_data(value), rows, found.cols, found.is_image, found.domain};
}

void Program::keep_as_image(int32_t value) {
    if (options_.checked || values_.at(value).cols % UNIT_K != 0)
        throw std::invalid_argument("a value of " + std::to_string(values_.at(value).cols) +
                                    " columns cannot be kept as an image; that needs a multiple of " +
                                    std::to_string(UNIT_K) + " columns, and no checked mode");
    values_[value].is_image = true;
}

void Program::add_record(const RecordSpec& spec) {
    auto record = std::make_unique<Record>();
    record->spec = spec;
    record->kernel = find_kernel(spec.kernel, options_.isa);
    if (!record->kernel) throw std::invalid_argument("no native kernel for operation '" + spec.kernel + "'");
    check_operand_names(spec.label, spec.names, *record->kernel->signature);
    const auto check = [&](int32_t index, size_t size) {
        if (index >= 0 && static_cast<size_t>(index) >= size)
            throw std::invalid_argument(spec.label + ": index " + std::to_string(index) + " must be below " +
                                        std::to_string(size));
    };
    for (const int32_t input : spec.inputs) check(input, values_.size());
    check(spec.output, values_.size());
    for (const int32_t weight : spec.weights) {
        check(weight, weights_.size());
        record->weights.push_back(weight < 0 ? Weight{} : weights_[weight]);
    }
    if ((spec.state_size > 0) != record->kernel->keeps_state)
        throw std::invalid_argument(
            spec.label + (spec.state_size > 0 ? ": the operation has no state" : ": the operation needs a state size"));
    if (spec.state_size > 0) options_.limits.has_states = true;
    if (spec.cache >= 0 && !record->kernel->cache)
        throw std::invalid_argument(spec.label + ": the operation has no cache");
    if (spec.cache >= static_cast<int32_t>(caches_.size())) caches_.resize(spec.cache + 1);
    if (spec.cache >= 0) options_.limits.cache_groups = std::max(options_.limits.cache_groups, spec.cache_group + 1);
    bind(*record);
    if (spec.int_of("num_slots") >= 0) make_slots(*record);
    const OperandNames& names = spec.names;
    if (spec.inputs.size() != names.inputs.size() || spec.ints.size() != names.ints.size() ||
        spec.floats.size() != names.floats.size() || spec.output < 0)
        throw std::invalid_argument(spec.label + ": not every field has an operand");
    check_operands_fit(spec.label, record->args, *record->kernel);
    for (const char* const kernel : {"gather", "pool_rows", "splice", "add_rows", "adapter_slots"})
        if (spec.kernel == kernel) check_row_index(spec);
    if (spec.kernel == "cross_attention") check_cached_domain(spec);
    if (spec.kernel == "token_type_embedding") limit_token_types(*record);
    records_.push_back(std::move(record));
}

// For an operation such as Gather, the index applies to the rows of its output, and its numbers are rows of the last
// input, if there is one.
void Program::check_row_index(const RecordSpec& spec) const {
    const int64_t number = spec.int_of("index");
    const std::vector<IndexLimits>& indices = options_.limits.indices;
    if (number < 0 || number >= static_cast<int64_t>(indices.size()) ||
        values_.at(spec.output).domain != indices[number].domain ||
        (!spec.inputs.empty() && values_.at(spec.inputs.back()).domain != indices[number].source))
        throw std::invalid_argument(spec.label + ": its index array belongs to the rows of another domain");
}

// The domain of a CrossAttention takes the cache group of the record.
void Program::check_cached_domain(const RecordSpec& spec) const {
    const int64_t number = spec.int_of("domain");
    const std::vector<DomainLimits>& domains = options_.limits.domains;
    if (number >= FIRST_FURTHER_DOMAIN && number < static_cast<int64_t>(domains.size()))
        for (const int32_t group : domains[number].groups)
            if (group == spec.cache_group) return;
    throw std::invalid_argument(spec.label + ": its domain lacks cache group " + std::to_string(spec.cache_group));
}

// Token types must be rows of the smallest of their tables.
void Program::limit_token_types(const Record& record) {
    const PackedWeight* const table = record.weights.empty() ? nullptr : record.weights[0].packed;
    if (!table) throw std::invalid_argument(record.spec.label + ": the operation needs a packed table");
    int32_t& limit = options_.limits.token_types;
    limit = limit > 0 ? std::min(limit, static_cast<int32_t>(table->n)) : static_cast<int32_t>(table->n);
}

// Makes the record's operands point to its own copies, with the largest row counts.
void Program::bind(Record& record) {
    const RecordSpec& spec = record.spec;
    const Step largest = largest_step();
    for (const int32_t input : spec.inputs)
        record.inputs.push_back(make_view(input, input < 0 ? 0 : value_rows(input, largest)));
    Args& args = record.args;
    args.inputs = record.inputs.data();
    args.output = make_view(spec.output, spec.output < 0 ? 0 : value_rows(spec.output, largest));
    set_weights(args, record.weights, *record.kernel->signature);
    args.ints = spec.ints.data();
    args.floats = spec.floats.data();
}

void Program::finish(size_t scratch_bytes) {
    scratch_bytes_ = scratch_bytes;
    size_t shared = 0;
    const Step largest = largest_step();
    for (const auto& record : records_) {
        if (record->kernel->scratch) {
            const ScratchSizes sizes = record->kernel->scratch(record->args, largest, pool_->count());
            scratch_bytes_ = std::max(scratch_bytes_, sizes.per_worker);
            shared = std::max(shared, sizes.shared);
        }
        if (record->spec.cache >= 0) record->args.cache = &record->cache;
        if (record->spec.state_size > 0) record->args.state = &record->state;
    }
    pool_->reserve_scratch(scratch_bytes_);
    shared_scratch_ = Memory(shared);
    for (const auto& record : records_) {
        const bool exchanges = record->spec.kernel == "all_reduce" || record->spec.kernel == "all_gather";
        if (exchanges && !group_)
            throw std::invalid_argument(record->spec.label + ": the program must join a group of ranks first");
        record->args.shared_scratch = exchanges ? static_cast<void*>(group_->exchange()) : shared_scratch_.data();
    }
}

void Program::stream_weights(const std::vector<int32_t>& weights, size_t ahead_bytes) {
    std::vector<WeightStream::Item> items;
    for (const int32_t weight : weights) {
        const PackedWeight* const packed = weights_.at(weight).packed;
        size_t last = records_.size();  // a table may first be read by rows, then as a whole by the output head
        for (size_t i = 0; i < records_.size(); ++i)
            for (const int32_t operand : records_[i]->spec.weights)
                if (operand == weight) last = i;
        if (!packed || last == records_.size())
            throw std::invalid_argument("weight " + std::to_string(weight) +
                                        " cannot be streamed: no record reads it, or it is not packed");
        items.push_back({last, const_cast<char*>(reinterpret_cast<const char*>(packed->data)), packed_bytes(*packed)});
    }
    std::stable_sort(items.begin(), items.end(), [](const auto& a, const auto& b) { return a.record < b.record; });
    if (!items.empty()) stream_ = std::make_unique<WeightStream>(std::move(items), records_.size(), ahead_bytes);
}

size_t Program::workspace_bytes() const {
    return workspace_bytes_ + shared_scratch_.size() + scratch_bytes_ * (pool_ ? pool_->count() : 0);
}

void Program::allocate_cache(int32_t num_blocks, int32_t block_size, int32_t num_states) {
    if (options_.limits.has_states && num_states <= 0)
        throw std::invalid_argument("the graph has states: at least one slot is needed");
    if (num_blocks <= 0) throw std::invalid_argument("a cache needs at least one block");
    if (!kv_block_size_is_valid(block_size))
        throw std::invalid_argument("the block size is " + std::to_string(block_size) +
                                    ", must be 8 or a multiple of 16 tokens");
    if (options_.limits.num_blocks > 0) throw std::invalid_argument("the cache is allocated already");
    const std::vector<size_t> bytes = block_bytes_of(block_size);
    for (size_t i = 0; i < caches_.size(); ++i)
        caches_[i] = Cache{bytes[i], Memory(bytes[i] * static_cast<size_t>(num_blocks), Pages::small_at_first)};
    for (const auto& record : records_) {
        if (record->spec.cache < 0) continue;
        const Cache& cache = caches_.at(record->spec.cache);
        record->cache = {cache.memory.data(), cache.block_bytes, block_size, record->spec.cache_group};
    }
    allocate_states(num_states);
    options_.limits.num_blocks = num_blocks;
    options_.limits.block_size = block_size;
}

void Program::borrow_cache(const Program& other) {
    const StepLimits& lent = other.options_.limits;
    if (options_.limits.num_blocks > 0) throw std::invalid_argument("the cache is allocated already");
    if (lent.num_blocks == 0) throw std::invalid_argument("the other program has no cache yet");
    const std::vector<size_t> bytes = block_bytes_of(lent.block_size);
    for (size_t i = 0; i < bytes.size(); ++i)
        if (bytes[i] > 0 && (i >= other.caches_.size() || bytes[i] > other.caches_[i].block_bytes))
            throw std::invalid_argument("the other program has no cache " + std::to_string(i) + " of that size");
    for (const auto& record : records_) {
        if (record->spec.cache < 0) continue;
        const Cache& cache = other.caches_.at(record->spec.cache);
        record->cache = {cache.memory.data(), cache.block_bytes, lent.block_size, record->spec.cache_group};
    }
    caches_.clear();  // a step must not copy or move blocks of another program
    lender_ = &other;
    options_.limits.num_blocks = lent.num_blocks;
    options_.limits.block_size = lent.block_size;
}

// In checked mode, memory that no sequence has written is NaN.
void Program::allocate_states(int32_t num_states) {
    for (const auto& record : records_) {
        const size_t size = static_cast<size_t>(record->spec.state_size);
        if (size == 0) continue;
        record->states = Memory(size * num_states * sizeof(float), options_.checked ? Pages::guarded : Pages::huge);
        if (options_.checked) std::memset(record->states.data(), 0xff, record->states.size());
        record->state = {reinterpret_cast<float*>(record->states.data()), size};
    }
    options_.limits.num_states = num_states;
}

// Logits are computed from the first selected rows; the rows after those are returned as they are.
void Program::update_rows(const Step& step) {
    for (const auto& record : records_) {
        const int32_t output = record->spec.output;
        const bool makes_logits = output >= 0 && values_[output].domain == DOMAIN_LOGITS;
        for (size_t i = 0; i < record->inputs.size(); ++i) {
            const int32_t input = record->spec.inputs[i];
            if (input < 0) continue;
            const bool is_selected = makes_logits && values_[input].domain == DOMAIN_OUTPUTS;
            record->inputs[i].rows = is_selected ? step.num_logits : value_rows(input, step);
        }
        if (output >= 0) record->args.output.rows = value_rows(output, step);
    }
}

// Whether the row count of a domain differs from the previous step.
bool Program::take_counts(const Step& step) {
    bool changed = counts_.empty();
    counts_.resize(options_.limits.domains.size());
    for (size_t i = 0; i < counts_.size(); ++i) {
        const int32_t count = step.domain(static_cast<int32_t>(i)).count;
        changed = changed || counts_[i] != count;
        counts_[i] = count;
    }
    return changed;
}

void Program::share_threads(const Program& other) {
    if (closed() || other.closed()) throw std::runtime_error("the executor is closed");
    if (pool_->count() != other.pool_->count())
        throw std::invalid_argument("programs that share threads need equal numbers of them, not " +
                                    std::to_string(pool_->count()) + " and " + std::to_string(other.pool_->count()));
    other.pool_->reserve_scratch(scratch_bytes_);
    pool_ = other.pool_;
}

size_t Program::end_of(int32_t output) const {
    for (size_t i = records_.size(); i > 0; --i)
        if (records_[i - 1]->spec.output == output) return i;
    return records_.size();
}

const std::optional<Program::GatheredLogits>& Program::gathered_logits(int32_t value) {
    const auto [place, is_new] = gathered_.try_emplace(value);
    std::optional<GatheredLogits>& found = place->second;
    const size_t end = is_new && group_ ? end_of(value) : 0;
    if (end == 0 || values_.at(value).domain != DOMAIN_LOGITS) return found;
    const Record& record = *records_[end - 1];
    if (record.spec.output != value || record.spec.kernel != "all_gather") return found;
    found = GatheredLogits{record.spec.inputs.at(0), static_cast<int32_t>(record.spec.int_of("begin")),
                           record.kernel->run, group_->exchange()};
    return found;
}

std::unique_lock<std::mutex> Program::lock() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (pool_) pool_->wait(pool_->last_job());
    return lock;
}

std::unique_lock<std::mutex> Program::lock_for_step() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!has_room()) pool_->wait(pool_->last_job() - (stream_ ? 0 : 1));
    return lock;
}

std::unique_lock<std::mutex> Program::try_lock_for_step() {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (lock && !has_room()) lock.unlock();
    return lock;
}

void Program::submit(PendingStep& pending) {
    if (closed() || (lender_ && lender_->closed())) throw std::runtime_error("the executor is closed");
    if ((!caches_.empty() || options_.limits.has_states) && options_.limits.num_blocks == 0)
        throw std::runtime_error("no cache was allocated");
    const size_t whole_end = end_of(pending.result);
    const size_t end = pending.end_record < 0 ? whole_end : static_cast<size_t>(pending.end_record);
    const bool is_part = pending.first_record != 0 || end != whole_end;
    if (pending.first_record < 0 || static_cast<size_t>(pending.first_record) > end || end > whole_end ||
        (is_part && (stream_ || !caches_.empty() || pending.step.num_logits > 0)))
        throw std::invalid_argument("no such part: records " + std::to_string(pending.first_record) + " to " +
                                    std::to_string(pending.end_record) + " of " + std::to_string(whole_end) +
                                    "; only a step without logits, caches and streamed weights has parts");
    // Done by a worker, because the records are no longer in the calling thread's cache.
    pending.changes_rows_ = take_counts(pending.step);
    if (stream_) stream_->begin_step();
    pending.program_ = this;
    pending.end_ = end;
    pending.num_turns_ = 1;
    pending.turn_rows_ = pending.step.num_logits;
    pending.in_turns_ = 0;
    const auto makes_logits = [&](size_t record) {
        const int32_t output = records_[record]->spec.output;
        return output >= 0 && values_[output].domain == DOMAIN_LOGITS;
    };
    if (pending.turn_rows_ > 0)
        while (pending.in_turns_ < pending.end_ && makes_logits(pending.end_ - 1 - pending.in_turns_))
            ++pending.in_turns_;
    if (pending.in_turns_ > 0) {
        pending.turn_rows_ = held_rows(values_[records_[pending.end_ - 1]->spec.output], pending.step);
        pending.num_turns_ =
            static_cast<size_t>((pending.step.num_logits + pending.turn_rows_ - 1) / pending.turn_rows_);
    }
    pending.job_ = pool_->start(
        [](void* pointer, Worker& worker, size_t position) {
            PendingStep& step = *static_cast<PendingStep*>(pointer);
            step.program_->run(step, worker, position);
        },
        &pending, is_part);
    pending.pool_ = pool_;
}

void Program::PendingStep::wait() {
    if (pool_) pool_->wait(job_);
    pool_.reset();
    if (!error_.empty()) throw std::runtime_error(error_);
}

// Boundary 1 is before the first record, and boundary i + 1 after i records.
void Program::run(PendingStep& pending, Worker& worker, size_t position) {
    const auto start = Clock::now();
    if (position == 0) {
        if (pending.changes_rows_ || pending.step.num_block_copies > 0 || pending.step.num_state_copies > 0 ||
            pending.moves() || !pending.inputs.empty() || pending.earlier_tokens.rows) {
            if (pending.changes_rows_ && worker.index == 0) update_rows(pending.step);
            if (pending.earlier_tokens.rows && worker.index == 0) pending.earlier_tokens.take(pending.step.num_tokens);
            move_blocks(pending, worker);
            move_states(pending, worker);
            copy_blocks(pending.step, worker);
            copy_states(pending.step, worker);
            transfer_in(pending, worker);
            pool_->boundary(worker, 1);
        }
    }
    position = std::max(position, static_cast<size_t>(pending.first_record) + 1);
    if (options_.checked)
        walk_checked(pending, worker, position - 1);
    else if (clocked_.empty())
        walk(pending, worker, position - 1);
    else
        walk_timed(pending, worker, position - 1);
    if (worker.index == 0 && is_broken()) pending.error_ = group_->error();
    if (worker.index == 0) pending.seconds = std::chrono::duration<double>(Clock::now() - start).count();
}

// Each worker copies part of every value.
void Program::transfer_in(const PendingStep& pending, const Worker& worker) const {
    for (const Transfer& each : pending.inputs) {
        const size_t size = static_cast<size_t>(value_rows(each.value, pending.step)) * values_.at(each.value).cols;
        const size_t begin = size * worker.index / worker.count, end = size * (worker.index + 1) / worker.count;
        std::memcpy(value_data(each.value) + begin, each.data + begin, (end - begin) * sizeof(float));
    }
}

// The same out of the workspace: for logits the rows of this turn, for other values all rows in the first turn.
void Program::transfer_out(const PendingStep& pending, const Part& part, const Worker& worker) const {
    for (const Transfer& each : pending.copies) {
        const ProgramValue& value = values_.at(each.value);
        const bool in_turns = value.domain == DOMAIN_LOGITS;
        if (!in_turns && part.is_again) continue;
        const int32_t rows = in_turns ? part.end_row - part.first_row : value_rows(each.value, pending.step);
        const size_t size = static_cast<size_t>(rows) * value.cols;
        const size_t begin = size * worker.index / worker.count, end = size * (worker.index + 1) / worker.count;
        float* const data = each.data + (in_turns ? static_cast<size_t>(part.first_row) * value.cols : 0);
        std::memcpy(data + begin, value_data(each.value) + begin, (end - begin) * sizeof(float));
    }
}

Program::Part Program::part_of(const PendingStep& pending, size_t part) const {
    const size_t once = pending.end_ - pending.in_turns_;
    const size_t turn = part < once ? 0 : (part - once) / (pending.in_turns_ + 1);
    const size_t place = part < once ? 0 : (part - once) % (pending.in_turns_ + 1);
    const int32_t first = static_cast<int32_t>(turn) * pending.turn_rows_;
    const int32_t end = std::min(first + pending.turn_rows_, pending.step.num_logits);
    if (part < once) return {part, first, end, false};
    return {place == pending.in_turns_ ? records_.size() : once + place, first, end, turn > 0};
}

// A turn has separate views for the last records: the selected rows that it covers, and as many rows of logits.
void Program::run_record(const PendingStep& pending, const Part& part, Worker& worker) {
    const Record& record = *records_[part.record];
    if (pending.num_turns_ == 1 || part.record + pending.in_turns_ < pending.end_) {
        reached(part.record);
        record.kernel->run(record.args, pending.step, worker);
        return;
    }
    if (!part.is_again) reached(part.record);
    std::vector<View> inputs = record.inputs;
    for (size_t i = 0; i < inputs.size(); ++i) {
        if (!inputs[i].data || !values_[record.spec.inputs[i]].is_output()) continue;
        if (inputs[i].domain == DOMAIN_OUTPUTS) inputs[i].data += static_cast<size_t>(part.first_row) * inputs[i].cols;
        inputs[i].rows = part.end_row - part.first_row;
    }
    Args args = record.args;
    args.inputs = inputs.data();
    args.output.rows = part.end_row - part.first_row;
    record.kernel->run(args, pending.step, worker);
}

void Program::run_finale(const PendingStep& pending, const Part& part, Worker& worker) {
    if (pending.finale) pending.finale(pending.finale_context, worker, part.first_row, part.end_row);
    transfer_out(pending, part, worker);
}

void Program::walk(const PendingStep& pending, Worker& worker, size_t first) {
    for (size_t i = first, count = num_parts(pending); i < count; ++i) {
        const Part part = part_of(pending, i);
        if (part.record < records_.size())
            run_record(pending, part, worker);
        else
            run_finale(pending, part, worker);
        if (i + 1 < count) pool_->boundary(worker, i + 2);
        // All workers see the same value here, because worker 0 changes it only after another barrier.
        if (is_broken()) return;
    }
}

void Program::walk_timed(const PendingStep& pending, Worker& worker, size_t first) {
    std::vector<Clocked>& clocked = clocked_[worker.index];
    auto start = Clock::now();
    for (size_t i = first, count = num_parts(pending); i < count; ++i) {
        const Part part = part_of(pending, i);
        const bool is_finale = part.record == records_.size();
        if (is_finale)
            run_finale(pending, part, worker);
        else
            run_record(pending, part, worker);
        const auto done = Clock::now();
        if (i + 1 < count)
            pool_->boundary(worker, i + 2);
        else
            worker.barrier();
        const auto all_done = Clock::now();
        if (!is_finale || pending.finale) {
            clocked[part.record].calls += part.is_again ? 0 : 1;
            clocked[part.record].nanoseconds += std::chrono::nanoseconds(all_done - start).count();
            clocked[part.record].busy_nanoseconds += std::chrono::nanoseconds(done - start).count();
        }
        start = all_done;
        if (is_broken()) return;
    }
}

void Program::close() {
    pool_.reset();
    stream_.reset();
    clocked_.clear();
    records_.clear();
    weights_.clear();
    workspace_.clear();
    caches_.clear();
    shared_scratch_ = Memory();
}

}  // namespace octavo
