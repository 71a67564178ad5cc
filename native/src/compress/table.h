// The table of one level's functions; included last by its file.

#pragma once

#include "compress/blocks.h"
#include "compress/lowrank.h"
#include "compress/select.h"

#define SLIPSTREAM_COMPRESS_KERNEL(name, level)                                              \
  namespace slipstream {                                                                     \
  namespace compress {                                                                       \
  extern const Kernel name;                                                                  \
  const Kernel name = {level,          finite,         encode_signs, encode_bytes,           \
                       encode_nibbles, decode_signs,   decode_bytes, decode_nibbles,         \
                       above,          project,        orthonormalise, project_back,         \
                       reconstruct};                                                         \
  }                                                                                          \
  }
