#include "lowbit/around.inc"

extern const Around around_baseline = {summarise, shift, quantise, correct, rescale, enlarge};

}  // namespace lowbit
}  // namespace slipstream
