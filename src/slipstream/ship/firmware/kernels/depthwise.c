/* 3 x 3 depthwise convolution, one channel at a time: rows of the channel are copied to 16-bit
 * numbers, three of them and one of padding; adjacent outputs share their reads.
 *
 * A row is copied before the first output that could overlap it is written, and other channels are
 * not accessed: with equal sizes, output and input may start at the same address. */
#include "slip_micro.h"

/* Words read from memory that was written as 16-bit numbers. */
typedef uint32_t __attribute__((may_alias)) pair_of_16;

/* Length of a row with padding: even, with one more output if their number is odd. */
static inline int row_pitch(const slip_depthwise *op) {
  int outputs = (op->out_w + 1) & ~1;
  return ((outputs - 1) * op->stride_w + op->kernel_w + 1) & ~1;
}

static inline __attribute__((always_inline)) void copy_row(
    const int8_t *from, int step, int width, int16_t *to) {
  for (; width >= 4; width -= 4, to += 4) {
    int16_t a = *from;
    from += step;
    int16_t b = *from;
    from += step;
    int16_t c = *from;
    from += step;
    int16_t d = *from;
    from += step;
    to[0] = a, to[1] = b, to[2] = c, to[3] = d;
  }
  for (; width > 0; width--, from += step) *to++ = *from;
}

/* An even number of sums of a row, in a separate function that keeps all weights in registers. */
static inline __attribute__((always_inline)) void sum_row(
    const int16_t *top, const int16_t *middle, const int16_t *bottom, const uint32_t *w,
    int stride, int32_t *sums, const int32_t *end) {
  const pair_of_16 *r0 = (const pair_of_16 *)(const void *)top;
  const pair_of_16 *r1 = (const pair_of_16 *)(const void *)middle;
  const pair_of_16 *r2 = (const pair_of_16 *)(const void *)bottom;
  const uint32_t w01 = w[0], w12 = w[1], w34 = w[2], w45 = w[3], w67 = w[4], w78 = w[5];
  do {
    int32_t a = 0, b = 0;
    uint32_t p, q;
    if (stride == 1) {
      p = r0[0], q = r0[1], r0++;
      a = slip_smlad(p, w01, a), b = slip_smlatb(p, w01, b);
      a = slip_smlabt(q, w12, a), b = slip_smlad(q, w12, b);
      p = r1[0], q = r1[1], r1++;
      a = slip_smlad(p, w34, a), b = slip_smlatb(p, w34, b);
      a = slip_smlabt(q, w45, a), b = slip_smlad(q, w45, b);
      p = r2[0], q = r2[1], r2++;
      a = slip_smlad(p, w67, a), b = slip_smlatb(p, w67, b);
      a = slip_smlabt(q, w78, a), b = slip_smlad(q, w78, b);
    } else {
      p = r0[0], q = r0[1], a = slip_smlad(p, w01, a);
      a = slip_smlabt(q, w12, a), b = slip_smlad(q, w01, b);
      p = r0[2], r0 += 2, b = slip_smlabt(p, w12, b);
      p = r1[0], q = r1[1], a = slip_smlad(p, w34, a);
      a = slip_smlabt(q, w45, a), b = slip_smlad(q, w34, b);
      p = r1[2], r1 += 2, b = slip_smlabt(p, w45, b);
      p = r2[0], q = r2[1], a = slip_smlad(p, w67, a);
      a = slip_smlabt(q, w78, a), b = slip_smlad(q, w67, b);
      p = r2[2], r2 += 2, b = slip_smlabt(p, w78, b);
    }
    sums[0] = a, sums[1] = b, sums += 2;
  } while (sums < end);
}

static inline __attribute__((always_inline)) int8_t *write_row(
    const slip_depthwise *op, const int32_t *sums, int32_t bias, const int32_t *rescale,
    int8_t *to) {
  const int32_t multiplier = rescale[0], power = rescale[1], zero = op->out_zero;
  const int32_t *end = sums + op->out_w;
  int step = op->channels;
  if (power > 0) {
    for (; sums < end; to += step) *to = (int8_t)slip_narrow(slip_sum(*sums++, bias), multiplier, power, zero);
    return to;
  }
  for (; sums < end; to += step) {
    *to = (int8_t)slip_to_int8(slip_sum(*sums++, bias), rescale, zero, op->low, op->high);
  }
  return to;
}

static inline __attribute__((always_inline)) void all_channels(
    const slip_depthwise *op, const int8_t *in, int8_t *out, int stride, int16_t *padding) {
  int pitch = row_pitch(op), channels = op->channels, left = op->pad_left;
  int width = pitch - left < op->in_w ? pitch - left : op->in_w, line = op->in_w * channels;
  int32_t *sums = (int32_t *)(void *)(padding + 4 * pitch);
  const int32_t *end = sums + ((op->out_w + 1) & ~1);
  /* Padding columns are the same for every channel and written once. */
  for (int n = 0; n < 4 * pitch; n++) padding[n] = op->in_zero;
  const int8_t *weights = op->weights;
  for (int c = 0; c < channels; c++, in++, weights++) {
    uint32_t pairs[6];
    const int8_t *w = weights;
    for (int k = 0; k < 6; k += 2, w += 3 * channels) {
      int middle = w[channels];
      pairs[k] = slip_pack(w[0], middle), pairs[k + 1] = slip_pack(middle, w[2 * channels]);
    }
    int16_t *row[3] = {padding + pitch, padding + 2 * pitch, padding + 3 * pitch};
    const int16_t *top, *middle, *bottom = padding;
    int8_t *to = out + c;
    const int8_t *from = in;
    int y = -op->pad_top, next = 0;
    top = middle = padding;
    /* Rows that are copied before the first output needs its last row. */
    for (int ready = 3 - stride; ready > 0; ready--, y++) {
      top = middle, middle = bottom, bottom = padding;
      if (y < 0) continue;
      copy_row(from, channels, width, row[next] + left);
      bottom = row[next], from += line, next = next == 2 ? 0 : next + 1;
    }
    for (int n = op->out_h; n > 0; n--) {
      for (int k = 0; k < stride; k++, y++) {
        top = middle, middle = bottom, bottom = padding;
        if (y < 0 || y >= op->in_h) continue;
        copy_row(from, channels, width, row[next] + left);
        bottom = row[next], from += line, next = next == 2 ? 0 : next + 1;
      }
      sum_row(top, middle, bottom, pairs, stride, sums, end);
      to = write_row(op, sums, op->bias[c], op->rescale + 2 * c, to);
    }
  }
}

/* Stride 1 or 2 in both directions, multiplier 1. scratch: 4 rows of `row_pitch` 16-bit numbers and
 * a row of sums. */
void slip_depthwise_2d(const slip_depthwise *op, const int8_t *in, int8_t *out, void *scratch) {
  if (op->stride_w == 1) {
    all_channels(op, in, out, 1, scratch);
  } else {
    all_channels(op, in, out, 2, scratch);
  }
}
