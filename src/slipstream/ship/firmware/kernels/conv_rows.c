/* Convolution whose weights stand in rows, one an output channel: two pixels with four channels at a
 * time, sixteen bytes to an instruction where there is Helium.
 *
 * Reads each block of two pixels whole, as a copy, before it writes it, in ascending order: what the
 * planner relies on where input and output overlap. */
#include "rows.h"

/* Sums of up to four channels with one column or two. */
static inline __attribute__((always_inline)) void multiply_rows(
    const int8_t *first, const int8_t *second, const int8_t *weights, int depth,
    const int32_t *bias, int32_t *sums) {
  int32_t a0 = bias[0], a1 = bias[1], a2 = bias[2], a3 = bias[3];
  int32_t b0 = a0, b1 = a1, b2 = a2, b3 = a3;
#ifdef SLIP_HELIUM
  const int8_t *w0 = weights, *w1 = w0 + depth, *w2 = w1 + depth, *w3 = w2 + depth;
  int n = depth;
  for (; n >= 16; n -= 16, first += 16, second += 16, w0 += 16, w1 += 16, w2 += 16, w3 += 16) {
    int8x16_t x = vldrbq_s8(first), y = vldrbq_s8(second), w = vldrbq_s8(w0);
    a0 = vmladavaq_s8(a0, x, w), b0 = vmladavaq_s8(b0, y, w);
    w = vldrbq_s8(w1);
    a1 = vmladavaq_s8(a1, x, w), b1 = vmladavaq_s8(b1, y, w);
    w = vldrbq_s8(w2);
    a2 = vmladavaq_s8(a2, x, w), b2 = vmladavaq_s8(b2, y, w);
    w = vldrbq_s8(w3);
    a3 = vmladavaq_s8(a3, x, w), b3 = vmladavaq_s8(b3, y, w);
  }
  if (n > 0) {
    mve_pred16_t some = vctp8q((uint32_t)n);
    int8x16_t x = vldrbq_z_s8(first, some), y = vldrbq_z_s8(second, some);
    int8x16_t w = vldrbq_z_s8(w0, some);
    a0 = vmladavaq_s8(a0, x, w), b0 = vmladavaq_s8(b0, y, w);
    w = vldrbq_z_s8(w1, some);
    a1 = vmladavaq_s8(a1, x, w), b1 = vmladavaq_s8(b1, y, w);
    w = vldrbq_z_s8(w2, some);
    a2 = vmladavaq_s8(a2, x, w), b2 = vmladavaq_s8(b2, y, w);
    w = vldrbq_z_s8(w3, some);
    a3 = vmladavaq_s8(a3, x, w), b3 = vmladavaq_s8(b3, y, w);
  }
#else
  for (int n = 0; n < depth; n++) {
    int32_t x = first[n], y = second[n];
    a0 += x * weights[n], b0 += y * weights[n];
    a1 += x * weights[depth + n], b1 += y * weights[depth + n];
    a2 += x * weights[2 * depth + n], b2 += y * weights[2 * depth + n];
    a3 += x * weights[3 * depth + n], b3 += y * weights[3 * depth + n];
  }
#endif
  sums[0] = a0, sums[1] = a1, sums[2] = a2, sums[3] = a3;
  sums[4] = b0, sums[5] = b1, sums[6] = b2, sums[7] = b3;
}

/* Sums of up to four channels for one pixel or two, `to_second` bytes further on. */
static inline __attribute__((always_inline)) void write_rows(
    const int32_t *sums, const int32_t *multipliers, const int32_t *shifts, slip_range range,
    int count, int pixels, int8_t *out, int to_second) {
#ifdef SLIP_HELIUM
  slip_scales scales = slip_load_scales(multipliers, shifts);
  mve_pred16_t some = vctp32q((uint32_t)count);
  vstrbq_p_s32(out, slip_four(vldrwq_s32(sums), scales, range), some);
  if (pixels > 1) {
    vstrbq_p_s32(out + to_second, slip_four(vldrwq_s32(sums + 4), scales, range), some);
  }
#else
  for (int c = 0; c < count; c++) {
    out[c] = slip_one(sums[c], multipliers[c], shifts[c], range);
    if (pixels > 1) out[to_second + c] = slip_one(sums[4 + c], multipliers[c], shifts[c], range);
  }
#endif
}

/* scratch: 2 * depth bytes, `depth` where the output is one pixel. */
void slip_conv_rows(const slip_conv *op, const int8_t *in, int8_t *out, void *scratch) {
  slip_range range = {op->out_zero, op->low, op->high};
  int pixels = op->out_h * op->out_w, padded = (op->out_c + 3) & ~3;
  int direct = op->kernel_h * op->kernel_w == 1 && op->stride_h * op->stride_w == 1 &&
               op->depth == op->in_c;
  int y = 0, x = 0;
  for (; pixels > 0; pixels -= 2, out += 2 * op->out_c) {
    int8_t *first = scratch, *second = pixels > 1 ? first + op->depth : first;
    if (direct) {
      memcpy(first, in, op->depth);
      if (pixels > 1) memcpy(second, in + op->depth, op->depth);
      in += 2 * op->depth;
    } else {
      slip_gather(op, in, y, x, first);
      if (++x == op->out_w) x = 0, y++;
      if (pixels > 1) slip_gather(op, in, y, x, second);
      if (++x == op->out_w) x = 0, y++;
    }
    const int8_t *weights = op->weights;
    const int32_t *bias = op->bias, *multipliers = op->rescale, *shifts = op->rescale + padded;
    int8_t *to = out;
    for (int left = op->out_c; left > 0; left -= 4) {
      int32_t sums[8];
      int count = left < 4 ? left : 4;
      multiply_rows(first, second, weights, op->depth, bias, sums);
      write_rows(sums, multipliers, shifts, range, count, pixels, to, op->out_c);
      weights += 4 * op->depth, bias += 4, multipliers += 4, shifts += 4, to += 4;
    }
  }
}
