// The best candidates of a row, without a full sort: by count (top-k) or by mass (top-p, typical).
#pragma once

#include <cstdint>

namespace octavo {
namespace {

constexpr int32_t NUM_BUCKETS = 1024;
constexpr int32_t SORT_LIMIT = 64;  // buckets up to this size are sorted

// Tokens that may still be chosen, by ascending id.
struct Candidates {
    int32_t count;
    int32_t* ids;
    float* weights;
    float* keys;  // sort keys of the current selection: ascending, ties by id
};

struct SelectBuffers {
    int32_t* active;  // indices of candidates
    double* masses;   // [NUM_BUCKETS]
    int32_t* counts;  // [NUM_BUCKETS]
};

// The last candidate to keep.
struct Border {
    float key;
    int32_t id;
};

inline bool precedes(const Candidates& c, int32_t a, int32_t b) {
    return c.keys[a] < c.keys[b] || (c.keys[a] == c.keys[b] && c.ids[a] < c.ids[b]);
}

// Heapsort of indices by key, then id.
inline void sort_positions(const Candidates& c, int32_t* positions, int32_t count) {
    const auto sink = [&](int32_t root, int32_t end) {
        for (int32_t child = 2 * root + 1; child < end; root = child, child = 2 * root + 1) {
            if (child + 1 < end && precedes(c, positions[child], positions[child + 1])) ++child;
            if (!precedes(c, positions[root], positions[child])) return;
            const int32_t swapped = positions[root];
            positions[root] = positions[child];
            positions[child] = swapped;
        }
    };
    for (int32_t i = count / 2 - 1; i >= 0; --i) sink(i, count);
    for (int32_t end = count - 1; end > 0; --end) {
        const int32_t swapped = positions[0];
        positions[0] = positions[end];
        positions[end] = swapped;
        sink(0, end);
    }
}

struct KeyRange {
    double low, scale;
    int32_t bucket(float key) const {
        const double b = (static_cast<double>(key) - low) * scale;
        return b < NUM_BUCKETS - 1 ? static_cast<int32_t>(b) : NUM_BUCKETS - 1;
    }
};

// The range of the active keys; scale is 0 if they are all equal.
inline KeyRange key_range(const Candidates& c, const int32_t* active, int32_t count) {
    float low = c.keys[active[0]], high = low;
    for (int32_t i = 1; i < count; ++i) {
        const float key = c.keys[active[i]];
        low = key < low ? key : low;
        high = key > high ? key : high;
    }
    const double width = static_cast<double>(high) - static_cast<double>(low);
    return {low, width > 0 ? NUM_BUCKETS / width : 0};
}

// Walks `active` in order until `target` is reached. Takes at least one candidate.
inline Border take_in_order(const Candidates& c, const int32_t* active, int32_t count, bool by_mass, double taken,
                            double target) {
    int32_t last = 0;
    for (int32_t i = 0; i < count; ++i) {
        last = active[i];
        taken += by_mass ? c.weights[last] : 1.0;
        if (taken >= target) break;
    }
    return {c.keys[last], c.ids[last]};
}

// Finds the end of the shortest prefix, in the order of the keys, whose count or mass is at least `target`.
inline Border find_border(const Candidates& c, bool by_mass, double target, const SelectBuffers& buffers) {
    int32_t* active = buffers.active;
    int32_t count = c.count;
    for (int32_t i = 0; i < count; ++i) active[i] = i;
    double taken = 0;
    while (count > SORT_LIMIT) {
        const KeyRange range = key_range(c, active, count);
        if (range.scale == 0) return take_in_order(c, active, count, by_mass, taken, target);
        __builtin_memset(buffers.masses, 0, sizeof(double) * NUM_BUCKETS);
        __builtin_memset(buffers.counts, 0, sizeof(int32_t) * NUM_BUCKETS);
        for (int32_t i = 0; i < count; ++i) {
            const int32_t b = range.bucket(c.keys[active[i]]);
            buffers.masses[b] += by_mass ? c.weights[active[i]] : 1.0;
            ++buffers.counts[b];
        }
        int32_t border = 0, last_filled = 0;
        double before = taken, before_last = taken;
        for (; border < NUM_BUCKETS; ++border) {
            if (buffers.counts[border] == 0) continue;
            last_filled = border;
            before_last = before;
            if (before + buffers.masses[border] >= target) break;
            before += buffers.masses[border];
        }
        // Rounding may leave the total just below the target. The border is then in the last bucket.
        taken = before_last;
        int32_t kept = 0;  // fewer than count: the ends of the range are in different buckets
        for (int32_t i = 0; i < count; ++i)
            if (range.bucket(c.keys[active[i]]) == last_filled) active[kept++] = active[i];
        count = kept;
    }
    sort_positions(c, active, count);
    return take_in_order(c, active, count, by_mass, taken, target);
}

// Drops what is past the border and keeps ids in ascending order.
inline void keep_until(Candidates& c, Border border) {
    int32_t kept = 0;
    for (int32_t i = 0; i < c.count; ++i) {
        if (c.keys[i] > border.key || (c.keys[i] == border.key && c.ids[i] > border.id)) continue;
        c.ids[kept] = c.ids[i];
        c.weights[kept] = c.weights[i];
        c.keys[kept] = c.keys[i];
        ++kept;
    }
    c.count = kept;
}

}  // namespace
}  // namespace octavo
