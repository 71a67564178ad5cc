// Which instruction sets this processor and operating system can run, and how fast its clock is.

#include "slipstream/engine.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Not every compiler's builtin knows its name.
static bool has_avx_vnni() {
  unsigned eax = 0, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 4 & 1) != 0;
}

// Whether there are tiles for products of bytes, and the operating system lets this process use them:
// they are large, so that Linux requires a request (since 5.16; every user makes it).
static bool has_amx_int8() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kTiles = 1u << 24 | 1u << 25, kSaved = 3u << 17;
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  unsigned eax = 0, ebx, ecx, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (edx & kTiles) != kTiles) return false;
  __asm__("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  return (eax & kSaved) == kSaved && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#endif

extern "C" uint32_t slipstream_cpu_features(void) {
  uint32_t features = 0;
#if defined(__x86_64__) || defined(__i386__)
  // The builtins also ask the operating system (XGETBV) whether it saves the wide registers.
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    features |= SLIPSTREAM_CPU_AVX2 | (has_avx_vnni() ? SLIPSTREAM_CPU_AVX_VNNI : 0) |
                (has_amx_int8() ? SLIPSTREAM_CPU_AMX_INT8 : 0);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    features |= SLIPSTREAM_CPU_AVX512;
  if (__builtin_cpu_supports("avx512vnni")) features |= SLIPSTREAM_CPU_AVX512_VNNI;
  if (__builtin_cpu_supports("avx512vbmi")) features |= SLIPSTREAM_CPU_AVX512_VBMI;
  if (__builtin_cpu_supports("avx512vpopcntdq")) features |= SLIPSTREAM_CPU_AVX512_VPOPCNTDQ;
  features |= 1u << 31;
#elif defined(__aarch64__) && defined(__linux__)
  const unsigned long capabilities = getauxval(AT_HWCAP);
  if (capabilities & (1ul << 1)) features |= SLIPSTREAM_CPU_NEON;      // HWCAP_ASIMD
  if (capabilities & (1ul << 20)) features |= SLIPSTREAM_CPU_DOTPROD;  // HWCAP_ASIMDDP
  features |= 1u << 31;
#elif defined(__aarch64__) && defined(__APPLE__)
  // Every Apple processor that runs macOS has both.
  features |= SLIPSTREAM_CPU_NEON | SLIPSTREAM_CPU_DOTPROD | 1u << 31;
#endif
  return features;
}

extern "C" void slipstream_spin(int64_t count) {
  int64_t sum = 0;
  for (int64_t i = 0; i < count; i += 8) {
    // Eight at a time, so that the loop's own work is hidden behind them.
    for (int step = 0; step < 8; ++step) {
      sum += count;
#if defined(__GNUC__)
      __asm__ volatile("" : "+r"(sum));
#endif
    }
  }
}
