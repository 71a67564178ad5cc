/* Depthwise convolution of any kernel, stride, dilation and multiplier, pixel by pixel without
 * copies. With multiplier 1, it processes sixteen channels at a time with Helium, four otherwise. */
#include "slip_micro.h"

#ifdef SLIP_HELIUM
/* Every fourth of 16 numbers at distance `step`; tables are padded to 16. */
static inline __attribute__((always_inline)) int32x4_t every_fourth(const int32_t *from, int step) {
  uint32x4_t places = vidupq_n_u32(0, 4);
  if (step == 2) places = vshlq_n_u32(places, 1);
  return vldrwq_gather_shifted_offset_s32(from, places);
}

static inline __attribute__((always_inline)) int32x4_t rescale_fourth(
    const slip_depthwise *op, int32x4_t sums, const int32_t *rescale, int narrow) {
  /* Sequentially: there are not enough registers for all. */
  __asm__ volatile("" : : : "memory");
  return slip_four(
      sums, every_fourth(rescale, 2), every_fourth(rescale + 1, 2), narrow, op->out_zero, op->low,
      op->high);
}

/* Up to sixteen channels of a pixel; `taps` point at the first channel in `in`. Even and odd bytes
 * are multiplied separately, so that a vector of sums holds every fourth channel. */
static inline __attribute__((always_inline)) void sixteen_channels(
    const slip_depthwise *op, const int8_t *in, const int32_t *taps, int channel, int left,
    int whole, int narrow, int8_t *out) {
  int channels = op->channels;
  in += channel;
  const int8_t *weights = op->weights + channel;
  const int32_t *bias = op->bias + channel, *rescale = op->rescale + 2 * channel;
  mve_pred16_t some = vctp8q((uint32_t)left);
  int32x4_t a = every_fourth(bias, 1), b = every_fourth(bias + 1, 1);
  int32x4_t c = every_fourth(bias + 2, 1), d = every_fourth(bias + 3, 1);
  for (int n = op->kernel_h * op->kernel_w; n > 0; n--, weights += channels) {
    const int8_t *from = in + *taps++;
    int8x16_t x = whole ? vldrbq_s8(from) : vldrbq_z_s8(from, some);
    int8x16_t w = whole ? vldrbq_s8(weights) : vldrbq_z_s8(weights, some);
    int16x8_t even = vmullbq_int_s8(x, w), odd = vmulltq_int_s8(x, w);
    a = vaddq_s32(a, vmovlbq_s16(even)), c = vaddq_s32(c, vmovltq_s16(even));
    b = vaddq_s32(b, vmovlbq_s16(odd)), d = vaddq_s32(d, vmovltq_s16(odd));
  }
  a = rescale_fourth(op, a, rescale, narrow);
  b = rescale_fourth(op, b, rescale + 2, narrow);
  c = rescale_fourth(op, c, rescale + 4, narrow);
  d = rescale_fourth(op, d, rescale + 6, narrow);
  int16x8_t even = vmovntq_s32(vreinterpretq_s16_s32(a), c);
  int16x8_t odd = vmovntq_s32(vreinterpretq_s16_s32(b), d);
  int8x16_t bytes = vmovntq_s16(vreinterpretq_s8_s16(even), odd);
  if (whole) {
    vstrbq_s8(out + channel, bytes);
  } else {
    vstrbq_p_s8(out + channel, bytes, some);
  }
}


static inline void all_channels(
    const slip_depthwise *op, const int8_t *in, const int32_t *taps, int8_t *out) {
  int c = 0, channels = op->channels;
  if (op->narrow) {
    for (; c + 16 <= channels; c += 16) sixteen_channels(op, in, taps, c, 16, 1, 1, out);
    if (c < channels) sixteen_channels(op, in, taps, c, channels - c, 0, 1, out);
  } else {
    for (; c + 16 <= channels; c += 16) sixteen_channels(op, in, taps, c, 16, 1, 0, out);
    if (c < channels) sixteen_channels(op, in, taps, c, channels - c, 0, 0, out);
  }
}
#else
/* Sums of `channels` to int8: those without the short form, and the last ones of a group of four. */
static __attribute__((noinline)) void write_any(
    const slip_depthwise *op, const int32_t *sums, const int32_t *rescale, int channels, int8_t *out) {
  for (int c = 0; c < channels; c++, rescale += 2) {
    out[c] = (int8_t)slip_to_int8(sums[c], rescale, op->out_zero, op->low, op->high);
  }
}

/* Sums of four channels of a pixel; `taps` point at the first in `in`. */
static inline __attribute__((always_inline)) void four_channels(
    const int8_t *in, const int8_t *weights, int channels, const int32_t *taps, int count,
    const int32_t *bias, int32_t *sums) {
  int32_t a = bias[0], b = bias[1], c = bias[2], d = bias[3];
#ifdef SLIP_DSP
  /* Assembly: no compiler we tried keeps all sums in registers (twelve). */
  uint32_t x, w, t, u;
  int left = count / 3 * 3;
  if (left) {
    count -= left;
    __asm__ volatile(
        "1:\n"
        ".rept 3\n"
        "ldr %[x], [%[taps]], #4\n"
        "ldr %[w], [%[k]]\n"
        "add %[k], %[k], %[step]\n"
        "ldr %[x], [%[in], %[x]]\n"
        "sxtb16 %[u], %[w]\n"
        "sxtb16 %[t], %[x]\n"
        "sxtb16 %[w], %[w], ror #8\n"
        "sxtb16 %[x], %[x], ror #8\n"
        "smlabb %[a], %[t], %[u], %[a]\n"
        "smlatt %[c], %[t], %[u], %[c]\n"
        "smlabb %[b], %[x], %[w], %[b]\n"
        "smlatt %[d], %[x], %[w], %[d]\n"
        ".endr\n"
        "ldr %[t], %[n]\n"
        "subs %[t], #3\n"
        "str %[t], %[n]\n"
        "bgt 1b\n"
        : [a] "+r"(a), [b] "+r"(b), [c] "+r"(c), [d] "+r"(d), [taps] "+r"(taps), [k] "+r"(weights),
          [n] "+m"(left), [x] "=&r"(x), [w] "=&r"(w), [t] "=&r"(t), [u] "=&r"(u)
        : [in] "r"(in), [step] "r"(channels)
        : "cc", "memory");
  }
#endif
  for (; count > 0; count--, weights += channels) {
    const int8_t *from = in + *taps++;
    a = slip_sum(a, from[0] * weights[0]), b = slip_sum(b, from[1] * weights[1]);
    c = slip_sum(c, from[2] * weights[2]), d = slip_sum(d, from[3] * weights[3]);
  }
  sums[0] = a, sums[1] = b, sums[2] = c, sums[3] = d;
}

static __attribute__((noinline)) void all_channels(
    const slip_depthwise *op, const int8_t *in, const int32_t *taps, int8_t *out) {
  int channels = op->channels, left = channels, count = op->kernel_h * op->kernel_w;
  int32_t narrow = op->narrow, zero = op->out_zero;
  const int8_t *weights = op->weights;
  const int32_t *bias = op->bias, *rescale = op->rescale;
  int32_t sums[4];
  for (; left >= 4; left -= 4, in += 4, weights += 4, bias += 4, rescale += 8, out += 4) {
    four_channels(in, weights, channels, taps, count, bias, sums);
    if (narrow) {
      out[0] = (int8_t)slip_narrow(sums[0], rescale[0], rescale[1], zero);
      out[1] = (int8_t)slip_narrow(sums[1], rescale[2], rescale[3], zero);
      out[2] = (int8_t)slip_narrow(sums[2], rescale[4], rescale[5], zero);
      out[3] = (int8_t)slip_narrow(sums[3], rescale[6], rescale[7], zero);
    } else {
      write_any(op, sums, rescale, 4, out);
    }
  }
  for (int c = 0; c < left; c++) {
    const int8_t *w = weights + c;
    int32_t sum = bias[c];
    for (int k = 0; k < count; k++, w += channels) sum = slip_sum(sum, in[taps[k] + c] * *w);
    sums[c] = sum;
  }
  if (left > 0) write_any(op, sums, rescale, left, out);
}
#endif

/* Pointers to the kernel's taps at a pixel; outside the input they point at `zeros`. */
static int taps_at(const slip_depthwise *op, int top, int left, int32_t zeros, int32_t *taps) {
  int reach_h = (op->kernel_h - 1) * op->dilation_h, reach_w = (op->kernel_w - 1) * op->dilation_w;
  for (int i = 0; i < op->kernel_h; i++, top += op->dilation_h) {
    int col = left;
    for (int j = 0; j < op->kernel_w; j++, col += op->dilation_w) {
      int inside = top >= 0 && top < op->in_h && col >= 0 && col < op->in_w;
      *taps++ = inside ? (top * op->in_w + col) * op->channels : zeros;
    }
  }
  top -= reach_h + op->dilation_h;
  return top >= 0 && top + reach_h < op->in_h && left >= 0 && left + reach_w < op->in_w;
}

/* Multiplier 1. scratch: a pointer per tap, and a zero point per channel. */
static void by_pixel(const slip_depthwise *op, const int8_t *in, int8_t *out, void *scratch) {
  int32_t *taps = scratch;
  int channels = op->channels, count = op->kernel_h * op->kernel_w;
  int step = op->stride_w * channels, reach_w = (op->kernel_w - 1) * op->dilation_w;
  int8_t *zeros = (int8_t *)(taps + count);
  memset(zeros, op->in_zero, (size_t)channels);
  for (int y = 0; y < op->out_h; y++) {
    int left = -op->pad_left, inner = 0;
    for (int x = 0; x < op->out_w; x++, left += op->stride_w, out += channels) {
      if (inner && left + reach_w < op->in_w) {
        for (int k = 0; k < count; k++) taps[k] += step;
      } else {
        inner = taps_at(op, y * op->stride_h - op->pad_top, left, (int32_t)(zeros - in), taps);
      }
      all_channels(op, in, taps, out);
    }
  }
}

void slip_depthwise_any(const slip_depthwise *op, const int8_t *in, int8_t *out, void *scratch) {
  if (op->multiplier == 1) {
    by_pixel(op, in, out, scratch);
    return;
  }
  int channels = op->channels * op->multiplier;
  for (int y = 0; y < op->out_h; y++) {
    for (int x = 0; x < op->out_w; x++) {
      for (int c = 0; c < channels; c++) {
        const int8_t *weights = op->weights + c;
        const int8_t *from = in + c / op->multiplier;
        int32_t sum = op->bias[c];
        int row = y * op->stride_h - op->pad_top;
        for (int i = 0; i < op->kernel_h; i++, row += op->dilation_h) {
          int col = x * op->stride_w - op->pad_left;
          for (int j = 0; j < op->kernel_w; j++, col += op->dilation_w, weights += channels) {
            int inside = row >= 0 && row < op->in_h && col >= 0 && col < op->in_w;
            int value = inside ? from[(row * op->in_w + col) * op->channels] : op->in_zero;
            sum = slip_sum(sum, value * *weights);
          }
        }
        *out++ = (int8_t)slip_to_int8(sum, op->rescale + 2 * c, op->out_zero, op->low, op->high);
      }
    }
  }
}
