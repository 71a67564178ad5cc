// The kernels for any processor.

#include "kernel.h"
#include "nearest.h"

const slipstream::sparse::Kernel slipstream::sparse::kScalar[2] = {
    {distances<float>, nearest<float>}, {distances<double>, nearest<double>}};
