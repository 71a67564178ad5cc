// How wide the registers are that a file is compiled for.
//
// In an anonymous namespace, as all that follows from it: each instruction set gets a copy of its
// own, and the linker cannot put an AVX-512 copy where another processor would run it.

#pragma once

namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

}  // namespace
