#include "quantizers.h"

#include <cstring>
#include <stdexcept>

#include "platform/registry.h"

OCTAVO_LIST(octavo::QuantizerEntry, quantizers)

namespace octavo {

const QuantizerEntry& find_quantizer(const std::string& type_name, Isa level) {
    for (int i = static_cast<int>(level); i >= 0; --i)
        for (const QuantizerEntry* e = octavo_first_of_quantizers(); e != octavo_end_of_quantizers(); ++e)
            if (type_name == e->type_name && std::strcmp(e->isa, isa_name(static_cast<Isa>(i))) == 0) return *e;
    std::string known;
    for (const std::string& name : quantizer_names()) known += (known.empty() ? "" : ", ") + name;
    throw std::invalid_argument("there is no quantizer for type '" + type_name + "'; known: " + known);
}

std::vector<std::string> quantizer_names() {
    std::vector<std::string> names;
    for (const QuantizerEntry* e = octavo_first_of_quantizers(); e != octavo_end_of_quantizers(); ++e)
        if (std::strcmp(e->isa, isa_name(Isa::scalar)) == 0) names.emplace_back(e->type_name);
    return names;
}

}  // namespace octavo
