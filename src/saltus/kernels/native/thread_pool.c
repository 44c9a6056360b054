// See thread_pool.h.
#include "thread_pool.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#define WORKERS 63
#define SPINS 16000  // looks at the ticket, for some 0.2 ms, before a worker goes to sleep: Python between two calls takes less
#define CLOSED ((uint64_t)0xffffffff)  // no piece can be taken

// Every access of a field is atomic; `number` alone is touched under `busy` only. The ticket and `finished` order the
// others: storing a ticket publishes the job's fields, and loading it acquires them.
static struct {
  _Atomic uint64_t ticket;  // number of the job << 32 | next piece
  _Atomic int64_t finished;
  _Atomic int asleep;
  _Atomic(Work) work;
  _Atomic(const void *) job;
  _Atomic int64_t pieces;
  uint64_t number;
  _Atomic int workers, limit;  // threads that were started, and how many of them work
  pthread_mutex_t busy, sleep;
  pthread_cond_t wake;
} pool = {.ticket = CLOSED, .busy = PTHREAD_MUTEX_INITIALIZER, .sleep = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER};

#define LOAD_RELAXED(field) atomic_load_explicit(&(field), memory_order_relaxed)
#define STORE_RELAXED(field, value) atomic_store_explicit(&(field), value, memory_order_relaxed)

static inline uint64_t current_ticket(void) { return atomic_load_explicit(&pool.ticket, memory_order_acquire); }
int64_t num_threads(void) {
  const int workers = LOAD_RELAXED(pool.workers), limit = LOAD_RELAXED(pool.limit);
  return (workers < limit ? workers : limit) + 1;
}

static inline void breathe(void) {
#if defined __x86_64__ || defined __i386__
  __builtin_ia32_pause();
#endif
}

// Take and do one piece of the job that the ticket names; 0 if there is none left. A ticket that can still be
// exchanged proves that its job is under way, so what was read of the job is its own: the next job's fields are stored
// after all pieces of this one were exchanged and finished.
static int take(uint64_t ticket) {
  const Work work = LOAD_RELAXED(pool.work);
  const void *job = LOAD_RELAXED(pool.job);
  const int64_t pieces = LOAD_RELAXED(pool.pieces), piece = ticket & CLOSED;
  if ((uint64_t)piece == CLOSED || piece >= pieces) return 0;
  if (!atomic_compare_exchange_strong_explicit(&pool.ticket, &ticket, ticket + 1, memory_order_acq_rel,
                                               memory_order_relaxed))
    return 1;
  work(job, piece);
  atomic_fetch_add_explicit(&pool.finished, 1, memory_order_release);
  return 1;
}

static void *worker(void *number) {
  for (;;) {
    int spins = 0;
    while (spins < SPINS && (intptr_t)number < LOAD_RELAXED(pool.limit)) {
      if (take(current_ticket())) spins = 0;
      else spins++, breathe();
    }
    pthread_mutex_lock(&pool.sleep);
    while ((intptr_t)number >= LOAD_RELAXED(pool.limit)) pthread_cond_wait(&pool.wake, &pool.sleep);
    atomic_fetch_add(&pool.asleep, 1);  // sequentially consistent, as in `share`: one of the two sees the other
    if ((atomic_load(&pool.ticket) & CLOSED) == CLOSED) pthread_cond_wait(&pool.wake, &pool.sleep);
    atomic_fetch_sub(&pool.asleep, 1);
    pthread_mutex_unlock(&pool.sleep);
  }
  return NULL;
}

// Work with so many threads, the caller included. They are started when first asked for, and those beyond a lower number sleep.
void saltus_threads(int64_t threads) {
  pthread_mutex_lock(&pool.busy);
  const int limit = threads < 1 ? 0 : threads - 1;
  int workers = LOAD_RELAXED(pool.workers);
  if (limit != LOAD_RELAXED(pool.limit)) {
    pthread_mutex_lock(&pool.sleep);
    STORE_RELAXED(pool.limit, limit);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.sleep);
  }
  for (; workers < limit && workers < WORKERS; workers++) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, worker, (void *)(intptr_t)workers)) break;
    pthread_detach(thread);
  }
  STORE_RELAXED(pool.workers, workers);
  pthread_mutex_unlock(&pool.busy);
}

// In a child there are no workers, and nobody who would give a lock back.
static void forked(void) {
  STORE_RELAXED(pool.workers, 0);
  atomic_store(&pool.ticket, CLOSED);
  atomic_store(&pool.asleep, 0);
  pthread_mutex_init(&pool.busy, NULL);
  pthread_mutex_init(&pool.sleep, NULL);
  pthread_cond_init(&pool.wake, NULL);
}
static __attribute__((constructor)) void watch_forks(void) { pthread_atfork(NULL, NULL, forked); }

void share(Work work, const void *job, int64_t pieces) {
  if (pieces < 2 || num_threads() < 2 || pthread_mutex_trylock(&pool.busy)) {
    for (int64_t piece = 0; piece < pieces; piece++) work(job, piece);
    return;
  }
  STORE_RELAXED(pool.work, work);
  STORE_RELAXED(pool.job, job);
  STORE_RELAXED(pool.pieces, pieces);
  STORE_RELAXED(pool.finished, 0);
  const uint64_t first = ++pool.number << 32;
  atomic_store(&pool.ticket, first);
  if (atomic_load(&pool.asleep)) {
    pthread_mutex_lock(&pool.sleep);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.sleep);
  }
  while (take(current_ticket())) continue;
  while (atomic_load_explicit(&pool.finished, memory_order_acquire) < pieces) breathe();
  STORE_RELAXED(pool.ticket, first | CLOSED);
  pthread_mutex_unlock(&pool.busy);
}

void *scratch(int which, size_t bytes) {
  static _Thread_local struct { void *at; size_t size; } kept[SCRATCHES];
  if (kept[which].size < bytes) {
    free(kept[which].at);
    bytes = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    kept[which].at = aligned_alloc(64, bytes);
    kept[which].size = kept[which].at ? bytes : 0;
  }
  return kept[which].at;
}
