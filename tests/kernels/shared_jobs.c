// Two callers share jobs of many sizes among four threads; each checks its own results (run by test_thread_pool.py).
#include "thread_pool.h"
#include <pthread.h>

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
  pthread_t of[20000];
} Owners;
static void own(const void *job, int64_t piece) {
  ((Owners *)job)->of[piece] = pthread_self();
  for (volatile int i = 0; i < 20000; i++) continue;  // so that others have the time to take a piece
}

// How many threads took pieces of one job.
static int num_owners(int pieces) {
  static Owners owners;
  int different = 0;
  share(own, &owners, pieces);
  for (int piece = 0; piece < pieces; piece++) {
    int before = 0;
    while (!pthread_equal(owners.of[before], owners.of[piece])) before++;
    different += before == piece;
  }
  return different;
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
  int more = 0;
  for (int job = 0; job < 50; job++) more += num_owners(64) > 2;
  // Each of the two workers beyond the limit may have read the old one, and lose its processor before it takes a last piece.
  if (num_threads() != 2 || more > 2) return 2;
  saltus_threads(1);
  if (num_threads() != 1 || num_owners(64) > 1) return 3;
  saltus_threads(4);
  // Half a second of work: on a busy machine two threads may end many small jobs before the others run.
  return num_threads() == 4 && num_owners(20000) > 2 && !call("wrong") ? 0 : 4;
}
