// Python bindings for groups of ranks, which can be passed to a program.
#include <nanobind/stl/string.h>

#include "bindings_step.h"
#include "collective.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

void bind_collective(nb::module_& module) {
    nb::class_<CollectiveGroup>(module, "CollectiveGroup")
        .def(
            "__init__",
            [](CollectiveGroup* self, const std::string& name, int32_t rank, int32_t size, size_t buffer_bytes,
               int32_t join_ms, int32_t silence_ms, int32_t deadline_ms, int32_t numa_node,
               const nb::object& given_up) {
                GroupOptions options;
                options.name = name;
                options.rank = rank;
                options.size = size;
                options.buffer_bytes = buffer_bytes;
                options.join_ms = join_ms;
                options.silence_ms = silence_ms;
                options.deadline_ms = deadline_ms;
                options.numa_node = numa_node;
                if (!given_up.is_none())
                    options.given_up = [function = given_up.ptr()] {  // the caller keeps it alive
                        nb::gil_scoped_acquire acquire;
                        return nb::cast<std::string>(nb::handle(function)());
                    };
                nb::gil_scoped_release release;
                new (self) CollectiveGroup(options);
            },
            "name"_a, "rank"_a, "size"_a, nb::kw_only(), "buffer_bytes"_a = GroupOptions{}.buffer_bytes,
            "join_ms"_a = GroupOptions{}.join_ms, "silence_ms"_a = GroupOptions{}.silence_ms,
            "deadline_ms"_a = GroupOptions{}.deadline_ms, "numa_node"_a = GroupOptions{}.numa_node,
            "given_up"_a.none() = nb::none())
        .def("fail", &CollectiveGroup::fail, "reason"_a)
        .def_prop_ro("placement_error", &CollectiveGroup::placement_error)
        .def_prop_ro("error", &CollectiveGroup::error)
        .def_prop_ro("is_waiting", &CollectiveGroup::is_waiting);
}

}  // namespace octavo
