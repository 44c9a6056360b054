// The registers of the processor's matrix unit (AMX): eight tiles of 16 rows of 64 bytes. An instruction adds to a tile of
// 16 × 16 sums the products of 16 rows of 32 bfloat16 numbers by 16 columns of as many, which come as pairs [16 pairs, 16
// columns], or those of 64 integers of 8 bits, which come as fours. A sum depends on its row and its column alone. Tiles
// must be released before other code runs.
#pragma once
#include "lanes.h"
#ifdef EMULATE_TILES
#include "tiles_emulated.h"
#endif

#define SIDE 16        // rows and columns of a tile
#define SIDE_BYTES 64  // of a row: 16 sums, or 32 numbers

typedef struct {
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
} TileShapes;

static inline void set_shapes(const TileShapes *shapes) {
  __asm__ volatile("" : : "r"(shapes) : "memory");  // gcc takes the instruction to read the first 8 bytes only
  _tile_loadconfig(shapes);
}

#ifdef AMX
// Tile 4 is whole, the others have so many columns.
static inline void begin_tiles(int64_t columns) {
  TileShapes shapes = {.palette = 1};
  for (int tile = 0; tile < 8; tile++) shapes.rows[tile] = SIDE, shapes.bytes[tile] = tile == 4 ? SIDE_BYTES : 4 * columns;
  set_shapes(&shapes);
}
#endif
