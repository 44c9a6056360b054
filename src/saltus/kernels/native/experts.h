// A mixture of experts (Shazeer et al. 2017), and its router: which experts a row goes to, and with what weights. All in
// float32, every sum in one order, whatever the width of vectors: a row's experts are the same on every processor.
#pragma once
#include "lanes.h"

enum { SOFTMAX_SCORES, SIGMOID_SCORES, SPARSE_MIXER };  // of experts, from the router's logits
enum { GATE, UP, DOWN, EXPERT_WEIGHTS };
// Of experts only: gates below the limit times their sigmoid, by values within it plus one (gpt-oss).
#define CLAMPED_SWIGLU 6

typedef struct {
  const void *x;       // [rows, hidden], dense
  const void *norm;    // [hidden] or NULL: of x, see Norm
  const void *routed;  // [rows, routed_in]: what the router sees, or NULL: the experts' normed rows
  const void *router;  // [experts, routed_in], of the format T or of float32
  const float *router_bias, *selection_bias, *expert_scale;  // [experts] or NULL: see choose_experts
  // of the first expert, as those of Linear, and the bytes to the next expert's; the gate is NULL where there is none
  const void *weight[EXPERT_WEIGHTS], *bias[EXPERT_WEIGHTS];
  int64_t format[EXPERT_WEIGHTS], weight_step[EXPERT_WEIGHTS], bias_step[EXPERT_WEIGHTS];  // gate and up: one arithmetic
  const void *shared, *shared_gate;  // [rows, hidden] or NULL: a shared expert's outputs; [rows] or NULL: logits of its weights
  const void *add;  // [rows, hidden] or NULL: added to the rounded sum
  void *out;        // [rows, hidden], dense; it may be x and what is added
  int64_t rows, hidden, width, routed_in, experts, top_k;
  int64_t groups, top_groups, best_of_group;
  int64_t router_is_float32, scoring, normalized, scales_inputs, norm_kind, activation;
  int64_t interleaved;  // the gate's weight has 2 · width outputs, of gate and up in turns; up's is NULL
  int64_t biases_logits;  // the selection bias is added to logits, not to scores
  int64_t zero_experts;   // how many of the experts, the last ones, have no weights and give what they are given
  float epsilon, scale, least_sum, limit, alpha, margin;
} Experts;

// The indices of the `most` greatest of n numbers, the greatest first, of equal ones the first; NAN is less than none.
static void find_greatest(const float *x, int64_t n, int64_t most, int32_t *indices) {
  for (int64_t i = 0, count = 0; i < n; i++) {
    if (count == most && !(x[i] > x[indices[most - 1]])) continue;
    int64_t j = count < most ? count++ : most - 1;
    for (; j && x[i] > x[indices[j - 1]]; j--) indices[j] = indices[j - 1];
    indices[j] = i;
  }
}

// Of experts in groups only those of the `top_groups` stay, by the sum of the best choices of each.
static void exclude_groups(const Experts *a, float *choice, float *sums, int32_t *indices) {
  const int64_t size = a->experts / a->groups;
  for (int64_t g = 0; g < a->groups; g++) {
    find_greatest(choice + g * size, size, a->best_of_group, indices);
    sums[g] = 0;
    for (int64_t i = 0; i < a->best_of_group; i++) sums[g] += choice[g * size + indices[i]];
  }
  find_greatest(sums, a->groups, a->top_groups, indices);
  for (int64_t g = 0; g < a->groups; g++) {
    int stays = 0;
    for (int64_t i = 0; i < a->top_groups; i++) stays |= indices[i] == g;
    for (int64_t e = 0; e < size && !stays; e++) choice[g * size + e] = -INFINITY;
  }
}

// SparseMixer (Liu et al. 2024): the experts of the two greatest logits, one after the other. A weight is the softmax over the
// logits that are left and less than `margin` below the greatest, relative to this one or to their own size.
static void mix_sparsely(const Experts *a, const float *logits, int32_t *chosen, float *weights) {
  find_greatest(logits, a->experts, 2, chosen);
  for (int64_t i = 0; i < 2; i++) {
    const float most = logits[chosen[i]];
    float sum = 0;
    for (int64_t e = 0; e < a->experts; e++) {
      const float size = fabsf(logits[e]) > most ? fabsf(logits[e]) : most;
      if ((i && e == chosen[0]) || (most - logits[e]) / size > a->margin) continue;
      sum += exp_lanes(all_lanes(logits[e] - most))[0];
    }
    weights[i] = a->scale / sum;
  }
  if (chosen[0] < chosen[1]) return;
  const int32_t second = chosen[0];
  const float weight = weights[0];
  chosen[0] = chosen[1], weights[0] = weights[1], chosen[1] = second, weights[1] = weight;
}

// The row's `top_k` experts, ascending, and their weights, from its logits [experts, padded to 16]. A score is the softmax
// of all logits or the sigmoid of one. Experts are chosen by score plus selection bias, of equal ones the first. A weight is
// the score, divided by the sum of the chosen ones and `least_sum` if they are normalized, times `scale` and the expert's.
// `room` has 2 · padded experts floats and as many int32_t.
static void choose_experts(const Experts *a, float *logits, float *room, int32_t *chosen, float *weights) {
  const int64_t padded = PAD(a->experts, 16);
  float *choice = room, *sums = room + padded, most = -INFINITY, sum = 0;
  int32_t *indices = (int32_t *)(room + 2 * padded);
  for (int64_t e = 0; e < a->experts; e++) {
    if (a->router_bias) logits[e] += a->router_bias[e];
    choice[e] = logits[e], most = logits[e] > most ? logits[e] : most;
  }
  if (a->scoring == SPARSE_MIXER) {
    mix_sparsely(a, logits, chosen, weights);
    return;
  }
  float *scores = logits;
  for (int64_t e = 0; e < padded; e += LANES) {
    const lanes here = load_f32(logits + e);
    store_f32(scores + e, a->scoring == SOFTMAX_SCORES ? exp_lanes(here - most) : 1.0f / (1.0f + exp_lanes(-here)));
  }
  if (a->scoring == SOFTMAX_SCORES) {
    for (int64_t e = 0; e < a->experts; e++) sum += scores[e];
    for (int64_t e = 0; e < a->experts; e++) scores[e] /= sum;
  }
  // without bias and groups the logits have the same order, and fewer equal ones
  if (a->selection_bias || a->groups > 1)
    for (int64_t e = 0; e < a->experts; e++)
      choice[e] = (a->biases_logits ? choice[e] : scores[e]) + (a->selection_bias ? a->selection_bias[e] : 0);
  if (a->groups > 1) exclude_groups(a, choice, sums, indices);
  find_greatest(choice, a->experts, a->top_k, chosen);
  for (int64_t i = 1; i < a->top_k; i++)
    for (int64_t j = i; j && chosen[j] < chosen[j - 1]; j--) {
      const int32_t one = chosen[j];
      chosen[j] = chosen[j - 1], chosen[j - 1] = one;
    }
  sum = a->least_sum;
  for (int64_t i = 0; i < a->top_k; i++) weights[i] = scores[chosen[i]], sum += weights[i];
  for (int64_t i = 0; i < a->top_k; i++) {
    if (a->normalized) weights[i] /= sum;
    weights[i] *= a->scale;
    if (a->expert_scale) weights[i] *= a->expert_scale[chosen[i]];
  }
}

// The first of ascending numbers that is greater than `number`.
static inline int64_t interval_of(const int64_t *ends, int64_t count, int64_t number) {
  int64_t low = 0, high = count - 1;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (ends[middle] > number) high = middle;
    else low = middle + 1;
  }
  return low;
}
