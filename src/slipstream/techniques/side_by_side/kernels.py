"""Two loops in one: items of a loop that waits for memory between calls of one that computes.

A memory loop has `items()`, `ahead(i)`, which asks for an item's memory, and `step(i)`; a computing
loop has `calls()` and `run(between)`, which calls `between` so often while its registers hold what
it adds up. Interleaved, both end together (Bresenham's ratio), and memory is asked for some items
ahead, so that it arrives while the other loop multiplies. C++ of both is generated into one
function, by the compiler that is there; without AVX-512 the vectors are emulated by it.

Source: Li et al., "Automatic Horizontal Fusion for GPU Kernels", CGO 2022; here on a processor,
whose window of instructions takes the place of the scheduler of warps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from slipstream.codegen import load

DISTANCES = (0, 8, 32, 128)
"""Items ahead of which memory is asked for."""
BLOCK = 32
"""Columns of a product that are computed at once."""

# Columns of a product in panels, rows in tiles of 12: 24 sums in registers of 16 numbers.
_SOURCE = r"""
#include <cstdint>
#define INLINE inline __attribute__((always_inline))
#define EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
namespace {
using i64 = int64_t;
typedef float V __attribute__((vector_size(64)));
typedef float U __attribute__((vector_size(64), aligned(4), may_alias));
INLINE V get(const float* p) { return *reinterpret_cast<const U*>(p); }
INLINE void put(float* p, V v) { *reinterpret_cast<U*>(p) = v; }
INLINE V all(float x) {
  return V{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}

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
    for (; c + 16 <= width; c += 16) put(to + c, get(from + c));
    for (; c < width; ++c) to[c] = from[c];
  }
};
// A step of gradient descent with momentum, in place: parameters, gradients, momenta; count.
struct Update {
  float *x, *m; const float* g; i64 count;
  Update(void** p, const i64* n)
      : x(static_cast<float*>(p[0])), m(static_cast<float*>(p[2])),
        g(static_cast<const float*>(p[1])), count(n[0]) {}
  i64 items() const { return count / 16; }
  INLINE void ahead(i64 i) const {
    __builtin_prefetch(x + i * 16, 1);
    __builtin_prefetch(m + i * 16, 1);
    __builtin_prefetch(g + i * 16);
  }
  INLINE void step(i64 i) const {
    const V v = get(m + i * 16) * 0.9f + get(g + i * 16);
    put(m + i * 16, v);
    put(x + i * 16, get(x + i * 16) - v * 0.01f);
  }
};
// A sweep that reads and writes past the caches: from, to; count.
struct Sweep {
  const float* from; float* to; i64 count;
  Sweep(void** p, const i64* n)
      : from(static_cast<const float*>(p[0])), to(static_cast<float*>(p[1])), count(n[0]) {}
  i64 items() const { return count / 16; }
  INLINE void ahead(i64 i) const { __builtin_prefetch(from + i * 16); }
  INLINE void step(i64 i) const {
    const V v = get(from + i * 16) * 1.5f;
#ifdef __AVX512F__
    __builtin_ia32_movntps512(to + i * 16, v);
#else
    put(to + i * 16, v);
#endif
  }
};
// x @ w.T + bias: x, w, bias, result, room for a panel of w, for x in tiles; rows, columns, inner.
struct Product {
  const float *x, *w, *bias; float *out, *panels, *tiles; i64 rows, columns, inner;
  static constexpr int kRows = 12, kEach = 8;
  Product(void** p, const i64* n)
      : x(static_cast<const float*>(p[0])), w(static_cast<const float*>(p[1])),
        bias(static_cast<const float*>(p[2])), out(static_cast<float*>(p[3])),
        panels(static_cast<float*>(p[4])), tiles(static_cast<float*>(p[5])),
        rows(n[0]), columns(n[1]), inner(n[2]) {}
  i64 calls() const { return rows / kRows * (columns / 32) * (inner / kEach); }
  INLINE void pack(i64 panel) const {
    for (i64 c = 0; c < 32; ++c) {
      const float* from = w + (panel * 32 + c) * inner;
      for (i64 k = 0; k < inner; ++k) panels[k * 32 + c] = from[k];
    }
  }
  void pack_rows() const {
    for (i64 row = 0; row + kRows <= rows; row += kRows)
      for (i64 r = 0; r < kRows; ++r)
        for (i64 k = 0; k < inner; ++k)
          tiles[row * inner + k * kRows + r] = x[(row + r) * inner + k];
  }
  template <typename F> INLINE void tile(i64 row, i64 panel, F&& between) const {
#define BEGIN(r) V left##r = V{}, right##r = V{};
    EACH(BEGIN)
    const float* a = tiles + row * inner;
    const float* b = panels;
    for (i64 k = 0; k < inner; k += kEach) {
      between();
#pragma GCC unroll 8
      for (int d = 0; d < kEach; ++d, a += kRows, b += 32) {
        const V left = get(b), right = get(b + 16);
#define ADD(r)                                  \
  {                                             \
    const V v = all(a[r]);                       \
    left##r += v * left;                        \
    right##r += v * right;                      \
  }
        EACH(ADD)
      }
    }
    float* to = out + row * columns + panel * 32;
    const V one = bias ? get(bias + panel * 32) : V{};
    const V two = bias ? get(bias + panel * 32 + 16) : V{};
#define END(r)                                  \
  put(to + r * columns, left##r + one);         \
  put(to + r * columns + 16, right##r + two);
    EACH(END)
  }
  void last(i64 row, i64 panel) const {
    V left = V{}, right = V{};
    for (i64 k = 0; k < inner; ++k) {
      left += all(x[row * inner + k]) * get(panels + k * 32);
      right += all(x[row * inner + k]) * get(panels + k * 32 + 16);
    }
    const V none = V{};
    float* to = out + row * columns + panel * 32;
    put(to, left + (bias ? get(bias + panel * 32) : none));
    put(to + 16, right + (bias ? get(bias + panel * 32 + 16) : none));
  }
  template <typename F> INLINE void run(F&& between) const {
    pack_rows();
    for (i64 panel = 0; panel < columns / 32; ++panel) {
      pack(panel);
      i64 row = 0;
      for (; row + kRows <= rows; row += kRows) tile(row, panel, between);
      for (; row < rows; ++row) last(row, panel);
    }
  }
};
// Arithmetic in registers alone: result; turns, of 12 multiplications and additions each.
struct Arithmetic {
  float* out; i64 turns;
  Arithmetic(void** p, const i64* n) : out(static_cast<float*>(p[0])), turns(n[0]) {}
  i64 calls() const { return turns; }
  template <typename F> INLINE void run(F&& between) const {
#define SET(r) V sum##r = all(static_cast<float>(r));
    EACH(SET)
    for (i64 t = 0; t < turns; ++t) {
      between();
#define TURN(r) sum##r = sum##r * all(1.0001f) + all(0.5f);
      EACH(TURN)
    }
#define KEEP(r) put(out + r * 16, sum##r);
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
struct Nothing { INLINE void operator()() const {} };
template <typename M, typename C>
INLINE void interleaved(const M& memory, const C& compute, i64 distance) {
  const i64 items = memory.items(), calls = compute.calls() > 0 ? compute.calls() : 1;
  const M mine = memory;  // which no store can change
  i64 done = 0, owed = 0;
  compute.run([&]() __attribute__((always_inline)) {
    for (owed += items; owed >= calls && done < items; owed -= calls) {
      if (distance) mine.ahead(done + distance);
      mine.step(done++);
    }
  });
  for (; done < items; ++done) mine.step(done);
}
}  // namespace
extern "C" void memory_alone(void** p, const i64* n, i64 distance) {
  memory_alone(MEMORY(p, n), distance);
}
extern "C" void compute_alone(void** p, const i64* n, i64) { COMPUTE(p, n).run(Nothing{}); }
extern "C" void together(void** p, const i64* n, i64 distance) {
  interleaved(MEMORY(p, n), COMPUTE(p + ARRAYS, n + SIZES), distance);
}
"""
# Of each loop: how many arrays and how many sizes it takes.
_TAKES = {
    "Gather": (3, 2),
    "Update": (3, 1),
    "Sweep": (2, 1),
    "Product": (6, 3),
    "Arithmetic": (1, 1),
}


@dataclass(frozen=True)
class Loop:
    """A loop with what it works on.

    Attributes:
        kind: Gather, Update and Sweep wait for memory; Product and Arithmetic compute.
        arrays: float32 and int64 on the processor, contiguous; None for a bias that is not there.
        sizes: as the kind's C++ says.
    """

    kind: str
    arrays: tuple[torch.Tensor | None, ...]
    sizes: tuple[int, ...]


def interleave(memory: Loop, compute: Loop, distance: int) -> Callable[[], None]:
    """Both loops as one function.

    Args:
        distance: items ahead of which memory is asked for, of `DISTANCES`.

    Raises:
        CompileError: there is no compiler, or it fails.
    """
    return _call("together", memory.kind, compute.kind, (memory, compute), distance)


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
    """``x @ weight.T + bias`` into `out`; see `fits`."""
    panel, tiles = torch.empty(weight.shape[1] * BLOCK), torch.empty(x.numel())
    sizes = (x.shape[0], weight.shape[0], weight.shape[1])
    return Loop("Product", (x, weight, bias, out, panel, tiles), sizes)


def fits(columns: int, inner: int) -> bool:
    """Whether a product of so many columns, and so many numbers added up, has no rest."""
    return columns % BLOCK == 0 and inner % 8 == 0 and inner > 0


def _call(
    name: str, memory: str, compute: str, loops: Sequence[Loop], distance: int
) -> Callable[[], None]:
    arrays, sizes = _TAKES[memory]
    extra = (f"-DMEMORY={memory}", f"-DCOMPUTE={compute}", f"-DARRAYS={arrays}", f"-DSIZES={sizes}")
    function = getattr(load(_SOURCE, extra), name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function.restype = None
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
