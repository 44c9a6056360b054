// y = x Wᵀ + b with interleaved integers: rows of x are rounded to 8 bits, groups of outputs are shared among threads.
#pragma once
#include "kernels.h"

#define ROW_BYTES (32 + 2 * sizeof(float) + 2 * sizeof(int32_t))  // of 32 inputs of a row, see integer_tile.inc

typedef struct {
  const Linear *a;
  uint16_t *made;    // [rows, in]: normed or gated rows, or NULL
  uint8_t *x;        // tiles of rows in 8 bits, see ROW_BYTES
  const float *low;  // what gated rows get, weight by weight [gated, outs], or NULL
  int64_t groups, step, pieces, threads;
  int64_t out_row;  // from an output to that of the next row, 0: outs
} IntegerJob;

// Round a row [in], number `r` of `rows`, to 8 bits, to its place among those of all rows, [rows · in / 32 · ROW_BYTES].
INTERNAL void quantize_row(const uint16_t *row, int64_t in, int64_t r, int64_t rows, uint8_t *x);
// All rows for the outputs of a piece of a job.
INTERNAL void integer_outputs(const void *of, int64_t piece);
// A whole call; `low` is what gated rows get, or NULL. 1 if scratch could not be had.
INTERNAL int linear_integer(const Linear *a, const float *low);
// The products of each head's numbers by a matrix of its own, without their tails. 1 if scratch could not be had.
INTERNAL int per_head_integer(const PerHead *a);
