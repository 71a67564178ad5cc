// What every low-bit matrix-multiply kernel is: one scheme written for one instruction set.
//
// A kernel computes, exactly (modulo 2^32) and over unsigned values a < 2^abits and w < 2^wbits,
//     out[i][j] = sum over k of a[i][k] * (w[j][k] - weight_offset)          (int32)
// Zero points, signs and scales are not its business: the driver (multiply.cpp) corrects with row
// and column sums, takes the offset back, and checks that activations are in range.
// How weights and activations are laid out in memory is private to the kernel.
//
// A kernel lives in SCHEME_LEVEL.cpp, which exports `extern const Kernel SCHEME_LEVEL`; the build
// finds it by its name and compiles it with the flags of the level. Such a file has everything else
// in an anonymous namespace and uses no standard library, so that the linker can never take a copy
// of an inline function compiled for a newer processor.

#pragma once

#include <cstdint>

namespace slipstream {
namespace lowbit {

struct Problem {
  int64_t m, n, k;
  int wbits, abits;
  int32_t center = 0;  // the zero point of all weights; 0 where they differ
};

struct Kernel {
  const char* scheme;  // "dense", "deferred", "bit_serial", "byte_table", ...: how it multiplies
  const char* level;   // a value of InstructionSet (slipstream/native/instruction_set.py)
  uint32_t features;   // bits of slipstream_cpu_features; all must be there to run it
  int64_t panel;       // columns of the output are divided among threads in multiples of this

  bool (*supports)(int wbits, int abits);

  // What is taken from every weight, so that signed bytes hold it or sums grow slower; often 0.
  int32_t (*weight_offset)(const Problem&);

  // Weights w[n][k] (row stride ldw), once and offline; Problem.m is 0 here, and one packing serves
  // every m. Packed buffers begin at a cache line and may be read 64 bytes beyond their end.
  int64_t (*weight_bytes)(const Problem&);
  void (*pack_weights)(const Problem&, const uint8_t* w, int64_t ldw, uint8_t* packed);

  // Activations a[m][k] (row stride lda), at every call. The driver cuts tall matrices into blocks
  // of rows; here and below Problem.m is the rows of one block.
  int64_t (*activation_bytes)(const Problem&);
  void (*pack_activations)(const Problem&, const uint8_t* a, int64_t lda, uint8_t* packed);

  // Columns first_column <= j < last_column, to out[i * ldo + j - first_column]. first_column is a
  // multiple of panel; so is last_column, or it is n. scratch_bytes is for one such call; calls with
  // columns apart may run concurrently, each with its own scratch.
  int64_t (*scratch_bytes)(const Problem&);
  void (*multiply)(const Problem&, const uint8_t* activations, const uint8_t* weights,
                   int64_t first_column, int64_t last_column, uint8_t* scratch, int32_t* out,
                   int64_t ldo);

  // Its multiplications, `rounds` times, on registers alone: what the processor could do at most.
  // Returns the number of products; null if it is not needed.
  int64_t (*spin)(int64_t rounds) = nullptr;
};

// The kernel that a class with these as static members is.
template <typename Scheme>
constexpr Kernel kernel_of(const char* scheme, const char* level, uint32_t features,
                           int64_t panel, int64_t (*spin)(int64_t rounds) = nullptr) {
  return {scheme,
          level,
          features,
          panel,
          Scheme::supports,
          Scheme::weight_offset,
          Scheme::weight_bytes,
          Scheme::pack_weights,
          Scheme::activation_bytes,
          Scheme::pack_activations,
          Scheme::scratch_bytes,
          Scheme::multiply,
          spin};
}

// How many bytes ahead kernels ask for weights that they read once: what memory delivers while it
// answers. The hardware's own prefetchers stop at the end of a page.
constexpr int64_t kPrefetch = 8192;

// Rows of a block are a multiple of it, and it of every tile height in use: 2, 3, 4, 6, 8, 12.
constexpr int64_t kRowBlock = 96;

}  // namespace lowbit
}  // namespace slipstream
