// Grow the likeliest paths of a draft call best first, each token given the tokens before it: the loop of `likely_paths`
// (methods/shared/draft_tree.py) for a drafter's or an any-subset model's correction, and for greedy drafts or those that Gumbel
// noise favours.
#include "kernels.h"

#define MOST_NODES 64
#define MOST_CHOICES 16
#define MOST_CANDIDATES 64

// What an any-subset model predicts for holes: the candidates of a node are found among all logits of its position, since
// the correction by pairs of tokens changes them much.
typedef struct {
  const uint16_t *const *logits;  // [positions] of [vocab], bfloat16: each hole's are in the outputs of its own call
  const uint16_t *const *states;  // [positions] of [hidden], bfloat16; NULL: there is no correction
  const int64_t *unknown;         // [positions]: how many tokens before the position its logits were computed without
  const float *gate;              // [hidden, width]: what a state is multiplied by for the weights of the rank
  const float *sharpness;         // [hidden]: the same for the sharpness
  const uint16_t *left, *second_left;  // [vocab, rank], bfloat16
  const uint16_t *right;               // [vocab / RUN, rank, RUN], bfloat16, padded with zeros
  const int64_t *banned, *last;        // tokens that are no candidates, and those after which nothing is drafted
  int64_t vocab, hidden, width, num_banned, num_last, second, first;  // second, first: the text's last tokens, −1 for none
} Holes;
#define RUN 64

typedef struct {
  // of each position its candidates [positions, MOST_CANDIDATES], as near_greatest finds them
  const int32_t *columns;
  const float *logits;
  const int64_t *counts;
  const float *rests;  // [positions]: Σ exp of the logits of all other tokens
  const int64_t *ids;  // [vocab]: the tokens of the columns
  // the correction, SiLU(A e(left) + B e(second left) + G h) − SiLU(G h); `right` NULL: there is none
  const uint16_t *right, *left, *second_left;  // [vocab, rank], bfloat16: of the columns
  const float *states;                         // [positions, rank]: G h
  const float *text_left, *text_second_left;   // [rank]: A e and B e of the text's last token, if it is of no column, or NULL
  const float *text_before;                    // [rank]: the same of B e and the token before it
  const uint64_t *keys;                        // [positions, 2] of the Gumbel noise; NULL: drafts are the likeliest
  const Holes *holes;                          // NULL: candidates are those above; else they and their correction are unused
  const int32_t *rows;  // [vocab]: the row of the candidates after a token, −1 for none; NULL: a position's row is its number
  int64_t last_column, column_before;          // of these two tokens; −1: of none
  int64_t positions, rank, choices, nodes;
  // gap: see NearGreatest; least: nodes that are reached with a smaller probability are not offered; confidence: a factor of all
  // probabilities
  float temperature, error, gap, least, confidence;
  // of each node: its parent, −1 for none, its token, and its probability of acceptance if its parent is accepted
  int64_t *parents, *tokens;
  float *chances;
} DraftPaths;

static inline lanes silu(lanes x) { return x / (1.0f + exp_lanes(-x)); }

typedef struct {
  float reached, chance;
  int64_t parent, depth, column;
} OpenPath;

typedef struct {
  const int32_t *columns;
  float values[MOST_CANDIDATES], rest;
  int32_t own_columns[MOST_CANDIDATES];
  int64_t count;
} Candidates;  // of a node

static inline int64_t token_of(const DraftPaths *a, int64_t column) { return a->ids ? a->ids[column] : column; }

// The candidates of a node of an any-subset model: the likely tokens of a hole, whose logits are corrected by the two tokens to
// its left (`PairwiseCorrection`, methods/shared/logit_correction.py).

// sharpness · logits + right @ (weights · (left[a] + second_left[z])), to `out` [vocab padded to RUN].
static void correct_hole(const DraftPaths *a, int64_t position, int64_t left, int64_t second_left, float *out) {
  const Holes *h = a->holes;
  const uint16_t *row = h->logits[position], *state = h->states[position];
  float vector[a->rank], sharpness = 1;
  lanes weights[a->rank / LANES];
  for (int64_t k = 0; k < a->rank / LANES; k++) weights[k] = (lanes){} + 1.0f;
  for (int64_t i = 0; i < h->hidden; i++) {
    const float value = from_bf16(state[i]);
    sharpness += value * h->sharpness[i];
    for (int64_t k = 0; k < a->rank / LANES; k++)
      weights[k] = multiply_add(load_f32(h->gate + i * h->width + k * LANES), all_lanes(value), weights[k]);
  }
  for (int64_t k = 0; k < a->rank; k += LANES) {
    lanes sum = load_bf16(h->left + left * a->rank + k);
    if (second_left >= 0) sum = sum + load_bf16(h->second_left + second_left * a->rank + k);
    store_f32(vector + k, sum * weights[k / LANES]);
  }
  for (int64_t t = 0; t < h->vocab; t += RUN) {
    lanes sums[RUN / LANES] = {};
    const uint16_t *right = h->right + t * a->rank;
    for (int64_t k = 0; k < a->rank; k++)
      for (int64_t l = 0; l < RUN / LANES; l++)
        sums[l] = multiply_add(load_bf16(right + k * RUN + l * LANES), all_lanes(vector[k]), sums[l]);
    if (t + RUN <= h->vocab)
      for (int64_t l = 0; l < RUN / LANES; l++)
        store_f32(out + t + l * LANES, multiply_add(load_bf16(row + t + l * LANES), all_lanes(sharpness), sums[l]));
    else
      for (int64_t v = t; v < h->vocab; v++) out[v] = sums[(v - t) / LANES][(v - t) % LANES] + from_bf16(row[v]) * sharpness;
  }
}

static void hole_candidates(const DraftPaths *a, int64_t position, const OpenPath *nodes, int64_t node, Candidates *found) {
  const Holes *h = a->holes;
  const int64_t parent = node < 0 ? -1 : nodes[node].parent;
  const int64_t left = node < 0 ? h->first : nodes[node].column;
  const int64_t before = node < 0 ? h->second : parent < 0 ? h->first : nodes[parent].column;
  const int corrected = h->states && h->states[position] && h->unknown[position] && left >= 0;
  found->columns = found->own_columns, found->count = 0;
  float *logits = scratch(SCORES, PAD(h->vocab, RUN) * sizeof *logits);
  if (!logits) return;
  if (corrected) correct_hole(a, position, left, h->unknown[position] > 1 ? before : -1, logits);
  for (int64_t v = 0; v < h->vocab && !corrected; v++) logits[v] = from_bf16(h->logits[position][v]);
  for (int64_t i = 0; i < h->num_banned; i++)
    if (h->banned[i] < h->vocab) logits[h->banned[i]] = -INFINITY;
  const NearGreatest all = {.x = logits, .columns = found->own_columns, .values = found->values, .counts = &found->count,
                            .rests = &found->rest, .rows = 1, .size = h->vocab, .most = MOST_CANDIDATES, .gap = a->gap};
  near_greatest_f32(&all);
}

static inline lanes text_vector(const uint16_t *table, int64_t column, const float *vector, int64_t rank, int64_t k) {
  return column >= 0 ? load_bf16(table + column * rank + k) : vector ? load_f32(vector + k) : (lanes){};
}

// The logits of a position's candidates after a node; NAN in the first if they are not finite.
static void correct_logits(const DraftPaths *a, int64_t position, const OpenPath *nodes, int64_t node, float *logits) {
  const int64_t count = a->counts[position], rank = a->rank;
  memcpy(logits, a->logits + position * MOST_CANDIDATES, count * sizeof *logits);
  if (!a->right || (node < 0 && !a->text_left && a->last_column < 0)) return;
  float vector[rank];
  const int64_t parent = node < 0 ? -1 : nodes[node].parent;
  const float *state = a->states + position * rank;
  for (int64_t k = 0; k < rank; k += LANES) {
    const lanes own = load_f32(state + k);
    lanes sum = own + (node < 0 ? text_vector(a->left, a->last_column, a->text_left, rank, k)
                                : load_bf16(a->left + nodes[node].column * rank + k));
    if (node < 0) sum = sum + text_vector(a->second_left, a->column_before, a->text_before, rank, k);
    else if (parent >= 0) sum = sum + load_bf16(a->second_left + nodes[parent].column * rank + k);
    else sum = sum + text_vector(a->second_left, a->last_column, a->text_second_left, rank, k);
    store_f32(vector + k, silu(sum) - silu(own));
  }
  for (int64_t i = 0; i < count; i++) {
    const uint16_t *right = a->right + a->columns[position * MOST_CANDIDATES + i] * rank;
    lanes sum = {};
    for (int64_t k = 0; k < rank; k += LANES) sum = multiply_add(load_bf16(right + k), load_f32(vector + k), sum);
    logits[i] += sum_four(sum, (lanes){}, (lanes){}, (lanes){})[0];
    if (!isfinite(logits[i])) logits[0] = NAN;
  }
}

// The row of a node's candidates, −1 for none.
static int64_t row_of(const DraftPaths *a, int64_t position, const OpenPath *nodes, int64_t node) {
  if (!a->rows) return position;
  const int64_t last = node < 0 ? a->last_column : nodes[node].column;
  return last < 0 ? -1 : a->rows[last];
}

static void list_candidates(const DraftPaths *a, int64_t position, const OpenPath *nodes, int64_t node, Candidates *found) {
  const int64_t row = row_of(a, position, nodes, node);
  found->count = 0;
  if (row < 0) return;
  found->columns = a->columns + row * MOST_CANDIDATES;
  found->count = a->counts[row], found->rest = a->rests[row];
  if (a->rows) {
    memcpy(found->values, a->logits + row * MOST_CANDIDATES, found->count * sizeof *found->values);
    return;
  }
  if (found->count) correct_logits(a, position, nodes, node, found->values);
  if (found->count && found->values[0] != found->values[0]) found->count = 0;
}

// Offer the best tokens of a position after a node. Noise is [positions, MOST_CANDIDATES], NAN where it is not known yet.
static int64_t expand_node(const DraftPaths *a, int64_t position, const OpenPath *nodes, int64_t node, float *noise,
                           OpenPath *open, int64_t count) {
  const float reached = node < 0 ? 1 : nodes[node].reached;
  Candidates found;
  (a->holes ? hole_candidates : list_candidates)(a, position, nodes, node, &found);
  float *values = found.values, greatest = -INFINITY, total = 0, scale = 1 / a->temperature;
  if (a->keys) {
    const int differ = a->holes || a->rows;  // the candidates of a position's nodes
    float own[MOST_CANDIDATES], *here = differ ? own : noise + position * MOST_CANDIDATES;
    if (differ || here[0] != here[0])
      for (int64_t i = 0; i < found.count; i++)
        here[i] = log_exponential(token_of(a, found.columns[i]), a->keys + 2 * position);
    for (int64_t i = 0; i < found.count; i++) values[i] = values[i] * scale - here[i];
    scale = 1 / a->error;
  }
  for (int64_t i = 0; i < found.count; i++) greatest = values[i] > greatest ? values[i] : greatest;
  for (int64_t i = 0; i < found.count; i++) total += expf((values[i] - greatest) * scale);
  if (!a->keys) total += found.rest * expf(-fminf(fmaxf(greatest, -80), 80));
  for (int64_t choice = 0; choice < a->choices && choice < found.count; choice++) {
    int64_t best = 0;
    for (int64_t i = 1; i < found.count; i++) best = values[i] > values[best] ? i : best;
    const float chance = a->confidence * expf((values[best] - greatest) * scale) / total;
    values[best] = -INFINITY;
    if (reached * chance >= a->least)
      open[count++] = (OpenPath){.reached = reached * chance, .chance = chance, .parent = node, .depth = position + 1,
                                 .column = found.columns[best]};
  }
  return count;
}

// The number of nodes; −1 if there are more candidates, choices or nodes than this file has room for.
int64_t saltus_draft_paths(const DraftPaths *a) {
  if (a->nodes > MOST_NODES || a->choices > MOST_CHOICES || a->rank % LANES) return -1;
  OpenPath nodes[MOST_NODES], open[(MOST_NODES + 1) * MOST_CHOICES];
  float noise[a->positions * MOST_CANDIDATES];
  for (int64_t p = 0; p < a->positions; p++) noise[p * MOST_CANDIDATES] = NAN;
  int64_t count = a->positions ? expand_node(a, 0, nodes, -1, noise, open, 0) : 0, made = 0;
  while (count && made < a->nodes) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++) best = open[i].reached > open[best].reached ? i : best;
    const OpenPath node = nodes[made] = open[best];
    open[best] = open[--count];
    a->parents[made] = node.parent, a->tokens[made] = token_of(a, node.column), a->chances[made] = node.chance;
    const int ends = a->holes && is_one_of(a->tokens[made], a->holes->last, a->holes->num_last);
    if (++made < a->nodes && node.depth < a->positions && !ends)
      count = expand_node(a, node.depth, nodes, made - 1, noise, open, count);
  }
  return made;
}
