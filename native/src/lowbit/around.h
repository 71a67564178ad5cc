// What happens around a kernel: activations are looked at before, products are corrected after.
#pragma once

#include <cstdint>

namespace slipstream {
namespace lowbit {

struct RowSummary {
  uint32_t sum;  // of all values, modulo 2^32
  uint8_t any;   // all values or-ed together: below 2^bits exactly when each value is
};

struct Around {
  RowSummary (*summarise)(const uint8_t* row, int64_t k);

  // out[j] = row[j] + shift modulo 2^8, and the summary of that.
  RowSummary (*shift)(const uint8_t* row, int64_t k, uint8_t by, uint8_t* out);

  // out[j] = x[j] / scale, to nearest (ties to even), + zero, held within 0 .. top. False when an
  // x[j] is not a number; out[j] is then any value in range.
  bool (*quantise)(const float* x, int64_t k, float scale, int32_t zero, int32_t top, uint8_t* out);

  // out[j] += factor * multiplier[j] + addend[j], modulo 2^32.
  void (*correct)(int32_t* out, int64_t n, uint32_t factor, const uint32_t* multiplier,
                  const uint32_t* addend);

  // y[j] = scale[j] * product[j] + bias[j] + added[j], held within floor and ceiling; bias and added
  // may be null.
  void (*rescale)(const int32_t* product, int64_t n, const float* scale, const float* bias,
                  const float* added, float floor, float ceiling, float* y);

  // y[j] = start[j] + the sum of seen[t][j] * weights[t / 2][j][t % 2] over 2 * pairs values of t
  void (*depthwise)(const uint8_t* const* seen, int64_t pairs, const int16_t* weights,
                    const int32_t* start, int64_t n, int32_t* y);

  // y[j] = max(y[j], x[j])
  void (*enlarge)(uint8_t* y, const uint8_t* x, int64_t n);
};

extern const Around around_baseline;
#if defined(SLIPSTREAM_AROUND_WIDE)
extern const Around around_wide;  // the same code, compiled for AVX2
#endif

}  // namespace lowbit
}  // namespace slipstream
