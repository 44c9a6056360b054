// The instructions on tiles of integers in plain C, as Intel's manual defines them: with -DEMULATE_TILES tests compare their
// kernel on processors without a matrix unit. What the processor refuses ends the process.
#pragma once
#include "lanes.h"

static _Thread_local struct {
  int configured, rows[8], bytes[8];  // of each tile
  uint8_t tile[8][16][64];
} tiles;

static void refuse_unless(int allowed) {
  if (!allowed) abort();
}
static void tile_release(void) { memset(&tiles, 0, sizeof tiles); }
static void tile_loadconfig(const void *from) {
  const uint8_t *byte = from;
  tile_release();
  refuse_unless(byte[0] == 1 && byte[1] == 0);  // the palette; no instruction goes on after an interruption here
  for (int i = 2; i < 64; i++) refuse_unless(!byte[i] || (i >= 16 && i < 32) || (i >= 48 && i < 56));
  for (int i = 0; i < 8; i++) {
    tiles.bytes[i] = byte[16 + 2 * i] | byte[17 + 2 * i] << 8, tiles.rows[i] = byte[48 + i];
    refuse_unless(tiles.bytes[i] <= 64 && tiles.rows[i] <= 16 && !tiles.bytes[i] == !tiles.rows[i]);
  }
  tiles.configured = 1;
}
static void tile_zero(int to) {
  refuse_unless(tiles.configured && tiles.rows[to]);
  memset(tiles.tile[to], 0, sizeof tiles.tile[to]);
}
static void tile_loadd(int to, const void *from, int64_t stride) {
  tile_zero(to);
  for (int row = 0; row < tiles.rows[to]; row++)
    memcpy(tiles.tile[to][row], (const char *)from + row * stride, tiles.bytes[to]);
}
static void tile_stored(int from, void *to, int64_t stride) {
  refuse_unless(tiles.configured && tiles.rows[from]);
  for (int row = 0; row < tiles.rows[from]; row++)
    memcpy((char *)to + row * stride, tiles.tile[from][row], tiles.bytes[from]);
}
// To the sums of rows of `a` and columns of `b`, where a column is four bytes wide, add products of signed integers.
static void tile_dpbssd(int to, int a, int b) {
  refuse_unless(tiles.configured && to != a && to != b && a != b);
  refuse_unless(tiles.rows[to] && tiles.rows[to] == tiles.rows[a] && tiles.bytes[to] == tiles.bytes[b]);
  refuse_unless(tiles.bytes[a] == 4 * tiles.rows[b] && tiles.bytes[to] % 4 == 0);
  for (int row = 0; row < tiles.rows[to]; row++)
    for (int column = 0; column < tiles.bytes[to] / 4; column++) {
      int32_t sum;
      memcpy(&sum, tiles.tile[to][row] + 4 * column, sizeof sum);
      for (int k = 0; k < tiles.bytes[a]; k++)
        sum += (int8_t)tiles.tile[a][row][k] * (int8_t)tiles.tile[b][k / 4][4 * column + k % 4];
      memcpy(tiles.tile[to][row] + 4 * column, &sum, sizeof sum);
    }
}
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#define _tile_loadconfig tile_loadconfig
#define _tile_release tile_release
#define _tile_zero tile_zero
#define _tile_loadd tile_loadd
#define _tile_stored tile_stored
#define _tile_dpbssd tile_dpbssd
