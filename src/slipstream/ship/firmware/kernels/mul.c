/* Product of two equal shapes, or of a tensor and one number per channel. */
#include "slip_micro.h"

void slip_mul_int8(const slip_mul *op, const int8_t *a, const int8_t *b, int8_t *out) {
  for (int32_t n = 0, at = 0; n < op->count; n++) {
    int32_t product = (a[n] - op->zero_a) * (b[at] - op->zero_b);
    int32_t value = slip_rescale(product, op->multiplier, op->shift);
    out[n] = (int8_t)slip_clamp(slip_sum(value, op->out_zero), op->low, op->high);
    if (++at == op->period) at = 0;
  }
}
