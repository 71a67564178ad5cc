/* Depthwise convolution of any kernel, stride, dilation and multiplier: one output after another,
 * row by row, nothing copied. */
#include "slip_micro.h"

void slip_depthwise_any(const slip_depthwise *op, const int8_t *in, int8_t *out, void *scratch) {
  (void)scratch;
  int channels = op->channels * op->multiplier, taps = op->kernel_h * op->kernel_w;
  for (int y = 0; y < op->out_h; y++) {
    for (int x = 0; x < op->out_w; x++) {
      for (int c = 0; c < channels; c++) {
        const int8_t *weights = op->weights + c * taps;
        const int8_t *from = in + c / op->multiplier;
        int32_t sum = op->bias[c];
        int row = y * op->stride_h - op->pad_top;
        for (int i = 0; i < op->kernel_h; i++, row += op->dilation_h) {
          int col = x * op->stride_w - op->pad_left;
          for (int j = 0; j < op->kernel_w; j++, col += op->dilation_w, weights++) {
            int inside = row >= 0 && row < op->in_h && col >= 0 && col < op->in_w;
            int value = inside ? from[(row * op->in_w + col) * op->channels] : op->in_zero;
            sum += value * *weights;
          }
        }
        *out++ = (int8_t)slip_to_int8(sum, op->rescale + 2 * c, op->out_zero, op->low, op->high);
      }
    }
  }
}
