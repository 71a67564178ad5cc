#include "lowbit/around.inc"

extern const Around around_wide = {summarise, shift,   quantise,  correct,
                                    rescale,   depthwise, enlarge};

}  // namespace lowbit
}  // namespace slipstream
