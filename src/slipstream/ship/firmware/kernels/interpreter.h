/* Runs a .tflite model in flash by the plan that `slipstream ship export` stored in its metadata. The
 * model can be replaced without other code, as long as it calls the same kernels. Weights are read
 * in place; nothing is allocated, and the only state is a `slip_model`. */
#ifndef SLIP_INTERPRETER_H
#define SLIP_INTERPRETER_H

#include "slip_micro.h"

typedef enum {
  SLIP_OK,
  SLIP_NO_MODEL,   /* the file is not a .tflite, is damaged, or is not aligned to 16 */
  SLIP_NO_PLAN,    /* its metadata holds no plan, or one for another version or processor */
  SLIP_BAD_PLAN,   /* a step would read or write outside its memory */
  SLIP_NO_KERNEL,  /* a step calls a kernel that was not linked */
  SLIP_NO_ARENA    /* the arena is too small, or not aligned to 16 */
} slip_status;

/* Kernels by number; those with tables come first. */
enum {
  SLIP_CONV_2D, SLIP_CONV_PLAIN, SLIP_DEPTHWISE_2D, SLIP_DEPTHWISE_ANY, SLIP_AVERAGE_POOL,
  SLIP_MAX_POOL, SLIP_ADD, SLIP_SOFTMAX, SLIP_KERNELS
};

/* other: the second input, or scratch. */
typedef void (*slip_kernel)(const void *op, int8_t *in, int8_t *other, int8_t *out);

typedef struct {
  uint32_t offset, bytes;  /* in the arena */
} slip_port;

typedef struct {
  const uint8_t *file;
  const uint32_t *steps;
  const slip_port *ports;  /* inputs, then outputs */
  const slip_kernel *kernels;
  uint32_t count, inputs, outputs, arena_bytes;
} slip_model;

/* Find and check the plan of a file in memory. `kernels`: SLIP_KERNELS entries, null if not linked.
 * The file must neither move nor change. */
slip_status slip_open(
    slip_model *model, const void *file, uint32_t bytes, const slip_kernel *kernels);

/* Read the inputs at their ports in the arena, write the outputs at theirs. */
slip_status slip_invoke(const slip_model *model, void *arena, uint32_t bytes);

#endif
