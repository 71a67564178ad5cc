/* Shared by convolutions: two pixels with four channels at a time.
 *
 * Blocks of two pixels are read completely before they are written, in ascending order; a last
 * single pixel is read while it is written. The planner relies on this to overlap input and output. */
#ifndef SLIP_CONV_H
#define SLIP_CONV_H

#include "slip_micro.h"

/* Sums to int8, for up to four channels and one pixel or two. */
static __attribute__((noinline)) void slip_write_any(
    const slip_conv *op, const int32_t *sums, const int32_t *rescale, int channels, int pixels,
    int8_t *out) {
  for (int c = 0; c < channels; c++) {
    for (int p = 0; p < pixels; p++) {
      out[p * op->out_c + c] = (int8_t)slip_to_int8(
          sums[2 * c + p], rescale + 2 * c, op->out_zero, op->low, op->high);
    }
  }
}

/* Sums of four channels and two pixels, [channel][pixel], to int8. */
static inline __attribute__((always_inline)) void slip_write_two(
    const slip_conv *op, const int32_t *sums, const int32_t *rescale, int channels, int8_t *out) {
  if (op->narrow && channels >= 4) {
    int32_t zero = op->out_zero;
    int8_t *next = out + op->out_c;
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      int32_t multiplier = rescale[2 * k], power = rescale[2 * k + 1];
      out[k] = (int8_t)slip_narrow(sums[2 * k], multiplier, power, zero);
      next[k] = (int8_t)slip_narrow(sums[2 * k + 1], multiplier, power, zero);
    }
  } else {
    slip_write_any(op, sums, rescale, channels < 4 ? channels : 4, 2, out);
  }
}

/* Four depths of each pixel as words of 16-bit pairs, in the order of widened bytes. */
static inline void slip_widen(const int8_t *first, const int8_t *second, int quads, uint32_t *columns) {
  for (; quads > 0; quads--, first += 4, second += 4, columns += 4) {
    uint32_t a = slip_word(first), b = slip_word(second);
    columns[0] = slip_even_bytes(a);
    columns[1] = slip_even_bytes(b);
    columns[2] = slip_odd_bytes(a);
    columns[3] = slip_odd_bytes(b);
  }
}

/* All channels of one pixel, or of two if `second` is not null. */
typedef void slip_multiply(
    const slip_conv *op, const int8_t *first, const int8_t *second, uint32_t *columns, int8_t *out);

/* scratch: `two_columns` bytes if the output has more than one pixel, and 2 * depth bytes more if the
 * input is not itself the column. */
static inline __attribute__((always_inline)) void slip_each_two(
    const slip_conv *op, const int8_t *in, int8_t *out, void *scratch, int two_columns,
    slip_multiply *multiply) {
  int pixels = op->out_h * op->out_w;
  /* With a 1 x 1 kernel and whole words, the input is itself the column. */
  int direct = op->kernel_h * op->kernel_w == 1 && op->stride_h * op->stride_w == 1 &&
               op->depth == op->in_c;
  uint32_t *columns = scratch;
  int8_t *first_column = (int8_t *)scratch + (pixels > 1 ? two_columns : 0);
  int8_t *second_column = first_column + op->depth;
  int y = 0, x = 0;
  for (; pixels > 0; pixels -= 2, out += 2 * op->out_c) {
    const int8_t *first = in, *second = pixels > 1 ? in + op->in_c : 0;
    if (direct) {
      in += 2 * op->in_c;
    } else {
      first = slip_gather(op, in, y, x, first_column);
      if (++x == op->out_w) x = 0, y++;
      if (second) second = slip_gather(op, in, y, x, second_column);
      if (++x == op->out_w) x = 0, y++;
    }
    multiply(op, first, second, columns, out);
  }
}

#endif
