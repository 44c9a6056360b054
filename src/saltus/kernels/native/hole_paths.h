// The candidates of a draft node of an any-subset model: the likely tokens of a hole, whose logits are corrected by the two
// tokens to its left (`PairwiseCorrection`, methods/shared/logit_correction.py).
#pragma once
#include "draft_paths.h"

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
  const NearGreatest all = {.x = logits, .places = found->own_columns, .values = found->values, .counts = &found->count,
                            .rests = &found->rest, .rows = 1, .size = h->vocab, .most = MOST_CANDIDATES, .gap = a->gap};
  near_greatest_row_f32(&all, 0);
}
