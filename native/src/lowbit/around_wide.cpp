#include "lowbit/around.inc"

extern const Around around_wide = {summarise, shift, quantise, correct, rescale, enlarge};

}  // namespace lowbit
}  // namespace slipstream
