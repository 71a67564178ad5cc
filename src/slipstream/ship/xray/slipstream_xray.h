/* Statistics of layers, written on a device as a log that `slipstream xray` reads. C99, one header.
 *
 *   static uint8_t room[32768];
 *   slip_xray log;
 *   slip_xray_begin(&log, room, sizeof room, send, &uart, MODEL_HEADER);  // from xray.device_header()
 *   slip_xray_layer_i8(&log, 3, tensor, n, channels, scale, zero);        // after a layer has run
 *   slip_xray_next(&log);                                                 // after every inference
 *   slip_xray_finish(&log);
 *
 * Nothing is allocated or static. If `send` is NULL, the log stays in `room`, and records that do not
 * fit are counted in `lost`. Only statistics leave the device: images cannot be reconstructed.
 */
#ifndef SLIPSTREAM_XRAY_H
#define SLIPSTREAM_XRAY_H
#include <math.h>
#include <stdint.h>
#include <string.h>

#define SLIP_XRAY_LANES 32u
#define SLIP_XRAY_GROUPS 16u
#define SLIP_XRAY_BINS 64u
#define SLIP_XRAY_SAMPLES 4096u

/* Statistics of one tensor; little-endian, as in the log. */
typedef struct {
  uint32_t elements, nonfinite, hash[2];
  float low, high, mean, std;
  uint32_t groups;
  float group_means[SLIP_XRAY_GROUPS];
  float projections[SLIP_XRAY_LANES];
  uint32_t histogram[SLIP_XRAY_BINS];
} slip_xray_stats;

/* A tensor in memory: kind 'f' float, 'b' int8, 'B' uint8; `apart` is the
 * distance of two pixels of a channel: 1 for [C, H, W], the number of channels for [H, W, C]. */
typedef struct {
  const void* data;
  char kind;
  uint32_t elements, channels, apart;
  float scale;
  int32_t zero;
} slip_xray_tensor;

typedef struct {
  float low[SLIP_XRAY_LANES], high[SLIP_XRAY_LANES], sum[SLIP_XRAY_LANES];
  float squares[SLIP_XRAY_LANES], projections[SLIP_XRAY_LANES];
  uint32_t hash[SLIP_XRAY_LANES], bad[SLIP_XRAY_LANES];
} slip_xray_lanes;

static inline uint32_t slip_xray_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

/* 32 signs for a row of 32 elements: a hash of the row's number. */
static inline uint32_t slip_xray_signs(uint32_t row) {
  uint32_t word = row * 0x9E3779B1u;
  word ^= word >> 15;
  word *= 0x85EBCA77u;
  return word ^ (word >> 13);
}

static inline float slip_xray_at(const slip_xray_tensor* t, uint32_t index) {
  if (t->apart != 1u) {
    uint32_t pixels = t->elements / t->channels;
    index = (index % pixels) * t->apart + index / pixels;
  }
  if (t->kind == 'f') return ((const float*)t->data)[index];
  int32_t code = t->kind == 'b' ? ((const int8_t*)t->data)[index] : ((const uint8_t*)t->data)[index];
  return t->scale * (float)(code - t->zero);
}

/* `count` elements of a row; with a constant `count` and -O3 every line becomes a few vectors. */
static inline void slip_xray_row(slip_xray_lanes* l, const float* x, uint32_t signs, uint32_t count) {
  for (uint32_t j = 0; j < count; ++j) {
    uint32_t bits = slip_xray_bits(x[j]);
    int fine = (bits & 0x7F800000u) != 0x7F800000u;
    float value = fine ? x[j] : 0.0f;
    l->low[j] = (fine && value < l->low[j]) ? value : l->low[j];
    l->high[j] = (fine && value > l->high[j]) ? value : l->high[j];
    l->sum[j] += value;
    l->squares[j] += value * value;
    l->projections[j] += ((signs >> j) & 1u) ? -value : value;
    l->hash[j] = l->hash[j] * 31u + bits;
    l->bad[j] += fine ? 0u : 1u;
  }
}

static void slip_xray_measure(const slip_xray_tensor* t, slip_xray_stats* out) {
  double sum = 0, squares = 0, projections[SLIP_XRAY_LANES] = {0};
  uint32_t groups = 1, row = 0, n = t->elements, at = 0;
  slip_xray_lanes l;
  memset(out, 0, sizeof *out);
  memset(&l, 0, sizeof l);
  out->elements = n;
  if (!n) return;
  for (uint32_t g = 2; g <= SLIP_XRAY_GROUPS; ++g)
    if (t->channels % g == 0u && n % g == 0u) groups = g;
  out->groups = groups;
  for (uint32_t j = 0; j < SLIP_XRAY_LANES; ++j) l.low[j] = INFINITY, l.high[j] = -INFINITY;
  for (uint32_t g = 0; g < groups; ++g) {
    double here = 0;
    uint32_t end = at + n / groups;
    if (t->kind == 'f' && t->apart == 1u)
      for (; end - at >= SLIP_XRAY_LANES; at += SLIP_XRAY_LANES)
        slip_xray_row(&l, (const float*)t->data + at, slip_xray_signs(row++), SLIP_XRAY_LANES);
    while (at < end) {
      float x[SLIP_XRAY_LANES];
      uint32_t count = end - at < SLIP_XRAY_LANES ? end - at : SLIP_XRAY_LANES;
      for (uint32_t j = 0; j < count; ++j) x[j] = slip_xray_at(t, at + j);
      slip_xray_row(&l, x, slip_xray_signs(row++), count);
      at += count;
    }
    for (uint32_t j = 0; j < SLIP_XRAY_LANES; ++j) {
      here += l.sum[j];
      squares += l.squares[j];
      projections[j] += l.projections[j];
      l.sum[j] = l.squares[j] = l.projections[j] = 0.0f;
    }
    sum += here;
    out->group_means[g] = (float)(here / (n / groups));
  }
  out->low = INFINITY, out->high = -INFINITY;
  out->hash[0] = out->hash[1] = 2166136261u;
  for (uint32_t j = 0; j < SLIP_XRAY_LANES; ++j) {
    out->projections[j] = (float)projections[j];
    out->low = l.low[j] < out->low ? l.low[j] : out->low;
    out->high = l.high[j] > out->high ? l.high[j] : out->high;
    out->nonfinite += l.bad[j];
    out->hash[0] = (out->hash[0] ^ l.hash[j]) * 16777619u;
    out->hash[1] = (out->hash[1] ^ (l.hash[j] >> 7)) * 0x85EBCA77u;
  }
  if (out->nonfinite == n) out->low = out->high = 0.0f;
  double finite = n - out->nonfinite ? (double)(n - out->nonfinite) : 1.0;
  double mean = sum / finite, variance = squares / finite - mean * mean;
  out->mean = (float)mean;
  out->std = (float)sqrt(variance > 0 ? variance : 0);
  uint32_t stride = n > SLIP_XRAY_SAMPLES ? n / SLIP_XRAY_SAMPLES : 1u;
  float scale = out->high > out->low ? (float)SLIP_XRAY_BINS / (out->high - out->low) : 0.0f;
  for (uint32_t i = 0; i < n; i += stride) {
    float value = slip_xray_at(t, i);
    if ((slip_xray_bits(value) & 0x7F800000u) == 0x7F800000u) continue;
    uint32_t bin = (uint32_t)((value - out->low) * scale);
    out->histogram[bin < SLIP_XRAY_BINS ? bin : SLIP_XRAY_BINS - 1u]++;
  }
}

#ifndef SLIP_XRAY_ONLY_STATISTICS
typedef void (*slip_xray_send)(void* to, const uint8_t* data, uint32_t bytes);

typedef struct {
  uint8_t* room;
  uint32_t capacity, used, frame, lost;
  slip_xray_send send;
  void* to;
} slip_xray;

static uint32_t slip_xray_crc(uint32_t crc, const uint8_t* data, uint32_t bytes) {
  crc = ~crc;
  while (bytes--) {
    crc ^= *data++;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0xEDB88320u & (0u - (crc & 1u)));
  }
  return ~crc;
}

static void slip_xray_put(slip_xray* log, const void* data, uint32_t bytes) {
  memcpy(log->room + log->used, data, bytes);
  log->used += bytes;
}

static void slip_xray_flush(slip_xray* log) {
  if (log->send && log->used) log->send(log->to, log->room, log->used), log->used = 0;
}

/* Write a record: tag, size, checksum, up to two parts of contents; entirely or not at all. */
static void slip_xray_chunk(slip_xray* log, const char* tag, const void* a, uint32_t na,
                            const void* b, uint32_t nb) {
  uint32_t head[2];
  if (log->used + 12u + na + nb > log->capacity) slip_xray_flush(log);
  if (log->used + 12u + na + nb > log->capacity) { log->lost++; return; }
  head[0] = na + nb;
  head[1] = slip_xray_crc(0, (const uint8_t*)a, na);
  if (nb) head[1] = slip_xray_crc(head[1], (const uint8_t*)b, nb);
  slip_xray_put(log, tag, 4);
  slip_xray_put(log, head, 8);
  slip_xray_put(log, a, na);
  if (nb) slip_xray_put(log, b, nb);
}

static inline void slip_xray_begin(slip_xray* log, uint8_t* room, uint32_t capacity,
                                   slip_xray_send send, void* to, const char* header) {
  memset(log, 0, sizeof *log);
  log->room = room, log->capacity = capacity, log->send = send, log->to = to;
  slip_xray_put(log, "SLIPXR1\n", 8);
  slip_xray_chunk(log, "HEAD", header, (uint32_t)strlen(header), NULL, 0);
}

static inline void slip_xray_layer(slip_xray* log, uint32_t layer, const slip_xray_tensor* tensor) {
  uint32_t head[3];
  slip_xray_stats stats;
  head[0] = log->frame, head[1] = layer, head[2] = 1;
  slip_xray_measure(tensor, &stats);
  slip_xray_chunk(log, "STAT", head, 12, &stats, sizeof stats);
}

/* An int8 or float tensor [H, W, C]; `layer` is its index in the header. */
static inline void slip_xray_layer_i8(slip_xray* log, uint32_t layer, const int8_t* data,
                                      uint32_t n, uint32_t channels, float scale, int32_t zero) {
  slip_xray_tensor t = {data, 'b', n, channels, channels, scale, zero};
  slip_xray_layer(log, layer, &t);
}

static inline void slip_xray_layer_f32(slip_xray* log, uint32_t layer, const float* data,
                                       uint32_t n, uint32_t channels) {
  slip_xray_tensor t = {data, 'f', n, channels, channels, 1.0f, 0};
  slip_xray_layer(log, layer, &t);
}

static inline void slip_xray_next(slip_xray* log) { log->frame++; }

static inline void slip_xray_finish(slip_xray* log) {
  slip_xray_chunk(log, "ENDS", &log->frame, 4, NULL, 0);
  slip_xray_flush(log);
}
#endif
#endif
