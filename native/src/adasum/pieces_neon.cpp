// Two products simultaneously.

#include "adasum/pieces.h"

ADASUM_KERNEL(pieces_neon, "neon")
