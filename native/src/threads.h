// A few threads that wait for loops to share.
#pragma once

#include <cstdint>

namespace slipstream {

// Calls body(context, index) once for each 0 <= index < count, on up to `threads` threads, the
// caller's among them, and returns when all calls have. With one thread, one call, or while another
// loop is being shared, the caller makes all calls itself; no thread is started before it is needed.
// A forked child starts from scratch. `body` must not throw.
void parallel_for(int64_t count, int threads, void (*body)(void *context, int64_t index),
                  void *context);

}  // namespace slipstream
