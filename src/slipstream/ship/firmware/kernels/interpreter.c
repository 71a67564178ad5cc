/* The file is untrusted: every offset is checked against its length, and every size that a kernel
 * uses against the memory that it accesses. */
#include "interpreter.h"

#include <stddef.h>

#ifndef SLIP_STEP
#define SLIP_STEP(number)
#endif

#define PLAN_NAME "slipstream.plan"
#define PLAN_MAGIC 0x31504C53u /* "SLP1" */
#ifdef SLIP_HELIUM
#define VECTORS 1u
#else
#define VECTORS 0u
#endif
/* Words of a plan: [magic, vectors, arena bytes, steps, inputs, outputs], steps, ports, tables.
 * Words of a step: [kernel, input, other, output], the last three offsets in the arena, then its
 * struct, whose pointers are offsets in the file. */
enum { HEADER_WORDS = 6, STEP_WORDS = 16, NUMBERS = 4 };

typedef struct {
  const uint8_t *bytes;
  uint32_t size;
  int damaged;
} reader;

static uint32_t word_at(reader *file, uint32_t at) {
  if (file->size < 4 || at > file->size - 4) {
    file->damaged = 1;
    return 0;
  }
  return slip_word(file->bytes + at);
}

/* Offset of a table's field; 0 if it is absent. */
static uint32_t field_at(reader *file, uint32_t table, uint32_t number) {
  uint32_t fields = table - word_at(file, table), slot = 4 + 2 * number;
  uint32_t length = word_at(file, fields) & 0xFFFFu;
  if (file->damaged || slot + 2 > length) return 0;
  uint32_t offset = word_at(file, fields + slot - 2) >> 16;
  return offset ? table + offset : 0;
}

static uint32_t followed(reader *file, uint32_t at) {
  return at + word_at(file, at);
}

/* Offset of a vector's elements. */
static uint32_t vector_at(
    reader *file, uint32_t table, uint32_t number, uint32_t size, uint32_t *count) {
  uint32_t at = field_at(file, table, number);
  *count = 0;
  if (!at) return 0;
  at = followed(file, at);
  uint32_t found = word_at(file, at);
  if (file->damaged || found > (file->size - at - 4) / size) {
    file->damaged = 1;
    return 0;
  }
  *count = found;
  return at + 4;
}

/* Offset of the plan in the file; 0 if there is none. */
static uint32_t plan_at(reader *file, uint32_t *bytes) {
  uint32_t model = word_at(file, 0), entries, buffers, length;
  uint32_t entry = vector_at(file, model, 6, 4, &entries);
  uint32_t buffer = vector_at(file, model, 4, 4, &buffers);
  for (; entries > 0; entries--, entry += 4) {
    uint32_t table = followed(file, entry);
    uint32_t name = vector_at(file, table, 0, 1, &length), number = field_at(file, table, 1);
    number = number ? word_at(file, number) : 0;
    if (file->damaged) return 0;
    if (length != sizeof PLAN_NAME - 1 || number >= buffers) continue;
    int same = 1;
    for (uint32_t n = 0; n < length; n++) same &= file->bytes[name + n] == (uint8_t)PLAN_NAME[n];
    if (same) return vector_at(file, followed(file, buffer + 4 * number), 0, 1, bytes);
  }
  return 0;
}

/* Saturating product of sizes. */
static uint32_t times(uint32_t a, uint32_t b) {
  uint64_t product = (uint64_t)a * b;
  return product >> 31 ? 0x7FFFFFFFu : (uint32_t)product;
}

typedef union {
  slip_conv conv;
  slip_depthwise depthwise;
} with_tables;

_Static_assert(
    sizeof(slip_conv) == sizeof(slip_depthwise) &&
        offsetof(slip_conv, in_h) == offsetof(slip_depthwise, in_h),
    "structs with tables are of one form");

static inline __attribute__((always_inline)) void unpack(
    const uint8_t *file, const uint32_t *numbers, with_tables *to) {
  to->conv.weights = (const int8_t *)file + numbers[0];
  to->conv.bias = (const int32_t *)(const void *)(file + numbers[1]);
  to->conv.rescale = (const int32_t *)(const void *)(file + numbers[2]);
  memcpy(&to->conv.in_h, numbers + 3, 28);
}

/* Memory that a step accesses. */
typedef struct {
  uint32_t in, other, out;    /* bytes in the arena */
  uint32_t weights, channels; /* bytes of weights, number of channels */
  uint32_t padded;            /* number of biases and pairs of rescaling */
} needs;

static int pools_inside(
    int in, int out, int kernel, int stride, int before) {
  return before < kernel && (out - 1) * stride - before < in;
}

static int conv_needs(uint32_t kernel, const slip_conv *op, needs *need) {
  uint32_t taps = times(op->kernel_h, op->kernel_w), pixels = times(op->out_h, op->out_w);
  int direct = taps * op->stride_h * op->stride_w == 1 && op->depth == op->in_c;
  uint32_t padded = (op->out_c + 3u) & ~3u, several = pixels < 2 ? pixels : 2;
  uint32_t columns = kernel == SLIP_CONV_PLAIN ? SLIP_PLAIN_COLUMNS(op->depth) : 4u * op->depth;
  need->in = times(times(op->in_h, op->in_w), op->in_c);
  need->out = times(pixels, op->out_c);
  need->other = (pixels > 1 ? columns : 0) + (direct ? 0 : several * op->depth);
  need->weights = times(padded, op->depth);
  need->channels = op->out_c;
  need->padded = padded;
  if (direct && times(pixels, op->in_c) > need->in) return 0;
  return op->depth % 4 == 0 && times(taps, op->in_c) <= op->depth && op->dilation_h && op->dilation_w;
}

static int depthwise_needs(uint32_t kernel, const slip_depthwise *op, needs *need) {
  uint32_t taps = times(op->kernel_h, op->kernel_w), pixels = times(op->out_h, op->out_w);
  uint32_t channels = times(op->channels, op->multiplier);
  need->in = times(times(op->in_h, op->in_w), op->channels);
  need->out = times(pixels, channels);
  need->weights = times(taps, channels);
  need->channels = need->padded = channels;
  if (kernel == SLIP_DEPTHWISE_2D) {
    uint32_t outputs = (op->out_w + 1u) & ~1u, stride = op->stride_w;
    uint32_t pitch = ((outputs - 1) * stride + 4) & ~1u;
    need->other = 8 * pitch + 4 * outputs;
    return op->kernel_h == 3 && op->kernel_w == 3 && op->multiplier == 1 &&
           (stride == 1 || stride == 2) && op->stride_h == stride && op->pad_left < 4 &&
           op->in_h + op->pad_top + stride >= 3;
  }
  if (VECTORS) need->padded = (channels + 15) & ~15u;
  if (op->multiplier == 1) need->other = 4 * taps + channels;
  return op->multiplier > 0;
}

static int pool_needs(const slip_pool *op, needs *need) {
  need->in = times(times(op->in_h, op->in_w), op->channels);
  need->out = times(times(op->out_h, op->out_w), op->channels);
  return pools_inside(op->in_h, op->out_h, op->kernel_h, op->stride_h, op->pad_top) &&
         pools_inside(op->in_w, op->out_w, op->kernel_w, op->stride_w, op->pad_left);
}

static int is_code(int32_t value) {
  return value >= -128 && value <= 127;
}

static int is_shift(int32_t shift) {
  return shift >= -31 && shift <= 30;
}

static int add_needs(const slip_add *op, needs *need) {
  if (op->count < 0) return 0;
  need->in = need->other = need->out = (uint32_t)op->count;
  return is_code(op->zero_a) && is_code(op->zero_b) && is_code(op->out_zero) &&
         is_shift(op->shift_a) && is_shift(op->shift_b) && is_shift(op->shift);
}

static int softmax_needs(const slip_softmax *op, needs *need) {
  if (op->rows < 0 || op->columns < 1 || op->columns > 511) return 0;
  need->in = need->out = times((uint32_t)op->rows, (uint32_t)op->columns);
  return op->left_shift >= 0 && op->left_shift <= 31 && op->least_difference <= 0;
}

/* Whether `count` numbers of `size` bytes at a word-aligned offset are inside the file. */
static int in_file(const reader *file, uint32_t offset, uint32_t count, uint32_t size) {
  return offset % 4 == 0 && offset <= file->size && count <= (file->size - offset) / size;
}

static int in_arena(uint32_t arena, uint32_t offset, uint32_t bytes) {
  return bytes <= arena && offset <= arena - bytes;
}

static int apart(uint32_t a, uint32_t a_bytes, uint32_t b, uint32_t b_bytes) {
  return !a_bytes || !b_bytes || a + a_bytes <= b || b + b_bytes <= a;
}

static slip_status check(
    const reader *file, const slip_kernel *kernels, const uint32_t *step, uint32_t arena) {
  uint32_t kernel = step[0];
  const uint32_t *numbers = step + NUMBERS;
  needs need = {0, 0, 0, 0, 0, 0};
  with_tables op;
  int fits = 0;
  if (kernel >= SLIP_KERNELS || !kernels[kernel]) return SLIP_NO_KERNEL;
  if (kernel <= SLIP_DEPTHWISE_ANY) {
    unpack(file->bytes, numbers, &op);
    fits = kernel <= SLIP_CONV_PLAIN ? conv_needs(kernel, &op.conv, &need)
                                     : depthwise_needs(kernel, &op.depthwise, &need);
    fits = fits && in_file(file, numbers[0], need.weights, 1) &&
           in_file(file, numbers[1], need.padded, 4) &&
           in_file(file, numbers[2], need.padded, 8) &&
           /* Functions fill scratch while they read the input, so the two must be disjoint. */
           in_arena(arena, step[1], need.in) && in_arena(arena, step[2], need.other) &&
           in_arena(arena, step[3], need.out) && apart(step[1], need.in, step[2], need.other) &&
           apart(step[3], need.out, step[2], need.other);
    for (uint32_t n = 0; fits && n < need.channels; n++) {
      int32_t second = op.conv.rescale[2 * n + 1];
      fits = second > 0 || (second >= -64 - 30 && second <= -64 + 31);
    }
  } else if (kernel <= SLIP_MAX_POOL) {
    fits = pool_needs((const slip_pool *)(const void *)numbers, &need);
  } else if (kernel == SLIP_ADD) {
    fits = add_needs((const slip_add *)(const void *)numbers, &need);
  } else {
    fits = softmax_needs((const slip_softmax *)(const void *)numbers, &need);
  }
  fits = fits && need.in && need.out && in_arena(arena, step[1], need.in) && in_arena(arena, step[2], need.other) &&
         in_arena(arena, step[3], need.out);
  return fits && (kernel == SLIP_ADD || step[2] % 4 == 0) ? SLIP_OK : SLIP_BAD_PLAN;
}

slip_status slip_open(
    slip_model *model, const void *bytes, uint32_t size, const slip_kernel *kernels) {
  reader file = {bytes, size, 0};
  uint32_t length = 0;
  if ((uintptr_t)bytes % 16 || size > 0x7FFFFFFFu || word_at(&file, 4) != 0x334C4654u) {
    return SLIP_NO_MODEL;
  }
  uint32_t at = plan_at(&file, &length);
  if (file.damaged) return SLIP_NO_MODEL;
  const uint32_t *plan = (const uint32_t *)(const void *)(file.bytes + at);
  if (!at || at % 4 || length < 4 * HEADER_WORDS) return SLIP_NO_PLAN;
  if (plan[0] != PLAN_MAGIC || plan[1] < VECTORS) return SLIP_NO_PLAN;
  uint32_t arena = plan[2], count = plan[3], inputs = plan[4], outputs = plan[5];
  uint32_t left = length - 4 * HEADER_WORDS;
  if (arena > 0x7FFFFFFFu || count > left / (4 * STEP_WORDS)) return SLIP_BAD_PLAN;
  left = (left - 4 * STEP_WORDS * count) / sizeof(slip_port);
  if (inputs > left || outputs > left - inputs) return SLIP_BAD_PLAN;
  const uint32_t *steps = plan + HEADER_WORDS, *end = steps + STEP_WORDS * count;
  const slip_port *ports = (const slip_port *)(const void *)end;
  for (uint32_t n = 0; n < inputs + outputs; n++) {
    if (!in_arena(arena, ports[n].offset, ports[n].bytes)) return SLIP_BAD_PLAN;
  }
  for (const uint32_t *step = steps; step < end; step += STEP_WORDS) {
    slip_status status = check(&file, kernels, step, arena);
    if (status) return status;
  }
  *model = (slip_model){file.bytes, steps, ports, kernels, count, inputs, outputs, arena};
  return SLIP_OK;
}

slip_status slip_invoke(const slip_model *model, void *arena, uint32_t bytes) {
  if (bytes < model->arena_bytes || (uintptr_t)arena % 16) return SLIP_NO_ARENA;
  const uint8_t *file = model->file;
  const slip_kernel *kernels = model->kernels;
  const uint32_t *step = model->steps;
  int8_t *at = arena;
  for (uint32_t n = 0; n < model->count; n++, step += STEP_WORDS) {
    with_tables op;
    const void *given = step + NUMBERS;
    SLIP_STEP(n)
    if (step[0] <= SLIP_DEPTHWISE_ANY) {
      unpack(file, step + NUMBERS, &op);
      given = &op;
    }
    kernels[step[0]](given, at + step[1], at + step[2], at + step[3]);
  }
  SLIP_STEP(model->count)
  return SLIP_OK;
}
