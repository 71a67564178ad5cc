"""Two loops in one: items of a loop that waits for memory between calls of one that computes.

A memory loop has `items()`, `ahead(i)`, which asks for an item's memory, and `step(i)`; a computing
loop has `calls()` and `run(ask, work)`: it calls `ask` so often while its registers hold what it
adds up, and `work` between two tiles, when they hold nothing. Interleaved, a tile asks for the
memory of items that are worked on after it, so that it arrives while the tile multiplies, and
both loops end together (Bresenham's ratio). C++ of both is generated into one function by the
compiler that is there.

Source: Li et al., "Automatic Horizontal Fusion for GPU Kernels", CGO 2022; here on a processor,
whose window of instructions takes the place of the scheduler of warps.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from slipstream.codegen import load

DISTANCES = (0, 8, 32, 128)
"""Items ahead of which memory is asked for."""
BLOCK = 32
"""Columns of a product come in multiples of this."""
_DEEP = 256

_SOURCE = r"""
#include <cstdint>
#define INLINE inline __attribute__((always_inline))
// As many sums as registers hold: 24 of 16 numbers in 32, else 12 of 8 in 16.
#ifdef __AVX512F__
#define WIDTH 64
#define EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#else
#define WIDTH 32
#define EACH(X) X(0) X(1) X(2) X(3) X(4) X(5)
#endif
namespace {
using i64 = int64_t;
typedef float V __attribute__((vector_size(WIDTH)));
typedef float U __attribute__((vector_size(WIDTH), aligned(4), may_alias));
constexpr i64 kLanes = WIDTH / 4, kLine = 16;
INLINE V get(const float* p) { return *reinterpret_cast<const U*>(p); }
INLINE void put(float* p, V v) { *reinterpret_cast<U*>(p) = v; }
INLINE V all(float x) { return x - V{}; }

// Rows of a table by number: table, numbers, result; rows, columns of the table.
struct Gather {
  const float* table; const i64* ids; float* out; i64 count, width;
  Gather(void** p, const i64* n)
      : table(static_cast<const float*>(p[0])), ids(static_cast<const i64*>(p[1])),
        out(static_cast<float*>(p[2])), count(n[0]), width(n[1]) {}
  i64 items() const { return count; }
  INLINE void ahead(i64 i) const {
    if (i >= count) return;
    const char* row = reinterpret_cast<const char*>(table + ids[i] * width);
    const char* to = reinterpret_cast<const char*>(out + i * width);
    for (i64 at = 0; at < width * 4; at += 64) {
      __builtin_prefetch(row + at);
      // What is written is fetched, too, and no stream that a processor would notice.
      __builtin_prefetch(to + at, 1);
    }
  }
  INLINE void step(i64 i) const {
    const float* from = table + ids[i] * width;
    float* to = out + i * width;
    i64 c = 0;
    for (; c + kLanes <= width; c += kLanes) put(to + c, get(from + c));
    for (; c < width; ++c) to[c] = from[c];
  }
};
// A step of gradient descent, in place: parameters, gradients, momenta or none, settings (learning
// rate, momentum, decay); count.
struct Descent {
  float *x, *m; const float *g; float rate, momentum, decay; i64 count;
  Descent(void** p, const i64* n)
      : x(static_cast<float*>(p[0])), m(static_cast<float*>(p[2])),
        g(static_cast<const float*>(p[1])), count(n[0]) {
    const float* s = static_cast<const float*>(p[3]);
    rate = s[0], momentum = s[1], decay = s[2];
  }
  i64 items() const { return count / kLine; }
  INLINE void ahead(i64 i) const {
    __builtin_prefetch(x + i * kLine, 1);
    __builtin_prefetch(g + i * kLine);
    if (m) __builtin_prefetch(m + i * kLine, 1);
  }
  INLINE void step(i64 i) const {
    for (i64 at = i * kLine; at < (i + 1) * kLine; at += kLanes) {
      V v = get(g + at) + get(x + at) * decay;
      if (m) put(m + at, v += get(m + at) * momentum);
      put(x + at, get(x + at) - v * rate);
    }
  }
};
// A step of Adam, in place: parameters, gradients, both moments, settings (learning rate over the
// first correction, both betas, epsilon, decay into the gradient, decay of the parameter, root of
// the second correction); count.
struct Adam {
  float *x, *m, *v; const float *g; float s[7]; i64 count;
  Adam(void** p, const i64* n)
      : x(static_cast<float*>(p[0])), m(static_cast<float*>(p[2])),
        v(static_cast<float*>(p[3])), g(static_cast<const float*>(p[1])), count(n[0]) {
    for (int i = 0; i < 7; ++i) s[i] = static_cast<const float*>(p[4])[i];
  }
  i64 items() const { return count / kLine; }
  INLINE void ahead(i64 i) const {
    __builtin_prefetch(x + i * kLine, 1);
    __builtin_prefetch(m + i * kLine, 1);
    __builtin_prefetch(v + i * kLine, 1);
    __builtin_prefetch(g + i * kLine);
  }
  INLINE void step(i64 i) const {
#pragma GCC ivdep
    for (i64 at = i * kLine; at < (i + 1) * kLine; ++at) {
      const float d = g[at] + s[4] * x[at];
      const float one = m[at] + (d - m[at]) * (1 - s[1]), two = v[at] * s[2] + d * d * (1 - s[2]);
      m[at] = one, v[at] = two;
      x[at] = x[at] * (1 - s[5]) - s[0] * one / (__builtin_sqrtf(two) / s[6] + s[3]);
    }
  }
};
// A sweep that reads and writes past the caches: from, to; count.
struct Sweep {
  const float* from; float* to; i64 count;
  Sweep(void** p, const i64* n)
      : from(static_cast<const float*>(p[0])), to(static_cast<float*>(p[1])), count(n[0]) {}
  i64 items() const { return count / 16; }
  INLINE void ahead(i64 i) const { __builtin_prefetch(from + i * kLine, 0, 0); }
  INLINE void step(i64 i) const {
    for (i64 at = i * kLine; at < (i + 1) * kLine; at += kLanes) {
      const V v = get(from + at) * 1.5f;
#if defined(__AVX512F__)
      __builtin_ia32_movntps512(to + at, v);
#elif defined(__AVX__)
      __builtin_ia32_movntps256(to + at, v);
#else
      put(to + at, v);
#endif
    }
  }
};
// x @ w.T + bias: x, w, bias, result, room for a panel of w, for x in tiles; rows, columns, inner,
// strides of x and of w. The inner dimension in parts that the first caches hold.
struct Product {
  const float *x, *w, *bias; float *out, *panel, *tiles;
  i64 rows, columns, inner, row_x, in_x, row_w, in_w;
#define COUNT(r) +1
  static constexpr int kRows = 0 EACH(COUNT), kEach = 8, kDeep = 256, kWide = 2 * kLanes;
  Product(void** p, const i64* n)
      : x(static_cast<const float*>(p[0])), w(static_cast<const float*>(p[1])),
        bias(static_cast<const float*>(p[2])), out(static_cast<float*>(p[3])),
        panel(static_cast<float*>(p[4])), tiles(static_cast<float*>(p[5])),
        rows(n[0]), columns(n[1]), inner(n[2]), row_x(n[3]), in_x(n[4]), row_w(n[5]), in_w(n[6]) {}
  i64 calls() const { return rows / kRows * (columns / kWide) * (inner / kEach); }
  void pack(i64 column, i64 from, i64 deep) const {
    const float* at = w + column * row_w + from * in_w;
    if (row_w == 1)
      for (i64 k = 0; k < deep; ++k)
        for (i64 c = 0; c < kWide; ++c) panel[k * kWide + c] = at[k * in_w + c];
    else
      for (i64 c = 0; c < kWide; ++c)
        for (i64 k = 0; k < deep; ++k) panel[k * kWide + c] = at[c * row_w + k * in_w];
  }
  void pack_rows(i64 from, i64 deep) const {
    for (i64 row = 0; row + kRows <= rows; row += kRows)
      for (i64 k = 0; k < deep; ++k)
        for (i64 r = 0; r < kRows; ++r)
          tiles[row * deep + k * kRows + r] = x[(row + r) * row_x + (from + k) * in_x];
  }
  INLINE V first(i64 row, i64 column, i64 from) const {
    if (from) return get(out + row * columns + column);
    return bias ? get(bias + column) : V{};
  }
  template <typename F>
  INLINE void tile(i64 row, i64 column, i64 from, i64 deep, F&& ask) const {
#define BEGIN(r) V left##r = V{}, right##r = V{};
    EACH(BEGIN)
    const float* a = tiles + row * deep;
    const float* b = panel;
    for (i64 k = 0; k < deep; k += kEach) {
      ask();
#pragma GCC unroll 8
      for (int d = 0; d < kEach; ++d, a += kRows, b += kWide) {
        const V left = get(b), right = get(b + kLanes);
#define ADD(r)              \
  {                         \
    const V v = all(a[r]);  \
    left##r += v * left;    \
    right##r += v * right;  \
  }
        EACH(ADD)
      }
    }
    const i64 other = column + kLanes;
#define END(r)                                                                        \
  put(out + (row + r) * columns + column, left##r + first(row + r, column, from));   \
  put(out + (row + r) * columns + other, right##r + first(row + r, other, from));
    EACH(END)
  }
  void last(i64 row, i64 column, i64 from, i64 deep) const {
    V left = first(row, column, from), right = first(row, column + kLanes, from);
    for (i64 k = 0; k < deep; ++k) {
      const V v = all(x[row * row_x + (from + k) * in_x]);
      left += v * get(panel + k * kWide);
      right += v * get(panel + k * kWide + kLanes);
    }
    put(out + row * columns + column, left);
    put(out + row * columns + column + kLanes, right);
  }
  template <typename F, typename G> INLINE void run(F&& ask, G&& work) const {
    for (i64 from = 0; from < inner; from += kDeep) {
      const i64 deep = inner - from < kDeep ? inner - from : kDeep;
      pack_rows(from, deep);
      for (i64 column = 0; column < columns; column += kWide) {
        pack(column, from, deep);
        i64 row = 0;
        for (; row + kRows <= rows; row += kRows) {
          tile(row, column, from, deep, ask);
          work();
        }
        for (; row < rows; ++row) last(row, column, from, deep);
      }
    }
  }
};
// Arithmetic in registers alone: result; turns, of a multiplication and an addition for each sum.
// Memory is asked for between blocks of turns: with a request between any two, the sums alone took
// 1.6 times as long, even with nothing to ask for (AMD family 25, AVX2).
struct Arithmetic {
  float* out; i64 turns;
  Arithmetic(void** p, const i64* n) : out(static_cast<float*>(p[0])), turns(n[0]) {}
  static constexpr i64 kBlock = 8;
  i64 calls() const { return turns / kBlock; }
  template <typename F, typename G> INLINE void run(F&& ask, G&& work) const {
#define SET(r) V sum##r = all(static_cast<float>(r));
    EACH(SET)
#define TURN(r) sum##r = sum##r * all(1.0001f) + all(0.5f);
    i64 t = 0;
    for (; t + kBlock <= turns; t += kBlock) {
      ask();
      if (t % (2 * kBlock) == 0) work();
#pragma GCC unroll 8
      for (i64 d = 0; d < kBlock; ++d) { EACH(TURN) }
    }
    for (; t < turns; ++t) { EACH(TURN) }
#define KEEP(r) put(out + r * kLanes, sum##r);
    EACH(KEEP)
  }
};

template <typename M> INLINE void memory_alone(const M& memory, i64 distance) {
  const i64 items = memory.items();
  for (i64 i = 0; i < items; ++i) {
    if (distance) memory.ahead(i + distance);
    memory.step(i);
  }
}
// Items between asking for one and working on it: as much as memory takes to answer.
constexpr i64 kBehind = 48;
struct Nothing { INLINE void operator()() const {} };
template <typename M, typename C> INLINE void interleaved(const M& memory, const C& compute) {
  const i64 items = memory.items(), calls = compute.calls() > 0 ? compute.calls() : 1;
  const M mine = memory;  // which no store can change
  i64 done = 0, asked = 0, owed = 0;
  compute.run(
      [&]() __attribute__((always_inline)) {
        for (owed += items; owed >= calls && asked < items; owed -= calls) mine.ahead(asked++);
      },
      [&]() __attribute__((always_inline)) {
        while (done + kBehind < asked) mine.step(done++);
      });
  while (done < items) mine.step(done++);
}
}  // namespace
extern "C" void memory_alone(void** p, const i64* n, i64 distance) {
  memory_alone(MEMORY(p, n), distance);
}
extern "C" void compute_alone(void** p, const i64* n, i64) {
  COMPUTE(p, n).run(Nothing{}, Nothing{});
}
extern "C" void together(void** p, const i64* n, i64) {
  interleaved(MEMORY(p, n), COMPUTE(p + ARRAYS, n + SIZES));
}
"""
# Of each loop: how many arrays and how many sizes it takes.
_TAKES = {
    "Gather": (3, 2),
    "Descent": (4, 1),
    "Adam": (5, 1),
    "Sweep": (2, 1),
    "Product": (6, 7),
    "Arithmetic": (1, 1),
}


@dataclass(frozen=True)
class Loop:
    """A loop with what it works on.

    Attributes:
        kind: Gather, Descent, Adam and Sweep wait for memory; Product and Arithmetic compute.
        arrays: float32 and int64 on the processor, contiguous; None for a bias that is not there.
        sizes: as the kind's C++ says.
    """

    kind: str
    arrays: tuple[torch.Tensor | None, ...]
    sizes: tuple[int, ...]


def interleave(memory: Loop, compute: Loop) -> Callable[[], None]:
    """Both loops as one function.

    Raises:
        CompileError: there is no compiler, or it fails.
    """
    return _call("together", memory.kind, compute.kind, (memory, compute), 0)


def alone(loop: Loop, distance: int = 0) -> Callable[[], None]:
    """One loop as a function."""
    computes = loop.kind in ("Product", "Arithmetic")
    if computes:
        return _call("compute_alone", "Gather", loop.kind, (loop,), 0)
    return _call("memory_alone", loop.kind, "Arithmetic", (loop,), distance)


def gather(table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> Loop:
    """Rows `ids` [n] of `table` [rows, width] into `out` [n, width]; ids are within the table."""
    return Loop("Gather", (table, ids, out), (ids.numel(), table.shape[1]))


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> Loop:
    """``x @ weight.T + bias`` into `out`, which is contiguous; see `fits`."""
    panel, tiles = torch.empty(_DEEP * BLOCK), torch.empty(x.shape[0] * _DEEP)
    sizes = (x.shape[0], weight.shape[0], weight.shape[1], *x.stride(), *weight.stride())
    return Loop("Product", (x, weight, bias, out, panel, tiles), sizes)


def fits(columns: int, inner: int) -> bool:
    """Whether a product of so many columns, and so many numbers added up, has no rest."""
    return columns % BLOCK == 0 and inner % 8 == 0 and inner > 0


@functools.cache
def _library(memory: str, compute: str) -> ctypes.CDLL:
    arrays, sizes = _TAKES[memory]
    extra = (f"-DMEMORY={memory}", f"-DCOMPUTE={compute}", f"-DARRAYS={arrays}", f"-DSIZES={sizes}")
    library = load(_SOURCE, extra)
    for name in ("memory_alone", "compute_alone", "together"):
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        function.restype = None
    return library


def version() -> str:
    """What tells one wording of these loops from another, where durations are kept."""
    return hashlib.sha256(_SOURCE.encode()).hexdigest()[:12]


def _call(
    name: str, memory: str, compute: str, loops: Sequence[Loop], distance: int
) -> Callable[[], None]:
    function = getattr(_library(memory, compute), name)
    given = [array for loop in loops for array in loop.arrays]
    numbers = [size for loop in loops for size in loop.sizes]
    pointers = (ctypes.c_void_p * len(given))(
        *(a.data_ptr() if a is not None else 0 for a in given)
    )
    counts = (ctypes.c_int64 * len(numbers))(*numbers)

    def run() -> None:
        function(pointers, counts, distance)
        assert given  # holds the arrays as long as the function lives

    return run
