// What one of several ranks offers for a row of logits: its best candidates, maxima and masses (sample_plan.h).
#pragma once

#include "sample_whole.h"

namespace octavo {
namespace {

// The lists that follow an offer.
struct OfferLists {
    float* choice_logits;
    int32_t* choice_ids;
    float* report_logits;
    int32_t* report_ids;
};
inline OfferLists lists_of(char* offer, const RowPlan& plan) {
    char* const start = offer + sizeof(RowOffer);
    char* const reports = start + 8 * static_cast<size_t>(plan.choices);
    return {reinterpret_cast<float*>(start), reinterpret_cast<int32_t*>(start) + plan.choices,
            reinterpret_cast<float*>(reports), reinterpret_cast<int32_t*>(reports) + plan.reports};
}

// The words of a mask from token `first` on, for `part` tokens. Bits past the end are unspecified.
inline const uint32_t* mask_from(const uint32_t* words, int32_t first, int32_t part, int32_t vocab, uint32_t* to) {
    if (!words) return nullptr;
    const int32_t shift = first % 32, num_words = (vocab + 31) / 32;
    words += first / 32;
    if (shift == 0) return words;
    for (int32_t i = 0; i < (part + 31) / 32; ++i) {
        const bool has_next = first / 32 + i + 1 < num_words;
        to[i] = words[i] >> shift | (has_next ? words[i + 1] << (32 - shift) : 0u);
    }
    return to;
}

// Writes the k most likely tokens, by ascending id. Returns their number.
inline int32_t give_likeliest(const Logits& logits, int32_t k, int32_t first, float* to, int32_t* ids,
                              RowBuffers& buffers) {
    if (k == 1) {
        const int32_t at = logits.max > NONE ? largest_id(logits) : 0;
        to[0] = logits.data[at];
        ids[0] = first + at;
        return 1;
    }
    const Candidates& c = buffers.candidates;
    collect_likeliest(logits, k < logits.size ? k : logits.size, buffers);
    for (int32_t i = 0; i < c.count; ++i) {
        to[i] = logits.data[c.ids[i]];
        ids[i] = first + c.ids[i];
    }
    return c.count;
}

// raw: the logits of this rank, without panel maxima. offer: has room for the lists of the plan.
inline RowError offer_row(const PartsTask& parts, int32_t row, Logits raw, const RowPlan& plan, RowOffer& offer,
                          RowBuffers& buffers) {
    const SamplingBatch& b = parts.task.batch;
    const int32_t vocab = parts.task.vocab;
    if (!ids_are_known(b, row, vocab)) return ROW_TOKEN_ID_OUT_OF_RANGE;
    const OfferLists lists = lists_of(reinterpret_cast<char*>(&offer), plan);
    const bool changes = changes_logits(b, row), reports = b.rows[row].num_logprobs >= 0;
    Logits changed{buffers.changed, parts.part, 0, 0, buffers.changed_max};
    const auto give_choices = [&](const Logits& logits) {
        offer.choice_max = logits.max;
        offer.num_choices =
            give_likeliest(logits, plan.choices, parts.first, lists.choice_logits, lists.choice_ids, buffers);
        if (plan.by_mass) offer.choice_mass = mass_of(logits, b.rows[row].temperature, buffers);
    };
    if (changes) {
        uint32_t* const room = reinterpret_cast<uint32_t*>(buffers.select.active);
        const uint32_t* words = mask_from(allowed_words(b, row, vocab), parts.first, parts.part, vocab, room);
        if (!copy_allowed(raw, words, buffers.changed, changed)) return ROW_NAN_LOGITS;
        change_logits(b, row, parts.first, vocab, buffers.changed, changed);
        update_maxima(changed);
        give_choices(changed);
        if (!reports) return ROW_OK;
    }
    if (!scan(raw)) return ROW_NAN_LOGITS;
    if (raw.max > LARGEST) {
        copy_allowed(raw, nullptr, buffers.changed, changed);
        update_maxima(changed);
        raw = changed;
    }
    if (!changes) give_choices(raw);
    if (!reports) return ROW_OK;
    offer.report_max = raw.max;
    offer.report_mass = mass_of(raw, 1.0f, buffers);
    if (changes)
        offer.num_reports =
            give_likeliest(raw, plan.reports, parts.first, lists.report_logits, lists.report_ids, buffers);
    return ROW_OK;
}

}  // namespace
}  // namespace octavo
