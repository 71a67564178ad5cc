// Kernels fused by slipstream: each runs on separate threads of every block.
#ifdef __CUDACC__
#define SLIP_INLINE __device__ __forceinline__
#ifdef SLIP_BLOCKS
#define SLIP_KERNEL(threads) __global__ void __launch_bounds__(threads, SLIP_BLOCKS)
#else
#define SLIP_KERNEL(threads) __global__ void __launch_bounds__(threads)
#endif
#define SLIP_BARRIER(id, count) slip::barrier<id, count>()
#define SLIP_SHARED(type, name, align) __shared__ align type name
extern __shared__ __align__(128) unsigned char slip_bytes[];
namespace slip {
template <int ID, int COUNT> SLIP_INLINE void barrier() {
  asm volatile("bar.sync %0, %1;" : : "n"(ID), "n"(COUNT) : "memory");
}
SLIP_INLINE unsigned char* dynamic() { return slip_bytes; }
SLIP_INLINE unsigned linear_thread() { return threadIdx.x; }
}  // namespace slip
#else
#include "slip_emulator.h"
#endif

namespace slip {
// The grid of a kernel before fusion, and the current block in it.
struct Place {
  dim3 grid;
  uint3 block;
};
SLIP_INLINE unsigned count(dim3 grid) { return grid.x * grid.y * grid.z; }
SLIP_INLINE Place place(dim3 grid, unsigned block) {
  Place result;
  result.grid = grid;
  result.block.x = block % grid.x;
  result.block.y = block / grid.x % grid.y;
  result.block.z = block / grid.x / grid.y;
  return result;
}
template <unsigned START, unsigned X, unsigned Y, unsigned Z> SLIP_INLINE uint3 thread() {
  const unsigned linear = linear_thread() - START;
  uint3 result;
  result.x = linear % X;
  result.y = linear / X % Y;
  result.z = linear / (X * Y);
  return result;
}
template <unsigned X, unsigned Y, unsigned Z> SLIP_INLINE dim3 extent() { return dim3(X, Y, Z); }
}  // namespace slip
