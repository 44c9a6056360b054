// The random numbers of tokens, as core/noise.py defines them: SplitMix64 with a key before each multiplication, and groups
// of exponentials whose least one is generated first.
#pragma once
#include <math.h>
#include <stdint.h>

#define GROUP_SIZE 64
#define GROUP_STRIDE 1024  // between the tokens of a group
#define GROUP_SPAN (GROUP_SIZE * GROUP_STRIDE)  // consecutive tokens that so many groups share

static inline uint64_t hash_counter(uint64_t counter, const uint64_t *keys) {
  uint64_t x = counter * 0x9E3779B97F4A7C15u + keys[0];
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u + keys[1];
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}
static inline double open_uniform(uint64_t word) { return ((word >> 12) + 0.5) * 0x1p-52; }
static inline int64_t group_of(int64_t token) { return token / GROUP_SPAN * GROUP_STRIDE + token % GROUP_STRIDE; }
static inline uint64_t group_word(int64_t group, const uint64_t *keys) {
  return hash_counter(((uint64_t)1 << 40) + group, keys);
}
static inline int64_t first_token(int64_t group) { return group / GROUP_STRIDE * GROUP_SPAN + group % GROUP_STRIDE; }
static inline double least_exponential(uint64_t word) { return -log1p(-open_uniform(word)) / GROUP_SIZE; }
static inline double exponential(int64_t token, uint64_t word, double least, const uint64_t *keys) {
  const int has_least = first_token(group_of(token)) + (int64_t)(word % GROUP_SIZE) * GROUP_STRIDE == token;
  return has_least ? least : least - log1p(-open_uniform(hash_counter(token, keys)));
}

static float log_exponential(int64_t token, const uint64_t *keys) {
  const uint64_t word = group_word(group_of(token), keys);
  return logf((float)exponential(token, word, least_exponential(word), keys));
}
