/* Convolution with weights in the model's order, a row per output channel, so that they are read in
 * place: sixteen depths per instruction with Helium, two with DSP instructions. */
#include "conv.h"

#ifdef SLIP_HELIUM
/* Sums of four channels with two columns, whose blocks of 16 depths alternate. Even registers hold
 * sums, odd ones addresses: no compiler we tried finds this allocation. */
static inline __attribute__((always_inline)) void multiply_two(
    const int8_t *columns, const int8_t *weights, int depth, int32x4_t *first, int32x4_t *second) {
  register const int8_t *x __asm__("r1") = columns;
  register const int8_t *w __asm__("r3") = weights;
  register int n __asm__("r11") = depth;
  int32x4_t a, b;
  __asm__ volatile(
      "add r5, r3, r11\n add r7, r5, r11\n add r9, r7, r11\n"
      "movs r0, #0\n movs r2, #0\n movs r4, #0\n movs r6, #0\n"
      "mov r8, #0\n mov r10, #0\n mov r12, #0\n mov lr, #0\n"
      "1:\n"
      "vctp.8 r11\n"
      "vpstttt\n"
      "vldrbt.8 q0, [r1], #16\n"
      "vldrbt.8 q1, [r1], #16\n"
      "vldrbt.8 q2, [r3], #16\n"
      "vmladavat.s8 r0, q0, q2\n"
      "vpstttt\n"
      "vmladavat.s8 r8, q1, q2\n"
      "vldrbt.8 q2, [r5], #16\n"
      "vmladavat.s8 r2, q0, q2\n"
      "vmladavat.s8 r10, q1, q2\n"
      "vpstttt\n"
      "vldrbt.8 q2, [r7], #16\n"
      "vmladavat.s8 r4, q0, q2\n"
      "vmladavat.s8 r12, q1, q2\n"
      "vldrbt.8 q2, [r9], #16\n"
      "vpstt\n"
      "vmladavat.s8 r6, q0, q2\n"
      "vmladavat.s8 lr, q1, q2\n"
      "subs r11, #16\n"
      "bgt 1b\n"
      "vmov %q[a][2], %q[a][0], r0, r4\n"
      "vmov %q[a][3], %q[a][1], r2, r6\n"
      "vmov %q[b][2], %q[b][0], r8, r12\n"
      "vmov %q[b][3], %q[b][1], r10, lr\n"
      : [a] "=&w"(a), [b] "=&w"(b), "+r"(x), "+r"(w), "+r"(n)
      :
      : "r0", "r2", "r4", "r5", "r6", "r7", "r8", "r9", "r10", "r12", "lr", "q0", "q1", "q2", "cc",
        "memory");
  *first = a, *second = b;
}

/* Sums of four channels with one column. */
static inline __attribute__((always_inline)) int32x4_t multiply_one(
    const int8_t *column, const int8_t *weights, int depth) {
  const int8_t *w1 = weights + depth, *w2 = w1 + depth, *w3 = w2 + depth;
  int32_t sums[4] = {0, 0, 0, 0};
  for (int n = depth; n > 0; n -= 16, column += 16) {
    mve_pred16_t some = vctp8q((uint32_t)n);
    int8x16_t x = vldrbq_z_s8(column, some);
    sums[0] = vmladavaq_s8(sums[0], x, vldrbq_z_s8(weights, some)), weights += 16;
    sums[1] = vmladavaq_s8(sums[1], x, vldrbq_z_s8(w1, some)), w1 += 16;
    sums[2] = vmladavaq_s8(sums[2], x, vldrbq_z_s8(w2, some)), w2 += 16;
    sums[3] = vmladavaq_s8(sums[3], x, vldrbq_z_s8(w3, some)), w3 += 16;
  }
  return vldrwq_s32(sums);
}

static inline __attribute__((always_inline)) void all_channels(
    const slip_conv *op, const int8_t *first, const int8_t *second, int8_t *copies, int8_t *out,
    int narrow) {
  int depth = op->depth, channels = op->out_c;
  const int8_t *weights = op->weights;
  const int32_t *bias = op->bias, *rescale = op->rescale;
  if (second) {
    int8_t *to = copies;
    for (int n = depth; n > 0; n -= 16, first += 16, second += 16, to += 32) {
      mve_pred16_t some = vctp8q((uint32_t)n);
      vstrbq_p_s8(to, vldrbq_z_s8(first, some), some);
      vstrbq_p_s8(to + 16, vldrbq_z_s8(second, some), some);
    }
  }
  for (; channels > 0; channels -= 4, weights += 4 * depth, bias += 4, rescale += 8, out += 4) {
    int32x4_t a, b;
    if (second) {
      multiply_two(copies, weights, depth, &a, &b);
    } else {
      a = multiply_one(first, weights, depth);
    }
    int32x4_t bias_of_four = vldrwq_s32(bias);
    int32x4x2_t scales = vld2q_s32(rescale);
    int32_t zero = op->out_zero, low = op->low, high = op->high;
    a = slip_four(
        vaddq_s32(a, bias_of_four), scales.val[0], scales.val[1], narrow, zero, low, high);
    if (second) {
      b = slip_four(
          vaddq_s32(b, bias_of_four), scales.val[0], scales.val[1], narrow, zero, low, high);
    }
    if (channels >= 4) {
      vstrbq_s32(out, a);
      if (second) vstrbq_s32(out + op->out_c, b);
    } else {
      mve_pred16_t some = vctp32q((uint32_t)channels);
      vstrbq_p_s32(out, a, some);
      if (second) vstrbq_p_s32(out + op->out_c, b, some);
    }
  }
}

static void multiply(
    const slip_conv *op, const int8_t *first, const int8_t *second, uint32_t *columns, int8_t *out) {
  int8_t *copies = (int8_t *)columns;
  if (!second) {
    all_channels(op, first, 0, copies, out, op->narrow);
  } else if (op->narrow) {
    all_channels(op, first, second, copies, out, 1);
  } else {
    all_channels(op, first, second, copies, out, 0);
  }
}

void slip_conv_plain(const slip_conv *op, const int8_t *in, int8_t *out, void *scratch) {
  slip_each_two(op, in, out, scratch, SLIP_PLAIN_COLUMNS(op->depth), multiply);
}
#else
#ifdef SLIP_DSP
/* Sums of two channels for two columns of `slip_widen`, [channel][pixel]. */
static inline __attribute__((always_inline)) void multiply_two(
    const uint32_t *columns, const int8_t *weights, int depth, const int32_t *bias, int32_t *sums) {
  const int8_t *next = weights + depth, *end = next;
  int32_t a0 = bias[0], a1 = bias[1], b0 = a0, b1 = a1;
  for (; weights < end; weights += 4, next += 4, columns += 4) {
    uint32_t w = slip_word(weights), v = slip_word(next);
    uint32_t even = slip_even_bytes(w), odd = slip_odd_bytes(w);
    a0 = slip_smlad(columns[0], even, a0), b0 = slip_smlad(columns[1], even, b0);
    a0 = slip_smlad(columns[2], odd, a0), b0 = slip_smlad(columns[3], odd, b0);
    even = slip_even_bytes(v), odd = slip_odd_bytes(v);
    a1 = slip_smlad(columns[0], even, a1), b1 = slip_smlad(columns[1], even, b1);
    a1 = slip_smlad(columns[2], odd, a1), b1 = slip_smlad(columns[3], odd, b1);
  }
  sums[0] = a0, sums[1] = b0, sums[2] = a1, sums[3] = b1;
}

/* The same for one pixel, widened while it is read. */
static inline __attribute__((always_inline)) void multiply_one(
    const int8_t *column, const int8_t *weights, int depth, const int32_t *bias, int32_t *sums) {
  const int8_t *next = weights + depth, *end = next;
  int32_t a0 = bias[0], a1 = bias[1];
  for (; weights < end; weights += 4, next += 4, column += 4) {
    uint32_t x = slip_word(column), w = slip_word(weights), v = slip_word(next);
    a0 = slip_smlad(slip_even_bytes(x), slip_even_bytes(w), a0);
    a0 = slip_smlad(slip_odd_bytes(x), slip_odd_bytes(w), a0);
    a1 = slip_smlad(slip_even_bytes(x), slip_even_bytes(v), a1);
    a1 = slip_smlad(slip_odd_bytes(x), slip_odd_bytes(v), a1);
  }
  sums[0] = a0, sums[2] = a1;
}
#else
/* Two columns, one after the other. */
static void slip_copy_two(const int8_t *first, const int8_t *second, int depth, uint32_t *columns) {
  memcpy(columns, first, (size_t)depth);
  memcpy((int8_t *)columns + depth, second, (size_t)depth);
}

static void multiply_one(
    const int8_t *column, const int8_t *weights, int depth, const int32_t *bias, int32_t *sums) {
  for (int c = 0; c < 2; c++) {
    sums[2 * c] = bias[c];
    for (int n = 0; n < depth; n++) sums[2 * c] = slip_sum(sums[2 * c], column[n] * *weights++);
  }
}

static void multiply_two(
    const uint32_t *columns, const int8_t *weights, int depth, const int32_t *bias, int32_t *sums) {
  multiply_one((const int8_t *)columns, weights, depth, bias, sums);
  multiply_one((const int8_t *)columns + depth, weights, depth, bias, sums + 1);
}
#endif

static void multiply(
    const slip_conv *op, const int8_t *first, const int8_t *second, uint32_t *columns, int8_t *out) {
  int depth = op->depth, channels = op->out_c;
  const int8_t *weights = op->weights;
  const int32_t *bias = op->bias, *rescale = op->rescale;
  int32_t sums[8];
#ifdef SLIP_DSP
  if (second) slip_widen(first, second, depth / 4, columns);
#else
  if (second) slip_copy_two(first, second, depth, columns);
#endif
  for (; channels > 0; channels -= 4, weights += 4 * depth, bias += 4, rescale += 8, out += 4) {
    if (second) {
      multiply_two(columns, weights, depth, bias, sums);
      multiply_two(columns, weights + 2 * depth, depth, bias + 2, sums + 4);
      slip_write_two(op, sums, rescale, channels, out);
    } else {
      multiply_one(first, weights, depth, bias, sums);
      multiply_one(first, weights + 2 * depth, depth, bias + 2, sums + 4);
      slip_write_any(op, sums, rescale, channels < 4 ? channels : 4, 1, out);
    }
  }
}

void slip_conv_plain(const slip_conv *op, const int8_t *in, int8_t *out, void *scratch) {
  slip_each_two(op, in, out, scratch, SLIP_PLAIN_COLUMNS(op->depth), multiply);
}
#endif
