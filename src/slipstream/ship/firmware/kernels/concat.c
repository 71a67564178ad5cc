/* Rows of one tensor, each followed by a row of another. */
#include "slip_micro.h"

void slip_concat_int8(const slip_concat *op, const int8_t *a, const int8_t *b, int8_t *out) {
  for (int32_t row = 0; row < op->rows; row++) {
    memcpy(out, a, (size_t)op->first);
    memcpy(out + op->first, b, (size_t)op->second);
    a += op->first, b += op->second, out += op->first + op->second;
  }
}
