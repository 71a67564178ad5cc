// For any processor: the compiler's vectors as its baseline has them.

#include "compress/lanes.h"
#include "compress/table.h"

SLIPSTREAM_COMPRESS_KERNEL(encode_scalar, "scalar")
