/* Depthwise convolution, one channel at a time: rows of the channel are copied to 16-bit numbers,
 * padded, as many as the kernel is high; two outputs beside each other share what they read.
 *
 * A row is copied before the first output that could lie on it is written, and no other channel is
 * touched: with as many outputs as inputs a channel, output and input may begin at one address. */
#include "slip_micro.h"

static void copy_row(
    const slip_depthwise *op, const int8_t *in, int row, int channel, int pitch, int16_t *to) {
  int16_t zero = op->in_zero;
  if (row < 0 || row >= op->in_h) {
    for (int n = 0; n < pitch; n++) to[n] = zero;
    return;
  }
  int16_t *end = to + pitch;
  for (int n = 0; n < op->pad_left; n++) *to++ = zero;
  int step = op->channels, width = op->in_w;
  if (width > end - to) width = (int)(end - to);
  const int8_t *from = in + row * op->in_w * step + channel;
  int n = width;
  for (; n >= 4; n -= 4, to += 4) {
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
  for (; n > 0; n--, from += step) *to++ = *from;
  while (to < end) *to++ = zero;
}

static __attribute__((noinline)) int32_t wide(
    const slip_depthwise *op, int32_t sum, const int32_t *pair) {
  return slip_to_int8(sum, pair, op->out_zero, op->low, op->high);
}

/* A channel of 3 x 3 with stride 1 or 2. `pitch` is even, so that words are aligned. */
static inline __attribute__((always_inline)) void channel_3x3(
    const slip_depthwise *op, const int8_t *in, int8_t *out, int channel, int stride, int narrow,
    int pitch, int16_t *rows) {
  const int8_t *w = op->weights + 9 * channel;
  const uint32_t w01 = slip_pack(w[0], w[1]), w12 = slip_pack(w[1], w[2]);
  const uint32_t w34 = slip_pack(w[3], w[4]), w45 = slip_pack(w[4], w[5]);
  const uint32_t w67 = slip_pack(w[6], w[7]), w78 = slip_pack(w[7], w[8]);
  const int32_t bias = op->bias[channel];
  const int32_t *pair = op->rescale + 2 * channel;
  const int32_t multiplier = pair[0], power = pair[1], zero = op->out_zero, step = op->channels;
  int16_t *top = rows, *middle = rows + pitch, *bottom = rows + 2 * pitch;
  int row = -op->pad_top;
  copy_row(op, in, row++, channel, pitch, top);
  if (stride == 1) copy_row(op, in, row++, channel, pitch, middle);
  int8_t *to = out + channel;
  for (int y = 0; y < op->out_h; y++) {
    if (stride == 2) copy_row(op, in, row++, channel, pitch, middle);
    copy_row(op, in, row++, channel, pitch, bottom);
    const int16_t *r0 = top, *r1 = middle, *r2 = bottom;
    for (int x = op->out_w; x > 0; x -= 2) {
      int32_t a = bias, b = bias;
      uint32_t p, q;
      if (stride == 1) {
        p = slip_word(r0), q = slip_word(r0 + 2), r0 += 2;
        a = slip_smlad(p, w01, a), b = slip_smlatb(p, w01, b);
        a = slip_smlabt(q, w12, a), b = slip_smlad(q, w12, b);
        p = slip_word(r1), q = slip_word(r1 + 2), r1 += 2;
        a = slip_smlad(p, w34, a), b = slip_smlatb(p, w34, b);
        a = slip_smlabt(q, w45, a), b = slip_smlad(q, w45, b);
        p = slip_word(r2), q = slip_word(r2 + 2), r2 += 2;
        a = slip_smlad(p, w67, a), b = slip_smlatb(p, w67, b);
        a = slip_smlabt(q, w78, a), b = slip_smlad(q, w78, b);
      } else {
        p = slip_word(r0), q = slip_word(r0 + 2), a = slip_smlad(p, w01, a);
        a = slip_smlabt(q, w12, a), b = slip_smlad(q, w01, b);
        p = slip_word(r0 + 4), r0 += 4, b = slip_smlabt(p, w12, b);
        p = slip_word(r1), q = slip_word(r1 + 2), a = slip_smlad(p, w34, a);
        a = slip_smlabt(q, w45, a), b = slip_smlad(q, w34, b);
        p = slip_word(r1 + 4), r1 += 4, b = slip_smlabt(p, w45, b);
        p = slip_word(r2), q = slip_word(r2 + 2), a = slip_smlad(p, w67, a);
        a = slip_smlabt(q, w78, a), b = slip_smlad(q, w67, b);
        p = slip_word(r2 + 4), r2 += 4, b = slip_smlabt(p, w78, b);
      }
      *to = (int8_t)(narrow ? slip_narrow(a, multiplier, power, zero) : wide(op, a, pair));
      to += step;
      if (x == 1) break;
      *to = (int8_t)(narrow ? slip_narrow(b, multiplier, power, zero) : wide(op, b, pair));
      to += step;
    }
    int16_t *free = top;
    if (stride == 1) {
      top = middle, middle = bottom, bottom = free;
    } else {
      top = bottom, bottom = free;
    }
  }
}

/* Even, and enough for an output beyond the last where their number is odd. */
static inline int row_pitch(const slip_depthwise *op) {
  int outputs = (op->out_w + 1) & ~1;
  return ((outputs - 1) * op->stride_w + op->kernel_w + 1) & ~1;
}

/* 3 x 3, stride 1 or 2 both ways, multiplier 1. scratch: 3 rows of `row_pitch` numbers. */
void slip_depthwise_2d(const slip_depthwise *op, const int8_t *in, int8_t *out, void *scratch) {
  int pitch = row_pitch(op);
  for (int c = 0; c < op->channels; c++) {
    int narrow = op->rescale[2 * c + 1] > 0;
    if (op->stride_w == 1) {
      if (narrow) {
        channel_3x3(op, in, out, c, 1, 1, pitch, scratch);
      } else {
        channel_3x3(op, in, out, c, 1, 0, pitch, scratch);
      }
    } else if (narrow) {
      channel_3x3(op, in, out, c, 2, 1, pitch, scratch);
    } else {
      channel_3x3(op, in, out, c, 2, 0, pitch, scratch);
    }
  }
}
