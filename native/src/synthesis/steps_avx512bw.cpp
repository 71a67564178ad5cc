#include "synthesis/steps.inc"
STEPS(steps_avx512bw, "avx512bw")
