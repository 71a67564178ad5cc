// Four products simultaneously.

#include "adasum/pieces.h"

ADASUM_KERNEL(pieces_avx2, "avx2")
