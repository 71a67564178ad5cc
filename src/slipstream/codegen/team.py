"""Worker team for generated C++: threads that run one function together and meet at barriers.

``run_team(workers, body, argument, &team)`` calls ``body(argument, worker)`` on each worker, the
caller being worker 0, and returns when all have returned. ``meet(team)`` is a barrier. Both wait
for a bounded time in a loop and then in a futex, so that an oversubscribed machine makes progress.
Threads start at the first use; a forked child starts its own.
"""

TEAM = r"""
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int kMaxWorkers = 64, kSpins = 4000;

INLINE void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Waits until *word differs from `old`.
inline void wait_for_change(int* word, int old) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != old) return;
    pause_briefly();
  }
  while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == old)
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
}

inline void change(int* word) {
  __atomic_add_fetch(word, 1, __ATOMIC_ACQ_REL);
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

struct Team {
  int size, arrived, phase;
  void (*body)(void*, int);
  void* argument;
};

// A barrier of all workers of the team.
inline void meet(Team* team) {
  if (team->size == 1) return;
  const int phase = __atomic_load_n(&team->phase, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == team->size) {
    __atomic_store_n(&team->arrived, 0, __ATOMIC_RELEASE);
    change(&team->phase);
  } else {
    wait_for_change(&team->phase, phase);
  }
}

struct alignas(64) Start { int word; };

// One team per library; a caller that finds it busy runs as a team of one. Each worker waits on a
// separate word, so that it cannot join a run late or twice.
pthread_mutex_t team_lock = PTHREAD_MUTEX_INITIALIZER;
Team shared_team;
Start start[kMaxWorkers];
int threads_started = 0, team_process = 0;

void* work(void* number) {
  const int worker = static_cast<int>(reinterpret_cast<intptr_t>(number));
  for (int seen = 0;;) {
    wait_for_change(&start[worker].word, seen);
    ++seen;
    shared_team.body(shared_team.argument, worker);
    meet(&shared_team);
  }
  return nullptr;
}

inline void run_team(int workers, void (*body)(void*, int), void* argument, Team** team) {
  static Team alone = {1, 0, 0, nullptr, nullptr};
  *team = &alone;
  if (workers <= 1 || pthread_mutex_trylock(&team_lock) != 0) {
    body(argument, 0);
    return;
  }
  const int process = static_cast<int>(getpid());
  if (team_process != process) {
    team_process = process;
    threads_started = 0;
    for (int worker = 0; worker < kMaxWorkers; ++worker) start[worker].word = 0;
    shared_team.arrived = 0;
  }
  if (workers > kMaxWorkers) workers = kMaxWorkers;
  while (threads_started < workers - 1) {
    pthread_t thread;
    void* number = reinterpret_cast<void*>(static_cast<intptr_t>(threads_started + 1));
    if (pthread_create(&thread, nullptr, work, number) != 0) break;
    pthread_detach(thread);
    ++threads_started;
  }
  *team = &shared_team;
  shared_team.size = workers < threads_started + 1 ? workers : threads_started + 1;
  shared_team.body = body;
  shared_team.argument = argument;
  for (int worker = 1; worker < shared_team.size; ++worker) change(&start[worker].word);
  body(argument, 0);
  meet(&shared_team);
  pthread_mutex_unlock(&team_lock);
}

}  // namespace
"""
"""C++ that follows `PRELUDE`."""
