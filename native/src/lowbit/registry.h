#pragma once

#include "lowbit/kernel.h"

namespace slipstream {
namespace lowbit {

// The kernel of this number, or null.
const Kernel* find(int32_t index);

}  // namespace lowbit
}  // namespace slipstream
