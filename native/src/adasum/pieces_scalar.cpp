// For any processor.

#include "adasum/pieces.h"

ADASUM_KERNEL(pieces_scalar, "scalar")
