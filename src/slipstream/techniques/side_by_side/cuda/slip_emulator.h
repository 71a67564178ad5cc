// A CUDA block on one CPU: each thread is a fiber that yields only where it waits.
//
// Threads wait at barriers and warp-wide operations. A barrier opens when exactly its count of
// threads wait; if no thread can run and some wait, the block hangs, which is reported with the
// lines. Shared memory is initialised with signalling NaN. A run is a child process, so that an
// access out of bounds only terminates the child.
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <sys/mman.h>
#include <sys/wait.h>
#include <type_traits>
#include <unistd.h>
#include <utility>
#ifndef __x86_64__
#include <ucontext.h>
#endif

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define SLIP_INLINE inline
#define SLIP_KERNEL(threads) static void
#define SLIP_BARRIER(id, count) slip::barrier(id, count, __FILE__, __LINE__)
#define __syncthreads() slip::barrier(0, -1, __FILE__, __LINE__)
#define __syncwarp(...) slip::warp_barrier(slip::mask_of(__VA_ARGS__), __FILE__, __LINE__)
#define SLIP_SHARED(type, name, align)            \
  static char slip_key_##name;                    \
  type& name = *static_cast<type*>(slip::shared(&slip_key_##name, sizeof(type)))

struct uint3 { unsigned x, y, z; };
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
namespace slip {
template <typename T> struct Lanes { using type = T; static constexpr int count = 1; };
}
#define SLIP_VECTOR(T, N)                                                          \
  struct N##2 { T x, y; };                                                         \
  struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) N##4 { T x, y, z, w; };  \
  template <> struct slip::Lanes<N##2> { using type = T; static constexpr int count = 2; };  \
  template <> struct slip::Lanes<N##4> { using type = T; static constexpr int count = 4; };  \
  inline N##2 make_##N##2(T a, T b) { return {a, b}; }                             \
  inline N##4 make_##N##4(T a, T b, T c, T d) { return {a, b, c, d}; }
SLIP_VECTOR(float, float)
SLIP_VECTOR(double, double)
SLIP_VECTOR(int, int)
SLIP_VECTOR(unsigned, uint)

namespace slip {

struct Settings {
  unsigned grid[3], block[3];
  int schedule;  // 0 in order, 1 reversed, 2 round-robin over warps; otherwise a seed
  int parts;
  unsigned starts[16];
  double limit_s;
};
struct Report {
  int failed;
  int float_atomics;
  uint64_t address;
  char text[2048];
};

constexpr int kMaxThreads = 1024, kStack = 64 << 10, kArena = 1 << 20, kIds = 16;

struct Fiber {
#ifdef __x86_64__
  void* stack;
#else
  ucontext_t context;
#endif
  bool ended;
  int barrier;         // barrier that it waits at; -1 for none
  unsigned mask;       // lanes of its warp that it waits for; 0 for none
  const char* file;
  int line;
};
struct Meeting {  // warp-wide operation
  unsigned mask, arrived;
  int turn;
  uint64_t value[2][32];
};

static Fiber fibers[kMaxThreads];
static Meeting meetings[kMaxThreads / 32][33];
static int waiting[kIds], expected[kIds], current, count_all;
static unsigned parts_at[kIds];
static char* stacks;
static void (*body)(void**);
static void** arguments;
static char wrong_barrier[256];  // reported if nothing else fails
static Report* report;
static Settings settings;
static dim3 grid_dim, block_dim;
static uint3 block_index;
alignas(128) static unsigned char arena[kArena], dynamic_arena[kArena];
static int arena_used;
static struct { const void* key; int at; } keys[256];
static int keys_used;

[[noreturn]] inline void fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(report->text, sizeof report->text, format, values);
  va_end(values);
  report->failed = 1;
  _exit(1);
}

#ifdef __x86_64__
static void* scheduler_stack;
extern "C" void slip_switch(void** from, void* to);
asm(".text\n.p2align 4\n.type slip_switch, @function\nslip_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n"
    ".size slip_switch, .-slip_switch\n");
inline void leave() { slip_switch(&fibers[current].stack, scheduler_stack); }
inline void enter() { slip_switch(&scheduler_stack, fibers[current].stack); }
#else
static ucontext_t scheduler;
inline void leave() { swapcontext(&fibers[current].context, &scheduler); }
inline void enter() { swapcontext(&scheduler, &fibers[current].context); }
#endif

inline void begin() {
  body(arguments);
  fibers[current].ended = true;
  leave();
  abort();
}
inline void prepare(int thread) {
  Fiber& fiber = fibers[thread];
  fiber.ended = false;
  fiber.barrier = -1;
  fiber.mask = 0;
  char* low = stacks + static_cast<size_t>(thread) * kStack;
#ifdef __x86_64__
  // At the entry of a function the stack pointer is 8 above a multiple of 16.
  void** top = reinterpret_cast<void**>(low + kStack) - 1;
  *--top = reinterpret_cast<void*>(&begin);
  for (int n = 0; n < 6; ++n) *--top = nullptr;
  fiber.stack = top;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = low;
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, &begin, 0);
#endif
}

inline unsigned linear_thread() { return static_cast<unsigned>(current); }
inline int part_of(int thread) {
  int part = 0;
  while (part + 1 < settings.parts && static_cast<unsigned>(thread) >= settings.starts[part + 1])
    ++part;
  return part;
}
inline unsigned char* dynamic() { return dynamic_arena; }
inline void* shared(const void* key, size_t bytes) {
  for (int n = 0; n < keys_used; ++n)
    if (keys[n].key == key) return arena + keys[n].at;
  const int at = (arena_used + 127) / 128 * 128;
  if (keys_used == 256 || at + bytes > kArena) fail("more than 1 MiB of shared memory");
  keys[keys_used++] = {key, at};
  arena_used = at + static_cast<int>(bytes);
  return arena + at;
}

inline void barrier(int id, int count, const char* file, int line) {
  Fiber& me = fibers[current];
  if (count < 0) count = count_all;
  if (id < 0 || id >= kIds) fail("barrier %d does not exist (%s:%d)", id, file, line);
  if (count % 32) fail("barrier %d counts %d threads, not a multiple of 32 (%s:%d)", id, count, file, line);
  if (waiting[id] && expected[id] != count)
    fail("barrier %d counts %d threads at %s:%d, and %d elsewhere", id, count, file, line, expected[id]);
  expected[id] = count;
  parts_at[id] |= 1u << part_of(current);
  if (parts_at[id] & (parts_at[id] - 1))
    fail("barrier %d joins threads of two kernels (%s:%d)", id, file, line);
  if (settings.parts > 1 && id != part_of(current) + 1)
    snprintf(wrong_barrier, sizeof wrong_barrier, "barrier %d does not belong to its kernel (%s:%d)", id, file, line);
  me.file = file;
  me.line = line;
  if (++waiting[id] == count) {
    waiting[id] = 0;
    parts_at[id] = 0;
    for (int n = 0; n < count_all; ++n)
      if (fibers[n].barrier == id) fibers[n].barrier = -1;
    return;
  }
  me.barrier = id;
  leave();
}

inline unsigned mask_of(unsigned mask = 0xFFFFFFFFu) { return mask; }
// Exchanges a value between all threads of `mask`; returns the values by lane.
inline const uint64_t* meet(unsigned mask, uint64_t value, const char* file, int line) {
  const int warp = current / 32, lane = current % 32;
  Fiber& me = fibers[current];
  const int lanes = count_all - warp * 32;
  if (lanes < 32) mask &= (1u << lanes) - 1;
  if (!(mask >> lane & 1)) fail("a thread is not in its own mask %08x (%s:%d)", mask, file, line);
  int at = 0;
  while (meetings[warp][at].mask && meetings[warp][at].mask != mask) ++at;
  if (at == 32) fail("more than 32 masks in a warp (%s:%d)", file, line);
  Meeting& here = meetings[warp][at];
  here.mask = mask;
  const int turn = here.turn;
  here.value[turn][lane] = value;
  here.arrived |= 1u << lane;
  if (here.arrived == mask) {
    here.arrived = 0;
    here.turn ^= 1;
    for (int n = 0; n < 32; ++n)
      if (mask >> n & 1) fibers[warp * 32 + n].mask = 0;
  } else {
    me.mask = mask;
    me.file = file;
    me.line = line;
    leave();
  }
  return here.value[turn];
}
inline void warp_barrier(unsigned mask, const char* file, int line) { meet(mask, 0, file, line); }

template <typename T> inline uint64_t packed(T value) {
  static_assert(sizeof(T) <= 8, "a shuffle of more than 8 bytes");
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  return word;
}
template <typename T> inline T unpacked(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}
template <typename T>
inline T shuffle(unsigned mask, T value, int source, bool own, const char* file, int line) {
  const uint64_t* all = meet(mask, packed(value), file, line);
  return own ? value : unpacked<T>(all[source & 31]);
}

inline void hang() {
  char where[1200] = "";
  int used = 0, ended = 0, listed = 0;
  for (int n = 0; n < count_all; ++n) {
    ended += fibers[n].ended;
    if (fibers[n].ended) continue;
    const Fiber& fiber = fibers[n];
    int same = 0;
    bool first = true;
    for (int m = 0; m < count_all; ++m) {
      const Fiber& other = fibers[m];
      if (other.ended || other.line != fiber.line || other.file != fiber.file ||
          other.barrier != fiber.barrier)
        continue;
      first &= m >= n;
      ++same;
    }
    if (!first || listed++ == 6) continue;
    if (fiber.barrier >= 0)
      used += snprintf(where + used, sizeof where - used, "; %d threads from %d wait at barrier %d, which counts %d (%s:%d)",
                       same, n, fiber.barrier, expected[fiber.barrier], fiber.file, fiber.line);
    else
      used += snprintf(where + used, sizeof where - used, "; %d threads from %d wait for their warp, mask %08x (%s:%d)",
                       same, n, fiber.mask, fiber.file, fiber.line);
  }
  fail("block %u,%u,%u hangs: %d of %d threads have ended%s", block_index.x, block_index.y,
       block_index.z, ended, count_all, where);
}

static void on_fault(int, siginfo_t* info, void*) {
  report->address = reinterpret_cast<uint64_t>(info->si_addr);
  fail("thread %d of block %u,%u,%u accesses memory out of bounds", current, block_index.x,
       block_index.y, block_index.z);
}

inline void run_block(uint64_t& random) {
  static int order[kMaxThreads];
  const uint32_t signalling = 0x7FA00000u;
  for (int n = 0; n < kArena; n += 4) {
    std::memcpy(arena + n, &signalling, 4);
    if (n < 65536 * 4) std::memcpy(dynamic_arena + n, &signalling, 4);
  }
  std::memset(waiting, 0, sizeof waiting);
  std::memset(parts_at, 0, sizeof parts_at);
  std::memset(meetings, 0, sizeof meetings);
  for (int n = 0; n < count_all; ++n) {
    prepare(n);
    order[n] = settings.schedule == 1 ? count_all - 1 - n : n;
    if (settings.schedule == 2) {
      const int warps = count_all / 32;
      order[n] = warps ? n % warps * 32 + n / warps : n;
    }
  }
  int remaining = count_all;
  while (remaining) {
    if (settings.schedule > 2)
      for (int n = count_all - 1; n > 0; --n) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        std::swap(order[n], order[(random >> 33) % static_cast<unsigned>(n + 1)]);
      }
    bool ran = false;
    for (int n = 0; n < count_all; ++n) {
      current = order[n];
      Fiber& fiber = fibers[current];
      if (fiber.ended || fiber.barrier >= 0 || fiber.mask) continue;
      ran = true;
      enter();
      remaining -= fiber.ended;
    }
    if (!ran) hang();
  }
}

inline void run_all() {
  struct sigaction action;
  std::memset(&action, 0, sizeof action);
  static char alternate[16384];
  stack_t other = {};
  other.ss_sp = alternate;
  other.ss_size = sizeof alternate;
  sigaltstack(&other, nullptr);
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
  uint64_t random = static_cast<uint64_t>(settings.schedule) * 0x9E3779B97F4A7C15u;
  for (unsigned n = 0; n < grid_dim.x * grid_dim.y * grid_dim.z; ++n) {
    block_index = {n % grid_dim.x, n / grid_dim.x % grid_dim.y, n / grid_dim.x / grid_dim.y};
    run_block(random);
  }
  if (wrong_barrier[0]) fail("%s", wrong_barrier);
}

template <typename... P, size_t... N>
inline void call_with(void (*kernel)(P...), void** values, std::index_sequence<N...>) {
  kernel(*static_cast<std::remove_reference_t<P>*>(values[N])...);
}
template <typename... P> inline void call(void (*kernel)(P...), void** values) {
  call_with(kernel, values, std::index_sequence_for<P...>());
}
// Of each parameter: size of its value or pointed-to element, and the kind of it.
struct Kind { int bytes, pointer, constant, floating, arithmetic, is_signed, lanes; };
template <typename P> inline Kind kind() {
  using T = std::remove_pointer_t<std::remove_reference_t<P>>;
  using L = Lanes<std::remove_cv_t<T>>;
  using V = typename L::type;
  return {static_cast<int>(sizeof(std::conditional_t<std::is_void_v<V>, char, V>)),
          std::is_pointer_v<P>, std::is_const_v<T>, std::is_floating_point_v<V>,
          std::is_arithmetic_v<V>, std::is_signed_v<V>, L::count};
}
template <typename... P> inline int describe(void (*)(P...), Kind* kinds) {
  const Kind all[] = {kind<P>()..., Kind{}};
  for (size_t n = 0; n < sizeof...(P); ++n) kinds[n] = all[n];
  return static_cast<int>(sizeof...(P));
}

template <typename T> inline T& counted(T* at) {
  if (std::is_floating_point_v<T>) report->float_atomics = 1;
  return *at;
}

}  // namespace slip

#define threadIdx (slip::thread_alone())
#define blockIdx (slip::block_index)
#define blockDim (slip::block_dim)
#define gridDim (slip::grid_dim)
namespace slip {
inline uint3 thread_alone() {
  const unsigned n = static_cast<unsigned>(current);
  return {n % block_dim.x, n / block_dim.x % block_dim.y, n / (block_dim.x * block_dim.y)};
}
}  // namespace slip

#define warpSize 32
#define SLIP_LANE (slip::current & 31)
#define __shfl_sync(mask, value, source, ...) \
  slip::shuffled(mask, value, 0, source, slip::width_of(__VA_ARGS__), __FILE__, __LINE__)
#define __shfl_up_sync(mask, value, delta, ...) \
  slip::shuffled(mask, value, 1, delta, slip::width_of(__VA_ARGS__), __FILE__, __LINE__)
#define __shfl_down_sync(mask, value, delta, ...) \
  slip::shuffled(mask, value, 2, delta, slip::width_of(__VA_ARGS__), __FILE__, __LINE__)
#define __shfl_xor_sync(mask, value, lanes, ...) \
  slip::shuffled(mask, value, 3, lanes, slip::width_of(__VA_ARGS__), __FILE__, __LINE__)
#define __ballot_sync(mask, test) slip::ballot(mask, test, __FILE__, __LINE__)
#define __any_sync(mask, test) (slip::ballot(mask, test, __FILE__, __LINE__) != 0)
#define __all_sync(mask, test) (slip::ballot(mask, !(test), __FILE__, __LINE__) == 0)
namespace slip {
inline int width_of(int width = 32) { return width; }
template <typename T>
inline T shuffled(unsigned mask, T value, int kind, int by, int width, const char* file, int line) {
  const int lane = SLIP_LANE, first = lane / width * width;
  int source = first + (by & (width - 1));
  bool own = false;
  if (kind == 1) source = lane - by, own = source < first;
  if (kind == 2) source = lane + by, own = source >= first + width;
  if (kind == 3) source = lane ^ by, own = source >= first + width;
  return shuffle(mask, value, source, own, file, line);
}
inline unsigned ballot(unsigned mask, bool test, const char* file, int line) {
  const uint64_t* all = meet(mask, test, file, line);
  unsigned found = 0;
  for (int n = 0; n < 32; ++n) found |= (mask >> n & 1 && all[n]) ? 1u << n : 0u;
  return found;
}
}  // namespace slip

#define SLIP_ATOMIC(name, value_of)                                             \
  template <typename T, typename U> inline T name(T* at, U operand) {             \
    T& place = slip::counted(at);                                               \
    const T old = place, with = static_cast<T>(operand);                          \
    place = value_of;                                                           \
    return old;                                                                 \
  }
SLIP_ATOMIC(atomicAdd, old + with)
SLIP_ATOMIC(atomicSub, old - with)
SLIP_ATOMIC(atomicMax, old > with ? old : with)
SLIP_ATOMIC(atomicMin, old < with ? old : with)
SLIP_ATOMIC(atomicAnd, old & with)
SLIP_ATOMIC(atomicOr, old | with)
SLIP_ATOMIC(atomicXor, old ^ with)
SLIP_ATOMIC(atomicExch, with)
SLIP_ATOMIC(atomicInc, old >= with ? 0 : old + 1)
SLIP_ATOMIC(atomicDec, old == 0 || old > with ? with : old - 1)
template <typename T, typename U, typename W> inline T atomicCAS(T* at, U expected, W with) {
  const T old = *at;
  if (old == static_cast<T>(expected)) *at = static_cast<T>(with);
  return old;
}
inline void __threadfence() {}
inline void __threadfence_block() {}
template <typename T> inline T __ldg(const T* at) { return *at; }
template <typename T, typename U> inline auto min(T a, U b) -> std::common_type_t<T, U> {
  return a < b ? a : b;
}
template <typename T, typename U> inline auto max(T a, U b) -> std::common_type_t<T, U> {
  return a > b ? a : b;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
  unsigned found = 0;
  for (int n = 0; n < 32; ++n) found |= (x >> n & 1) << (31 - n);
  return found;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return by & 31 ? high << (by & 31) | low >> (32 - (by & 31)) : high;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return by & 31 ? low >> (by & 31) | high << (32 - (by & 31)) : low;
}
inline int __mul24(int a, int b) { return a * b; }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline int __float_as_int(float x) { return slip::unpacked<int>(slip::packed(x)); }
inline float __int_as_float(int x) { return slip::unpacked<float>(slip::packed(x)); }
inline unsigned __float_as_uint(float x) { return slip::unpacked<unsigned>(slip::packed(x)); }
inline float __uint_as_float(unsigned x) { return slip::unpacked<float>(slip::packed(x)); }

// Functions that Python calls.
extern "C" {
void* slip_buffer(int64_t bytes, void** base, int64_t* whole) {
  const int64_t page = sysconf(_SC_PAGESIZE), wide = (bytes + 15) / 16 * 16;
  const int64_t inner = (wide + page - 1) / page * page;
  *whole = inner + 2 * page;
  void* at = mmap(nullptr, static_cast<size_t>(*whole), PROT_NONE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  *base = at;
  char* low = static_cast<char*>(at) + page;
  mprotect(low, static_cast<size_t>(inner), PROT_READ | PROT_WRITE);
  return low + inner - wide;
}
void slip_release(void* base, int64_t whole) { munmap(base, static_cast<size_t>(whole)); }
}
namespace slip {
inline void run(void (*kernel)(void**), void** kernel_arguments, const Settings* request, Report* result) {
  const size_t stack_bytes = static_cast<size_t>(kMaxThreads) * kStack;
  void* memory = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void* page = mmap(nullptr, sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  report = static_cast<Report*>(page);
  stacks = static_cast<char*>(memory);
  settings = *request;
  body = kernel;
  arguments = kernel_arguments;
  grid_dim = dim3(request->grid[0], request->grid[1], request->grid[2]);
  block_dim = dim3(request->block[0], request->block[1], request->block[2]);
  count_all = static_cast<int>(block_dim.x * block_dim.y * block_dim.z);
  const pid_t child = fork();
  if (child == 0) {
    run_all();
    _exit(0);
  }
  int status = 0;
  timespec began, now, nap = {0, 200000};
  clock_gettime(CLOCK_MONOTONIC, &began);
  bool late = false;
  while (child > 0 && waitpid(child, &status, WNOHANG) == 0) {
    nanosleep(&nap, nullptr);
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!late && now.tv_sec - began.tv_sec > request->limit_s) {
      late = true;
      kill(child, SIGKILL);
    }
  }
  *result = *report;
  if (late)
    result->failed = 2;
  else if (child < 0 || WIFSIGNALED(status))
    result->failed = 3;
  munmap(page, sizeof(Report));
  munmap(memory, stack_bytes);
}
}  // namespace slip
