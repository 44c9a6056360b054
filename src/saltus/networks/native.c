// Attend so that a row's rounding depends on nothing but the row: not on the call's width, the row's place in it,
// what other rows hold, the buffer's extent or the slots between its keys. Keys are summed in slot order, one by
// one; a masked key adds an exact zero. Compiled once for this machine by native.py.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define ROWS 8   // rows of one register tile
#define TILE 24  // rows that share one pass over the keys

typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t ilanes __attribute__((vector_size(LANES * sizeof(int32_t))));

typedef struct {
  // this layer's new rows: [rows, heads, dim] by strides in elements (row, head); the last axis is dense
  const void *query, *key, *value;
  int64_t query_row, query_head, key_row, key_head, value_row, value_head;
  // this text's memory: [kv_heads, capacity, dim]
  void *keys, *values;
  int64_t capacity;
  void *out;               // [rows, heads, value_dim], dense
  const uint8_t *visible;  // [rows, rows]: may row i see new row j?
  const int32_t *first;    // [rows]: first slot that row i may see (sliding windows), 0 otherwise
  int64_t rows, past, heads, kv_heads, dim, value_dim;
  float scale, softcap;    // softcap 0: none
} Attention;

// exp, lane by lane the same operations: 2^n · polynomial, exact zero below −87
static inline lanes exp_lanes(lanes x) {
  const lanes low = (lanes){} - 87.0f;
  ilanes alive = x > low;
  x = (lanes)(((ilanes)x & alive) | ((ilanes)low & ~alive));
  lanes n = x * 1.44269504088896f + 12582912.0f;  // round to nearest by the magic number 1.5·2^23
  n = n - 12582912.0f;
  lanes r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  lanes p = (lanes){} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  ilanes bits = (__builtin_convertvector(n, ilanes) + 127) << 23;
  return (lanes)((ilanes)(p * (lanes)bits) & alive);
}

static inline float from_bf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
static inline uint16_t to_bf16(float x) {  // round to nearest even
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
static inline float from_f32(float x) { return x; }
static inline float to_f32(float x) { return x; }

#define DEFINE(NAME, T, FROM, TO)                                                                                    \
  static void tile_##NAME(const Attention *a, int64_t kv, int64_t start, int64_t count, float *room) {               \
    const int64_t group = a->heads / a->kv_heads, dim = a->dim, vdim = a->value_dim, slots = a->past + a->rows;      \
    const int64_t blocks = (slots + LANES - 1) / LANES, width = blocks * LANES;                                      \
    const int64_t parts = (vdim + LANES - 1) / LANES;                                                                \
    float *query = room;                         /* [TILE, dim] */                                                   \
    float *turned = query + TILE * dim;          /* [dim, LANES], also [LANES, parts · LANES] */                      \
    float *out = turned + LANES * (dim > parts * LANES ? dim : parts * LANES); /* [TILE, parts · LANES] */            \
    float *total = out + TILE * parts * LANES;   /* [2 · LANES] */                                                      \
    float *scores = total + 2 * LANES;           /* [TILE, width] */                                                 \
    const T *keys = (const T *)a->keys + kv * a->capacity * dim;                                                     \
    const T *values = (const T *)a->values + kv * a->capacity * vdim;                                                \
    const int64_t padded = (count + ROWS - 1) / ROWS * ROWS;                                                         \
    int64_t begin = slots;                                                                                           \
    for (int64_t i = 0; i < padded; i++) {                                                                           \
      int64_t at = start + (i < count ? i : 0), row = at / group, head = kv * group + at % group;                    \
      const T *q = (const T *)a->query + row * a->query_row + head * a->query_head;                                  \
      for (int64_t d = 0; d < dim; d++) query[i * dim + d] = FROM(q[d]) * a->scale;                                  \
      if (a->first[row] < begin) begin = a->first[row];                                                              \
    }                                                                                                                \
    const int64_t block0 = begin / LANES;                                                                            \
    for (int64_t b = block0; b < blocks; b++) {                                                                      \
      int64_t have = slots - b * LANES < LANES ? slots - b * LANES : LANES;                                          \
      const T *k = keys + b * LANES * dim;                                                                           \
      for (int64_t j = 0; j < have; j++)                                                                             \
        for (int64_t d = 0; d < dim; d++) turned[d * LANES + j] = FROM(k[j * dim + d]);                              \
      for (int64_t j = have; j < LANES; j++)                                                                         \
        for (int64_t d = 0; d < dim; d++) turned[d * LANES + j] = 0;                                                 \
      for (int64_t i = 0; i < padded; i += ROWS) {                                                                   \
        lanes sum[ROWS] = {};                                                                                        \
        for (int64_t d = 0; d < dim; d++) {                                                                          \
          lanes column = *(const lanes *)(turned + d * LANES);                                                       \
          for (int r = 0; r < ROWS; r++) sum[r] = sum[r] + column * query[(i + r) * dim + d];                        \
        }                                                                                                            \
        for (int r = 0; r < ROWS; r++) *(lanes *)(scores + (i + r) * width + b * LANES) = sum[r];                    \
      }                                                                                                              \
    }                                                                                                                \
    for (int64_t i = 0; i < padded; i++) {                                                                           \
      int64_t row = (start + (i < count ? i : 0)) / group;                                                           \
      float *s = scores + i * width, top = -INFINITY;                                                                \
      if (a->softcap > 0)                                                                                            \
        for (int64_t j = block0 * LANES; j < slots; j++) s[j] = a->softcap * tanhf(s[j] / a->softcap);               \
      for (int64_t j = block0 * LANES; j < a->first[row]; j++) s[j] = -INFINITY;                                     \
      for (int64_t j = 0; j < a->rows; j++)                                                                          \
        if (!a->visible[row * a->rows + j]) s[a->past + j] = -INFINITY;                                              \
      for (int64_t j = slots; j < width; j++) s[j] = -INFINITY;                                                      \
      for (int64_t j = block0 * LANES; j < slots; j++) top = s[j] > top ? s[j] : top;                                \
      for (int64_t j = block0 * LANES; j < width; j += LANES)                                                        \
        *(lanes *)(s + j) = exp_lanes(*(lanes *)(s + j) - top);                                                      \
    }                                                                                                                \
    memset(out, 0, (TILE * parts * LANES + 2 * LANES) * sizeof(float));                                                   \
    for (int64_t b = block0; b < blocks; b++) {                                                                      \
      int64_t have = slots - b * LANES < LANES ? slots - b * LANES : LANES;                                          \
      const T *v = values + b * LANES * vdim;                                                                        \
      for (int64_t j = 0; j < have; j++) {                                                                           \
        for (int64_t d = 0; d < vdim; d++) turned[j * parts * LANES + d] = FROM(v[j * vdim + d]);                    \
        for (int64_t d = vdim; d < parts * LANES; d++) turned[j * parts * LANES + d] = 0;                            \
      }                                                                                                              \
      for (int64_t i = 0; i < padded; i += ROWS) {                                                                   \
        for (int64_t part = 0; part < parts; part++) {                                                               \
          lanes sum[ROWS];                                                                                           \
          for (int r = 0; r < ROWS; r++) sum[r] = *(lanes *)(out + ((i + r) * parts + part) * LANES);                \
          for (int64_t j = 0; j < have; j++) {                                                                       \
            lanes value = *(const lanes *)(turned + (j * parts + part) * LANES);                                     \
            for (int r = 0; r < ROWS; r++) sum[r] = sum[r] + value * scores[(i + r) * width + b * LANES + j];        \
          }                                                                                                          \
          for (int r = 0; r < ROWS; r++) *(lanes *)(out + ((i + r) * parts + part) * LANES) = sum[r];                \
        }                                                                                                            \
        for (int64_t j = 0; j < have; j++)                                                                           \
          for (int r = 0; r < ROWS; r++) total[i + r] += scores[(i + r) * width + b * LANES + j];                    \
      }                                                                                                              \
    }                                                                                                                \
    for (int64_t i = 0; i < count; i++) {                                                                            \
      int64_t at = start + i, row = at / group, head = kv * group + at % group;                                      \
      T *o = (T *)a->out + (row * a->heads + head) * vdim;                                                           \
      for (int64_t d = 0; d < vdim; d++) o[d] = TO(out[i * parts * LANES + d] / total[i]);                           \
    }                                                                                                                \
  }                                                                                                                  \
                                                                                                                     \
  int attend_##NAME(const Attention *a) {                                                                            \
    for (int64_t kv = 0; kv < a->kv_heads; kv++)                                                                     \
      for (int64_t i = 0; i < a->rows; i++) {                                                                        \
        memcpy((T *)a->keys + (kv * a->capacity + a->past + i) * a->dim,                                             \
               (const T *)a->key + i * a->key_row + kv * a->key_head, a->dim * sizeof(T));                           \
        memcpy((T *)a->values + (kv * a->capacity + a->past + i) * a->value_dim,                                     \
               (const T *)a->value + i * a->value_row + kv * a->value_head, a->value_dim * sizeof(T));               \
      }                                                                                                              \
    const int64_t rows = a->rows * (a->heads / a->kv_heads), tiles = (rows + TILE - 1) / TILE;                       \
    const int64_t width = (a->past + a->rows + LANES - 1) / LANES * LANES;                                           \
    const int64_t parts = (a->value_dim + LANES - 1) / LANES;                                                        \
    const int64_t floats = TILE * a->dim + LANES * (a->dim + parts * LANES) + TILE * parts * LANES + 2 * LANES +     \
                           TILE * width;                                                                             \
    int failed = 0;                                                                                                  \
    _Pragma("omp parallel for schedule(static, 1) reduction(|| : failed)")                                           \
    for (int64_t task = 0; task < a->kv_heads * tiles; task++) {                                                     \
      float *room = aligned_alloc(64, (floats * sizeof(float) + 127) / 64 * 64);                                     \
      if (!room) { failed = 1; continue; }                                                                           \
      int64_t start = task % tiles * TILE;                                                                           \
      tile_##NAME(a, task / tiles, start, rows - start < TILE ? rows - start : TILE, room);                          \
      free(room);                                                                                                    \
    }                                                                                                                \
    return failed;                                                                                                   \
  }

DEFINE(bf16, uint16_t, from_bf16, to_bf16)
DEFINE(f32, float, from_f32, to_f32)
#ifdef __FLT16_MAX__
static inline float from_f16(_Float16 x) { return (float)x; }
static inline _Float16 to_f16(float x) { return (_Float16)x; }
DEFINE(f16, _Float16, from_f16, to_f16)
#endif
