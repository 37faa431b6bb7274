// Names of weight types, and the sizes of their packed matrices.
#include <climits>
#include <stdexcept>
#include <vector>

#include "pack.h"

namespace octavo {
namespace {

constexpr int32_t ROW = 0;  // as the width of a group

// A grouped type as its name says.
struct GroupedName {
    const WeightType* type = nullptr;  // null: the name is none
    Groups groups;
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

// A multiple of UNIT_K; -1: the text is none.
int32_t parse_group(const std::string& text) {
    if (text == "ROW") return ROW;
    if (text.empty() || text.size() > 7 || text.find_first_not_of("0123456789") != std::string::npos) return -1;
    const int32_t group = std::stoi(text);
    return group > 0 && group % UNIT_K == 0 ? group : -1;
}

GroupedName parse_grouped(const std::string& name) {
    const std::vector<std::string> parts = split(name);
    if (parts.size() < 2) return {};
    GroupedName found;
    found.groups = {parse_group(parts[1]), 2, 0};
    size_t at = 2;
    const auto take = [&](const char* mark) { return at < parts.size() && parts[at] == mark && ++at; };
    const bool has_zeros = take("Z"), has_mins = !has_zeros && take("M");
    if (take("F32")) found.groups.scale_bytes = 4;
    if (has_zeros) found.groups.min_bytes = 1;
    if (has_mins) found.groups.min_bytes = found.groups.scale_bytes;
    if (at < parts.size() || found.groups.k < 0) return {};
    const Mins mins = has_zeros || has_mins ? Mins::group : Mins::none;
    for (const WeightType& type : WEIGHT_TYPES)
        if (is_grouped(type.traits) && type.traits.mins == mins && parts[0] == type.name) found.type = &type;
    return found;
}

}  // namespace

const WeightType& parse_weight_type(const std::string& name) {
    std::string known;
    for (const WeightType& type : WEIGHT_TYPES) {
        if (type.file == FileBlock::none) continue;
        if (name == type.name) return type;
        known += (known.empty() ? "" : ", ") + std::string(type.name);
    }
    throw std::invalid_argument("weight type '" + name + "' cannot be packed; known: " + known);
}

PackedWeight describe_packed(const std::string& type_name, int64_t n, int64_t k) {
    GroupedName grouped = parse_grouped(type_name);
    const WeightType& type = grouped.type ? *grouped.type : parse_weight_type(type_name);
    if (n < 1 || k < 1 || n > INT32_MAX - PANEL_COLS || k > INT32_MAX)
        throw std::invalid_argument("a matrix of " + std::to_string(n) + " x " + std::to_string(k) +
                                    " cannot be packed");
    const int32_t columns = static_cast<int32_t>(k);
    int64_t block_k = type.traits.block_k;
    if (grouped.type) {
        if (grouped.groups.k == ROW) grouped.groups.k = (columns + UNIT_K - 1) / UNIT_K * UNIT_K;
        block_k = grouped.groups.k;
    }
    if (k % block_k != 0)
        throw std::invalid_argument(type_name + " has blocks of " + std::to_string(block_k) + " values; rows of " +
                                    std::to_string(k) + " do not divide into them");
    const Groups groups = grouped.type ? grouped.groups : Groups{};
    return {&type, static_cast<int32_t>(n), columns, groups, packed_panel_bytes(type.traits, groups, columns), nullptr};
}

}  // namespace octavo
