/* Runs a model on an emulated Cortex-M and reports its cost; for verification, not for production.
 *
 * Counts are instructions: the emulator's clock advances by a fixed time per instruction, and the
 * SysTick timer counts that time, calibrated by a loop of known length. RAM is filled with a pattern
 * first, which exposes reads of uninitialized memory. */
#include <stdint.h>
#include <string.h>

#include "board.h"

#define REGISTER(address) (*(volatile uint32_t *)(address))
#define SYSTICK_CONTROL REGISTER(0xE000E010u)
#define SYSTICK_RELOAD REGISTER(0xE000E014u)
#define SYSTICK_NOW REGISTER(0xE000E018u)

extern uint32_t board_data_image, board_data, board_data_end, board_bss, board_bss_end, board_stack;

/* All sets of inputs in sequence: megabytes, which a compiler would be slow to parse. */
__asm__(".section .inputs, \"a\"\n.global board_inputs\nboard_inputs:\n.incbin \"" BOARD_INPUTS_FILE
        "\"\n.text\n");
extern const uint8_t board_inputs[];

static __attribute__((aligned(16))) uint8_t board_arena[BOARD_ARENA_BYTES];

void board_main(void);

static void board_say(const char *text) {
  register uint32_t r0 __asm__("r0") = 4; /* SYS_WRITE0 */
  register const char *r1 __asm__("r1") = text;
  __asm__ volatile("bkpt 0xAB" : "+r"(r0) : "r"(r1) : "memory");
}

static void board_exit(uint32_t code) {
  uint32_t block[2] = {0x20026, code};
  register uint32_t r0 __asm__("r0") = 0x20; /* SYS_EXIT_EXTENDED */
  register uint32_t *r1 __asm__("r1") = block;
  __asm__ volatile("bkpt 0xAB" : : "r"(r0), "r"(r1) : "memory");
  for (;;) {
  }
}

static void board_say_bytes(const char *name, const uint8_t *bytes, uint32_t count) {
  char line[2 * 32 + 2];
  board_say(name);
  while (count) {
    uint32_t n = count < 32 ? count : 32;
    for (uint32_t i = 0; i < n; i++) {
      line[2 * i] = "0123456789abcdef"[bytes[i] >> 4];
      line[2 * i + 1] = "0123456789abcdef"[bytes[i] & 15];
    }
    line[2 * n] = 0;
    board_say(line);
    bytes += n, count -= n;
  }
  board_say("\n");
}

static void board_say_number(const char *name, uint32_t value) {
  char digits[12];
  char *at = digits + 11;
  *at = 0;
  do *--at = (char)('0' + value % 10);
  while (value /= 10);
  board_say(name);
  board_say(at);
  board_say("\n");
}

void board_fault(void) {
  board_say("fault\n");
  board_exit(3);
}

void board_reset(void) {
  /* Enable the floating-point unit and Helium, which share registers. */
  REGISTER(0xE000ED88u) |= 0xFu << 20;
  __asm__ volatile("dsb\n isb");
  uint32_t *from = &board_data_image;
  for (uint32_t *to = &board_data; to < &board_data_end;) *to++ = *from++;
  for (uint32_t *to = &board_bss; to < &board_bss_end;) *to++ = 0;
  board_main();
}

__attribute__((section(".vectors"), used)) static const void *const board_vectors[16] = {
    &board_stack, board_reset, board_fault, board_fault, board_fault, board_fault, board_fault, 0,
    0, 0, 0, board_fault, board_fault, 0, board_fault, board_fault};

static __attribute__((noinline)) uint32_t board_ticks(void) {
  return 0xFFFFFFu & ~SYSTICK_NOW;
}

#define BOARD_PATTERN 0xA5u
#define BOARD_STACK_BYTES 4096u

static uint32_t board_starts[BOARD_STEPS + 2], board_ends[BOARD_STEPS + 2];
static uint32_t board_depths[BOARD_STEPS + 2];
static volatile uint8_t *board_top; /* the stack below it is the model's */

/* Called between two steps of the model; records time and stack of the last one. Function calls and
 * interrupts align the stack to 8, so an unwritten last word counts, too. */
void board_step(uint32_t number) {
  board_ends[number] = board_ticks();
  uint32_t used = BOARD_STACK_BYTES;
  while (used && board_top[-(int)used] == BOARD_PATTERN) used--;
  used = (used + 7) & ~7u;
  if (used > board_depths[number]) board_depths[number] = used;
  volatile uint8_t *here;
  __asm__ volatile("mov %0, sp" : "=r"(here));
  for (volatile uint8_t *at = board_top - BOARD_STACK_BYTES; at < here; at++) *at = BOARD_PATTERN;
  board_starts[number] = board_ticks();
}

static uint32_t board_ticks_between(uint32_t start, uint32_t end) {
  return (end - start) & 0xFFFFFFu;
}

void board_main(void) {
  SYSTICK_RELOAD = 0xFFFFFF;
  SYSTICK_NOW = 0;
  SYSTICK_CONTROL = 5;
  uint32_t start = board_ticks();
  uint32_t loops = 500000;
  __asm__ volatile("1: subs %0, #1\n bne 1b" : "+r"(loops) : : "cc");
  board_say_number("ticks_per_million ", board_ticks_between(start, board_ticks()));
  __asm__ volatile("mov %0, sp" : "=r"(board_top));
  board_step(0);
  board_step(1);
  board_say_number("ticks_per_mark ", board_ticks_between(board_starts[0], board_ends[1]));
  board_step(0);
  if (BOARD_OPEN()) board_exit(4);
  board_step(1);
  board_say_number("ticks_to_open ", board_ticks_between(board_starts[0], board_ends[1]));
  memset(board_arena, BOARD_PATTERN, BOARD_ARENA_BYTES);
  memset(board_depths, 0, sizeof board_depths);
  uint32_t inputs = 0;
  for (uint32_t run = 0; run < BOARD_RUNS; run++) {
    const uint8_t *next = board_inputs + inputs;
    for (uint32_t i = 0; i < BOARD_INPUTS; i++) {
      memcpy(board_arena + board_input_places[2 * i], next, board_input_places[2 * i + 1]);
      next += board_input_places[2 * i + 1];
    }
    inputs = (uint32_t)(next - board_inputs);
    BOARD_INVOKE(board_arena);
    for (uint32_t i = 0; i < BOARD_STEPS; i++) {
      board_say_number("ticks ", board_ticks_between(board_starts[i], board_ends[i + 1]));
    }
    for (uint32_t i = 0; i < BOARD_OUTPUTS; i++) {
      board_say_bytes("output ", board_arena + board_output_places[2 * i],
                      board_output_places[2 * i + 1]);
    }
    memset(board_arena, BOARD_PATTERN, BOARD_ARENA_BYTES);
  }
  for (uint32_t i = 1; i <= BOARD_STEPS; i++) board_say_number("stack ", board_depths[i]);
  board_exit(0);
}
