#include "scan.h"

#include <algorithm>

namespace octavo {
namespace {

bool is_space(uint8_t c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

}  // namespace

JsonString find_json_string(const uint8_t* data, size_t size, size_t begin) {
    JsonString found{size, true};
    for (size_t at = begin + 1; at < size; ++at) {
        if (data[at] == '"') {
            found.end = at + 1;
            break;
        }
        found.is_plain = found.is_plain && data[at] >= 0x20 && data[at] != '\\';
        if (data[at] == '\\') ++at;
    }
    return found;
}

size_t cut_json_string(const uint8_t* data, size_t size, size_t begin, size_t wanted) {
    size_t at = begin;
    bool is_high = false;  // the last character was the first half of a surrogate pair
    while (at < size && (at < wanted || is_high)) {
        is_high = false;
        if (data[at] != '\\') {
            ++at;
            while (at < size && (data[at] & 0xc0) == 0x80) ++at;
        } else if (at + 1 < size && data[at + 1] == 'u') {
            is_high = at + 3 < size && (data[at + 2] | 0x20) == 'd' && data[at + 3] >= '8' &&
                      (data[at + 3] <= '9' || (data[at + 3] | 0x20) == 'a' || (data[at + 3] | 0x20) == 'b');
            at += 6;
        } else {
            at += 2;
        }
    }
    return std::min(at, size);
}

JsonSize measure_json(const uint8_t* data, size_t size) {
    JsonSize found;
    int64_t depth = 0;
    bool in_other = false;
    for (size_t at = 0; at < size;) {
        const uint8_t c = data[at];
        const bool was_in_other = in_other;
        in_other = false;
        if (c == '"') {
            ++found.strings;
            at = find_json_string(data, size, at).end;
            continue;
        }
        if (c == '[' || c == '{') {
            ++found.containers;
            found.depth = std::max(found.depth, ++depth);
        } else if (c == ']' || c == '}') {
            --depth;
        } else if (c != ',' && c != ':' && !is_space(c)) {
            if (!was_in_other) ++found.others;
            in_other = true;
        }
        ++at;
    }
    return found;
}

JsonRuns split_json(const uint8_t* data, size_t size, size_t begin, size_t run_bytes, int64_t most_items) {
    JsonRuns found;
    size_t run = begin + 1, item = begin + 1;
    int64_t earlier = 0;  // items before this run
    const auto add = [&](size_t last, int64_t items) {
        found.runs.push_back({static_cast<int64_t>(run), static_cast<int64_t>(last), items - earlier});
        earlier = items;
        run = last + 1;
    };
    int depth = 1;
    bool is_empty = true;  // whether the current item is empty
    for (size_t at = begin + 1; at < size; ++at) {
        const uint8_t c = data[at];
        if (c == '"') {
            at = find_json_string(data, size, at).end - 1;
            is_empty = false;
            continue;
        }
        if (c == '[' || c == '{') ++depth;
        if (c == ']' || c == '}') --depth;
        const bool ends = depth == 0;
        if (!ends && !(c == ',' && depth == 1)) {
            is_empty = is_empty && is_space(c);
            continue;
        }
        if (ends && is_empty && found.items == 0) {  // only white space so far
            found.close = static_cast<int64_t>(at);
            return found;
        }
        if (++found.items > most_items) return found;
        if (at - item > run_bytes) {
            if (item > run) add(item - 1, found.items - 1);
            add(at, found.items);
        } else if (ends || at - run > run_bytes) {
            add(at, found.items);
        }
        item = at + 1;
        is_empty = true;
        if (ends) {
            found.close = static_cast<int64_t>(at);
            return found;
        }
    }
    return found;
}

}  // namespace octavo
