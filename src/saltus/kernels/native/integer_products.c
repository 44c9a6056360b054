// See integer_products.h.
#include "integer_products.h"
#include "integer_lanes.h"
#include "integer_tile.inc"
#ifdef AMX_INT8
#include "tiles_amx.h"
#include "integer_tile_amx.inc"
#define HIGHEST_TILE SIDE  // of rows
#else
#define HIGHEST_TILE MAX_HEIGHT
#endif

#define TILES_AT_ONCE 4  // of rows, multiplied while the scales of a group are at hand

// Rows are divided into as few tiles as have room for them, of even heights: the first ones may have a row more.
typedef struct {
  int64_t first, height;  // a row, and how many
} RowTile;
static inline int64_t num_tiles(int64_t rows) { return (rows + HIGHEST_TILE - 1) / HIGHEST_TILE; }
static inline RowTile row_tile(int64_t rows, int64_t number) {
  const int64_t height = rows / num_tiles(rows), higher = rows % num_tiles(rows);
  return (RowTile){number * height + (number < higher ? number : higher), height + (number < higher)};
}
static inline RowTile tile_of_row(int64_t rows, int64_t row) {
  const int64_t height = rows / num_tiles(rows), higher = rows % num_tiles(rows), bound = higher * (height + 1);
  return row_tile(rows, row < bound ? row / (height + 1) : higher + (row - bound) / height);
}

static inline int32_t greatest_integer(ilanes x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_epi32((__m512i)x);
#elif defined __AVX2__
  __m128i most = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
#else
  int32_t most = x[0];
  for (int l = 1; l < LANES; l++) most = x[l] > most ? x[l] : most;
  return most;
#endif
}
static inline int32_t sum_integers(ilanes x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_epi32((__m512i)x);
#elif defined __AVX2__
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
#else
  int32_t sum = 0;
  for (int l = 0; l < LANES; l++) sum += x[l];
  return sum;
#endif
}

// −Σ q of 16 inputs, whose lanes are added up before; see sum_of.
static inline int32_t minus_sum(ilanes x, ilanes place) {
#ifdef PAIRS_OF_PRODUCTS
  const ilanes is_first = (place & 2) == 0;
  return (int32_t)((uint16_t)-sum_integers(x & is_first) | (uint32_t)-sum_integers(x & ~is_first) << 16);
#else
  return -sum_integers(x);
#endif
}

// Integers of 8 bits.
static inline void store_bytes(int8_t *p, ilanes x) {
#ifdef __AVX512F__
  _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)x));  // gcc: one by one
#elif defined __AVX2__
  const __m256i low = _mm256_and_si256((__m256i)x, _mm256_set1_epi32(255));  // what is not finite is cut off alike everywhere
  const __m128i pairs = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(pairs, pairs));
#else
  const signed_lanes bytes = __builtin_convertvector(x, signed_lanes);
  memcpy(p, &bytes, sizeof bytes);
#endif
}

// A row of a tile in 8 bits: of 32 inputs each, the scale is max |x| / 127, and an integer the one nearest to
// x · (127 / max |x|), the even one of two. What is not finite makes its scale not finite.
void quantize_row(const uint16_t *row, int64_t in, int64_t r, int64_t rows, uint8_t *x) {
  const RowTile own = tile_of_row(rows, r);
  const int64_t number = r - own.first, height = own.height;
  uint8_t *tile = x + own.first * (in / 32) * ROW_BYTES;
  for (int64_t first = 0, blocks = in / 32; first < blocks; first += LANES) {
    const int64_t some = blocks - first < LANES ? blocks - first : LANES;
    ilanes greatest = {}, place;
    for (int l = 0; l < LANES; l++) place[l] = l;
    for (int64_t block = 0; block < some; block++) {
      ilanes most = {};
      for (int i = 0; i < 32; i += LANES) {
        const ilanes size = (ilanes)load_bf16(row + block * 32 + i) & 0x7fffffff, more = size > most;
        most = (size & more) | (most & ~more);
      }
      greatest |= ((ilanes){} + greatest_integer(most)) & (place == (int32_t)block);
    }
    const lanes most = (lanes)greatest;
    const lanes scales = most / 127.0f;
    lanes inverses = 127.0f / most;
    inverses = (lanes)((ilanes)inverses & (inverses < INFINITY));  // 0 of what is too small, or not finite
    for (int64_t block = 0; block < some; block++, row += 32, tile += height * ROW_BYTES) {
      ilanes sums[2] = {};
      for (int i = 0; i < 32; i += LANES) {
        const lanes x = load_bf16(row + i) * inverses[block];
        const ilanes whole = (ilanes)(x + 12582912.0f) - 0x4b400000;  // 1.5 · 2^23 leaves no room for a fraction
        store_bytes((int8_t *)tile + number * 32 + i, whole);
        sums[i / 16] += whole;
      }
      int32_t *minus = sums_of_rows(tile, height) + 2 * number;
      for (int i = 0; i < 2; i++) minus[i] = minus_sum(sums[i], place);
      scales_of_rows(tile, height)[number] = scales[block];
      totals_of_rows(tile, height)[number] = scales[block] * -(sum_of(minus[0]) + sum_of(minus[1]));
    }
  }
}

// The rows that a thread quantises at a time: where there are many, those of a tile, whose numbers share cache lines.
static inline int by_tiles(int64_t rows) { return num_tiles(rows) >= 2 * num_threads(); }
static inline int64_t num_row_pieces(int64_t rows) { return by_tiles(rows) ? num_tiles(rows) : (rows + PACK - 1) / PACK; }
static inline RowTile row_piece(int64_t rows, int64_t piece) {
  if (by_tiles(rows)) return row_tile(rows, piece);
  return (RowTile){piece * PACK, rows - piece * PACK < PACK ? rows - piece * PACK : PACK};
}

static void quantize_rows(const void *of, int64_t piece) {
  const IntegerJob *job = of;
  const Linear *a = job->a;
  const int64_t in = a->in;
  const RowTile some = row_piece(a->rows, piece);
  for (int64_t r = some.first; r < some.first + some.height; r++) {
    const uint16_t *from = (const uint16_t *)a->x + r * in;
    if (job->made) {
      prepare_row_bf16(a, r, job->made + r * in);
      from = job->made + r * in;
    }
    quantize_row(from, in, r, a->rows, job->x);
  }
}

// Round the sums of a tile of `count` rows from `first` on and write them to a weight's outputs.
static void write_outputs(const IntegerJob *job, int64_t which, int64_t group, const float *low, const float *y, int64_t first,
                          int64_t count) {
  const Linear *a = job->a;
  const int64_t out_row = job->out_row ? job->out_row : a->outs[which];
  const int64_t outs = a->outs[which], start = group * OUTPUTS, have = outs - start < OUTPUTS ? outs - start : OUTPUTS;
  const uint16_t *bias = a->bias[which] ? (const uint16_t *)a->bias[which] + start : NULL;
  const uint16_t *add = a->add && which == 0 ? (const uint16_t *)a->add + start : NULL;
  for (int64_t r = first; r < first + count; r++, y += OUTPUTS) {
    const float *own = low && a->place[r] >= 0 ? low + a->place[r] * outs + start : NULL;
    uint16_t *out = (uint16_t *)a->out[which] + r * out_row + start;
    if (have == OUTPUTS && !own) {  // the usual case
      lanes sums[OUTPUTS / LANES];
      for (int i = 0, o = 0; i < OUTPUTS / LANES; i++, o += LANES) {
        sums[i] = bias ? load_f32(y + o) + load_bf16(bias + o) : load_f32(y + o);
        if (add) sums[i] = rounded_bf16(sums[i]) + load_bf16(add + r * outs + o);  // `add` may be `out`
      }
#if OUTPUTS == LANES
      store_bf16(out, sums[0]);
#else
      for (int i = 0; i < OUTPUTS / LANES; i += 2) store_two_bf16(out + i * LANES, sums[i], sums[i + 1]);
#endif
      continue;
    }
    for (int64_t o = 0; o < have; o++) {
      float sum = y[o];
      if (own) sum = sum + own[o];
      if (bias) sum = sum + from_bf16(bias[o]);
      if (add) sum = from_bf16(to_bf16(sum)) + from_bf16(add[r * outs + o]);
      out[o] = to_bf16(sum);
    }
  }
}

void integer_outputs(const void *of, int64_t number_of_piece) {
  const IntegerJob *job = of;
  // threads that take pieces in turns go through neighbouring ones, so that weights are fetched ahead across their borders
  const int64_t turns = job->pieces / job->threads, piece = number_of_piece % job->threads * turns + number_of_piece / job->threads;
  const Linear *a = job->a;
  const int64_t blocks = a->in / 32;
  const int64_t end = (piece + 1) * job->step < job->groups ? (piece + 1) * job->step : job->groups;
#ifdef AMX_INT8
  _Alignas(64) uint8_t unpacked[BLOCKS * UNPACKED_BYTES];
  const int by_matrix = a->rows > MAX_HEIGHT;
  if (by_matrix) begin_integer_tiles(row_tile(a->rows, 0).height);
#else
  const int by_matrix = 0;
#endif
  for (int64_t number = piece * job->step; number < end; number++) {
    int64_t which = 0, group = number;
    const float *low = job->low;
    for (int64_t groups; group >= (groups = (a->outs[which] + OUTPUTS - 1) / OUTPUTS); which++) {
      group -= groups;
      if (low) low += a->gated * a->outs[which];
    }
    const int format = a->format[which] - INTERLEAVED;
    const uint8_t *weights = (const uint8_t *)a->weight[which] + group * group_bytes(format, a->in);
    const uint8_t *integers = weights + all_scale_bytes(format, a->in);
    _Alignas(64) float y[TILES_AT_ONCE * HIGHEST_TILE * OUTPUTS];
    for (int64_t tile = 0, tiles = num_tiles(a->rows), after; tile < tiles; tile = after) {
      after = tile + TILES_AT_ONCE < tiles ? tile + TILES_AT_ONCE : tiles;
      const int64_t first = row_tile(a->rows, tile).first, rows = row_tile(a->rows, after).first - first;
      memset(y, 0, rows * OUTPUTS * sizeof *y);
      for (int64_t block = 0, count; block < blocks; block += count) {
        Scales scales;
        count = blocks - block < BLOCKS ? blocks - block : BLOCKS;
        make_scales(format, weights, block, count, group_bytes(format, a->in), &scales);
        look_ahead(format, a->in, block, &scales);
        for (int64_t t = tile; t < after; t++) {
          const RowTile here = row_tile(a->rows, t);
          const uint8_t *p = integers + block * integer_bytes(format);
          const uint8_t *x = job->x + (here.first * blocks + block * here.height) * ROW_BYTES;
          float *to = y + (here.first - first) * OUTPUTS;
          share_prefetches(count, tile, t, by_matrix ? tile + 1 : after, &scales);  // the matrix unit's weights are read once
#ifdef AMX_INT8
          if (by_matrix) {
            add_matrix_tile(format, here.height, t == tile ? p : NULL, count, &scales, x, unpacked, to);
            continue;
          }
#endif
          add_tile(format, here.height, p, count, &scales, x, to);
        }
      }
      write_outputs(job, which, group, a->up[which] ? low : NULL, y, first, rows);
    }
  }
#ifdef AMX_INT8
  if (by_matrix) _tile_release();
#endif
}

int linear_integer(const Linear *a, const float *low) {
  IntegerJob job = {.a = a, .low = low};
  for (int64_t i = 0; i < a->count; i++) job.groups += (a->outs[i] + OUTPUTS - 1) / OUTPUTS;
  job.threads = num_threads(), job.pieces = PIECES * job.threads;
  job.step = (job.groups + job.pieces - 1) / job.pieces;
  if (is_prepared(a)) {
    job.made = scratch(MADE, a->rows * a->in * sizeof *job.made);
    if (!job.made) return 1;
  }
  job.x = scratch(PACKED, a->rows * (a->in / 32) * ROW_BYTES);
  if (!job.x) return 1;
  share(quantize_rows, &job, num_row_pieces(a->rows));
  share(integer_outputs, &job, job.pieces);
  return 0;
}

typedef struct {
  const PerHead *a;
  Linear *linears;   // [heads]
  IntegerJob *jobs;  // [heads]
} HeadsJob;

static void quantize_heads(const void *of, int64_t piece) {
  const HeadsJob *job = of;
  const PerHead *a = job->a;
  for (int64_t r = piece * PACK; r < a->rows && r < (piece + 1) * PACK; r++)
    for (int64_t head = 0; head < a->heads; head++)
      quantize_row((const uint16_t *)a->x + r * a->x_row + head * a->x_head, a->in, r, a->rows, job->jobs[head].x);
}

static void head_outputs(const void *of, int64_t piece) {
  const HeadsJob *job = of;
  const int64_t pieces = job->jobs->pieces;
  integer_outputs(job->jobs + piece / pieces, piece % pieces);
}

int per_head_integer(const PerHead *a) {
  const int64_t groups = (a->outs + OUTPUTS - 1) / OUTPUTS, room = a->rows * (a->in / 32) * ROW_BYTES;
  const int64_t wanted = (PIECES * num_threads() + a->heads - 1) / a->heads, step = (groups + wanted - 1) / wanted;
  HeadsJob job = {.a = a, .linears = scratch(MADE, a->heads * (sizeof(Linear) + sizeof(IntegerJob)))};
  uint8_t *x = scratch(PACKED, a->heads * room);
  if (!job.linears || !x) return 1;
  job.jobs = (IntegerJob *)(job.linears + a->heads);
  for (int64_t head = 0; head < a->heads; head++) {
    Linear *linear = job.linears + head;
    *linear = (Linear){.rows = a->rows, .in = a->in, .count = 1};
    linear->weight[0] = (const char *)a->weight + head * a->weight_step, linear->format[0] = a->format;
    linear->out[0] = (uint16_t *)a->out + head * a->out_head, linear->outs[0] = a->outs;
    job.jobs[head] = (IntegerJob){.a = linear, .x = x + head * room, .groups = groups, .step = step,
                                  .pieces = (groups + step - 1) / step, .threads = 1, .out_row = a->out_row};
  }
  share(quantize_heads, &job, (a->rows + PACK - 1) / PACK);
  share(head_outputs, &job, a->heads * job.jobs->pieces);
  return 0;
}
