/* Softmax in fixed point, as in gemmlowp: exp of a negative number by its bits down to a quarter and
 * a polynomial below, 1 / sum by Newton's method. `Qn` has n integer bits. */
#include "slip_micro.h"

static int32_t shift_left_saturated(int32_t value, int bits) {
  int32_t most = INT32_MAX >> bits;
  if (value > most) return INT32_MAX;
  return value < -most - 1 ? INT32_MIN : slip_shift_left(value, bits);
}

/* exp of a Q0 in [-1/4, 0), by a Taylor series around -1/8. */
static int32_t exp_small(int32_t a) {
  const int32_t exp_eighth = 1895147668, third = 715827883;
  int32_t x = a + (1 << 28);
  int32_t x2 = slip_high_product(x, x), x3 = slip_high_product(x2, x);
  int32_t x4 = slip_round_shift(slip_high_product(x2, x2), 2);
  int32_t rest = slip_round_shift(slip_high_product(x4 + x3, third) + x2, 1);
  return exp_eighth + slip_high_product(exp_eighth, x + rest);
}

/* exp of a Q5 that is at most 0, as Q0. */
static int32_t exp_negative(int32_t a) {
  /* exp(-1/4), exp(-1/2), exp(-1), ... exp(-16) */
  static const int32_t powers[7] = {1672461947, 1302514674, 790015084, 290630308,
                                    39332535,   720401,     242};
  const int32_t quarter = 1 << 24;
  if (a == 0) return INT32_MAX;
  int32_t small = (a & (quarter - 1)) - quarter;
  int32_t result = exp_small(shift_left_saturated(small, 5));
  int32_t remainder = (int32_t)((uint32_t)small - (uint32_t)a);
  for (int bit = 0; bit < 7; bit++) {
    if (remainder & (1 << (24 + bit))) result = slip_high_product(result, powers[bit]);
  }
  return result;
}

/* 1 / (1 + a) of a Q0 in [0, 1), as Q0. */
static int32_t reciprocal(int32_t a) {
  int32_t half = (int32_t)(((int64_t)a + INT32_MAX + 1) / 2);
  int32_t x = 1515870810 + slip_high_product(half, -1010580540);  /* 48/17 - 32/17 half, Q2 */
  for (int step = 0; step < 3; step++) {
    int32_t error = (1 << 29) - slip_high_product(half, x);
    x += shift_left_saturated(slip_high_product(x, error), 2);
  }
  return shift_left_saturated(x, 1);
}

void slip_softmax_int8(const slip_softmax *op, const int8_t *in, int8_t *out) {
  for (int32_t row = 0; row < op->rows; row++, in += op->columns, out += op->columns) {
    int32_t most = -128, sum = 0;
    for (int32_t c = 0; c < op->columns; c++) most = in[c] > most ? in[c] : most;
    for (int32_t c = 0; c < op->columns; c++) {
      int32_t difference = in[c] - most;
      if (difference < op->least_difference) continue;
      int32_t scaled = slip_high_product(slip_shift_left(difference, op->left_shift), op->multiplier);
      sum += slip_round_shift(exp_negative(scaled), 12);
    }
    int headroom = 0;
    while (!((uint32_t)sum << headroom & 0x80000000u)) headroom++;
    int32_t scale = reciprocal((int32_t)(((uint32_t)sum << headroom) - 0x80000000u));
    int shift = 12 - headroom + 31 - 8;
    for (int32_t c = 0; c < op->columns; c++) {
      int32_t difference = in[c] - most;
      if (difference < op->least_difference) {
        out[c] = -128;
        continue;
      }
      int32_t scaled = slip_high_product(slip_shift_left(difference, op->left_shift), op->multiplier);
      int32_t value = slip_round_shift(slip_high_product(scale, exp_negative(scaled)), shift);
      out[c] = (int8_t)slip_clamp(value - 128, -128, 127);
    }
  }
}
