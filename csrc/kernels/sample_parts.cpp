// Sampling on several ranks: each offers its best candidates of a row, and the first rank samples from them. If they do
// not suffice for a row, all its logits are gathered.
#include "meeting.h"
#include "sample_offer.h"
#include "shapes.h"

namespace octavo {
namespace {

OCTAVO_SIGNATURE(SampleParts, (), (), (), ());

// One worker's memory for a row: of its rank's part, or of the candidates of all ranks.
struct PartBuffers {
    RowBuffers row;
    float* logits[2];
    int32_t* ids[2];
};

inline PartBuffers carve_part_buffers(char* base, int32_t vocab, int32_t num_ranks) {
    PartBuffers b{};
    b.row = carve_row_buffers(base, vocab);
    const int64_t all = static_cast<int64_t>(MOST_CANDIDATES) * num_ranks, most = vocab < all ? vocab : all;
    const int64_t list_bytes = (most * 4 + 63) / 64 * 64;
    char* lists = base + (sampling_scratch_bytes(vocab) + 63) / 64 * 64;
    for (int i = 0; i < 2; ++i, lists += 2 * list_bytes) {
        b.logits[i] = reinterpret_cast<float*>(lists);
        b.ids[i] = reinterpret_cast<int32_t*>(lists + list_bytes);
    }
    return b;
}

// A position in the order of likelihood.
struct Likelihood {
    float logit;
    int32_t id;
    bool precedes(const Likelihood& other) const {
        return logit > other.logit || (logit == other.logit && id < other.id);
    }
};

// The candidates of all ranks, up to the first position after which some rank has tokens that it did not offer.
struct Merged {
    Logits logits;  // by ascending token id
    int32_t* ids;
    bool is_whole;  // all tokens are included
    float border;   // otherwise: the logit at that position
};

inline const RowOffer& offer_of(const PartsTask& parts, int32_t rank, uint32_t turn, size_t at) {
    return *reinterpret_cast<const RowOffer*>(reinterpret_cast<char*>(numbers(*parts.exchange, rank, turn)) + at);
}

// The offers for a row, `at` bytes after the header of each half.
struct Offers {
    const PartsTask& parts;
    const RowPlan& plan;
    uint32_t turn;
    size_t at;
    bool of_raw;  // candidates from the unchanged logits

    const RowOffer& of(int32_t rank) const { return offer_of(parts, rank, turn, at); }
    int32_t count(int32_t rank) const {
        const int32_t given = of_raw ? of(rank).num_reports : of(rank).num_choices;
        const int32_t most = of_raw ? plan.reports : plan.choices;
        return given < most ? given : most;
    }
    Merged merge(float* logits, int32_t* ids, float* panel_max) const {
        Merged merged{{logits, 0, 0, 0, panel_max}, ids, true, NONE};
        Likelihood border{};
        int32_t total = 0;
        for (int32_t rank = 0; rank < parts.exchange->size; ++rank) {
            const OfferLists lists = lists_of(reinterpret_cast<char*>(const_cast<RowOffer*>(&of(rank))), plan);
            const int32_t n = count(rank);
            __builtin_memcpy(logits + total, of_raw ? lists.report_logits : lists.choice_logits, 4 * n);
            __builtin_memcpy(ids + total, of_raw ? lists.report_ids : lists.choice_ids, 4 * n);
            if (n < of(rank).part) {
                Likelihood last{logits[total], ids[total]};
                for (int32_t i = total + 1; i < total + n; ++i)
                    if (last.precedes({logits[i], ids[i]})) last = {logits[i], ids[i]};
                if (merged.is_whole || last.precedes(border)) border = last;
                merged.is_whole = false;
            }
            total += n;
        }
        for (int32_t i = 0; i < total; ++i) {
            if (!merged.is_whole && border.precedes({logits[i], ids[i]})) continue;
            logits[merged.logits.size] = logits[i];
            ids[merged.logits.size++] = ids[i];
        }
        scan(merged.logits);
        merged.border = border.logit;
        return merged;
    }
    // The sum of the ranks' masses, relative to the largest logit of all ranks.
    double mass(float largest, float temperature, bool of_report) const {
        double sum = 0;
        for (int32_t rank = 0; rank < parts.exchange->size; ++rank) {
            const RowOffer& offer = of(rank);
            const double own = of_report ? offer.report_mass : offer.choice_mass;
            const float own_largest = of_report ? offer.report_max : offer.choice_max;
            if (own > 0) sum += own * __builtin_exp(static_cast<double>(own_largest - largest) / temperature);
        }
        return sum;
    }
};

// Whether the row's min-p, which bounds its tokens, drops all tokens that are not candidates.
inline bool min_p_suffices(const Merged& choices, const SamplingRow& options) {
    const float x = static_cast<float>(__builtin_log(options.min_p < 1.0f ? static_cast<double>(options.min_p) : 1.0));
    return (choices.border - choices.logits.max) / options.temperature < (x > SMALLEST_X ? x : SMALLEST_X);
}

// Samples a row from the offers of all ranks. is_open: set if they do not suffice.
inline RowError sample_offers(const Offers& offers, int32_t row, PartBuffers& buffers, bool& is_open) {
    const SamplingTask& task = offers.parts.task;
    const SamplingRow& options = task.batch.rows[row];
    for (int32_t rank = 0; rank < offers.parts.exchange->size; ++rank)
        if (offers.of(rank).error != ROW_OK) return static_cast<RowError>(offers.of(rank).error);
    const Merged choices = offers.merge(buffers.logits[0], buffers.ids[0], buffers.row.changed_max);
    if (choices.logits.max == NONE) return ROW_NOTHING_ALLOWED;
    if (!choices.is_whole && !is_bounded(options) && !offers.plan.by_mass && !min_p_suffices(choices, options)) {
        is_open = true;
        return ROW_OK;
    }
    const bool by_mass = offers.plan.by_mass && !choices.is_whole;
    const double mass = by_mass ? offers.mass(choices.logits.max, options.temperature, false) : 0;
    const int32_t chosen = choose(choices.logits, task.batch, row, buffers.row, mass);
    if (chosen < 0) {
        is_open = true;
        return ROW_OK;
    }
    task.output.token_ids[row] = choices.ids[chosen];
    if (options.num_logprobs < 0) return ROW_OK;
    Merged raw = choices;
    int32_t at = chosen;
    if (offers.plan.reports > 0) {
        const Offers of_raw{offers.parts, offers.plan, offers.turn, offers.at, true};
        raw = of_raw.merge(buffers.logits[1], buffers.ids[1], buffers.row.raw_max);
        for (at = 0; at < raw.logits.size && raw.ids[at] != choices.ids[chosen];) ++at;
    }
    if (at == raw.logits.size) {
        is_open = true;
        return ROW_OK;
    }
    report_logprobs(raw.logits, raw.ids, at, offers.mass(raw.logits.max, 1.0f, true), options.num_logprobs, row,
                    buffers.row, task.output);
    return ROW_OK;
}

// Rows whose offers fit into a half together.
struct Piece {
    int32_t first, end;
    size_t bytes;
    bool is_certain;
};
inline Piece piece_from(const PartsTask& parts, int32_t first) {
    Piece piece{first, first, 0, true};
    for (; piece.end < parts.task.end_row; ++piece.end) {
        const RowPlan plan = plan_row(parts.task.batch, piece.end, *parts.exchange);
        const size_t bytes = plan.choices > 0 ? plan.bytes() : 0;
        const auto rows = static_cast<size_t>(piece.end - first);
        if (piece.bytes + bytes > parts.exchange->bytes || rows == parts.exchange->bytes) break;
        piece.bytes += bytes;
        piece.is_certain = piece.is_certain && plan.is_certain;
    }
    return piece;
}

// Calls f(row, plan, address of the offer) for this worker's rows of a piece.
template <typename F>
inline void each_row(const PartsTask& parts, const Piece& piece, const Worker& worker, F f) {
    size_t at = 0;
    for (int32_t row = piece.first; row < piece.end; ++row) {
        const RowPlan plan = plan_row(parts.task.batch, row, *parts.exchange);
        if ((row - piece.first) % worker.count == worker.index) f(row, plan, at);
        if (plan.choices > 0) at += plan.bytes();
    }
}

// Gathers the open rows of a piece and samples them.
inline void sample_open(const PartsTask& parts, const Piece& piece, PartBuffers& buffers, Worker& worker) {
    Exchange& e = *parts.exchange;
    const SamplingTask& task = parts.task;
    for (int32_t row = piece.first; row < piece.end;) {
        int32_t end = row;
        while (end < piece.end && parts.is_open[end]) ++end;
        if (end > row) {
            const int64_t at = row - task.first_row;
            const View x{const_cast<float*>(task.logits) + at * parts.part, end - row, parts.part};
            Args args{};
            args.inputs = &x;
            args.output = {parts.gathered + at * task.vocab, end - row, task.vocab};
            args.shared_scratch = &e;
            parts.gather(args, Step{}, worker);
            if (!e.met) return;
        }
        row = end + 1;
    }
    worker.barrier();
    if (e.rank != 0) return;
    SamplingTask whole = task;
    whole.logits = parts.gathered;
    whole.exchange = &e;
    for (int32_t row = piece.first + worker.index; row < piece.end; row += worker.count)
        if (parts.is_open[row]) task.output.errors[row] = sample_row(whole, row, buffers.row);
}

inline void sample_piece(const PartsTask& parts, const Piece& piece, PartBuffers& buffers, Worker& worker) {
    Exchange& e = *parts.exchange;
    const SamplingTask& task = parts.task;
    uint32_t turn = e.turn;
    each_row(parts, piece, worker, [&](int32_t row, const RowPlan& plan, size_t at) {
        if (plan.choices == 0) return;
        RowOffer& offer = const_cast<RowOffer&>(offer_of(parts, e.rank, turn, at));
        const float* logits = task.logits + static_cast<int64_t>(row - task.first_row) * parts.part;
        offer = RowOffer{};
        offer.part = parts.part;
        offer.error = offer_row(parts, row, {logits, parts.part, 0, 0, buffers.row.raw_max}, plan, offer, buffers.row);
    });
    if (!meet(e, turn, worker, piece.bytes)) return;
    uint8_t* const open = reinterpret_cast<uint8_t*>(numbers(e, 0, turn));  // one per row, written by the first rank
    if (e.rank == 0)
        each_row(parts, piece, worker, [&](int32_t row, const RowPlan& plan, size_t at) {
            bool is_open = plan.choices == 0;
            clear_outputs(task.output, row);
            task.output.errors[row] =
                is_open ? ROW_OK : sample_offers({parts, plan, turn - 1, at, false}, row, buffers, is_open);
            if (!piece.is_certain) open[row - piece.first] = is_open;
        });
    if (piece.is_certain) return;
    if (!meet(e, turn, worker, e.rank == 0 ? static_cast<size_t>(piece.end - piece.first) : 0)) return;
    // The next exchange reuses the memory of the half.
    if (worker.index == 0)
        __builtin_memcpy(parts.is_open + piece.first, open, static_cast<size_t>(piece.end - piece.first));
    worker.barrier();
    sample_open(parts, piece, buffers, worker);
}

void sample_parts(const Args& args, const Step&, Worker& worker) {
    const PartsTask& parts = *static_cast<const PartsTask*>(args.shared_scratch);
    PartBuffers buffers =
        carve_part_buffers(static_cast<char*>(worker.scratch), parts.task.vocab, parts.exchange->size);
    for (int32_t first = parts.task.first_row; first < parts.task.end_row && parts.exchange->met;) {
        const Piece piece = piece_from(parts, first);
        sample_piece(parts, piece, buffers, worker);
        first = piece.end;
    }
}

// The executor calls it after the last record; it is not itself a record.
bool sample_parts_fits(const Args&) { return false; }

}  // namespace

OCTAVO_KERNEL(sample_parts, SampleParts);

}  // namespace octavo
