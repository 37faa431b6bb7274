// The Python module octavo.server.http._json_text: scans JSON text while other threads run.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <vector>

#include "scan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

const uint8_t* bytes_of(const nb::bytes& data) { return reinterpret_cast<const uint8_t*>(data.c_str()); }

void check_place(const nb::bytes& data, size_t begin, size_t end) {
    if (begin >= end || end > data.size()) throw nb::value_error("begin and end must delimit a part of the text");
}

std::tuple<int64_t, int64_t, int64_t, int64_t> measure(const nb::bytes& data) {
    nb::gil_scoped_release release;
    const JsonSize found = measure_json(bytes_of(data), data.size());
    return {found.containers, found.strings, found.others, found.depth};
}

std::tuple<int64_t, int64_t, std::vector<std::tuple<int64_t, int64_t, int64_t>>> split(const nb::bytes& data,
                                                                                       size_t begin, size_t run_bytes,
                                                                                       int64_t most_items) {
    check_place(data, begin, data.size());
    nb::gil_scoped_release release;
    const JsonRuns found = split_json(bytes_of(data), data.size(), begin, run_bytes, most_items);
    std::vector<std::tuple<int64_t, int64_t, int64_t>> runs;
    for (const JsonRun& run : found.runs) runs.emplace_back(run.begin, run.end, run.items);
    return {found.items, found.close, std::move(runs)};
}

std::tuple<size_t, bool> find_string(const nb::bytes& data, size_t begin) {
    check_place(data, begin, data.size());
    nb::gil_scoped_release release;
    const JsonString found = find_json_string(bytes_of(data), data.size(), begin);
    return {found.end, found.is_plain};
}

size_t cut_string(const nb::bytes& data, size_t begin, size_t end, size_t wanted) {
    check_place(data, begin, end);
    nb::gil_scoped_release release;
    return cut_json_string(bytes_of(data), end, begin, wanted);
}

}  // namespace

NB_MODULE(_json_text, module) {
    module.def("measure_json", measure, "data"_a);
    module.def("split_json", split, "data"_a, "begin"_a, "run_bytes"_a, "most_items"_a);
    module.def("find_json_string", find_string, "data"_a, "begin"_a);
    module.def("cut_json_string", cut_string, "data"_a, "begin"_a, "end"_a, "wanted"_a);
}

}  // namespace octavo
