#include "synthesis/steps.inc"
STEPS(steps_scalar, "scalar")
