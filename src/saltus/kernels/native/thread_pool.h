// Share the pieces of a job among threads. The caller takes pieces too and waits only for pieces that another thread
// has begun, so that a busy machine slows a call down instead of stopping it. A forked child starts threads of its own.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define INTERNAL __attribute__((visibility("hidden")))  // of the library

typedef void (*Work)(const void *job, int64_t piece);

// Call work(job, piece) for the pieces from 0 on, each once, and return when all are done.
INTERNAL void share(Work work, const void *job, int64_t pieces);
INTERNAL int64_t num_threads(void);
void saltus_threads(int64_t threads);

// Memory that a thread keeps from call to call: fresh pages would cost more than the work. NULL if there is none.
enum {
  PACKED, MADE, SCORES, GATED, MIDDLE, LOW, EXPANDED, SELECTED, FEATURES, CONTEXT, MIXTURE, PLANNED, RECURRENT, BRANCHES,
  CHOSEN, CHOSEN_KEYS, POOL_ENDS, RANKS, HEAD_WEIGHTS, SCRATCHES
};
INTERNAL void *scratch(int which, size_t bytes);
