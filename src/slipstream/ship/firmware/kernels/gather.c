#include "slip_micro.h"

/* Values under the kernel at a pixel, an int8 per depth; the zero point outside the input. */
const int8_t *slip_gather(const slip_conv *op, const int8_t *in, int y, int x, int8_t *column) {
  int8_t *next = column;
  int row = y * op->stride_h - op->pad_top, left = x * op->stride_w - op->pad_left;
  int depth = op->in_c, line = op->in_w * depth;
  if (op->dilation_w == 1 && op->dilation_h == 1 && row >= 0 && left >= 0 &&
      row + op->kernel_h <= op->in_h && left + op->kernel_w <= op->in_w) {
    const int8_t *from = in + row * line + left * depth;
    int run = op->kernel_w * depth;
    for (int i = op->kernel_h; i > 0; i--, from += line - run) {
      int n = run;
      if (n == 3) {
        next[0] = from[0], next[1] = from[1], next[2] = from[2], next += 3, from += 3;
        continue;
      }
      for (; n >= 4; n -= 4, from += 4, next += 4) memcpy(next, from, 4);
      for (; n > 0; n--) *next++ = *from++;
    }
  } else {
    for (int i = 0; i < op->kernel_h; i++, row += op->dilation_h) {
      int col = left, inside = row >= 0 && row < op->in_h;
      for (int j = 0; j < op->kernel_w; j++, col += op->dilation_w, next += depth) {
        if (inside && col >= 0 && col < op->in_w) {
          memcpy(next, in + row * line + col * depth, (size_t)depth);
        } else {
          memset(next, op->in_zero, (size_t)depth);
        }
      }
    }
  }
  for (int8_t *end = column + op->depth; next < end;) *next++ = 0;
  return column;
}
