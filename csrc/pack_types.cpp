// Names of weight types, and the sizes of their packed matrices.
#include <climits>
#include <stdexcept>
#include <vector>

#include "checksum.h"
#include "pack.h"

namespace octavo {
namespace {

constexpr int32_t ROW = 0;  // stands for the width of a group

// A parsed name of a grouped type.
struct GroupedName {
    const WeightType* type = nullptr;  // null: not the name of a grouped type
    Groups groups;
    int32_t num_orders = 0;
};

std::vector<std::string> split(const std::string& name) {
    std::vector<std::string> parts(1);
    for (const char c : name) {
        if (c == '_')
            parts.emplace_back();
        else
            parts.back() += c;
    }
    return parts;
}

// Returns -1 if the text is not a number.
int32_t parse_number(const std::string& text) {
    if (text.empty() || text.size() > 7 || text.find_first_not_of("0123456789") != std::string::npos) return -1;
    return std::stoi(text);
}

// A multiple of UNIT_K, or -1 for any other text.
int32_t parse_group(const std::string& text) {
    if (text == "ROW") return ROW;
    const int32_t group = parse_number(text);
    return group > 0 && group % UNIT_K == 0 ? group : -1;
}

// F8_E4M3, F8_E4M3_ROW, F8_E4M3_128X128: the second number is the width of a block, or ALL for a row. The first number
// does not matter, because every row has its own scales once it is packed.
GroupedName parse_float8(const std::string& name, const std::vector<std::string>& parts) {
    GroupedName found;
    found.groups = {ROW, 4, 0};
    if (parts.size() > 3) return {};
    if (parts.size() == 3 && parts[2] != "ROW") {
        const size_t cross = parts[2].find('X');
        const std::string rows = parts[2].substr(0, cross);
        const std::string width = cross == std::string::npos ? "" : parts[2].substr(cross + 1);
        if (rows != "ALL" && parse_number(rows) < 1) return {};
        if (width != "ALL") found.groups.k = parse_group(width);
        if (found.groups.k < 0) return {};
    }
    for (const WeightType& type : WEIGHT_TYPES)
        if (has_exponents(type.traits) && name.substr(0, 7) == type.name) found.type = &type;
    return found;
}

GroupedName parse_grouped(const std::string& name) {
    const std::vector<std::string> parts = split(name);
    if (parts.size() < 2) return {};
    if (parts[0] == "F8") return parse_float8(name, parts);
    GroupedName found;
    for (const WeightType& type : WEIGHT_TYPES)
        if (type.file == FileBlock::none && has_e4m3_scales(type.traits) && name == type.name)
            return {&type, {ROW, 4, 0}, 0};
    found.groups.k = parse_group(parts[1]);
    size_t at = 2;
    const auto take = [&](const char* mark) { return at < parts.size() && parts[at] == mark && ++at; };
    const bool has_zeros = take("Z"), has_mins = !has_zeros && take("M");
    found.groups.scale_bytes = take("F32") ? 4 : 2;
    if (at < parts.size() && parts[at].rfind("ORDER", 0) == 0) {
        const std::string count = parts[at++].substr(5);
        found.num_orders = count.empty() ? 1 : parse_number(count);
    }
    if (at < parts.size() || found.groups.k < 0 || found.num_orders < 0) return {};
    const Mins mins = has_zeros || has_mins ? Mins::group : Mins::none;
    for (const WeightType& type : WEIGHT_TYPES)
        if (type.file == FileBlock::none && type.traits.mins == mins && parts[0] == type.name) found.type = &type;
    if (found.type && found.type->table) found.groups.scale_bytes = 4;
    if (has_zeros) found.groups.min_bytes = 1;
    if (has_mins) found.groups.min_bytes = found.groups.scale_bytes;
    return found;
}

}  // namespace

const WeightType& parse_weight_type(const std::string& name) {
    std::string known;
    for (const WeightType& type : WEIGHT_TYPES) {
        if (comes_as_arrays(type)) continue;
        if (name == type.name) return type;
        known += (known.empty() ? "" : ", ") + std::string(type.name);
    }
    throw std::invalid_argument("weight type '" + name + "' cannot be packed; known: " + known);
}

PackedWeight describe_packed(const std::string& type_name, int64_t n, int64_t k) {
    GroupedName grouped = parse_grouped(type_name);
    const WeightType& type = grouped.type ? *grouped.type : parse_weight_type(type_name);
    const bool is_file_group = !grouped.type && is_grouped(type.traits);
    if (is_file_group) {
        grouped.groups = {type.file_values, 2, 0};
        if (has_e4m3_scales(type.traits)) grouped.groups = {ROW, 4, 0};
    }
    if (n < 1 || k < 1 || n > INT32_MAX - PANEL_COLS || k > INT32_MAX)
        throw std::invalid_argument("a matrix of " + std::to_string(n) + " x " + std::to_string(k) +
                                    " cannot be packed; its sizes must be positive and fit into 32 bits");
    const int32_t columns = static_cast<int32_t>(k);
    int64_t block_k = block_values(type);
    if (grouped.type || is_file_group) {
        if (grouped.groups.k == ROW) grouped.groups.k = (columns + UNIT_K - 1) / UNIT_K * UNIT_K;
        if (grouped.type) block_k = has_exponents(type.traits) ? UNIT_K : grouped.groups.k;
    }
    if (k % block_k != 0)
        throw std::invalid_argument(type_name + " has blocks of " + std::to_string(block_k) + " values; rows of " +
                                    std::to_string(k) + " are not a multiple of that");
    if (grouped.num_orders > 0 && n % grouped.num_orders != 0)
        throw std::invalid_argument(std::to_string(n) + " rows cannot be divided evenly among the orders of " +
                                    type_name);
    PackedWeight w{&type, static_cast<int32_t>(n), columns, grouped.groups, 0, nullptr};
    w.panel_bytes = packed_panel_bytes(type.traits, w.groups, columns);
    w.num_orders = grouped.num_orders;
    return w;
}

std::vector<uint64_t> find_orders(PackedWeight& w) {
    std::vector<uint64_t> ids;
    if (w.num_orders == 0) return ids;
    const uint8_t* const bytes = w.data + num_panels(w) * w.panel_bytes;
    w.order = reinterpret_cast<const int32_t*>(bytes);
    for (int32_t i = 0; i < w.num_orders; ++i) {
        const int32_t* const order = w.order + static_cast<int64_t>(i) * w.k;
        for (int32_t j = 0; j < w.k; ++j)
            if (order[j] < 0 || order[j] >= w.k)
                throw std::invalid_argument("an order of columns has column " + std::to_string(order[j]) +
                                            ", must be from 0 to " + std::to_string(w.k - 1));
        ids.push_back(checksum(reinterpret_cast<const uint8_t*>(order), sizeof(int32_t) * w.k));
    }
    w.order_id = ids.data();
    return ids;
}

}  // namespace octavo
