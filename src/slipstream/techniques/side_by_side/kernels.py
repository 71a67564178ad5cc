"""Interleaving of two loops: a memory-bound one and a compute-bound one.

A memory loop has `items()`, `ahead(i)`, which prefetches an item, and `step(i)`, which processes
it. A compute loop has `calls()` and `run(ask, work)`: it calls `ask` `calls()` times while its sums
are in registers, and `work` between two tiles, when registers are free. Interleaved, a tile
prefetches the items that are processed after it, so that their memory arrives while the tile
multiplies, and both loops end together (Bresenham's ratio). The local C++ compiler compiles both
into one function.

Source: Li et al., "Automatic Horizontal Fusion for GPU Kernels", CGO 2022; here on a CPU, whose
out-of-order execution replaces the warp scheduler.
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
"""Prefetch distances, in items."""
BLOCK = 32
"""The columns of a product are a multiple of this."""
_DEEP = 256

_SOURCE = r"""
#include <cstdint>
#define INLINE inline __attribute__((always_inline))
// Sums that fit into registers: 24 of 16 numbers in 32 registers, or 12 of 8 in 16.
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

// Rows of a table by index: table, indices, result; number of indices, columns of the table.
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
      // The written row is prefetched too: hardware prefetchers do not detect a stream here.
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
// A step of gradient descent, in place: parameters, gradients, momenta or null, settings (learning
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
// A sweep that reads and writes without caching: from, to; count.
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
// x @ w.T + bias: x, w, bias, result, buffers for a panel of w and for x in tiles; rows, columns,
// inner, strides of x and of w. The inner dimension is split into parts that fit into the L1 cache.
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
// Arithmetic in registers only: result; turns, of a multiplication and an addition for each sum.
// Prefetches are between blocks of turns: with one between any two turns, the sums alone took
// 1.6 times as long, even if there was nothing to prefetch (AMD family 25, AVX2).
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
// Items between the prefetch of an item and its processing, to cover the memory latency.
constexpr i64 kBehind = 48;
struct Nothing { INLINE void operator()() const {} };
template <typename M, typename C> INLINE void interleaved(const M& memory, const C& compute) {
  const i64 items = memory.items(), calls = compute.calls() > 0 ? compute.calls() : 1;
  const M copy = memory;  // no store can alias a local copy
  i64 done = 0, prefetched = 0, due = 0;
  compute.run(
      [&]() __attribute__((always_inline)) {
        for (due += items; due >= calls && prefetched < items; due -= calls)
          copy.ahead(prefetched++);
      },
      [&]() __attribute__((always_inline)) {
        while (done + kBehind < prefetched) copy.step(done++);
      });
  while (done < items) copy.step(done++);
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
# Number of arrays and of sizes of each loop.
_ARGUMENT_COUNTS = {
    "Gather": (3, 2),
    "Descent": (4, 1),
    "Adam": (5, 1),
    "Sweep": (2, 1),
    "Product": (6, 7),
    "Arithmetic": (1, 1),
}


@dataclass(frozen=True)
class Loop:
    """A loop with its arguments.

    Attributes:
        kind: Gather, Descent, Adam and Sweep are memory-bound; Product and Arithmetic are
            compute-bound.
        arrays: contiguous float32 and int64 tensors on the CPU; None for a missing bias.
        sizes: arguments that the kind's C++ class lists.
    """

    kind: str
    arrays: tuple[torch.Tensor | None, ...]
    sizes: tuple[int, ...]


def interleave(memory: Loop, compute: Loop) -> Callable[[], None]:
    """Return a function that runs both loops interleaved.

    Raises:
        CompileError: there is no compiler, or compilation fails.
    """
    return _call("together", memory.kind, compute.kind, (memory, compute), 0)


def alone(loop: Loop, distance: int = 0) -> Callable[[], None]:
    """Return a function that runs one loop; `distance` is in items, 0 for no prefetches."""
    computes = loop.kind in ("Product", "Arithmetic")
    if computes:
        return _call("compute_alone", "Gather", loop.kind, (loop,), 0)
    return _call("memory_alone", loop.kind, "Arithmetic", (loop,), distance)


def gather(table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> Loop:
    """Copy rows `ids` [n] of `table` [rows, width] to `out` [n, width]; ids are not checked."""
    return Loop("Gather", (table, ids, out), (ids.numel(), table.shape[1]))


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> Loop:
    """Compute ``x @ weight.T + bias`` in the contiguous `out`; see `fits`."""
    panel, tiles = torch.empty(_DEEP * BLOCK), torch.empty(x.shape[0] * _DEEP)
    sizes = (x.shape[0], weight.shape[0], weight.shape[1], *x.stride(), *weight.stride())
    return Loop("Product", (x, weight, bias, out, panel, tiles), sizes)


def fits(columns: int, inner: int) -> bool:
    """Whether a product of `columns` columns and `inner` summands consists of whole tiles."""
    return columns % BLOCK == 0 and inner % 8 == 0 and inner > 0


@functools.cache
def _library(memory: str, compute: str) -> ctypes.CDLL:
    arrays, sizes = _ARGUMENT_COUNTS[memory]
    extra = (f"-DMEMORY={memory}", f"-DCOMPUTE={compute}", f"-DARRAYS={arrays}", f"-DSIZES={sizes}")
    library = load(_SOURCE, extra)
    for name in ("memory_alone", "compute_alone", "together"):
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        function.restype = None
    return library


def version() -> str:
    """Return a hash of these loops, which identifies them in stored durations."""
    return hashlib.sha256(_SOURCE.encode()).hexdigest()[:12]


def _call(
    name: str, memory: str, compute: str, loops: Sequence[Loop], distance: int
) -> Callable[[], None]:
    function = getattr(_library(memory, compute), name)
    arrays = [array for loop in loops for array in loop.arrays]
    sizes = [size for loop in loops for size in loop.sizes]
    pointers = (ctypes.c_void_p * len(arrays))(
        *(a.data_ptr() if a is not None else 0 for a in arrays)
    )
    counts = (ctypes.c_int64 * len(sizes))(*sizes)

    def run() -> None:
        function(pointers, counts, distance)
        assert arrays  # keeps the arrays alive

    return run
