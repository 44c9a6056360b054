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

int main(void) {
  pthread_t other;
  void *found = 0;
  saltus_threads(4);
  pthread_create(&other, 0, call, "wrong");
  const void *own = call("wrong");
  pthread_join(other, &found);
  return own || found;
}
