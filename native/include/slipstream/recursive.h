/* Linearization of recursive structures, trees and DAGs: a plain C ABI.
 *
 * Levels are heights: 0 for a node without children. Nodes are numbered so that every level and,
 * within it, every group of equal kind and mask is one range, and every child has a larger number
 * than its parents: level 0 has the largest numbers.
 */
#ifndef SLIPSTREAM_RECURSIVE_H
#define SLIPSTREAM_RECURSIVE_H

#include "slipstream/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

enum slipstream_linearize_status {
  SLIPSTREAM_LINEARIZE_CYCLE = 16,
  SLIPSTREAM_LINEARIZE_RANGE = 17, /* a child is no node */
  SLIPSTREAM_LINEARIZE_ARITY = 18  /* more children than slots, or offsets that decrease */
};

struct slipstream_linearization {
  int64_t nodes, slots, kinds;
  int32_t mask_slots;     /* children whose kind is `tabled` set bits of the mask, up to this slot */
  int32_t reserved;
  const int64_t *offset;  /* [nodes + 1]: children of n are child[offset[n] .. offset[n + 1]) */
  const int32_t *child;
  const int32_t *kind;    /* [nodes], 0 <= kind < kinds; NULL: the number of children */
  const uint8_t *tabled;  /* [kinds] */
  /* out */
  int32_t *place;         /* [nodes]: new number */
  int32_t *child_of;      /* [slots, nodes] by new number; -1: no such child */
  int32_t *groups;        /* [capacity, 5]: level, kind, mask, first node, count; ascending levels */
  int64_t capacity, group_count, levels;
  int64_t bad_node;       /* given number of the node at fault */
};

SLIPSTREAM_API int32_t slipstream_linearize(struct slipstream_linearization *args);

#ifdef __cplusplus
}
#endif

#endif
