// The kernels for AVX2 and FMA.

#include "kernel.h"
#include "nearest.h"

const slipstream::sparse::Kernel slipstream::sparse::kAvx2[2] = {
    {distances<float>, nearest<float>}, {distances<double>, nearest<double>}};
