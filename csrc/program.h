// A compiled graph: a list of records that every worker walks, with a barrier after each.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collective.h"
#include "isa.h"
#include "kernel.h"
#include "memory.h"
#include "signature.h"
#include "step_check.h"
#include "thread_pool.h"
#include "weight_stream.h"

namespace octavo {

// A matrix of the program: where in the workspace, how wide, and the domain of its rows. Of the rows of logits only
// StepLimits::logits_rows are held at once: their record is the last and runs in turns. They are made of the first of
// the selected rows, the outputs.
struct ProgramValue {
    size_t offset = 0;  // bytes
    int32_t cols = 0;
    int32_t domain = DOMAIN_TOKENS;
    bool is_image = false;

    bool is_output() const { return domain == DOMAIN_OUTPUTS || domain == DOMAIN_LOGITS; }
};

struct ProgramOptions {
    Isa isa = Isa::scalar;
    PoolOptions pool;
    StepLimits limits;
    bool checked = false;  // poison outputs, guard memory and look for NaN and infinity after each record (slow)
};

// One operation as compile.py describes it; indices refer to values and weights, -1: absent.
struct RecordSpec {
    std::string kernel;
    std::string label;  // for errors and profiles
    OperandNames names;
    std::vector<int32_t> inputs;
    int32_t output = -1;
    std::vector<int32_t> weights;  // those of the tuples last
    std::vector<int64_t> ints;
    std::vector<float> floats;
    int32_t cache = -1;  // layers of different groups may have the same: a block belongs to one group at a time
    int32_t cache_group = 0;
    int64_t state_size = 0;  // floats of a sequence's state

    // The int of this name; -1: there is none.
    int64_t int_of(const char* name) const;
};

// Tokens that come from the output of the step before, which may still run: token i of the step is that of `rows[i]`,
// unless that is -1. `tokens` are those of the step.
struct EarlierTokens {
    const int32_t* rows = nullptr;  // null: there are none
    const int32_t* output = nullptr;
    int32_t* tokens = nullptr;

    // A row without an outcome has token 0 or -1: its step is repeated, and this one too.
    void take(int32_t num_tokens) const {
        for (int32_t i = 0; i < num_tokens; ++i)
            if (rows[i] >= 0) tokens[i] = std::max(output[rows[i]], 0);
    }
};

// Blocks and memory outside the cache: `count` rows of `block_bytes`, `stride` bytes apart, in each the bytes of a
// block in all caches, one behind the other. Or slots for states: then the bytes of a slot in all operations.
struct BlockBytes {
    const int32_t* block_ids = nullptr;
    char* data = nullptr;
    size_t block_bytes = 0, stride = 0;
    int32_t count = 0;
};

class Program {
  public:
    Program(const ProgramOptions& options, std::vector<ProgramValue> values, size_t workspace_bytes);

    int32_t add_weight(const Weight& weight);
    // Throws std::invalid_argument if the operation has no kernel or other fields than its kernel reads, if an index
    // is out of range, or if the shapes of its operands do not fit each other.
    void add_record(const RecordSpec& spec);
    // Asks the kernels for their scratch and allocates it, at least `scratch_bytes` a worker. Afterwards no record
    // can be added.
    void finish(size_t scratch_bytes);

    // The group that operations between ranks exchange their values in. To be called before records are added; the
    // group must outlive the program.
    void join(CollectiveGroup* group) {
        group_ = group;
        gathered_.clear();
    }
    int32_t num_ranks() const { return group_ ? group_->size() : 1; }

    // The value becomes what the product that reads it needs (View::is_image). To be called before records are added.
    // Throws std::invalid_argument in checked mode, or if its columns are no whole units.
    void keep_as_image(int32_t value);

    // Computes on the threads of `other` from now on, and ends its own; the two never run a step at the same time.
    // Throws std::invalid_argument if they have different numbers of threads. Not during a step.
    void share_threads(const Program& other);

    // These weights, which lie in a mapped file, pass through memory in every step instead of staying there. To be
    // called once, after `finish`. Throws std::invalid_argument for a weight that no record reads or that is a vector.
    void stream_weights(const std::vector<int32_t>& weights, size_t ahead_bytes);

    // The part of an adapter beside weight `weight` of record `record`, an operation with adapters.
    struct AdapterPart {
        int32_t record = 0, weight = 0;
        LowRank low_rank;
        size_t a_size = 0, b_size = 0, gain_size = 0;  // numbers
    };
    // Fills a slot with these parts, or empties it if there are none. Their memory must stay until the slot changes or
    // the program ends. Throws std::invalid_argument for a slot that does not exist and for parts that do not fit.
    // Callers hold `lock()`.
    void set_adapter(int32_t slot, const std::vector<AdapterPart>& parts);

    // Makes room for `num_blocks` blocks of `block_size` tokens, and for the states of `num_states` sequences.
    void allocate_cache(int32_t num_blocks, int32_t block_size, int32_t num_states);

    // Reads the cache that `other` has allocated, in the places of the same numbers; it must outlive this program, and
    // their steps never run at the same time. Throws std::invalid_argument if it has no such places, if they have less
    // room for a token, or if there is a cache already.
    void borrow_cache(const Program& other);

    // Logits that an AllGather makes of those of several ranks.
    struct GatheredLogits {
        int32_t part;     // the value with this rank's columns
        int32_t first;    // its first column
        KernelFn gather;  // the kernel
        Exchange* exchange;
    };
    // Found once for each value; from Python's thread.
    const std::optional<GatheredLogits>& gathered_logits(int32_t value);

    // A value of the program and memory of its size outside.
    struct Transfer {
        int32_t value;
        float* data;
    };

    // One step from submit to wait: blocks and states saved, then loaded, the copies of both, values from `inputs`, the
    // records up to the one that makes the value `result` (all, if none does), `finale` on all workers (may be null),
    // and values into `copies`. Logits that are not held at once go through their records, finale and copy in turns. It
    // stays where it is, with all memory that it points to, until `wait` has returned.
    struct PendingStep {
        Step step{};
        int32_t result = -1;
        // Only records [first_record, end_record) run; -1: to the end. Values stay in the workspace from one part of a
        // step to the next.
        int32_t first_record = 0, end_record = -1;
        void (*finale)(void* context, Worker& worker, int32_t first_row, int32_t end_row) = nullptr;
        void* finale_context = nullptr;
        std::vector<Transfer> inputs, copies;
        EarlierTokens earlier_tokens;
        BlockBytes block_saves, block_loads, snapshot_saves, snapshot_loads;
        double seconds = 0;  // from the start of the first worker to its end; once `wait` has returned

        // Returns when the step is done. Throws std::runtime_error for what checked mode found, or after a fork.
        void wait();
        bool is_done() const { return !pool_ || pool_->is_done(job_); }
        bool moves() const {
            return block_saves.count + block_loads.count + snapshot_saves.count + snapshot_loads.count > 0;
        }

      private:
        friend class Program;
        Program* program_ = nullptr;
        size_t end_ = 0;                    // records to walk
        size_t num_turns_ = 1;              // of the last records, if they make logits
        size_t in_turns_ = 0;               // these records
        int32_t turn_rows_ = 0;             // output rows of each
        bool changes_rows_ = false;         // the views of the records have other numbers of rows
        std::shared_ptr<ThreadPool> pool_;  // null: done, or not submitted
        uint32_t job_ = 0;
        std::string error_;
    };
    // Throws std::invalid_argument unless the program has the blocks and states that the step moves, of these sizes.
    void check_moves(const PendingStep& pending) const;
    // Starts a step that has been checked, after the one that runs, and returns at once. Callers hold `lock_for_step`.
    void submit(PendingStep& pending);

    // Whoever holds it has the program to himself: no step runs. Waits for those that do.
    std::unique_lock<std::mutex> lock();
    // Whoever holds it may submit one step: at most one runs. `try_lock_for_step` owns nothing if it would have to
    // wait.
    std::unique_lock<std::mutex> lock_for_step();
    std::unique_lock<std::mutex> try_lock_for_step();
    void close();
    bool closed() const { return pool_ == nullptr; }
    // A number that changes with every record of a step. Not during `close`.
    uint32_t progress() const { return pool_ ? pool_->progress() : 0; }

    float* value_data(int32_t value) const;
    int32_t value_rows(int32_t value, const Step& step) const;
    const std::vector<ProgramValue>& values() const { return values_; }
    Isa isa() const { return options_.isa; }
    const StepLimits& limits() const { return options_.limits; }
    ThreadPool& pool() { return *pool_; }
    size_t workspace_bytes() const;
    size_t num_records() const { return records_.size(); }

    // One operation since start_profile: from barrier to barrier on worker 0, and inside the kernel over all workers.
    struct Timing {
        std::string label, kernel;
        int64_t calls, nanoseconds, busy_nanoseconds;
    };
    // Counts from zero from now on. Costs each worker two looks at the clock for each record. Callers hold `lock()`.
    void start_profile();
    // Every record in order, and the finale at the end. Empty unless started.
    std::vector<Timing> profile() const;

  private:
    struct Record {
        RecordSpec spec;
        const KernelEntry* kernel = nullptr;
        std::vector<View> inputs;
        std::vector<Weight> weights;
        LayerCache cache{};
        StateSlots state{};
        Memory states;
        std::vector<LowRank> low_ranks;
        Args args{};
    };
    View make_view(int32_t value, int32_t rows) const;
    int32_t held_rows(const ProgramValue& value, const Step& step) const;
    void bind(Record& record);
    void limit_token_types(const Record& record);
    void make_slots(Record& record);
    void check_slot(int32_t slot) const;
    void check_part(const AdapterPart& part) const;
    void check_row_index(const RecordSpec& spec) const;
    void check_cached_domain(const RecordSpec& spec) const;
    void update_rows(const Step& step);
    bool take_counts(const Step& step);
    Step largest_step() const;
    size_t end_of(int32_t output) const;
    void run(PendingStep& pending, Worker& worker, size_t position);
    void reached(size_t record) {
        if (stream_) stream_->reached(record);
    }
    // The parts of a step, with a boundary between them: its records, then the finale with the copies, and for each
    // further turn the records that make logits and the finale again.
    struct Part {
        size_t record;  // the number of records of the program, for the finale
        int32_t first_row, end_row;
        bool is_again;  // a turn after the first
    };
    size_t num_parts(const PendingStep& pending) const {
        return pending.end_ - pending.in_turns_ + pending.num_turns_ * (pending.in_turns_ + 1);
    }
    // One step may wait while another runs; none with streamed weights, because their thread reads for one step.
    bool has_room() const { return !pool_ || (stream_ ? pool_->is_done(pool_->last_job()) : pool_->has_room()); }
    bool is_broken() const { return group_ && !group_->exchange()->met; }
    Part part_of(const PendingStep& pending, size_t part) const;
    void run_record(const PendingStep& pending, const Part& part, Worker& worker);
    void run_finale(const PendingStep& pending, const Part& part, Worker& worker);
    void walk(const PendingStep& pending, Worker& worker, size_t first);
    void walk_timed(const PendingStep& pending, Worker& worker, size_t first);
    void walk_checked(PendingStep& pending, Worker& worker, size_t first);
    void allocate_states(int32_t num_states);
    void move_blocks(const PendingStep& pending, const Worker& worker);
    void move_states(const PendingStep& pending, const Worker& worker);
    void copy_blocks(const Step& step, const Worker& worker);
    void copy_states(const Step& step, const Worker& worker);
    void transfer_in(const PendingStep& pending, const Worker& worker) const;
    void transfer_out(const PendingStep& pending, const Part& part, const Worker& worker) const;
    static void poison(const View& out);
    static std::string check_finite(const Record& record, const View& out);

    ProgramOptions options_;
    std::vector<ProgramValue> values_;
    std::vector<Weight> weights_;
    std::vector<std::unique_ptr<Record>> records_;
    size_t workspace_bytes_;
    std::vector<Memory> workspace_;  // one region, or one a value if checked
    Memory shared_scratch_;
    size_t scratch_bytes_ = 0;
    // Memory of layers that share it.
    struct Cache {
        size_t block_bytes = 0;
        Memory memory;
    };
    std::vector<size_t> block_bytes_of(int32_t block_size) const;
    std::vector<Cache> caches_;
    std::vector<int32_t> counts_;        // rows of each domain, of the views of all records
    std::vector<DomainRows> most_rows_;  // of the further domains
    // Of one worker and one record, the finale being the last; empty: no profile. Each worker writes its own row.
    struct Clocked {
        int64_t calls = 0, nanoseconds = 0, busy_nanoseconds = 0;
    };
    std::vector<std::vector<Clocked>> clocked_;
    std::unique_ptr<WeightStream> stream_;                       // null: all weights stay in memory
    const Program* lender_ = nullptr;                            // of the cache; null: it is this program's
    CollectiveGroup* group_ = nullptr;                           // null: the only rank
    std::map<int32_t, std::optional<GatheredLogits>> gathered_;  // by value
    std::shared_ptr<ThreadPool> pool_;                           // null: closed
    std::mutex mutex_;
};

}  // namespace octavo
