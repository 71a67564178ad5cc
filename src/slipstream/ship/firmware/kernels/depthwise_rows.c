/* Depthwise convolution of any kernel with multiplier 1: a row of the output for four channels at a
 * time, which are one vector where there is Helium. Reads row by row in the order in which it writes.
 * Here the input's zero point is not folded into the bias: taps outside of the input are left out. */
#include "rows.h"

/* The first tap inside of the input, and how many of `kernel` there are. */
static inline int inside(int start, int kernel, int dilation, int size, int *first) {
  int from = start < 0 ? (-start + dilation - 1) / dilation : 0;
  int to = size > start ? (size - start + dilation - 1) / dilation : 0;
  *first = from;
  to = to < kernel ? to : kernel;
  return to > from ? to - from : 0;
}

#ifdef SLIP_HELIUM
static inline __attribute__((always_inline)) int32x4_t add_taps(
    int32x4_t sums, const int8_t *x, const int8_t *w, int count, int across, int channels,
    int32_t zero) {
  for (; count > 0; count--, x += across, w += channels) {
    sums = vaddq_s32(sums, vmulq_s32(vsubq_n_s32(vldrbq_s32(x), zero), vldrbq_s32(w)));
  }
  return sums;
}
#endif

/* scratch is not used. */
void slip_depthwise_rows(const slip_depthwise *op, const int8_t *in, int8_t *out, void *scratch) {
  (void)scratch;
  slip_range range = {op->out_zero, op->low, op->high};
  int channels = op->channels, padded = (channels + 3) & ~3;
  int across = op->dilation_w * channels, down = op->dilation_h * op->in_w * channels;
  int weights_down = op->kernel_w * channels, zero = op->in_zero;
  for (int y = 0; y < op->out_h; y++, out += op->out_w * channels) {
    int i, j, top = y * op->stride_h - op->pad_top;
    int rows = inside(top, op->kernel_h, op->dilation_h, op->in_h, &i);
    const int8_t *row = in + (top + i * op->dilation_h) * op->in_w * channels;
    const int8_t *row_weights = op->weights + i * weights_down;
    int c = 0;
#ifdef SLIP_HELIUM
    for (; c + 4 <= channels; c += 4) {
      slip_scales scales = slip_load_scales(op->rescale + c, op->rescale + padded + c);
      int8_t *to = out + c;
      int left = -op->pad_left;
      for (int x = op->out_w; x > 0; x--, left += op->stride_w, to += channels) {
        int32x4_t sums = vldrwq_s32(op->bias + c);
        const int8_t *from, *weights;
        if (left >= 0 && left + 3 <= op->in_w && op->kernel_w == 3 && across == channels) {
          from = row + left * channels + c, weights = row_weights + c;
          for (int m = rows; m > 0; m--, from += down, weights += weights_down) {
            sums = add_taps(sums, from, weights, 1, 0, 0, zero);
            sums = add_taps(sums, from + channels, weights + channels, 1, 0, 0, zero);
            sums = add_taps(sums, from + 2 * channels, weights + 2 * channels, 1, 0, 0, zero);
          }
        } else {
          int columns = inside(left, op->kernel_w, op->dilation_w, op->in_w, &j);
          from = row + (left + j * op->dilation_w) * channels + c;
          weights = row_weights + j * channels + c;
          for (int m = rows; m > 0; m--, from += down, weights += weights_down) {
            sums = add_taps(sums, from, weights, columns, across, channels, zero);
          }
        }
        vstrbq_s32(to, slip_four(sums, scales, range));
      }
    }
#endif
    for (; c < channels; c++) {
      int left = -op->pad_left;
      for (int x = 0; x < op->out_w; x++, left += op->stride_w) {
        int columns = inside(left, op->kernel_w, op->dilation_w, op->in_w, &j);
        const int8_t *from = row + (left + j * op->dilation_w) * channels + c;
        const int8_t *weights = row_weights + j * channels + c;
        int32_t sum = op->bias[c];
        for (int m = 0; m < rows; m++) {
          for (int n = 0; n < columns; n++) {
            sum += (from[m * down + n * across] - zero) * weights[m * weights_down + n * channels];
          }
        }
        out[x * channels + c] = slip_one(sum, op->rescale[c], op->rescale[padded + c], range);
      }
    }
  }
}
