// AArch64 with NEON, which its baseline has: four registers of four.

#include "compress/lanes.h"
#include "compress/table.h"

SLIPSTREAM_COMPRESS_KERNEL(encode_neon, "neon")
