// The plain C face: checks the caller's structs and chooses the kernels for this processor.

#include "slipstream/sparse.h"

#include <atomic>

#include "kernel.h"
#include "threads.h"

using slipstream::sparse::Kernel;

namespace {

bool in_range(const slipstream_sparse_calls& calls, int64_t queries) {
  for (int64_t n = 0; n < calls.count; ++n) {
    const int64_t first = calls.ranges[2 * n], last = calls.ranges[2 * n + 1];
    if (first < calls.base || first > last || last > queries) return false;
  }
  return calls.threads >= 1;
}

bool valid(const slipstream_sparse_job* job, const slipstream_sparse_calls* calls) {
  if (job->struct_bytes != sizeof *job || calls->struct_bytes != sizeof *calls) return false;
  if (job->tile_rows <= 0 || job->tile_rows % 128 != 0 || job->tile_rows > 65536) return false;
  if (job->channels < 1 || job->channels > 2) return false;
  return in_range(*calls, job->queries);
}

const Kernel& kernel_of(int32_t level, int32_t is_double) {
#if defined(SLIPSTREAM_SPARSE_WIDE)
  const int32_t chosen = slipstream_sparse_level(level);
  if (chosen == 2) return slipstream::sparse::kAvx512[is_double != 0];
  if (chosen == 1) return slipstream::sparse::kAvx2[is_double != 0];
#else
  (void)level;
#endif
  return slipstream::sparse::kScalar[is_double != 0];
}

// Ranges of queries, each taken by the next free thread; each thread has its own scratch.
template <typename Call>
struct Shared {
  const slipstream_sparse_calls& calls;
  const Call& call;
  std::atomic<int64_t> next{0};

  static void work(void* context, int64_t worker) {
    Shared& shared = *static_cast<Shared*>(context);
    void* scratch = static_cast<char*>(shared.calls.scratch) + worker * shared.calls.scratch_bytes;
    for (;;) {
      const int64_t n = shared.next.fetch_add(1, std::memory_order_relaxed);
      if (n >= shared.calls.count) return;
      shared.call(shared.calls.ranges[2 * n], shared.calls.ranges[2 * n + 1], scratch);
    }
  }
};

template <typename Call>
void share(const slipstream_sparse_calls& calls, const Call& call) {
  Shared<Call> shared{calls, call};
  slipstream::parallel_for(calls.threads, calls.threads, Shared<Call>::work, &shared);
}

}  // namespace

extern "C" int32_t slipstream_sparse_abi(void) { return SLIPSTREAM_SPARSE_ABI; }

extern "C" int32_t slipstream_sparse_level(int32_t highest) {
#if defined(SLIPSTREAM_SPARSE_WIDE)
  const uint32_t features = slipstream_cpu_features();
  if (highest >= 2 && features & SLIPSTREAM_CPU_AVX512 && features & SLIPSTREAM_CPU_AVX2) return 2;
  if (highest >= 1 && features & SLIPSTREAM_CPU_AVX2) return 1;
#else
  (void)highest;
#endif
  return 0;
}

extern "C" int64_t slipstream_sparse_scratch_bytes(const slipstream_sparse_job* job,
                                                   int64_t queries) {
  const int64_t sums = job->tile_rows * job->channels * (job->is_double ? 8 : 4);
  // Without dense columns queries are computed one by one, and which rows they met is noted: at
  // most all, and a place that is written without being kept.
  return job->head_columns ? queries * sums : sums + (job->tile_rows + 8) * 2;
}

extern "C" int32_t slipstream_sparse_distances(const slipstream_sparse_job* job,
                                               const slipstream_sparse_calls* calls, void* out,
                                               int64_t ldo) {
  if (!valid(job, calls)) return SLIPSTREAM_INVALID;
  const int64_t bytes = job->is_double ? 8 : 4;
  const Kernel& kernel = kernel_of(calls->level, job->is_double);
  share(*calls, [&](int64_t first, int64_t last, void* scratch) {
    kernel.distances(*job, first, last, scratch,
                     static_cast<char*>(out) + (first - calls->base) * ldo * bytes, ldo);
  });
  return SLIPSTREAM_OK;
}

extern "C" int32_t slipstream_sparse_nearest(const slipstream_sparse_job* job,
                                             const slipstream_sparse_calls* calls, int64_t k,
                                             void* out_distance, int64_t* out_row) {
  if (!valid(job, calls) || k < 1 || k > job->rows) return SLIPSTREAM_INVALID;
  const int64_t bytes = job->is_double ? 8 : 4;
  const Kernel& kernel = kernel_of(calls->level, job->is_double);
  share(*calls, [&](int64_t first, int64_t last, void* scratch) {
    const int64_t at = (first - calls->base) * k;
    kernel.nearest(*job, first, last, k, scratch, static_cast<char*>(out_distance) + at * bytes,
                   out_row + at);
  });
  return SLIPSTREAM_OK;
}

extern "C" int32_t slipstream_sparse_chebyshev(const slipstream_sparse_chebyshev_job* job,
                                               const slipstream_sparse_calls* calls, double* out,
                                               int64_t ldo) {
  if (job->struct_bytes != sizeof *job || calls->struct_bytes != sizeof *calls ||
      !in_range(*calls, job->a.rows))
    return SLIPSTREAM_INVALID;
  share(*calls, [&](int64_t first, int64_t last, void* scratch) {
    slipstream::sparse::chebyshev(*job, first, last, static_cast<double*>(scratch),
                                  out + (first - calls->base) * ldo, ldo);
  });
  return SLIPSTREAM_OK;
}
