#include "lowbit/around.inc"

extern const Around around_baseline = {summarise, shift,   quantise,  correct,
                                    rescale,   depthwise, enlarge};

}  // namespace lowbit
}  // namespace slipstream
