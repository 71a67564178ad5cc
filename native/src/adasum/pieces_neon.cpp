// Two products at once.

#include "adasum/pieces.h"

ADASUM_KERNEL(pieces_neon, "neon")
