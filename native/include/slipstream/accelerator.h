/* Cycles of a processing element that skips zeros: a plain C ABI.
 *
 * A lane takes one pair of operands per cycle from a window of `depth` rows; see
 * src/accelerator/kernel.h for the model and its source.
 */
#ifndef SLIPSTREAM_ACCELERATOR_H
#define SLIPSTREAM_ACCELERATOR_H

#include "slipstream/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SLIPSTREAM_ACCELERATOR_DEPTH = 4, SLIPSTREAM_ACCELERATOR_OPTIONS = 16 };

/* `row[o]` and `shift[o]`: option o of lane i is the pair of row `row[o]` in lane i + shift[o],
 * modulo the lanes; options are tried in order. `level[l]`: lanes that choose at the same time. */
struct slipstream_accelerator_frontend {
  int32_t lanes, depth, options, levels;
  int32_t row[SLIPSTREAM_ACCELERATOR_OPTIONS], shift[SLIPSTREAM_ACCELERATOR_OPTIONS];
  uint64_t level[64];
};

SLIPSTREAM_API int32_t slipstream_accelerator_kernel_count(void);
SLIPSTREAM_API const char *slipstream_accelerator_level(int32_t kernel);

/* The schedule of `count` windows, window[count][depth], each on its own: the option of each lane
 * in selects[count][lanes], `options` for none, and the number of empty leading rows afterwards in
 * advance[count], from 1 to depth. */
SLIPSTREAM_API int32_t slipstream_accelerator_schedule(
    const struct slipstream_accelerator_frontend *frontend, const uint64_t *window, int64_t count,
    uint8_t *selects, uint8_t *advance);

/* Cycles of groups of streams. Row t of stream s is words[base[s] + offset[t]], of 16 bits for up
 * to 16 lanes and else of 64; a negative base is a stream of zeros. Streams group * together to
 * (group + 1) * together - 1 advance in step; `together` is a power of two up to 32. Results are
 * out[groups][3]: cycles, nonzeros, and the most nonzeros of one stream. */
SLIPSTREAM_API int32_t slipstream_accelerator_cycles(
    int32_t kernel, const struct slipstream_accelerator_frontend *frontend, const void *words,
    const int64_t *base, int64_t groups, int32_t together, const int64_t *offset, int64_t length,
    int64_t *out, int32_t threads);

#ifdef __cplusplus
}
#endif

#endif
