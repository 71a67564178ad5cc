// Twenty kernels of many kinds, of which any two are fused: what a fused kernel must keep apart.
#include <cuda_runtime.h>
#define WARP 32
#define EVERYONE 0xffffffffu
#define LINEAR (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z))
#define WAIT __syncthreads()

struct Range {
  int begin, end;
  __device__ bool holds(int i) const { return i >= begin && i < end; }
};

__device__ float warp_sum(float v) {
  for (int d = WARP / 2; d > 0; d /= 2) v += __shfl_xor_sync(EVERYONE, v, d);
  return v;
}
__device__ int thread_of_grid() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ int threads_of_grid() { return gridDim.x * blockDim.x; }
__device__ void block_sum(float* s, int t) {
  for (int d = blockDim.x / 2; d > 0; d /= 2) {
    if (t < d) s[t] += s[t + d];
    __syncthreads();
  }
}
template <typename T, int N> __device__ T power(T x) {
  T y = 1;
#pragma unroll
  for (int i = 0; i < N; ++i) y *= x;
  return y;
}

// 1: a loop over the grid, no barrier.
__global__ void saxpy(const float* x, float* y, float a, int n) {
  for (int i = thread_of_grid(); i < n; i += threads_of_grid()) y[i] = a * x[i] + y[i];
}
// 2: an early return.
extern "C" __global__ void relu(float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  if (x[i] > 0.5f) return;
  x[i] = 0.0f;
}
// 3: barriers in a function that it calls.
__global__ void __launch_bounds__(256) block_sums(const float* x, float* y, int n) {
  __shared__ float s[512];
  const int t = threadIdx.x;
  float a = 0;
  for (int i = thread_of_grid(); i < n; i += threads_of_grid()) a += x[i];
  s[t] = a;
  __syncthreads();
  block_sum(s, t);
  if (t == 0) y[blockIdx.x] = s[0];
}
// 4: shuffles, and shared memory between warps.
__global__ void warp_sums(const float* x, float* y, int n) {
  __shared__ float of_warp[WARP];
  int i = thread_of_grid();
  float v = warp_sum(i < n ? x[i] : 0.0f);
  if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = v;
  WAIT;
  if (threadIdx.x == 0) {
    float sum = 0;
    for (unsigned w = 0; w < blockDim.x / WARP; ++w) sum += of_warp[w];
    y[blockIdx.x] = sum;
  }
}
// 5: shared memory whose size is told at the launch.
__global__ void reverse(const int* x, int* y) {
  extern __shared__ int turned[];
  int t = threadIdx.x, base = blockIdx.x * blockDim.x;
  turned[blockDim.x - 1 - t] = x[base + t];
  __syncthreads();
  y[base + t] = turned[t];
}
// 6: a block of two dimensions, and a tile with padding.
__global__ void transpose(const float* x, float* y, int width, int height) {
  __shared__ float tile[32][33];
  for (int row = threadIdx.y; row < 32; row += blockDim.y) {
    int r = blockIdx.y * 32 + row, c = blockIdx.x * 32 + threadIdx.x;
    if (r < height && c < width) tile[row][threadIdx.x] = x[r * width + c];
  }
  __syncthreads();
  for (int row = threadIdx.y; row < 32; row += blockDim.y) {
    int r = blockIdx.x * 32 + row, c = blockIdx.y * 32 + threadIdx.x;
    if (r < width && c < height) y[r * height + c] = tile[threadIdx.x][row];
  }
}
// 7: a block of three dimensions.
__global__ void stencil(const float* x, float* y, int nx, int ny, int nz) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, j = blockIdx.y * blockDim.y + threadIdx.y;
  int k = blockIdx.z * blockDim.z + threadIdx.z;
  if (i <= 0 || j <= 0 || k <= 0 || i >= nx - 1 || j >= ny - 1 || k >= nz - 1) return;
  int at = (k * ny + j) * nx + i;
  y[at] = x[at] * 6 - x[at - 1] - x[at + 1] - x[at - nx] - x[at + nx] - x[at - nx * ny] - x[at + nx * ny];
}
// 8: atomics on whole numbers, in shared and in global memory.
__global__ void histogram(const int* x, unsigned* counts, int n) {
  __shared__ unsigned own[64];
  for (int b = LINEAR; b < 64; b += blockDim.x * blockDim.y) own[b] = 0;
  WAIT;
  int step = gridDim.x * blockDim.x * blockDim.y;
  for (int i = blockIdx.x * blockDim.x * blockDim.y + LINEAR; i < n; i += step) atomicAdd(&own[x[i]], 1u);
  WAIT;
  for (int b = LINEAR; b < 64; b += blockDim.x * blockDim.y) atomicAdd(&counts[b], own[b]);
}
// 9: atomics on floats, whose sums depend on the order.
__global__ void dot(const float* x, const float* y, float* sum, int n) {
  float a = 0;
  for (int i = thread_of_grid(); i < n; i += threads_of_grid()) a += x[i] * y[i];
  a = warp_sum(a);
  if (threadIdx.x % WARP == 0) atomicAdd(sum, a);
}
// 10: a template over a type and a number.
template <typename T, int N> __global__ void powers(const T* x, T* y, int n) {
  int i = thread_of_grid();
  if (i < n) y[i] = power<T, N>(x[i]);
}
// 11: a loop that waits twice in each turn.
__global__ void scan(const int* x, int* y) {
  __shared__ int s[512];
  int t = threadIdx.x, at = blockIdx.x * blockDim.x + t;
  s[t] = x[at];
  __syncthreads();
  for (unsigned d = 1; d < blockDim.x; d *= 2) {
    int v = t >= (int)d ? s[t - d] : 0;
    __syncthreads();
    s[t] += v;
    __syncthreads();
  }
  y[at] = s[t];
}
// 12: products of tiles.
__global__ void product(const float* a, const float* b, float* c, int n) {
  __shared__ float as[16][16], bs[16][16];
  int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
  float sum = 0;
  for (int k = 0; k < n; k += 16) {
    as[threadIdx.y][threadIdx.x] = a[row * n + k + threadIdx.x];
    bs[threadIdx.y][threadIdx.x] = b[(k + threadIdx.y) * n + column];
    WAIT;
    for (int m = 0; m < 16; ++m) sum += as[threadIdx.y][m] * bs[m][threadIdx.x];
    WAIT;
  }
  c[row * n + column] = sum;
}
// 13: votes of a warp.
__global__ void compact(const int* x, int* y, unsigned* masks, int n) {
  int i = thread_of_grid();
  unsigned mask = __ballot_sync(EVERYONE, i < n && x[i] > 31);
  if (i < n) y[i] = (mask >> (threadIdx.x % WARP) & 1u) ? __popc(mask & ((1u << (threadIdx.x % WARP)) - 1)) : -1;
  if (threadIdx.x % WARP == 0) masks[i / WARP] = mask;
}
// 14: much arithmetic on whole numbers.
__global__ void hash(const unsigned* x, unsigned* y, int n) {
  int i = thread_of_grid();
  if (i >= n) return;
  unsigned h = x[i] ^ 0x9e3779b9u;
  for (int r = 0; r < 64; ++r) {
    h ^= h >> 16;
    h *= 0x85ebca6bu;
    h = __funnelshift_l(h, h, r & 31);
  }
  y[i] = h;
}
// 15: statistics of channels, in two arrays of one declaration.
__global__ void statistics(const float* x, float* mean, float* variance, int count, int channels) {
  __shared__ float sums[256], squares[256];
  int t = threadIdx.x + threadIdx.y * blockDim.x, threads = blockDim.x * blockDim.y;
  for (int c = blockIdx.x; c < channels; c += gridDim.x) {
    float a = 0, b = 0;
    for (int i = t; i < count; i += threads) {
      float v = x[c * count + i];
      a += v;
      b += v * v;
    }
    sums[t] = a, squares[t] = b;
    __syncthreads();
    for (int d = threads / 2; d > 0; d /= 2) {
      if (t < d) sums[t] += sums[t + d], squares[t] += squares[t + d];
      __syncthreads();
    }
    if (t == 0) {
      mean[c] = sums[0] / count;
      variance[c] = squares[0] / count - mean[c] * mean[c];
    }
    __syncthreads();
  }
}
// 16: windows into columns.
__global__ void im2col(const float* x, float* columns, int height, int width, int kernel) {
  int h = height - kernel + 1, w = width - kernel + 1;
  for (int i = thread_of_grid(); i < h * w; i += threads_of_grid())
    for (int r = 0; r < kernel; ++r)
      for (int c = 0; c < kernel; ++c)
        columns[(r * kernel + c) * h * w + i] = x[(i / w + r) * width + i % w + c];
}
// 17: maximum pooling, with a struct of ranges.
__global__ void max_pool(const float* x, float* y, int height, int width) {
  int i = thread_of_grid();
  Range rows{0, height}, columns{0, width};
  if (i >= (height / 2) * (width / 2)) return;
  int r = i / (width / 2) * 2, c = i % (width / 2) * 2;
  float most = -1e30f;
  for (int a = -1; a < 3; ++a)
    for (int b = -1; b < 3; ++b)
      if (rows.holds(r + a) && columns.holds(c + b)) most = fmaxf(most, x[(r + a) * width + c + b]);
  y[i] = most;
}
// 18: vectors of four.
__global__ void scale4(float4* x, float by, int n) {
  int i = thread_of_grid();
  if (i < n) {
    float4 v = x[i];
    x[i] = make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
  }
}
// 19: one half of the block waits elsewhere than the other.
__global__ void odd_even(const int* x, int* y) {
  __shared__ int s[256];
  int t = threadIdx.x, at = blockIdx.x * blockDim.x + t;
  s[t] = x[at];
  for (int phase = 0; phase < 8; ++phase) {
    __syncthreads();
    if (t % 2 == phase % 2 && t + 1 < (int)blockDim.x && s[t] > s[t + 1]) {
      int v = s[t];
      s[t] = s[t + 1], s[t + 1] = v;
    }
  }
  __syncthreads();
  y[at] = s[t];
}
// 20: warps in step, and a jump.
__global__ void softmax(const float* x, float* y, int rows, int columns) {
  int row = blockIdx.x * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  float most = -1e30f, sum = 0;
  for (int c = threadIdx.x; c < columns; c += WARP) most = max(most, x[row * columns + c]);
  for (int d = 16; d > 0; d /= 2) most = max(most, __shfl_xor_sync(EVERYONE, most, d));
  __syncwarp();
  for (int c = threadIdx.x; c < columns; c += WARP) {
    if (x[row * columns + c] < -1e29f) goto next;
    sum += expf(x[row * columns + c] - most);
  next:;
  }
  sum = warp_sum(sum);
  for (int c = threadIdx.x; c < columns; c += WARP) y[row * columns + c] = expf(x[row * columns + c] - most) / sum;
}
