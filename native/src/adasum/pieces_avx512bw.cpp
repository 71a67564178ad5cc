// Eight products simultaneously.

#include "adasum/pieces.h"

ADASUM_KERNEL(pieces_avx512bw, "avx512bw")
