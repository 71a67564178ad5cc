#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace slipstream {
namespace {

struct Loop {
  void (*body)(void *, int64_t);
  void *context;
  int64_t count;
  std::atomic<int64_t> next{0};

  void work() {
    for (;;) {
      const int64_t index = next.fetch_add(1, std::memory_order_relaxed);
      if (index >= count) return;
      body(context, index);
    }
  }
};

class Pool {
 public:
  // False when another loop is being shared.
  bool run(Loop &loop, int helpers) {
    std::unique_lock<std::mutex> only(busy_, std::try_to_lock);
    if (!only.owns_lock()) return false;
    start(helpers);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      loop_ = &loop;
      seats_ = helpers < started_ ? helpers : started_;
    }
    wake_.notify_all();
    loop.work();
    std::unique_lock<std::mutex> lock(mutex_);
    seats_ = 0;  // who has not begun by now need not
    done_.wait(lock, [this] { return working_ == 0; });
    loop_ = nullptr;
    return true;
  }

 private:
  void start(int helpers) {
    while (started_ < helpers) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error &) {
        return;  // the system gives no more threads; those there are suffice
      }
      ++started_;
    }
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return seats_ > 0; });
      --seats_;
      ++working_;
      Loop &loop = *loop_;
      lock.unlock();
      loop.work();
      lock.lock();
      if (--working_ == 0) done_.notify_one();
    }
  }

  std::mutex busy_, mutex_;
  std::condition_variable wake_, done_;
  Loop *loop_ = nullptr;
  int seats_ = 0, working_ = 0;
  int started_ = 0;
};

// Never deleted: its threads wait on it until the process ends.
std::atomic<Pool *> pool{nullptr};

// The child of a fork has none of the threads, and perhaps a lock that is never released.
void forget() { pool.store(nullptr); }

Pool *the_pool() {
  Pool *found = pool.load();
  if (found != nullptr) return found;
  static std::atomic<bool> registered{false};
  if (!registered.exchange(true)) pthread_atfork(nullptr, nullptr, forget);
  Pool *made = new (std::nothrow) Pool;
  if (made != nullptr && !pool.compare_exchange_strong(found, made)) {
    delete made;
    return found;
  }
  return made;
}

}  // namespace

void parallel_for(int64_t count, int threads, void (*body)(void *context, int64_t index),
                  void *context) {
  Loop loop{body, context, count};
  const int64_t helpers = (threads < count ? threads : count) - 1;
  Pool *shared = helpers > 0 ? the_pool() : nullptr;
  if (shared == nullptr || !shared->run(loop, static_cast<int>(helpers))) loop.work();
}

}  // namespace slipstream
