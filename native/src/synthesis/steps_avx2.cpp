#include "synthesis/steps.inc"
STEPS(steps_avx2, "avx2")
