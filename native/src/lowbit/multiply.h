// Products whose activations are known to be in range, for callers inside the library.
#pragma once

#include <cstdint>

#include "slipstream/lowbit.h"

namespace slipstream {
namespace lowbit {

// Whether all of `count` activations have no more bits than `weights` were packed for.
bool are_codes(const slipstream_lowbit_weights* weights, const uint8_t* a, int64_t count);

// As slipstream_lowbit_multiply, of dense rows of activations that are in range, unchecked.
int32_t multiply_codes(const slipstream_lowbit_weights* weights, const uint8_t* a, int64_t m,
                       int32_t activation_zero, int32_t* out, int64_t ldo, int32_t threads);

}  // namespace lowbit
}  // namespace slipstream
