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
  SLIPSTREAM_LINEARIZE_ARITY = 18, /* more children than slots, or offsets that decrease */
  SLIPSTREAM_READ_UNKNOWN = 19,    /* a node that the code does not know */
  SLIPSTREAM_READ_ERROR = 20       /* Python raised an exception, which is set */
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

/* Reading structures from Python objects, breadth first. The functions are those of Python's stable
 * C API, as the caller has them; the caller holds the interpreter's lock. */
struct slipstream_python {
  void *(*get_attr)(void *, void *), *(*get_item)(void *, int64_t), *(*call)(void *);
  void *(*type_of)(void *);
  int64_t (*size)(void *);
  long (*as_long)(void *);
  void *(*list_new)(int64_t);
  int (*list_append)(void *, void *);
  void (*release)(void *);
  void *(*error)(void);
  void (*clear)(void);
  void *none, *yes, *no, *integer;
};

enum slipstream_read_access {
  SLIPSTREAM_READ_SELF = 0, SLIPSTREAM_READ_ATTR = 1, SLIPSTREAM_READ_ITEM = 2,
  SLIPSTREAM_READ_CALL = 3
};
enum slipstream_read_test {
  SLIPSTREAM_TEST_OBJECT = 0, /* is keys[a] */
  SLIPSTREAM_TEST_VALUE = 1,  /* is the integer a */
  SLIPSTREAM_TEST_TYPE = 2,   /* is of type keys[a], of size b unless that is -1 */
  SLIPSTREAM_TEST_INTEGER = 3 /* is an integer */
};

/* The code is a tree. At a place: the access, register of the parent, key, register of the result,
 * number of tests; then, for each test: its kind, a, b, and the place to go to; or, if the access is
 * negative: -1, kind of node, register of the word or -1, number of children, their registers. */
struct slipstream_read_args {
  const struct slipstream_python *python;
  const int32_t *code;
  void *const *keys;
  void *const *roots;
  int64_t root_count;
  /* out */
  void *nodes;          /* a list; owned by the caller */
  int64_t count, edges;
  void *handle;         /* for slipstream_read_take, which frees it */
  int64_t bad_node;     /* a node that the code does not know */
};

SLIPSTREAM_API int32_t slipstream_read(struct slipstream_read_args *args);
/* Copies what was read: kind and word [count], offset [count + 1], child [edges], roots. */
SLIPSTREAM_API void slipstream_read_take(void *handle, int32_t *kind, int32_t *word,
                                         int64_t *offset, int32_t *child, int32_t *roots);

#ifdef __cplusplus
}
#endif

#endif
