/* Transposed convolution: an output pixel gathers the input pixels whose window covers it. */
#include "slip_micro.h"

void slip_transpose_conv(const slip_transpose *op, const int8_t *in, int8_t *out) {
  for (int y = 0; y < op->out_h; y++) {
    for (int x = 0; x < op->out_w; x++) {
      const int8_t *weights = op->weights;
      for (int c = 0; c < op->out_c; c++) {
        int32_t sum = op->bias[c];
        for (int i = 0; i < op->kernel_h; i++) {
          int row = y + op->pad_top - i;
          for (int j = 0; j < op->kernel_w; j++, weights += op->in_c) {
            int col = x + op->pad_left - j;
            if (row < 0 || col < 0 || row % op->stride_h || col % op->stride_w) continue;
            if (row / op->stride_h >= op->in_h || col / op->stride_w >= op->in_w) continue;
            const int8_t *from = in + (row / op->stride_h * op->in_w + col / op->stride_w) * op->in_c;
            for (int d = 0; d < op->in_c; d++) sum += (from[d] - op->in_zero) * weights[d];
          }
        }
        *out++ = (int8_t)slip_to_int8(sum, op->rescale + 2 * c, op->out_zero, op->low, op->high);
      }
    }
  }
}
