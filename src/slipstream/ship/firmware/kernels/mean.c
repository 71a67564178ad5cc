/* Mean over the pixels of an image per channel, at the output's scale. */
#include "slip_micro.h"

void slip_mean_int8(const slip_mean *op, const int8_t *in, int8_t *out) {
  for (int32_t c = 0; c < op->channels; c++) {
    int32_t sum = -op->in_zero * op->pixels;
    for (int32_t n = 0; n < op->pixels; n++) sum += in[n * op->channels + c];
    int32_t value = slip_rescale(sum, op->multiplier, op->shift);
    out[c] = (int8_t)slip_clamp(slip_sum(value, op->out_zero), -128, 127);
  }
}
