// Share the pieces of a job among threads. The caller takes pieces too and waits only for pieces that another thread
// has begun, so that a busy machine slows a call down instead of stopping it. A forked child starts threads of its own.
#pragma once
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#define WORKERS 63
#define SPINS 4000                    // looks at the ticket before a worker goes to sleep
#define CLOSED ((uint64_t)0xffffffff)  // no piece can be taken

typedef void (*Work)(const void *job, int64_t piece);

static struct {
  _Atomic uint64_t ticket;  // number of the job << 32 | next piece
  _Atomic int64_t finished;
  _Atomic int asleep;
  Work work;
  const void *job;
  int64_t pieces;
  uint64_t number;
  int workers, alone;
  pthread_mutex_t busy, sleep;
  pthread_cond_t wake;
} pool = {.ticket = CLOSED, .busy = PTHREAD_MUTEX_INITIALIZER, .sleep = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER};

static inline void breathe(void) {
#if defined __x86_64__ || defined __i386__
  __builtin_ia32_pause();
#endif
}

// Take and do one piece of the job that the ticket names; 0 if there is none left. A ticket that can still be
// exchanged proves that its job is under way, so what was read of the job is its own.
static int take(uint64_t ticket) {
  const Work work = pool.work;
  const void *job = pool.job;
  const int64_t pieces = pool.pieces, piece = ticket & CLOSED;
  if ((uint64_t)piece == CLOSED || piece >= pieces) return 0;
  if (!atomic_compare_exchange_strong(&pool.ticket, &ticket, ticket + 1)) return 1;
  work(job, piece);
  atomic_fetch_add(&pool.finished, 1);
  return 1;
}

static void *worker(void *unused) {
  for (;;) {
    int spins = 0;
    while (spins < SPINS) {
      if (take(atomic_load(&pool.ticket))) spins = 0;
      else spins++, breathe();
    }
    pthread_mutex_lock(&pool.sleep);
    atomic_fetch_add(&pool.asleep, 1);
    if ((atomic_load(&pool.ticket) & CLOSED) == CLOSED) pthread_cond_wait(&pool.wake, &pool.sleep);
    atomic_fetch_sub(&pool.asleep, 1);
    pthread_mutex_unlock(&pool.sleep);
  }
  return unused;
}

// Work with so many threads, the caller included. They are started when first asked for and never stopped.
void saltus_threads(int64_t threads) {
  pthread_mutex_lock(&pool.busy);
  pool.alone = threads < 2;
  while (pool.workers < threads - 1 && pool.workers < WORKERS) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, worker, NULL)) break;
    pthread_detach(thread);
    pool.workers++;
  }
  pthread_mutex_unlock(&pool.busy);
}

// In a child there are no workers, and nobody who would give a lock back.
static void forked(void) {
  pool.workers = 0;
  atomic_store(&pool.ticket, CLOSED);
  atomic_store(&pool.asleep, 0);
  pthread_mutex_init(&pool.busy, NULL);
  pthread_mutex_init(&pool.sleep, NULL);
  pthread_cond_init(&pool.wake, NULL);
}
static __attribute__((constructor)) void watch_forks(void) { pthread_atfork(NULL, NULL, forked); }

static void share(Work work, const void *job, int64_t pieces) {
  if (pieces < 2 || pool.alone || !pool.workers || pthread_mutex_trylock(&pool.busy)) {
    for (int64_t piece = 0; piece < pieces; piece++) work(job, piece);
    return;
  }
  pool.work = work, pool.job = job, pool.pieces = pieces;
  atomic_store(&pool.finished, 0);
  const uint64_t first = ++pool.number << 32;
  atomic_store(&pool.ticket, first);
  if (atomic_load(&pool.asleep)) {
    pthread_mutex_lock(&pool.sleep);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.sleep);
  }
  while (take(atomic_load(&pool.ticket))) continue;
  while (atomic_load(&pool.finished) < pieces) breathe();
  atomic_store(&pool.ticket, first | CLOSED);
  pthread_mutex_unlock(&pool.busy);
}
