/* Nearest-neighbour upsampling: pixels repeated in both directions. */
#include "slip_micro.h"

void slip_repeat_int8(const slip_repeat *op, const int8_t *in, int8_t *out) {
  for (int32_t y = 0; y < op->in_h * op->factor_h; y++) {
    const int8_t *row = in + y / op->factor_h * op->in_w * op->channels;
    for (int32_t x = 0; x < op->in_w * op->factor_w; x++, out += op->channels) {
      memcpy(out, row + x / op->factor_w * op->channels, (size_t)op->channels);
    }
  }
}
