/* Average (rounded half away from zero) and maximum over windows; padding does not count. */
#include "slip_micro.h"

typedef struct {
  int top, bottom, left, right;
} window;

static window window_at(const slip_pool *op, int y, int x) {
  int top = y * op->stride_h - op->pad_top, left = x * op->stride_w - op->pad_left;
  int bottom = top + op->kernel_h, right = left + op->kernel_w;
  return (window){top < 0 ? 0 : top, bottom > op->in_h ? op->in_h : bottom, left < 0 ? 0 : left,
                  right > op->in_w ? op->in_w : right};
}

void slip_average_pool(const slip_pool *op, const int8_t *in, int8_t *out) {
  for (int y = 0; y < op->out_h; y++) {
    for (int x = 0; x < op->out_w; x++) {
      window w = window_at(op, y, x);
      int32_t count = (w.bottom - w.top) * (w.right - w.left);
      for (int c = 0; c < op->channels; c++) {
        int32_t sum = 0;
        for (int row = w.top; row < w.bottom; row++) {
          const int8_t *from = in + (row * op->in_w + w.left) * op->channels + c;
          for (int n = w.right - w.left; n > 0; n--, from += op->channels) sum += *from;
        }
        sum = (sum > 0 ? sum + count / 2 : sum - count / 2) / count;
        *out++ = (int8_t)slip_clamp(sum, op->low, op->high);
      }
    }
  }
}

void slip_max_pool(const slip_pool *op, const int8_t *in, int8_t *out) {
  for (int y = 0; y < op->out_h; y++) {
    for (int x = 0; x < op->out_w; x++) {
      window w = window_at(op, y, x);
      for (int c = 0; c < op->channels; c++) {
        int32_t most = -128;
        for (int row = w.top; row < w.bottom; row++) {
          const int8_t *from = in + (row * op->in_w + w.left) * op->channels + c;
          for (int n = w.right - w.left; n > 0; n--, from += op->channels) {
            if (*from > most) most = *from;
          }
        }
        *out++ = (int8_t)slip_clamp(most, op->low, op->high);
      }
    }
  }
}
