/* A function of one number: a table with an entry for each of the 256 codes. */
#include "slip_micro.h"

void slip_lookup_int8(const slip_lookup *op, const int8_t *in, int8_t *out) {
  for (int32_t n = 0; n < op->count; n++) out[n] = op->table[(uint8_t)in[n]];
}
