// Compute a row so that its rounding depends on nothing but the row: not on the call's width, the row's place in it,
// or what other rows hold. Every sum runs in one fixed order; a masked key adds an exact zero. This is why a method
// writes the very text that plain decoding writes, in bfloat16 too. Compiled once for this machine by __init__.py, the
// files beside one another.
#pragma once
#include "integer_weights.h"
#include "lanes.h"
#include "noise.h"
#include "recurrent_text.h"
#include "thread_pool.h"
#include <time.h>

#define PIECES 6  // of a job, for each thread
#define PACK 2    // rows that a thread packs at a time
#define ROWS 6    // rows of one register tile, at most
#define EACH_HEIGHT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#define FAR (4 * LANES)  // keys and values that are fetched ahead
// Blocks of keys of a register tile of scores, and vectors of one of outputs: few rows leave room for more.
#if defined __AVX__ || defined __aarch64__
#define KEY_BLOCKS 2
#define VALUE_VECTORS(rows) ((rows) > 3 ? 2 : 4)
#else
#define KEY_BLOCKS 1
#define VALUE_VECTORS(rows) 1
#endif
#define VALUE_KEYS 16  // whose values are added at a time
#define BLOCK_KEYS PAD(KEY_BLOCKS * LANES, VALUE_KEYS)  // that a block has room for

typedef struct {
  // one layer's new rows: [rows, heads, dim] by strides in elements (row, head); the last axis is dense
  const void *query, *key, *value;  // key NULL: keys and values of these rows are in the memory already; value NULL: see values
  int64_t query_row, query_head, key_row, key_head, value_row, value_head;
  void *keys, *values;     // this text's memory: [kv_heads, capacity, dim]
  int64_t capacity;
  void *out;               // [rows, heads, value_dim], dense
  const uint8_t *visible;  // [rows, rows]: may row i see new row j?
  const int32_t *first;    // [rows]: first slot that row i may see (sliding windows, chunks), 0 otherwise
  const float *sinks;      // [heads] or NULL: a score of each head that takes weight and has no value
  int64_t rows, past, heads, kv_heads, dim, value_dim;
  int64_t value_size;  // numbers between values in the memory
  float scale, softcap;    // softcap 0: none
  int64_t same_everywhere;  // the bits must not depend on the processor: the matrix unit is left alone
  int64_t values_in_keys;   // values are the first numbers of the keys; `values` holds the keys of an indexer, if there is one
} Attention;

// What chooses the keys of each row, before its attention: see key_choice.inc.
typedef struct {
  const void *x, *weight;    // [rows, in], dense; [heads, in]: the product weighs a row's heads
  const void *query, *key;   // [rows, heads, dim]; [rows, kept], dense
  const float *offsets;      // [pool, dim], with pools
  int64_t in, heads, dim, most;  // most: keys that a row attends to
  int64_t kept;              // numbers that are kept of a token: dim, or of pools 3 · dim
  int64_t pool;              // so many keys after each other are chosen together, 0: each alone
  int64_t weight_is_float32;
} Indexer;

#define WEIGHTS 4
typedef struct {
  const void *x;  // [rows, in], dense
  int64_t rows, in, count;
  const void *weight[WEIGHTS], *bias[WEIGHTS];  // [out, in]; [out] or NULL
  void *out[WEIGHTS];                           // [rows, out], dense
  int64_t outs[WEIGHTS];
  int64_t format[WEIGHTS];  // of packed weights (packed_weights.h), 0: the weights are numbers of the format T
  const void *norm;  // [in] or NULL: x is first divided by its root mean square and multiplied by this, see Norm
  const void *gate;  // [rows, in] or NULL: x is first multiplied by the activation of this
  const void *add;   // [rows, out] or NULL: added to the first product
  int64_t norm_kind, activation;  // the activation is of x itself where there is no gate and it is not 0
  float epsilon;     // of the norm
  float limit;       // if not 0, the activation of a gate is at most this, and what it multiplies within ± this
  // s · B(Ax) is added to gated rows before they are rounded (Hu et al. 2021); sums in float32
  float scale;
  const void *down[WEIGHTS], *up[WEIGHTS];  // A [rank, in], B turned [rank, out], or NULL
  const int32_t *place;                     // [rows]: the number of a gated row among them, −1 of others; NULL: none is
  int64_t rank, gated;
} Linear;

// Whether the activation of a linear product stands alone or multiplies, it is one of these; SILU alone has a number of its own.
// CLAMPED_SILU: a gate is at most the limit before its activation, and what it multiplies within ± this.
enum { SILU, GELU_TANH, GELU, RELU_SQUARED, SIGMOID, SILU_ALONE, SOFTPLUS = 7, RELU, CLAMPED_SILU };
static inline int is_prepared(const Linear *a) { return a->norm || a->gate || a->activation; }

typedef struct {
  void *x;                // [rows, heads, dim], changed in place
  const void *cos, *sin;  // [rows, turned], or [positions, turned]; the second halves repeat the first. NULL: a norm alone
  const int64_t *position;  // [rows]: the row's place in these, or NULL: the row itself
  const void *norm;       // [dim] or NULL: of each head, see Norm
  int64_t rows, heads, dim;
  int64_t stride;  // between heads, 0: dim
  int64_t turned, interleaved;  // dimensions that are rotated, 0: all; pairs lie beside each other, not half of them apart
  int64_t norm_kind;
  float epsilon;
} Rotary;

// Kinds of norms: by the root mean square, with weights of the format T; the same with weights in float32, the product
// rounded once; by mean and variance, with weights and then biases in float32.
enum { RMS, RMS_FLOAT32, LAYER_NORM };
typedef struct {
  const void *x, *weight;  // [rows, size], dense; [size], by kind
  void *out;               // [rows, size], dense
  int64_t rows, size;
  float epsilon;
  int64_t kind;
  int64_t parts;    // of a row, each of which is normed by itself; 0: one
  const void *add;  // [rows, parts, size] or NULL: added to the rounded norm
  void *room;       // set by the kernel
} Norm;

#define MOST_WIDTH 8  // of a convolution
typedef struct {
  const void *x, *before, *after;  // [rows, channels] by strides; x is multiplied by `before`, the outputs by `after`, or NULL
  int64_t x_row, before_row, after_row;
  const void *weight, *bias;  // [width, channels]; [channels] or NULL
  void *out;                  // [rows, channels], dense
  int64_t channels, width, silu;
  int64_t state_place, node_place;  // bytes before the layer's own in a text's states, and in a node's inputs
  const RecurrentText *text;
} Convolution;

#define COLUMNS 32  // of a state that stand together
typedef struct {
  const void *query, *key, *value;  // [rows, groups, key_dim], the same, [rows, heads, value_dim], by strides of rows
  const void *step, *weight;        // [rows, steps]: before bias and softplus; [rows, heads] before the sigmoid, NULL: Mamba-2
  int64_t query_row, key_row, value_row, step_row, weight_row;
  const float *bias, *rate, *skip;  // [steps]: of the step; [heads]: of decay, −exp(A_log); D or NULL. Of SELECTIVE_SCAN both last
                                    // are of each value, rates as states are kept, with zeros where those are padded
  void *out;                        // [rows, heads, value_dim], dense
  int64_t heads, groups, key_dim, value_dim, state_place, node_place;
  int64_t steps;  // heads; or, with weights, heads · key_dim: a decay for each number of a key; or, without, value_dim
  float least, most;      // step sizes
  float scale, epsilon;   // of queries; of the norms of queries and keys
  float weight_scale;     // of the weights after the sigmoid
  float least_decay;      // 0, or of CHANNELWISE the logarithm that decays do not reach, see recur_prepare
  int64_t rounds_decay;   // then: logarithms of decays are rounded to T
  const RecurrentText *text;
} Recurrence;
// Recurrences: Mamba-2, the gated delta rule, the same with channel-wise decays, and Mamba, whose one head has a step of
// each value and a decay of each number of the state.
enum { SELECTIVE, DELTA, CHANNELWISE, SELECTIVE_SCAN };
static inline int recurrence_of(const Recurrence *a) {
  if (a->weight) return a->steps == a->heads ? DELTA : CHANNELWISE;
  return a->steps == a->heads ? SELECTIVE : SELECTIVE_SCAN;
}
static inline int is_channelwise(const Recurrence *a) { return recurrence_of(a) == CHANNELWISE; }

typedef struct {
  void *x;                    // [rows, size], dense, changed in place
  const void *gate, *weight;  // [rows, groups, group] by strides; [weights] or NULL: there is no norm
  int64_t gate_row, gate_group, rows, size, group, weights;  // norms are of `group` numbers; weights: some groups'
  int64_t gate_first, one_gate, activation;  // one_gate: gates are [rows, groups]
  float epsilon;
  void *failed;  // set by the kernel
} GatedNorm;

typedef struct {
  void *x;             // [rows, size], dense, changed in place
  const float *scale;  // [size]
  int64_t rows, size;
} ColumnScale;

typedef struct {
  void *x;                    // [rows, heads, dim], dense, changed in place
  const float *scale, *bias;  // [heads]: a head's numbers are multiplied by scale · log(1 + position) + bias
  const void *logs;           // [positions]
  const int64_t *position;    // [rows], or NULL: logs are those of rows
  int64_t rows, heads, dim;
} HeadScale;

typedef struct {
  void *x;  // [rows, size], dense, changed in place
  int64_t rows, size;
  float above, below, slope, most;  // see xielu
} Xielu;

typedef struct {
  const void *x, *other;  // [rows, in], [rows, others], dense
  void *out;            // [rows, size], dense: the columns of both in another order
  const int64_t *runs;  // [num_runs, 2]: first columns and how many; those of `other` are counted from `in` on
  int64_t rows, in, others, size, num_runs;
} Rearrangement;

#define PANEL 64  // outputs whose weights lie together
typedef struct {
  const void *x;       // [rows, heads, in + tail] by strides; the last axis is dense
  // [heads, panels, in, PANEL]: of each head [outs, in], turned, with zeros after the last output; or of interleaved
  // integers, `weight_step` bytes a head
  const void *weight;
  void *out;  // [rows, heads, outs + tail] by strides: the products, then the tail of x
  int64_t format, weight_step;  // 0: the format T; see Linear
  int64_t rows, heads, in, outs, tail, x_row, x_head, out_row, out_head;
} PerHead;

typedef struct {
  const void *x, *add;  // [rows, size], dense; `add` may be NULL
  void *out;            // add + x · scale
  int64_t rows, size;
  float scale;
} Addition;

typedef struct {
  const void *x;  // [rows, width], dense
  void *out;      // [rows, size], dense: columns of x
  int64_t rows, width, first, size;
} Columns;

#define MOST_KEPT 4
typedef struct {
  void *x[MOST_KEPT];  // [rows, size], `step` numbers apart
  int64_t count, step[MOST_KEPT], size[MOST_KEPT];
} KeptRows;

typedef struct {
  const void *x;     // [rows, size], dense
  int32_t *columns;  // [rows, most]: of values less than `gap` below the row's greatest, the `most` greatest, ascending
  float *values;     // [rows, most]: those values less the greatest
  int64_t *counts;   // [rows]: how many; 0 where the greatest is not finite
  float *rests;      // [rows]: Σ exp(value − greatest) of all other values
  int64_t rows, size, most, sample;  // sample: above 1, one of so many of the other values stands for them
  float gap;
} NearGreatest;
int near_greatest_f32(const NearGreatest *a);

// Of some rows alone, each with a place of its own for what is found.
typedef struct {
  NearGreatest all;            // its outputs are tables [·, most] and [·]
  const int64_t *from, *into;  // [rows]: the row of x, and the row of the tables
} NearGreatestRows;

typedef struct {
  const void *logits;               // [1 + rows, vocab]
  const int64_t *tokens, *parents;  // [nodes]: of the draft tree
  const uint64_t *keys;             // [positions, 2] of the Gumbel noise; NULL: the greatest logit is picked
  int64_t vocab, nodes, positions;
  float temperature;
  int64_t *decided;                 // [positions]
  int64_t last, ended;              // the last accepted node, −1: none; see `walk`
  const int64_t *banned, *ends;     // tokens that are never picked, and those after which the walk stops
  int64_t num_banned, num_ends;
} Walk;

static inline int is_one_of(int64_t token, const int64_t *tokens, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (tokens[i] == token) return 1;
  return 0;
}

#include "altup.h"
#include "hyper.h"
#include "experts.h"
#define OUT_OF_MEMORY 1
#define UNKNOWN_TOKEN 2

// What a decoder does, in order. `of` is a struct that stays the same from call to call, but for its rows.
enum {
  LAYER_BEGINS, PRODUCT, NORMALIZE, ROTATE, ATTEND, ADD, COPY_COLUMNS, EMBED_TOKENS, MIX_EXPERTS,
  CONVOLVE, RECUR, GATE_OUTPUTS, SCALE_COLUMNS, REARRANGE, MULTIPLY_HEADS, XIELU, ADD_POSITIONS,
  SKIP_UNLESS_CHOOSING, CHOOSE_KEYS, KEEP_SELECTED, SCALE_HEADS,
  PREDICT_STREAMS, CORRECT_STREAMS, MATCH_MAGNITUDE, AVERAGE, CUT_OFF,
  COLLAPSE_STREAMS, SPREAD_STREAMS
};
typedef struct {
  int64_t kind;
  const void *of;  // the struct of the operation, such as Linear, Norm, Rotary or Experts; of ATTEND an Indexer or NULL
  int64_t which;   // layer; angles of a rotation; arguments of an attention
  int64_t place;   // of an attention: which layer's memory, counted from that of the arguments; see embed_known; of
                   // SKIP_UNLESS_CHOOSING: how many operations
} Op;

typedef struct {
  const void *cos, *sin;  // see Rotary; or cos are embeddings of positions
  const int64_t *position;
} Angles;

typedef struct {
  Expansion embedding;          // of the tokens, to the hidden states; its rows are NULL if these are there already
  float embedding_scale;        // embeddings are multiplied by it
  float logit_scale, logit_softcap;  // logits, too; then softcap · tanh(logits / softcap); 0: not
  Norm norm;                    // the last one: x is [rows, size]; out has all rows, or the selected ones
  Linear head;                  // gives the logits; out is NULL: none are wanted
  const int64_t *tokens;        // [rows], or NULL: inputs are embeddings
  const Op *ops;
  int64_t num_ops;
  const Attention *attentions;  // [kinds, texts]
  const int64_t *key_step, *value_step;  // [texts]: bytes of memory between layers
  const Angles *angles;
  const RecurrentText *recurrent;  // [texts], or NULL: no layer keeps a state
  void *const *kept;            // [layers + 1]: where to copy the hidden states before a layer or after all, NULL: nowhere
  const int64_t *selected;      // [num_selected]: the rows that have logits, in their order; NULL: the first ones
  double *seconds;  // [PARTS_OF_CALL]: of each part, added up, or NULL
  int64_t texts, rows, num_selected, vocab, all_states;
  int64_t narrows;  // rows that are not selected may end with the last mixer: nobody reads their states, and no row is gated
} Decoder;

typedef struct {
  Decoder decoder;           // of the layers; its inputs are made here
  Expansion embedding;       // of the context tokens of all texts, in the target's embeddings [vocab, size]
  Linear fuse;               // [size, (parts + 1) · size]: of the states before a token and its embedding
  Linear project;            // of the selected rows' last hidden states, see `projected`
  NearGreatest likely;       // of the selected rows' logits
  const void *const *states;   // [texts] of [contexts, parts · size]
  const void *const *vectors;  // [texts] of [queries, size]: added to the last context input to make a query
  const int64_t *contexts, *queries;  // [texts]: how many rows each has of both; the selected ones are the last 1 + queries
  const void *ones;          // [size]
  float *projected;          // [num_selected, outs of project], or NULL
  int64_t parts, vocab;
  float epsilon;             // of the norms
} DraftPass;

enum { EMBEDDING, LINEAR, ATTENTION, NORMS, UNEMBEDDING, PARTS_OF_CALL };
// Count the time since *last for a part of a decoder's call.
static void count_time(const Decoder *a, int part, double *last) {
  struct timespec time;
  if (!a->seconds) return;
  clock_gettime(CLOCK_MONOTONIC, &time);
  const double now = time.tv_sec + time.tv_nsec * 1e-9;
  if (part < PARTS_OF_CALL) a->seconds[part] += now - *last;
  *last = now;
}

// The height of a tile of attention, of `rows` query rows for each of `heads` key/value heads. Its rows share the conversion
// of keys and values, which costs about as much as FIXED rows, but every thread should have work.
#define FIXED 5
#define MOST_ROWS 48
static int64_t best_tile(int64_t rows, int64_t heads, int64_t unit) {
  const int64_t threads = num_threads();
  int64_t best = 0, least = INT64_MAX;
  for (int64_t tiles = 1, tile; tiles <= rows; tiles++) {
    tile = PAD((rows + tiles - 1) / tiles, unit);
    const int64_t pieces = heads * ((rows + tile - 1) / tile), cost = (pieces + threads - 1) / threads * (FIXED + tile);
    if (tile <= MOST_ROWS && cost < least) best = tile, least = cost;
    if (tile == unit) break;
  }
  return best;
}

// Infinity times an exact zero is not a number: rows that may not see such a value step over it. Else the sums are those
// of attention_values.inc: to `out` [rows, vdim] add the values [have, vdim] by their scores [rows, width].
static __attribute__((noinline)) void step_over(const float *values, int64_t have, int64_t vdim, const float *scores,
                                                int64_t width, int64_t rows, float *out) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = 0; j < have; j++)
      for (int64_t d = 0; d < vdim && scores[r * width + j] != 0; d += LANES)
        store_f32(out + r * vdim + d, fused(load_f32(values + j * vdim + d), all_lanes(scores[r * width + j]),
                                            load_f32(out + r * vdim + d)));
}

#define ROUGH 1e-4  // of a comparison of bounds in float32

#define OUTS 4   // outputs of a register tile of linear
#define WIDE (4 * LANES)  // outputs of low rank that a thread computes at a time
#define AHEAD 12288  // bytes of weights that are fetched ahead, in whole rows of OUTS outputs
#define ROWS_AHEAD(size) (OUTS * ((AHEAD / OUTS + (size) - 1) / (size)))  // of so many bytes each

// Of row_ops.inc: Σ (x − mean)² of a row [in], and what a product multiplies.
INTERNAL float sum_of_squares_f32(const float *x, float mean, int64_t in);
INTERNAL void prepare_row_bf16(const Linear *a, int64_t r, uint16_t *row);
