/* Recurrences over many short steps, forward and backward in one call: a plain C ABI.
 *
 * A cell is torch's: gates in the order of nn.GRU (r, z, n) and nn.LSTM (i, f, g, o). Arrays are
 * contiguous, of the dtype of the call: [T, B, G H] for gates, [T, B, H] for states, with T steps, B
 * sequences, H hidden units and G gates.
 */
#ifndef SLIPSTREAM_SCAN_H
#define SLIPSTREAM_SCAN_H

#include "slipstream/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

enum slipstream_scan_dtype { SLIPSTREAM_SCAN_FLOAT32 = 0, SLIPSTREAM_SCAN_FLOAT64 = 1 };
enum slipstream_scan_kind {
  SLIPSTREAM_SCAN_TANH = 0,
  SLIPSTREAM_SCAN_RELU = 1,
  SLIPSTREAM_SCAN_GRU = 2,
  SLIPSTREAM_SCAN_LSTM = 3
};

struct slipstream_scan_cell {
  int64_t steps, batch, hidden;
  int32_t kind, workers;
  const void *weight; /* [G H, H], as torch's weight_hh */
  const void *bias;   /* [H] of the GRU's candidate, else NULL */
  const void *projections; /* forward: [T, B, G H], of the input, with all other biases */
  void *gates;             /* [T, B, G H] (GRU, LSTM): what the gates are */
  void *extra;        /* [T, B, H]: W_hn h + b_hn of the GRU, the LSTM's cell states */
  const void *h0, *c0; /* [B, H] */
  void *y;             /* [T, B, H]: every state */
  /* Backward only. */
  const void *dy;       /* [T, B, H], or NULL for none */
  const void *dh, *dc;  /* [B, H]: of the last states, or NULL for none */
  void *dgates;         /* out: of the projections */
  void *dweight;        /* out: [workers, G H, H], to be added up */
  void *dbias;          /* out: [workers, G H], what reaches the gates from the hidden side */
  void *dh0, *dc0;      /* out: [B, H] */
};

/* h_t = a_t h_(t-1) + b_t, each of `width` numbers by itself; t runs down where `reverse`. */
struct slipstream_scan_diagonal {
  int64_t steps, width;
  int32_t reverse, workers;
  const void *a, *b;  /* [T, width] */
  const void *h0;     /* [width] */
  void *h;            /* [T, width] */
  /* Backward only. */
  const void *dh;     /* [T, width] */
  void *da, *db;      /* out: [T, width] */
  void *dh0;          /* out: [width] */
};

/* Kernels of this build, whether or not this processor can run them: numbered from 0. */
SLIPSTREAM_API int32_t slipstream_scan_kernel_count(void);
SLIPSTREAM_API const char *slipstream_scan_level(int32_t kernel);

/* The caller has made sure that this processor runs the kernel. */
SLIPSTREAM_API int32_t slipstream_scan_forward(int32_t kernel, int32_t dtype,
                                               const struct slipstream_scan_cell *cell);
SLIPSTREAM_API int32_t slipstream_scan_backward(int32_t kernel, int32_t dtype,
                                                const struct slipstream_scan_cell *cell);
SLIPSTREAM_API int32_t slipstream_scan_diagonal_forward(int32_t kernel, int32_t dtype,
                                                        const struct slipstream_scan_diagonal *one);
SLIPSTREAM_API int32_t slipstream_scan_diagonal_backward(
    int32_t kernel, int32_t dtype, const struct slipstream_scan_diagonal *one);

/* out[n] = left[n] right[n], n small matrices [width, width], row by row, n of them; strides count
 * matrices. */
SLIPSTREAM_API int32_t slipstream_scan_products(int32_t kernel, int32_t dtype, int64_t count,
                                                int64_t width, const void *left,
                                                int64_t left_stride, const void *right,
                                                int64_t right_stride, void *out,
                                                int64_t out_stride);

#ifdef __cplusplus
}
#endif

#endif
