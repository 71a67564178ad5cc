// What the copy of the kernels for one instruction set offers.

#pragma once

#include "slipstream/sparse.h"

namespace slipstream {
namespace sparse {

struct Kernel {
  void (*distances)(const slipstream_sparse_job&, int64_t first, int64_t last, void* scratch,
                    void* out, int64_t ldo);
  void (*nearest)(const slipstream_sparse_job&, int64_t first, int64_t last, int64_t k,
                  void* scratch, void* out_distance, int64_t* out_row);
};

void chebyshev(const slipstream_sparse_chebyshev_job&, int64_t first, int64_t last,
               double* scratch, double* out, int64_t ldo);

// [is_double]
extern const Kernel kScalar[2];
extern const Kernel kAvx2[2];
extern const Kernel kAvx512[2];

}  // namespace sparse
}  // namespace slipstream
