// Mixture of experts. All chosen (row, expert) pairs form one list. The workers first share the gate and up panels of
// every expert that has rows and, after one barrier, the panels of `down`. The worker for a panel of `down` adds the
// experts in increasing order, so a row's result depends neither on other rows nor on the number of threads.
//
// With adapters (linear_adapted.h), the products of all pairs with A are shared out before the products with gate and
// up, and again before the products with `down`.
//
// With few pairs, every worker routes and quantizes all rows itself. Otherwise this work is also shared out, with a
// barrier after each part, and long steps are split into chunks of rows, which bounds the scratch memory.
#pragma once

#include "moe_experts.h"

namespace octavo {
namespace {

constexpr int FEW_PAIRS = 16;
constexpr int64_t CHUNK_BYTES = int64_t{64} << 20;  // scratch memory of a chunk, unless experts get few rows
constexpr int CHUNK_EXPERT_ROWS = 32;  // average rows per expert in a chunk: enough to make unpacking pay off
constexpr int SUM_ROWS = 4096;         // rows times panels that a worker sums at a time, in the L2 cache
constexpr int LEAST_COST = 8;          // of a panel, in rows, because its bytes must be read
constexpr int LEAST_PANELS = 2;        // the smallest piece of work, for few rows

// Memory requirements that both kinds of products share.
struct MoeNeeds {
    int images;       // for gate and up
    bool own_rows;    // x of each pair is stored as floats: for dense weights, adapters, or scaled inputs
    bool own_orders;  // each expert has its own order of columns

    explicit MoeNeeds(const MoeOperands& m) {
        const ProductNeeds needs(plain_product(m.gate_up, nullptr, m.num_gate_up, m.x, m.out));
        images = needs.images;
        own_rows = m.routing.on_input || m.adapters.parts;
        own_orders = false;
        for (const Weight& w : m.gate_up) {
            own_rows |= is_dense(w.packed->type->traits);
            own_orders |= w.packed->num_orders > 1;
        }
    }
};

// Hands out pieces of a region. Without a base it only counts their bytes.
struct Region {
    uint8_t* base;
    int64_t size = 0;

    uint8_t* bytes(int64_t count) {
        uint8_t* const piece = base + size;
        size += align64(count);
        return piece;
    }
    float* floats(int64_t count) { return reinterpret_cast<float*>(bytes(count * 4)); }
    int32_t* ints(int64_t count) { return reinterpret_cast<int32_t*>(bytes(count * 4)); }
};

// Memory for pairs: the images of their x and of their hidden rows, and x by expert.
struct PairMemory {
    uint8_t *x_images, *hidden_images;
    float* x;

    PairMemory(const MoeOperands& m, int64_t pairs, Region& region) {
        const MoeNeeds needs(m);
        x_images = region.bytes(needs.images * image_bytes(pairs, m.x.cols));
        hidden_images = region.bytes(is_dense(m.down.packed->type->traits) ? 0 : image_bytes(pairs, m.intermediate));
        x = region.floats(needs.own_rows ? pairs * m.x.cols : 0);
    }
    static int64_t image_bytes(int64_t pairs, int64_t k) {
        return pairs * PairRows::image_row_bytes(k) + Image::SLACK_BYTES;
    }
};

// The largest number of rows in a chunk.
inline int64_t chunk_rows(const MoeOperands& m) {
    Region none{nullptr}, some{nullptr};
    PairMemory(m, 0, none);
    PairMemory(m, 64, some);
    const int64_t pair_bytes = (some.size - none.size) / 64 + (m.intermediate + PANEL_COLS + m.inner_numbers()) * 4;
    const int64_t row_bytes = m.top_k * pair_bytes + m.experts * 4;
    const int64_t fitting = CHUNK_BYTES / row_bytes, wanted = CHUNK_EXPERT_ROWS * m.experts / m.top_k;
    const int64_t rows = fitting > wanted ? fitting : wanted;
    return rows < m.x.rows ? rows : m.x.rows;
}

// Scratch for m.x.rows rows. `product`: the scratch of the largest product.
struct MoeScratch {
    // Shared by all workers.
    void* product;
    float *scores, *weights, *hidden;  // [rows, experts], [rows, top_k], [pairs, intermediate + 16]
    float* inner;                      // [pairs, inner numbers] for adapters
    int32_t* chosen;                   // [rows, top_k]
    // Private to this worker. sums: [panels][rows][16]
    RoutingScratch routing;
    MoePairs pairs;
    float *sums, *few_weights;
    int32_t* few_chosen;
    void* own_product;
    PairMemory many, few;

    MoeScratch(const MoeOperands& m, const ScratchSizes& product_sizes, Region& own, Region& shared)
        : product(shared.bytes(static_cast<int64_t>(product_sizes.shared))),
          scores(shared.floats(chunk_rows(m) * m.experts)),
          weights(shared.floats(chunk_rows(m) * m.top_k)),
          hidden(shared.floats(chunk_rows(m) * m.top_k * (m.intermediate + PANEL_COLS))),
          inner(shared.floats(chunk_rows(m) * m.top_k * m.inner_numbers())),
          chosen(shared.ints(chunk_rows(m) * m.top_k)),
          own_product(own.bytes(static_cast<int64_t>(product_sizes.per_worker))),
          many(m, chunk_rows(m) * m.top_k, shared),
          few(m, FEW_PAIRS, own) {
        const int64_t rows = chunk_rows(m), panels = RUN_PANELS * rows;
        routing = {own.floats(m.experts), own.floats(m.experts), own.floats(m.experts), own.ints(m.experts)};
        pairs = {
            own.ints(m.experts + 2),  own.ints(m.experts),        0,
            own.ints(rows * m.top_k), own.floats(rows * m.top_k), m.num_identities > 0 ? own.floats(rows) : nullptr};
        sums = own.floats((panels < SUM_ROWS ? panels : rows > SUM_ROWS ? rows : SUM_ROWS) * PANEL_COLS);
        few_weights = own.floats(FEW_PAIRS);
        few_chosen = own.ints(FEW_PAIRS);
    }
};

// One worker's share of the work for some rows.
class MoeRun {
  public:
    // m: with the rows of this chunk, and with their adapters if any row has one.
    MoeRun(const MoeOperands& m, const MoeScratch& s, Worker& worker)
        : m_(m),
          s_(s),
          worker_(worker),
          needs_(m),
          few_(static_cast<int64_t>(m.x.rows) * m.top_k <= FEW_PAIRS),
          memory_(few_ ? s.few : s.many),
          hidden_stride_(m.intermediate + PANEL_COLS),
          num_pairs_(0),
          pairs_(s.pairs) {}

    void run() {
        route();
        const PairRows x = prepare_x();
        multiply_inner(x, [&](int32_t e, Activations&, const auto& f) { f(gate_up(e)); });
        multiply_gate_up(x);
        worker_.barrier();
        const PairRows hidden = prepare_hidden();
        multiply_inner(hidden, [&](int32_t e, Activations& a, const auto& f) {
            a.dense += hidden_skip(e);
            f(down(e));
        });
        multiply_down(hidden);
    }

  private:
    // The pairs that this worker prepares.
    Range own_pairs() const { return few_ ? Range{0, num_pairs_} : share(num_pairs_, worker_); }

    void route() {
        const View scores = {s_.scores, m_.x.rows, m_.experts};
        AdapterRows adapters = m_.adapters;
        adapters.inner = s_.inner;
        const Product router = plain_product(&m_.router, &m_.router_bias, 1, m_.router_x, scores);
        run_product(adapted_product(router, adapters), s_.product, worker_);
        worker_.barrier();
        int32_t* const chosen = few_ ? s_.few_chosen : s_.chosen;
        float* const weights = few_ ? s_.few_weights : s_.weights;
        const Range rows = few_ ? Range{0, m_.x.rows} : share(m_.x.rows, worker_);
        for (int64_t r = rows.begin; r < rows.end; ++r)
            choose_experts(m_.routing, s_.scores + r * m_.experts, s_.routing, chosen + r * m_.top_k,
                           weights + r * m_.top_k);
        if (!few_) worker_.barrier();
        pairs_.sort(chosen, weights, m_.x.rows, m_);
        num_pairs_ = pairs_.starts[m_.experts];
    }

    ExpertProduct gate_up(int32_t expert) const {
        return {m_.gate_up,
                m_.gate_up_bias,
                m_.num_gate_up,
                expert,
                m_.intermediate,
                pairs_.count(expert),
                adapters_of(expert, 1, m_.num_gate_up, m_.x.cols)};
    }
    ExpertProduct down(int32_t expert) const {
        const int32_t number = m_.num_gate_up + 1;
        return {&m_.down,
                &m_.down_bias,
                1,
                expert,
                m_.out.cols,
                pairs_.count(expert),
                adapters_of(expert, number, 1, m_.intermediate)};
    }

    // The adapters of an expert's pairs for `count` weights from `first` on that read k numbers.
    AdapterRows adapters_of(int32_t expert, int32_t first, int32_t count, int32_t k) const {
        if (!m_.adapters.parts) return {};
        AdapterRows found = m_.expert_adapters(first, count, k);
        found.rows = pairs_.rows + pairs_.starts[expert];
        found.num_rows = pairs_.count(expert);
        found.inner = s_.inner + pairs_.starts[expert] * found.row_numbers();
        found.expert = expert;
        return found;
    }

    // Multiplies the pairs of all experts by A. each(expert, its rows, f): calls f with its product.
    template <typename F>
    void multiply_inner(const PairRows& rows, const F& each) {
        if (!m_.adapters.parts) return;
        int64_t unit = 0;
        each_expert({0, num_pairs_}, [&](int32_t e) {
            Activations a = rows.of(pairs_, e);
            each(e, a, [&](const ExpertProduct& expert) {
                const ProductScratch scratch(expert.product, s_.own_product);
                ProductSums sums(scratch);
                InnerProducts(expert.product, scratch, a, sums).run(worker_, unit);
            });
            ++unit;  // experts have few rows, so each starts with a different worker
        });
        worker_.barrier();
    }

    // Calls f(expert) for each expert with pairs in [range.begin, range.end).
    template <typename F>
    void each_expert(Range range, const F& f) const {
        for (int32_t i = 0; i < pairs_.num_used; ++i) {
            const int32_t e = pairs_.used[i];
            if (pairs_.starts[e] < range.end && pairs_.starts[e + 1] > range.begin) f(e);
        }
    }

    // Writes the images of those pairs of an expert that are in the range. source(pair): its row.
    template <typename F>
    void quantize(const Product& p, const PairRows& rows, int32_t expert, Range range, const F& source) const {
        const Activations a = rows.of(pairs_, expert);
        for (int32_t i = 0; i < pairs_.count(expert); ++i) {
            const int32_t pair = pairs_.starts[expert] + i;
            if (pair < range.begin || pair >= range.end) continue;
            for (int j = 0, image; j < p.num_weights; ++j)
                if (has_new_image(p, j, image))
                    a.image(image).quantize_row(source(pair), i, p.weights[j].packed->order);
        }
    }

    PairRows prepare_x() const {
        const int64_t k = m_.x.cols, row_bytes = PairRows::image_row_bytes(k);
        const bool scaled = m_.routing.on_input;
        const bool shared_row = few_ && m_.x.rows == 1 && !needs_.own_orders && !scaled;
        const bool gathered = needs_.own_rows && !shared_row;
        const PairRows rows = {memory_.x_images,
                               row_bytes,
                               PairMemory::image_bytes(num_pairs_, k),
                               gathered ? memory_.x : m_.x.data,
                               k,
                               static_cast<int32_t>(k / UNIT_K),
                               shared_row};
        const Range mine = shared_row ? Range{0, 1} : own_pairs();
        for (int64_t pair = mine.begin; gathered && pair < mine.end; ++pair) {
            const float* const from = m_.x.data + pairs_.rows[pair] * k;
            if (scaled)
                scale_row(from, pairs_.weights[pair], k, memory_.x + pair * k);
            else
                __builtin_memcpy(memory_.x + pair * k, from, sizeof(float) * k);
        }
        const auto source = [&](int32_t pair) {
            return gathered ? memory_.x + pair * k : m_.x.data + pairs_.rows[pair] * k;
        };
        each_expert(mine, [&](int32_t e) { quantize(gate_up(e).product, rows, e, mine, source); });
        if (!few_) worker_.barrier();
        return rows;
    }

    static void scale_row(const float* from, float factor, int64_t n, float* to) {
        for (int64_t i = 0; i < n; i += 16) {
            const int lanes = n - i < 16 ? static_cast<int>(n - i) : 16;
            store_partial(to + i, load_partial(from + i, lanes) * broadcast(factor), lanes);
        }
    }

    // Items are panels of gate and up for a block of an expert's rows.
    void multiply_gate_up(const PairRows& x) {
        const Product any = plain_product(m_.gate_up, nullptr, m_.num_gate_up, m_.x, m_.out);
        const ProductScratch scratch(adapted_product(any, m_.adapters), s_.own_product);
        int64_t cost = 0;
        each_expert({0, num_pairs_}, [&](int32_t e) { cost += expert_cost(e, gate_up(e)); });
        for (Range part;;) {
            part.end = worker_.take(cost, LEAST_COST * LEAST_PANELS, &part.begin);
            if (part.begin >= cost) return;
            int64_t begin = 0;
            each_expert({0, num_pairs_}, [&](int32_t e) {
                ExpertProduct expert = gate_up(e);
                const int64_t end = begin + expert_cost(e, expert);
                if (begin < part.end && end > part.begin)
                    run_gate_up(e, expert, x, scratch, {part.begin - begin, part.end - begin});
                begin = end;
            });
        }
    }

    static RowBlock block_of(int32_t rows, int32_t first, int32_t most) {
        return {first, rows - first < most ? rows - first : most};
    }
    static int64_t block_cost(RowBlock block) { return block.count < LEAST_COST ? LEAST_COST : block.count; }

    int64_t expert_cost(int32_t e, const ExpertProduct& expert) const {
        int64_t cost = 0;
        const int32_t rows = pairs_.count(e);
        for (int32_t r = 0; r < rows; r += BLOCK_ROWS) cost += block_cost(block_of(rows, r, BLOCK_ROWS));
        return cost * num_panels(expert.panels[0]);
    }

    // range: a part of the expert's cost.
    void run_gate_up(int32_t e, ExpertProduct& expert, const PairRows& x, const ProductScratch& scratch, Range range) {
        const int32_t rows = pairs_.count(e), panels = num_panels(expert.panels[0]);
        Product& p = expert.product;
        p.out = {s_.hidden + pairs_.starts[e] * hidden_stride_, rows, static_cast<int32_t>(hidden_stride_)};
        p.gate_kind = m_.kind;
        p.gate_limit = m_.limit;
        p.up_offset = m_.up_offset;
        p.limits_activated = m_.limits_activated;
        const Activations a = x.of(pairs_, e);
        ProductRun run(p, scratch, a);
        int64_t at = 0;
        for (int32_t r = 0; r < rows; r += BLOCK_ROWS) {
            const RowBlock block = block_of(rows, r, BLOCK_ROWS);
            const int64_t cost = block_cost(block);
            run.run_panels(block, first_item(range.begin - at, cost, panels), first_item(range.end - at, cost, panels));
            at += cost * panels;
        }
    }

    // The columns of an expert's hidden rows that belong to the previous expert.
    int32_t hidden_skip(int32_t expert) const {
        return static_cast<int32_t>(static_cast<int64_t>(expert) * m_.intermediate % PANEL_COLS);
    }

    PairRows prepare_hidden() const {
        const PairRows rows = {memory_.hidden_images,
                               PairRows::image_row_bytes(m_.intermediate),
                               0,
                               s_.hidden,
                               hidden_stride_,
                               m_.intermediate / UNIT_K,
                               false};
        if (is_dense(m_.down.packed->type->traits)) return rows;
        const Range mine = own_pairs();
        each_expert(mine, [&](int32_t e) {
            const float* const first = s_.hidden + hidden_skip(e);
            quantize(down(e).product, rows, e, mine, [&](int32_t pair) { return first + pair * hidden_stride_; });
        });
        if (!few_) worker_.barrier();
        return rows;
    }

    // Items are 16 columns of the output.
    void multiply_down(const PairRows& hidden) {
        const Product any = plain_product(&m_.down, nullptr, 1, {nullptr, m_.x.rows, m_.intermediate}, m_.out);
        const ProductScratch scratch(adapted_product(any, m_.adapters), s_.own_product);
        const int32_t panels = (m_.out.cols + PANEL_COLS - 1) / PANEL_COLS;
        const int32_t fitting = SUM_ROWS / m_.x.rows;
        const int32_t step = fitting < 1 ? 1 : fitting < RUN_PANELS ? fitting : RUN_PANELS;
        for (Range part;;) {
            part.end = worker_.take(panels, few_ ? LEAST_PANELS : 1, &part.begin);
            if (part.begin >= panels) return;
            for (int32_t first = static_cast<int32_t>(part.begin); first < part.end; first += step) {
                const int32_t count = static_cast<int32_t>(part.end) - first;
                sum_experts(hidden, scratch, first, count < step ? count : step);
            }
        }
    }

    void sum_experts(const PairRows& hidden, const ProductScratch& scratch, int32_t first, int32_t count) {
        begin_sums(first, count);
        each_expert({0, num_pairs_}, [&](int32_t e) {
            const ExpertProduct expert = down(e);
            Activations a = hidden.of(pairs_, e);
            a.dense += hidden_skip(e);
            ProductRun run(expert.product, scratch, a);
            // Columns that begin inside a panel extend into the next one.
            const int32_t most = expert.skip ? BLOCK_ROWS / 2 : BLOCK_ROWS, rows = pairs_.count(e);
            for (int32_t r = 0; r < rows; r += most) {
                const RowBlock block = block_of(rows, r, most);
                const int32_t step = expert.skip ? 1 : fitting_panels(block.count, panels_at_once());
                for (int32_t i = 0; i < count; i += step)
                    add_panels(e, expert, run, block, {first + i, i, count - i < step ? count - i : step});
            }
        });
        for (int32_t i = 0; i < count; ++i) {
            const int32_t column = (first + i) * PANEL_COLS, left = m_.out.cols - column;
            for (int64_t r = 0; r < m_.x.rows; ++r)
                store_partial(m_.out.data + r * m_.out.cols + column, load(sums_of(i, r)),
                              left < PANEL_COLS ? left : PANEL_COLS);
        }
    }

    // Initializes each row of the sums with weight * x for its identity experts, or zeros.
    void begin_sums(int32_t first, int32_t count) const {
        for (int32_t i = 0; i < count; ++i) {
            const int32_t column = (first + i) * PANEL_COLS, left = m_.x.cols - column;
            for (int64_t r = 0; r < m_.x.rows; ++r) {
                F32x16 sum = broadcast(0.0f);
                if (pairs_.of_identities)
                    sum = broadcast(pairs_.of_identities[r]) *
                          load_partial(m_.x.data + r * m_.x.cols + column, left < PANEL_COLS ? left : PANEL_COLS);
                store(sums_of(i, r), sum);
            }
        }
    }

    float* sums_of(int32_t panel, int64_t row) const { return s_.sums + (panel * m_.x.rows + row) * PANEL_COLS; }

    struct OutPanels {
        int32_t first, slot, count;  // slot: the position of the first panel in the sums
    };
    // Adds weight * (outputs + bias) of a block of an expert's rows to the sums of those rows.
    void add_panels(int32_t e, const ExpertProduct& expert, ProductRun& run, RowBlock block, OutPanels out) const {
        const int32_t left = num_panels(expert.panels[0]) - out.first, wanted = out.count + (expert.skip > 0);
        const float* const y = run.sum_panels(block, out.first, left < wanted ? left : wanted);
        const float* const bias =
            m_.down_bias.data ? m_.down_bias.data + static_cast<int64_t>(e) * m_.out.cols : nullptr;
        for (int32_t i = 0; i < out.count; ++i) {
            const int32_t column = (out.first + i) * PANEL_COLS;
            const int lanes = m_.out.cols - column < PANEL_COLS ? m_.out.cols - column : PANEL_COLS;
            const F32x16 b = bias ? load_partial(bias + column, lanes) : broadcast(0.0f);
            for (int32_t r = 0; r < block.count; ++r) {
                const int32_t pair = pairs_.starts[e] + block.first + r;
                F32x16 value = columns_at(y, sum_rows(block.count), i, r, expert.skip, left > i + 1);
                if (bias) value = value + b;
                float* const sum = sums_of(out.slot + i, pairs_.rows[pair]);
                const float weight = m_.routing.on_input ? 1.0f : pairs_.weights[pair];
                store(sum, fma(broadcast(weight), value, load(sum)));
            }
        }
    }

    // The 16 columns from `skip` on, in panel i of y [panels, rows, 16]. has_next: whether another panel follows.
    static F32x16 columns_at(const float* y, int32_t rows, int32_t i, int32_t r, int32_t skip, bool has_next) {
        const float* const own = y + (i * rows + r) * PANEL_COLS;
        if (skip == 0) return load(own);
        float both[2 * PANEL_COLS];
        store(both, load(own));
        store(both + PANEL_COLS, has_next ? load(own + rows * PANEL_COLS) : broadcast(0.0f));
        return load(both + skip);
    }

    const MoeOperands& m_;
    const MoeScratch& s_;
    Worker& worker_;
    const MoeNeeds needs_;
    const bool few_;
    const PairMemory& memory_;
    const int64_t hidden_stride_;
    int32_t num_pairs_;  // valid once rows are routed
    MoePairs pairs_;
};

// Scratch for the largest product of a chunk, the router's or an expert's.
inline ScratchSizes moe_product_scratch(const MoeOperands& m) {
    const int32_t rows = static_cast<int32_t>(chunk_rows(m));
    const View x = {nullptr, rows, m.x.cols}, hidden = {nullptr, rows, m.intermediate};
    const View router_x = {nullptr, rows, m.router_x.cols};
    const auto adapted = [&m](const Product& p) { return adapted_product(p, m.adapters); };
    ScratchSizes sizes = product_scratch(adapted(plain_product(&m.router, nullptr, 1, router_x, m.out)));
    const int64_t own[2] = {ProductScratch::bytes(adapted(plain_product(m.gate_up, nullptr, m.num_gate_up, x, m.out))),
                            ProductScratch::bytes(adapted(plain_product(&m.down, nullptr, 1, hidden, m.out)))};
    for (const int64_t bytes : own)
        if (static_cast<size_t>(bytes) > sizes.per_worker) sizes.per_worker = static_cast<size_t>(bytes);
    return sizes;
}

// The adapters of `count` rows; without parts if none of the rows has one.
inline AdapterRows adapters_of_rows(AdapterRows adapters, int32_t first, int32_t count) {
    if (!adapters.parts) return adapters;
    adapters.slots += first;
    adapters.num_rows = count;
    if (!adapters.has_any()) adapters.parts = nullptr;
    return adapters;
}

inline void run_moe(const MoeOperands& m, void* shared_memory, Worker& worker) {
    if (m.x.rows == 0) return;
    Region own{static_cast<uint8_t*>(worker.scratch)}, shared{static_cast<uint8_t*>(shared_memory)};
    const MoeScratch scratch(m, moe_product_scratch(m), own, shared);
    const int32_t step = static_cast<int32_t>(chunk_rows(m));
    for (int32_t first = 0; first < m.x.rows; first += step) {
        if (first > 0) worker.barrier();
        MoeOperands part = m;
        part.x.rows = part.router_x.rows = part.out.rows = m.x.rows - first < step ? m.x.rows - first : step;
        part.x.data += static_cast<int64_t>(first) * m.x.cols;
        part.router_x.data += static_cast<int64_t>(first) * m.router_x.cols;
        part.out.data += static_cast<int64_t>(first) * m.out.cols;
        part.adapters = adapters_of_rows(m.adapters, first, part.x.rows);
        MoeRun(part, scratch, worker).run();
    }
}

inline ScratchSizes moe_scratch_sizes(const MoeOperands& largest) {
    Region own{nullptr}, shared{nullptr};
    MoeScratch(largest, moe_product_scratch(largest), own, shared);
    return {static_cast<size_t>(own.size), static_cast<size_t>(shared.size)};
}

}  // namespace
}  // namespace octavo
