// C interface of the cache policies; see src/cache/.
#ifndef SLIPSTREAM_CACHE_H_
#define SLIPSTREAM_CACHE_H_

#include <stdint.h>

#if defined(_WIN32)
#define SLIPSTREAM_CACHE_API __declspec(dllexport)
#else
#define SLIPSTREAM_CACHE_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Policies, by number: LRU, FIFO, SIEVE, S3-FIFO, LIRS, W-TinyLFU, Belady, learned, auto.
// `capacity` is in bytes; `by_bytes` ranks objects for byte hits rather than object hits.
// Returns null if the policy is unknown or memory is exhausted.
SLIPSTREAM_CACHE_API void *slipstream_cache_create(int32_t policy, int64_t capacity,
                                                   int32_t by_bytes, uint64_t seed);
SLIPSTREAM_CACHE_API void slipstream_cache_free(void *cache);

// Bits of an outcome: 1 the object was cached, 2 it is cached now.
SLIPSTREAM_CACHE_API int32_t slipstream_cache_request(void *cache, int32_t id, int64_t size,
                                                      int32_t context);
// Copies objects evicted by the last request to `out`; returns their number, maybe above `room`.
SLIPSTREAM_CACHE_API int64_t slipstream_cache_evicted(void *cache, int32_t *out, int64_t room);
// Runs `count` requests; `context` and `next` may be null, `hit` gets 0 or 1 for each request.
SLIPSTREAM_CACHE_API int32_t slipstream_cache_simulate(void *cache, int64_t count,
                                                       const int32_t *id, const int64_t *size,
                                                       const int32_t *context, const int64_t *next,
                                                       uint8_t *hit);
// Sets the expected hazards [64] of a context, with the weight of `strength` observations.
SLIPSTREAM_CACHE_API int32_t slipstream_cache_prior(void *cache, int32_t context,
                                                    const double *hazard, double strength);
// The number of the policy that an auto cache follows; -1 for the others.
SLIPSTREAM_CACHE_API int32_t slipstream_cache_followed(void *cache);
// Hit density [64] of an interval distribution, by age bin, from its hazards [64].
SLIPSTREAM_CACHE_API void slipstream_cache_gittins(const double *hazard, double *rank);
// First ages [65] of the bins, in requests.
SLIPSTREAM_CACHE_API void slipstream_cache_edges(double *edge);
// Numbers distinct keys from 0 in order of appearance; returns how many there are, or -1.
SLIPSTREAM_CACHE_API int64_t slipstream_cache_number(const uint64_t *key, int64_t count,
                                                     int32_t *id);

// Requests from OpenTelemetry spans in protobuf's wire format (OTLP). Spans with one of the first
// `object_keys` of `keys` are requests; the other keys are those of sizes. Each key ends with 0, and
// so does the list. Without `skip_bad`, the first damage ends the reading. Null: out of memory.
SLIPSTREAM_CACHE_API void *slipstream_otlp_read(const char *bytes, int64_t size, const char *keys,
                                                int32_t object_keys, int32_t skip_bad);
SLIPSTREAM_CACHE_API void slipstream_otlp_free(void *spans);
// Results: for tables of distinct items, the ends of items (int64) and the items: 0-1 words (names of
// spans, and keys), 2-3 values and 4-5 objects (AnyValue messages), 6-7 attributes (int32 pairs of
// word and value, without object and size), 8-9 contexts (int32 attributes, then words of the span
// and its callers). Then int64 rows: 10 requests by time (time in ns, size, object, context), 11
// damage (byte, kind), 12 the number of duplicate spans.
SLIPSTREAM_CACHE_API const char *slipstream_otlp_result(void *spans, int32_t number, int64_t *size);

#ifdef __cplusplus
}
#endif

#endif  // SLIPSTREAM_CACHE_H_
