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

// A matrix of the program: its offset in the workspace, its width, and the domain of its rows. Of logits, only
// StepLimits::logits_rows rows are held at once: their record comes last and runs in turns. Logits are computed from
// the first of the selected rows, the outputs.
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
    bool checked = false;  // poison outputs, guard memory and check for NaN and infinity after each record (slow)
};

// One operation as compile.py describes it. Indices refer to values and weights; -1 means absent.
struct RecordSpec {
    std::string kernel;
    std::string label;  // for errors and profiles
    OperandNames names;
    std::vector<int32_t> inputs;
    int32_t output = -1;
    std::vector<int32_t> weights;  // weights in tuples come last
    std::vector<int64_t> ints;
    std::vector<float> floats;
    int32_t cache = -1;  // layers of different groups may share one: a block belongs to one group at a time
    int32_t cache_group = 0;
    int64_t state_size = 0;  // floats in a sequence's state

    // The int with this name, or -1.
    int64_t int_of(const char* name) const;
};

// Tokens taken from the output of the previous step, which may still be running: token i of the step is the token of
// `rows[i]`, unless that is -1. `tokens` are those of this step.
struct EarlierTokens {
    const int32_t* rows = nullptr;  // null: none
    const int32_t* output = nullptr;
    int32_t* tokens = nullptr;

    // A row that failed has token 0 or -1; its step is repeated, and so is this one.
    void take(int32_t num_tokens) const {
        for (int32_t i = 0; i < num_tokens; ++i)
            if (rows[i] >= 0) tokens[i] = std::max(output[rows[i]], 0);
    }
};

// Blocks and memory outside the cache: `count` rows of `block_bytes`, `stride` bytes apart. Each row has the bytes of a
// block in all caches, one after the other. For state slots, it has the bytes of a slot in all operations.
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
    // Throws std::invalid_argument if the operation has no kernel, or other fields than its kernel reads, if an index
    // is out of range, or if the shapes of its operands do not match.
    void add_record(const RecordSpec& spec);
    // Asks the kernels for their scratch sizes and allocates at least `scratch_bytes` per worker. Afterwards no record
    // can be added.
    void finish(size_t scratch_bytes);

    // Sets the group in which operations between ranks exchange their values. Call it before adding records; the group
    // must outlive the program.
    void join(CollectiveGroup* group) {
        group_ = group;
        gathered_.clear();
    }
    int32_t num_ranks() const { return group_ ? group_->size() : 1; }

    // Stores the value in the form that the product reading it needs (View::is_image). Call it before adding records.
    // Throws std::invalid_argument in checked mode, or if its columns do not form whole units.
    void keep_as_image(int32_t value);

    // Ends the program's own threads and uses those of `other` from now on; the two must never run a step at the same
    // time. Throws std::invalid_argument if their numbers of threads differ. Not during a step.
    void share_threads(const Program& other);

    // Streams these weights of a mapped file through memory in every step instead of keeping them there. Call it once,
    // after `finish`. Throws std::invalid_argument for a weight that no record reads or that is a vector.
    void stream_weights(const std::vector<int32_t>& weights, size_t ahead_bytes);

    // The part of an adapter for weight `weight` of record `record`, an operation with adapters.
    struct AdapterPart {
        int32_t record = 0, weight = 0;
        LowRank low_rank;
        size_t a_size = 0, b_size = 0, gain_size = 0;  // numbers
    };
    // Fills a slot with these parts, or empties it if there are none. Their memory must stay valid until the slot
    // changes or the program ends. Throws std::invalid_argument for an unknown slot or for parts that do not fit.
    // Callers must hold `lock()`.
    void set_adapter(int32_t slot, const std::vector<AdapterPart>& parts);

    // Allocates `num_blocks` blocks of `block_size` tokens, and the states of `num_states` sequences.
    void allocate_cache(int32_t num_blocks, int32_t block_size, int32_t num_states);

    // Uses the caches that `other` has allocated, by the same indices. `other` must outlive this program, and their
    // steps must never run at the same time. Throws std::invalid_argument if an index is missing there, if its tokens
    // have less room, or if this program already has a cache.
    void borrow_cache(const Program& other);

    // Logits that an AllGather joins from several ranks.
    struct GatheredLogits {
        int32_t part;     // the value with this rank's columns
        int32_t first;    // its first column
        KernelFn gather;  // the kernel that gathers them
        Exchange* exchange;
    };
    // Looked up once per value. Call it from Python's thread only.
    const std::optional<GatheredLogits>& gathered_logits(int32_t value);

    // A value of the program and external memory of the same size.
    struct Transfer {
        int32_t value;
        float* data;
    };

    // One step from submit to wait. It saves and then loads blocks and states, copies both, reads values from `inputs`,
    // runs the records up to the one that computes `result` (all, if none does) and `finale` on all workers (may be
    // null), and writes values to `copies`. Logits that are not held at once take turns through their records, finale
    // and copy. The object and all memory that it points to must stay in place until `wait` returns.
    struct PendingStep {
        Step step{};
        int32_t result = -1;
        // Runs only records [first_record, end_record); -1: to the end. Values stay in the workspace between the parts
        // of a step. A part may have a single record and no boundary, so it starts on all workers and needs `wait`.
        int32_t first_record = 0, end_record = -1;
        void (*finale)(void* context, Worker& worker, int32_t first_row, int32_t end_row) = nullptr;
        void* finale_context = nullptr;
        std::vector<Transfer> inputs, copies;
        EarlierTokens earlier_tokens;
        BlockBytes block_saves, block_loads, snapshot_saves, snapshot_loads;
        double seconds = 0;  // from the first worker's start to its end; valid after `wait`

        // Returns when the step is done. Throws std::runtime_error for problems found by checked mode, or after a fork.
        void wait();
        bool is_done() const { return !pool_ || pool_->is_done(job_); }
        bool moves() const {
            return block_saves.count + block_loads.count + snapshot_saves.count + snapshot_loads.count > 0;
        }

      private:
        friend class Program;
        Program* program_ = nullptr;
        size_t end_ = 0;                    // number of records to run
        size_t num_turns_ = 1;              // turns of the last records, if they compute logits
        size_t in_turns_ = 0;               // number of records in each turn
        int32_t turn_rows_ = 0;             // output rows per turn
        bool changes_rows_ = false;         // the row counts in the records' views change
        std::shared_ptr<ThreadPool> pool_;  // null: done, or not submitted
        uint32_t job_ = 0;
        std::string error_;
    };
    // Throws std::invalid_argument unless the program has all blocks and states that the step moves, in these sizes.
    void check_moves(const PendingStep& pending) const;
    // Starts a checked step after the running one, and returns at once. Callers must hold `lock_for_step`.
    void submit(PendingStep& pending);

    // Gives exclusive access to the program: no step runs. Waits for running steps.
    std::unique_lock<std::mutex> lock();
    // Allows the holder to submit one step: at most one other is running. `try_lock_for_step` returns an empty lock if
    // it would have to wait.
    std::unique_lock<std::mutex> lock_for_step();
    std::unique_lock<std::mutex> try_lock_for_step();
    void close();
    bool closed() const { return pool_ == nullptr; }
    // A number that changes with every record of a step. Do not call it during `close`.
    uint32_t progress() const { return pool_ ? pool_->progress() : 0; }

    float* value_data(int32_t value) const;
    int32_t value_rows(int32_t value, const Step& step) const;
    const std::vector<ProgramValue>& values() const { return values_; }
    Isa isa() const { return options_.isa; }
    const StepLimits& limits() const { return options_.limits; }
    ThreadPool& pool() { return *pool_; }
    size_t workspace_bytes() const;
    size_t num_records() const { return records_.size(); }

    // The time of one operation since start_profile: between barriers on worker 0, and in the kernel over all workers.
    struct Timing {
        std::string label, kernel;
        int64_t calls, nanoseconds, busy_nanoseconds;
    };
    // Restarts the counters. Costs each worker two clock reads per record. Callers must hold `lock()`.
    void start_profile();
    // Every record in order, then the finale. Empty unless profiling was started.
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
    // The parts of a step, separated by boundaries: its records, then the finale with the copies, then for each further
    // turn the records that compute logits and the finale again.
    struct Part {
        size_t record;  // for the finale: the number of records in the program
        int32_t first_row, end_row;
        bool is_again;  // a turn after the first
    };
    size_t num_parts(const PendingStep& pending) const {
        return pending.end_ - pending.in_turns_ + pending.num_turns_ * (pending.in_turns_ + 1);
    }
    // One step may wait while another runs, but not with streamed weights, because their thread reads for one step.
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
    std::vector<Memory> workspace_;  // one region, or one per value in checked mode
    Memory shared_scratch_;
    size_t scratch_bytes_ = 0;
    // Memory shared by one or more layers.
    struct Cache {
        size_t block_bytes = 0;
        Memory memory;
    };
    std::vector<size_t> block_bytes_of(int32_t block_size) const;
    std::vector<Cache> caches_;
    std::vector<int32_t> counts_;        // rows of each domain, in the views of all records
    std::vector<DomainRows> most_rows_;  // for further domains
    // The times of one worker and one record, with the finale last; empty without a profile. Workers write their own
    // rows.
    struct Clocked {
        int64_t calls = 0, nanoseconds = 0, busy_nanoseconds = 0;
    };
    std::vector<std::vector<Clocked>> clocked_;
    std::unique_ptr<WeightStream> stream_;                       // null: all weights stay in memory
    const Program* lender_ = nullptr;                            // owner of the cache; null: this program
    CollectiveGroup* group_ = nullptr;                           // null: a single rank
    std::map<int32_t, std::optional<GatheredLogits>> gathered_;  // by value
    std::shared_ptr<ThreadPool> pool_;                           // null: closed
    std::mutex mutex_;
};

}  // namespace octavo
