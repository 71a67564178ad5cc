/* Convolution, and fully connected layers as 1 x 1 convolutions: 16-bit products of two pixels with
 * four channels at a time, two per instruction with DSP instructions. */
#include "conv.h"

/* columns: per two depths a word for each pixel; weights: per two depths a word for channels 0 and
 * 1 and one for 2 and 3, whose even bytes are the first channel's. */
static inline __attribute__((always_inline)) void multiply_two(
    const uint32_t *columns, const uint32_t *weights, int quads, const int32_t *bias, int32_t *sums) {
  int32_t a0 = bias[0], a1 = bias[1], a2 = bias[2], a3 = bias[3];
  int32_t b0 = a0, b1 = a1, b2 = a2, b3 = a3;
#ifdef SLIP_DSP
  /* Assembly: no compiler we tried keeps all sums in registers (thirteen, and the stack pointer). */
  uint32_t x0, x1, w, t;
  __asm__ volatile(
      "1:\n"
      ".rept 2\n"
      "ldrd %[x0], %[x1], [%[x]], #8\n"
      "ldr %[w], [%[k]], #4\n"
      "sxtb16 %[t], %[w]\n"
      "sxtb16 %[w], %[w], ror #8\n"
      "smlad %[a0], %[x0], %[t], %[a0]\n"
      "smlad %[b0], %[x1], %[t], %[b0]\n"
      "smlad %[a1], %[x0], %[w], %[a1]\n"
      "smlad %[b1], %[x1], %[w], %[b1]\n"
      "ldr %[w], [%[k]], #4\n"
      "sxtb16 %[t], %[w]\n"
      "sxtb16 %[w], %[w], ror #8\n"
      "smlad %[a2], %[x0], %[t], %[a2]\n"
      "smlad %[b2], %[x1], %[t], %[b2]\n"
      "smlad %[a3], %[x0], %[w], %[a3]\n"
      "smlad %[b3], %[x1], %[w], %[b3]\n"
      ".endr\n"
      "ldr %[t], %[n]\n"
      "subs %[t], #1\n"
      "str %[t], %[n]\n"
      "bne 1b\n"
      : [a0] "+r"(a0), [a1] "+r"(a1), [a2] "+r"(a2), [a3] "+r"(a3), [b0] "+r"(b0), [b1] "+r"(b1),
        [b2] "+r"(b2), [b3] "+r"(b3), [x] "+r"(columns), [k] "+r"(weights), [x0] "=&r"(x0),
        [x1] "=&r"(x1), [w] "=&r"(w), [t] "=&r"(t), [n] "+m"(quads)
      :
      : "cc", "memory");
#else
  for (int pair = 0; pair < 2 * quads; pair++) {
    uint32_t x0 = *columns++, x1 = *columns++, w = *weights++;
    uint32_t even = slip_even_bytes(w), odd = slip_odd_bytes(w);
    a0 = slip_smlad(x0, even, a0);
    b0 = slip_smlad(x1, even, b0);
    a1 = slip_smlad(x0, odd, a1);
    b1 = slip_smlad(x1, odd, b1);
    w = *weights++;
    even = slip_even_bytes(w);
    odd = slip_odd_bytes(w);
    a2 = slip_smlad(x0, even, a2);
    b2 = slip_smlad(x1, even, b2);
    a3 = slip_smlad(x0, odd, a3);
    b3 = slip_smlad(x1, odd, b3);
  }
#endif
  sums[0] = a0, sums[1] = b0, sums[2] = a1, sums[3] = b1;
  sums[4] = a2, sums[5] = b2, sums[6] = a3, sums[7] = b3;
}

/* The same for one pixel, widened while it is read. */
static inline __attribute__((always_inline)) void multiply_one(
    const int8_t *column, const uint32_t *weights, int quads, const int32_t *bias, int32_t *sums) {
  int32_t a0 = bias[0], a1 = bias[1], a2 = bias[2], a3 = bias[3];
  for (; quads > 0; quads--, column += 4, weights += 4) {
    uint32_t bytes = slip_word(column), x = slip_even_bytes(bytes), w = weights[0];
    a0 = slip_smlad(x, slip_even_bytes(w), a0);
    a1 = slip_smlad(x, slip_odd_bytes(w), a1);
    w = weights[1];
    a2 = slip_smlad(x, slip_even_bytes(w), a2);
    a3 = slip_smlad(x, slip_odd_bytes(w), a3);
    x = slip_odd_bytes(bytes);
    w = weights[2];
    a0 = slip_smlad(x, slip_even_bytes(w), a0);
    a1 = slip_smlad(x, slip_odd_bytes(w), a1);
    w = weights[3];
    a2 = slip_smlad(x, slip_even_bytes(w), a2);
    a3 = slip_smlad(x, slip_odd_bytes(w), a3);
  }
  sums[0] = a0, sums[2] = a1, sums[4] = a2, sums[6] = a3;
}

static void multiply(
    const slip_conv *op, const int8_t *first, const int8_t *second, uint32_t *columns, int8_t *out) {
  int quads = op->depth / 4, channels = op->out_c;
  const uint32_t *weights = (const uint32_t *)(const void *)op->weights;
  const int32_t *bias = op->bias, *rescale = op->rescale;
  int32_t sums[8];
  if (second) slip_widen(first, second, quads, columns);
  for (; channels > 0; channels -= 4, weights += op->depth, bias += 4, rescale += 8, out += 4) {
    if (second) {
      multiply_two(columns, weights, quads, bias, sums);
      slip_write_two(op, sums, rescale, channels, out);
    } else {
      multiply_one(first, weights, quads, bias, sums);
      slip_write_any(op, sums, rescale, channels < 4 ? channels : 4, 1, out);
    }
  }
}

void slip_conv_2d(const slip_conv *op, const int8_t *in, int8_t *out, void *scratch) {
  slip_each_two(op, in, out, scratch, 4 * op->depth, multiply);
}
