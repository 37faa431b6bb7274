// A quick look at JSON text: its size in values, and where its items begin. It accepts what is not JSON, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace octavo {

struct JsonSize {
    int64_t containers = 0;  // arrays and objects
    int64_t strings = 0;     // names included
    int64_t others = 0;      // numbers, true, false and null
    int64_t depth = 0;       // of the innermost container
};

JsonSize measure_json(const uint8_t* data, size_t size);

// Whole items of a container: their bytes [begin, end).
struct JsonRun {
    int64_t begin, end, items;
};

struct JsonRuns {
    int64_t items = 0;   // of the container; counting ends one beyond the limit
    int64_t close = -1;  // offset of its last byte; -1: the text or the limit ends before
    std::vector<JsonRun> runs;
};

// Divides the items of the container that begins at data[begin] into runs [begin, end) of whole items, without the
// comma between two runs. A run has at most twice `run_bytes`, or one item.
JsonRuns split_json(const uint8_t* data, size_t size, size_t begin, size_t run_bytes, int64_t most_items);

// A JSON string. end: the offset just past its closing quote, or the size of the text if there is none. is_plain: it
// has neither escapes nor control characters.
struct JsonString {
    size_t end;
    bool is_plain;
};

// The string that begins at data[begin].
JsonString find_json_string(const uint8_t* data, size_t size, size_t begin);

// A place in a string at or behind `wanted`, where the string can be cut: not within a character, an escape or a
// surrogate pair. begin: such a place before it. size: the offset of the end.
size_t cut_json_string(const uint8_t* data, size_t size, size_t begin, size_t wanted);

}  // namespace octavo
