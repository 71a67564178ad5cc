/* Sum of two equal shapes: both to a common scale with 20 extra bits, then to the output's. */
#include "slip_micro.h"

void slip_add_int8(const slip_add *op, const int8_t *a, const int8_t *b, int8_t *out) {
  for (int32_t n = 0; n < op->count; n++) {
    int32_t first = slip_rescale((a[n] - op->zero_a) * (1 << 20), op->multiplier_a, op->shift_a);
    int32_t second = slip_rescale((b[n] - op->zero_b) * (1 << 20), op->multiplier_b, op->shift_b);
    int32_t sum = slip_rescale(slip_sum(first, second), op->multiplier, op->shift);
    out[n] = (int8_t)slip_clamp(slip_sum(sum, op->out_zero), op->low, op->high);
  }
}
