// How linear_registers.inc multiplies, where a format does not say.
#ifndef PRODUCTS
#define PRODUCTS "linear_registers.inc"
#define UNIT OUTS  // outputs whose weights a thread prepares together
#define PACKED_ROWS(rows) (rows)
#define ROWS_OF_PACK PACK  // rows of a piece of linear_pack
#endif
#ifndef TILE
#define TILE OF(linear_tile)
#define PACK_ROW OF(pack_row)
#endif
#ifndef ROW_WIDTH
#define ROW_WIDTH(in) PAD(in, STEP)
#endif
#ifndef FLUSH
#define FLUSH 0  // subnormal numbers to zero, as the processor's bfloat16 products do
#define GROUP 2  // tiles that share a pass over the rows; one is better where the tile itself is fast
#endif
