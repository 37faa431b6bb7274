// A quick scan of JSON text: how many values it has, and where its items begin. It does not validate the text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace octavo {

struct JsonSize {
    int64_t containers = 0;  // arrays and objects
    int64_t strings = 0;     // including names
    int64_t others = 0;      // numbers, true, false and null
    int64_t depth = 0;       // the deepest nesting
};

JsonSize measure_json(const uint8_t* data, size_t size);

// A run of whole items of a container: their bytes [begin, end).
struct JsonRun {
    int64_t begin, end, items;
};

struct JsonRuns {
    int64_t items = 0;   // items in the container; counting stops one past the limit
    int64_t close = -1;  // offset of the closing bracket; -1: the text or the limit ended first
    std::vector<JsonRun> runs;
};

// Splits the items of the container that begins at data[begin] into runs [begin, end) of whole items, without the comma
// between two runs. A run has at most 2 * `run_bytes` bytes, or is a single item.
JsonRuns split_json(const uint8_t* data, size_t size, size_t begin, size_t run_bytes, int64_t most_items);

// A JSON string. end: the offset just past its closing quote, or the size of the text if there is none. is_plain: it
// contains neither escapes nor control characters.
struct JsonString {
    size_t end;
    bool is_plain;
};

// Finds the end of the string that begins at data[begin].
JsonString find_json_string(const uint8_t* data, size_t size, size_t begin);

// Returns an offset at or after `wanted` where the string can be cut: not inside a character, an escape or a surrogate
// pair. begin: an earlier such offset. size: the offset of the end.
size_t cut_json_string(const uint8_t* data, size_t size, size_t begin, size_t wanted);

}  // namespace octavo
