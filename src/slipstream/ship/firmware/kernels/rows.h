/* Sums to int8, whose multipliers and shifts stand in rows: with Helium four in one go. */
#ifndef SLIP_ROWS_H
#define SLIP_ROWS_H

#include "slip_micro.h"

typedef struct {
  int32_t zero, low, high;
} slip_range;

#ifdef SLIP_HELIUM
typedef struct {
  int32x4_t multiplier, left, right;
} slip_scales;

static inline slip_scales slip_load_scales(const int32_t *multipliers, const int32_t *shifts) {
  int32x4_t shift = vnegq_s32(vldrwq_s32(shifts)), none = vdupq_n_s32(0);
  return (slip_scales){vldrwq_s32(multipliers), vmaxq_s32(shift, none), vminq_s32(shift, none)};
}

/* `vqrdmulh` rounds half up as the first rounding does; `vrshl` rounds half up too, and the sign is
 * added first where there is a shift, so that it is half away from zero. */
static inline int32x4_t slip_four(int32x4_t sums, slip_scales scales, slip_range range) {
  sums = vqrdmulhq_s32(vshlq_s32(sums, scales.left), scales.multiplier);
  sums = vaddq_s32(sums, vshrq_n_s32(vandq_s32(sums, scales.right), 31));
  sums = vaddq_n_s32(vrshlq_s32(sums, scales.right), range.zero);
  return vminq_s32(vmaxq_s32(sums, vdupq_n_s32(range.low)), vdupq_n_s32(range.high));
}
#endif

static inline int8_t slip_one(int32_t sum, int32_t multiplier, int32_t shift, slip_range range) {
  return (int8_t)slip_clamp(slip_rescale(sum, multiplier, -shift) + range.zero, range.low, range.high);
}

#endif
