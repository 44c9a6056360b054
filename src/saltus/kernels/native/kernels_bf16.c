// The kernels for bfloat16, in uint16_t, and for packed weights. Where the processor multiplies bfloat16, products and attention
// are by its instructions.
#include "integer_products.h"
#include "kernels.h"

#define T uint16_t
#define OF(name) name##_bf16
#define PACKABLE 1
#define STEP (2 * LANES)
#ifdef AMX
#include "tiles_amx.h"
#define TILE_UNIT SIDE
#define X uint16_t
#define PRODUCTS "linear_amx.inc"
#define UNIT SIDE
#define ROWS_OF_PACK SIDE
#define PACKED_ROWS(rows) (PAD(rows, rows > HEIGHTS * SIDE ? HEIGHTS * SIDE : SIDE) + 1)  // as linear_amx.inc takes them
#elif defined __AVX512BF16__
#define TILE_UNIT ROWS
#ifdef SLOW_BF16_PRODUCTS
#define X float
#define TILE either_tile
#define PACK_ROW pack_both
#define ROW_WIDTH(in) (PAD(in, STEP) * 3 / 2)
#else
#define X uint16_t
#define TILE bf16_tile
#define PACK_ROW pack_bf16
#endif
#else
#define TILE_UNIT ROWS
#define X float
#endif
#ifdef __AVX512BF16__
#define FLUSH 1
#define GROUP 1
#endif
#include "product_settings.h"

#include "row_ops.inc"
#include "row_picks.inc"
#include "mixers.inc"
#include "per_head.inc"
#include "attention_tile.inc"
#ifdef __AVX512BF16__
#include "attention_avx512_bf16.inc"
#include "linear_tile_avx512_bf16.inc"
#else
#include "attention_scores_bf16_pairs.inc"
#include "attention_values.inc"
#endif
#if !defined __AVX512BF16__ || (defined SLOW_BF16_PRODUCTS && !defined AMX)
#include "dot_products_bf16_pairs.inc"
#include "linear_tile.inc"
#endif
#if defined __AVX512BF16__ && defined SLOW_BF16_PRODUCTS && !defined AMX
#include "linear_tile_either.inc"
#endif
#include "attention.inc"
#include "linear.inc"
#include "experts.inc"
#include "key_choice.inc"
#include "hyper.inc"
#include "altup.inc"
#include "decoder.inc"
#include "draft_pass.inc"
