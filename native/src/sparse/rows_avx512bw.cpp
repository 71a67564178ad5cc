// The kernels for AVX-512 F, BW, DQ and VL.

#include "kernel.h"
#include "nearest.h"

const slipstream::sparse::Kernel slipstream::sparse::kAvx512[2] = {
    {distances<float>, nearest<float>}, {distances<double>, nearest<double>}};
