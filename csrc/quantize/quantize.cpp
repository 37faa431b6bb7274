// The quantizers of all types, for one instruction set.
#include "grid_blocks.h"
#include "platform/registry.h"
#include "widen.h"

#define OCTAVO_STRINGIFY_(x) #x
#define OCTAVO_STRINGIFY(x) OCTAVO_STRINGIFY_(x)
#define OCTAVO_QUANTIZER(name, values, bytes, scratch, ...)         \
    OCTAVO_LISTED(quantizers)                                       \
    static const octavo::QuantizerEntry octavo_quantizer_##name = { \
        #name, OCTAVO_STRINGIFY(OCTAVO_ISA), values, bytes, scratch, __VA_ARGS__, widen}
#define OCTAVO_GRID_QUANTIZER(name, type) \
    OCTAVO_QUANTIZER(name, SUPER, type::bytes, sizeof(GridTables<type>), quantize_grid<type>)

namespace octavo {

OCTAVO_QUANTIZER(Q4_0, 32, 18, 0, quantize_scaled<Flat::q4>);
OCTAVO_QUANTIZER(Q4_1, 32, 20, 0, quantize_line<Flat::q4>);
OCTAVO_QUANTIZER(Q5_0, 32, 22, 0, quantize_scaled<Flat::q5>);
OCTAVO_QUANTIZER(Q5_1, 32, 24, 0, quantize_line<Flat::q5>);
OCTAVO_QUANTIZER(Q8_0, 32, 34, 0, quantize_scaled<Flat::q8>);
OCTAVO_QUANTIZER(IQ4_NL, 32, 18, 0, quantize_scaled<Flat::curve>);
OCTAVO_QUANTIZER(MXFP4, 32, 17, 0, quantize_mxfp4);
OCTAVO_QUANTIZER(TQ1_0, 256, 54, 0, quantize_tq1_0);
OCTAVO_QUANTIZER(TQ2_0, 256, 66, 0, quantize_tq2_0);
OCTAVO_QUANTIZER(Q2_K, 256, 84, 0, quantize_q2_k);
OCTAVO_QUANTIZER(Q3_K, 256, 110, 0, quantize_q3_k);
OCTAVO_QUANTIZER(Q4_K, 256, 144, 0, quantize_q4_k);
OCTAVO_QUANTIZER(Q5_K, 256, 176, 0, quantize_q5_k);
OCTAVO_QUANTIZER(Q6_K, 256, 210, 0, quantize_q6_k);
OCTAVO_QUANTIZER(IQ4_XS, 256, 136, 0, quantize_iq4_xs);
OCTAVO_GRID_QUANTIZER(IQ2_XXS, IQ2XXS);
OCTAVO_GRID_QUANTIZER(IQ2_XS, IQ2XS);
OCTAVO_GRID_QUANTIZER(IQ2_S, IQ2S);
OCTAVO_GRID_QUANTIZER(IQ3_XXS, IQ3XXS);
OCTAVO_GRID_QUANTIZER(IQ3_S, IQ3S);

}  // namespace octavo
