// Two callers share jobs of many sizes among four threads; each checks its own results (run by test_thread_pool.py).
#include "thread_pool.h"

#define JOBS 2000

typedef struct {
  int64_t number, out[64];
} Job;

static void fill(const void *job, int64_t piece) { ((Job *)job)->out[piece] = ((Job *)job)->number + piece; }

static void *call(void *wrong) {
  for (int64_t number = 0; number < JOBS; number++) {
    Job job = {.number = number};
    const int64_t pieces = 2 + number % 63;
    share(fill, &job, pieces);
    for (int64_t piece = 0; piece < pieces; piece++)
      if (job.out[piece] != number + piece) return wrong;
  }
  return 0;
}

typedef struct {
  pthread_t of[64];
} Owners;
static void own(const void *job, int64_t piece) {
  ((Owners *)job)->of[piece] = pthread_self();
  for (volatile int i = 0; i < 20000; i++) continue;  // so that others have the time to take a piece
}

// Of so many jobs, those of which more than `threads` took pieces.
static int shared_by_more_than(int threads, int jobs) {
  int more = 0;
  while (jobs--) {
    Owners owners;
    int different = 0;
    share(own, &owners, 64);
    for (int piece = 0; piece < 64; piece++) {
      int before = 0;
      while (!pthread_equal(owners.of[before], owners.of[piece])) before++;
      different += before == piece;
    }
    more += different > threads;
  }
  return more;
}

int main(void) {
  pthread_t other;
  void *found = 0;
  saltus_threads(4);
  pthread_create(&other, 0, call, "wrong");
  const void *own = call("wrong");
  pthread_join(other, &found);
  if (own || found) return 1;
  saltus_threads(2);
  // Each of the two workers beyond the limit may have read the old one, and lose its processor before it takes a last piece.
  if (num_threads() != 2 || shared_by_more_than(2, 50) > 2) return 2;
  saltus_threads(1);
  if (num_threads() != 1 || shared_by_more_than(1, 5)) return 3;
  saltus_threads(4);
  if (num_threads() != 4 || call("wrong")) return 4;
  for (int tries = 0; tries < 1000; tries++)  // on a busy machine two threads may do many jobs before the others run
    if (shared_by_more_than(2, 1)) return 0;
  return 5;
}
