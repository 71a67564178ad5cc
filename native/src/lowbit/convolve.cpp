// Convolutions of codes: patches, products and epilogue of some rows at a time.

#include "slipstream/convolve.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "lowbit/around.h"
#include "lowbit/multiply.h"
#include "threads.h"

namespace slipstream {
namespace lowbit {
namespace {

// Patches and products of one block should stay in a second-level cache of 1 MiB.
constexpr int64_t kBlockBytes = 512 << 10;
constexpr int64_t kLeastRows = 64;

const Around& around(int32_t wide) {
#if defined(SLIPSTREAM_AROUND_WIDE)
  if (wide) return around_wide;
#endif
  (void)wide;
  return around_baseline;
}

// One line of a patch: kernel_width pixels of an image line from column `left` on.
void copy_line(const slipstream_convolution& s, const uint8_t* line, int64_t left, uint8_t outside,
               uint8_t* out) {
  const int64_t pixel = s.channels;
  if (s.dilation_width == 1) {
    const int64_t before = std::min(std::max<int64_t>(-left, 0), s.kernel_width);
    const int64_t end = std::max(before, std::min(s.kernel_width, s.width - left));
    if (before > 0) std::memset(out, outside, before * pixel);
    if (end > before) {
      std::memcpy(out + before * pixel, line + (left + before) * pixel, (end - before) * pixel);
    }
    if (end < s.kernel_width) {
      std::memset(out + end * pixel, outside, (s.kernel_width - end) * pixel);
    }
    return;
  }
  for (int64_t x = 0; x < s.kernel_width; ++x, out += pixel) {
    const int64_t column = left + x * s.dilation_width;
    if (column < 0 || column >= s.width) {
      std::memset(out, outside, pixel);
    } else {
      std::memcpy(out, line + column * pixel, pixel);
    }
  }
}

void patches(const slipstream_convolution& s, const uint8_t* codes, uint8_t outside, int64_t first,
             int64_t last, uint8_t* rows) {
  const int64_t run = s.kernel_width * s.channels, line = s.width * s.channels;
  int64_t column = first % s.out_width, row = first / s.out_width % s.out_height;
  int64_t image = first / s.out_width / s.out_height;
  for (int64_t i = first; i < last; ++i) {
    const uint8_t* pixels = codes + image * s.height * line;
    const int64_t top = row * s.stride_height - s.padding_height;
    const int64_t left = column * s.stride_width - s.padding_width;
    for (int64_t y = 0; y < s.kernel_height; ++y, rows += run) {
      const int64_t from = top + y * s.dilation_height;
      if (from < 0 || from >= s.height) {
        std::memset(rows, outside, run);
      } else {
        copy_line(s, pixels + from * line, left, outside, rows);
      }
    }
    if (++column == s.out_width) {
      column = 0;
      if (++row == s.out_height) {
        row = 0;
        ++image;
      }
    }
  }
}

bool is_pointwise(const slipstream_convolution& s) {
  return s.kernel_height == 1 && s.kernel_width == 1 && s.stride_height == 1 &&
         s.stride_width == 1 && s.padding_height == 0 && s.padding_width == 0;
}

// Floats that are rescaled before they are rounded: they stay in a first-level cache, and rounding
// has long runs even where there are few columns.
constexpr int64_t kFloatsAtOnce = 2048;

// Turns rows of products into floats or codes.
class Finish {
 public:
  Finish(const Around& around, const slipstream_epilogue& epilogue, int64_t columns,
         const slipstream_result& result)
      : around_(around),
        epilogue_(epilogue),
        columns_(columns),
        at_once_(std::max<int64_t>(1, kFloatsAtOnce / columns)),
        result_(result) {
    if (epilogue.binary) signed_.reset(new (std::nothrow) int32_t[columns]);
    if (result.floats == nullptr) floats_.reset(new (std::nothrow) float[at_once_ * columns]);
  }

  bool ready() const { return (!epilogue_.binary || signed_) && (result_.floats || floats_); }

  // Rows first <= i < last of the result; the first of their products is at `products`.
  void operator()(const int32_t* products, int64_t ldp, int64_t first, int64_t last) {
    for (; first < last; first += at_once_) {
      const int64_t rows = std::min(at_once_, last - first), begin = first * columns_;
      float* y = result_.floats == nullptr ? floats_.get() : result_.floats + begin;
      for (int64_t i = 0; i < rows; ++i, products += ldp)
        rescale(products, result_.added == nullptr ? nullptr : result_.added + begin + i * columns_,
                y + i * columns_);
      if (epilogue_.code_scale > 0)
        around_.quantise(y, rows * columns_, epilogue_.code_scale, epilogue_.code_zero,
                         epilogue_.code_top, result_.codes + begin);
    }
  }

 private:
  void rescale(const int32_t* products, const float* added, float* y) {
    if (epilogue_.binary) {
      for (int64_t j = 0; j < columns_; ++j) signed_[j] = 2 * products[j] - products[columns_];
      products = signed_.get();
    }
    around_.rescale(products, columns_, epilogue_.scale, epilogue_.bias, added, epilogue_.floor,
                    epilogue_.ceiling, y);
  }

  const Around& around_;
  const slipstream_epilogue& epilogue_;
  const int64_t columns_, at_once_;
  const slipstream_result& result_;
  std::unique_ptr<int32_t[]> signed_;
  std::unique_ptr<float[]> floats_;  // scratch if the caller does not need them
};

// The part of a window from `start` on that lies within `size`: first and last step of the kernel.
struct Steps {
  int64_t first, last;

  Steps(int64_t start, int64_t kernel, int64_t dilation, int64_t size)
      : first(start < 0 ? (-start + dilation - 1) / dilation : 0),
        last(std::min(kernel, (size - start + dilation - 1) / dilation)) {}
};

// Some output pixels of a depthwise layer, shared among threads.
struct Depthwise {
  const Around& around;
  const slipstream_convolution& s;
  const uint8_t* codes;
  const uint8_t* outside;  // what every channel is beyond the image
  const int16_t* weights;
  const int32_t* start;
  int64_t pairs;
  const uint8_t** seen;  // 2 * pairs of each task
  int64_t first, last, at_once;
  int32_t* products;  // of `first` and those behind

  // What an output pixel of `image` sees, one pointer for each pixel of the kernel.
  void look(const uint8_t* image, int64_t row, int64_t column, const uint8_t** seen_by) const {
    const int64_t top = row * s.stride_height - s.padding_height;
    const int64_t left = column * s.stride_width - s.padding_width;
    for (int64_t y = top; y < top + s.kernel_height * s.dilation_height; y += s.dilation_height) {
      const bool within = y >= 0 && y < s.height;
      const uint8_t* line = within ? image + y * s.width * s.channels : outside;
      for (int64_t x = left; x < left + s.kernel_width * s.dilation_width; x += s.dilation_width)
        *seen_by++ = within && x >= 0 && x < s.width ? line + x * s.channels : outside;
    }
  }

  static void task(void* context, int64_t index) {
    const Depthwise& layer = *static_cast<const Depthwise*>(context);
    const uint8_t** seen = layer.seen + 2 * layer.pairs * index;
    const int64_t begin = layer.first + index * layer.at_once, n = layer.s.channels;
    const int64_t end = std::min(begin + layer.at_once, layer.last);
    const int64_t pixels = layer.s.height * layer.s.width * n;
    int64_t column = begin % layer.s.out_width, row = begin / layer.s.out_width;
    const uint8_t* image = layer.codes + row / layer.s.out_height * pixels;
    row %= layer.s.out_height;
    for (int64_t i = begin; i < end; ++i) {
      layer.look(image, row, column, seen);
      layer.around.depthwise(seen, layer.pairs, layer.weights, layer.start, n,
                             layer.products + (i - layer.first) * n);
      if (++column < layer.s.out_width) continue;
      column = 0;
      if (++row < layer.s.out_height) continue;
      row = 0;
      image += pixels;
    }
  }
};

}  // namespace
}  // namespace lowbit
}  // namespace slipstream

using namespace slipstream::lowbit;

extern "C" {

int32_t slipstream_quantise(int32_t wide, const float* x, int64_t n, float scale, int32_t zero,
                            int32_t top, uint8_t* codes) {
  return around(wide).quantise(x, n, scale, zero, top, codes) ? SLIPSTREAM_OK : SLIPSTREAM_INVALID;
}

int32_t slipstream_finish(int32_t wide, const slipstream_epilogue* epilogue,
                          const int32_t* products, int64_t ldp, int64_t rows, int64_t columns,
                          const slipstream_result* result) {
  Finish finish(around(wide), *epilogue, columns, *result);
  if (!finish.ready()) return SLIPSTREAM_NO_MEMORY;
  finish(products, ldp, 0, rows);
  return SLIPSTREAM_OK;
}

void slipstream_patches(const slipstream_convolution* shape, const uint8_t* codes, uint8_t outside,
                        int64_t first, int64_t last, uint8_t* rows) {
  patches(*shape, codes, outside, first, last, rows);
}

int32_t slipstream_convolve(int32_t wide, const slipstream_convolution* shape,
                            const uint8_t* codes, int32_t activation_zero,
                            const slipstream_lowbit_weights* weights, int64_t out_channels,
                            const slipstream_epilogue* epilogue, const slipstream_result* result,
                            int32_t threads) {
  const int64_t k = shape->kernel_height * shape->kernel_width * shape->channels;
  const int64_t total = shape->images * shape->out_height * shape->out_width;
  if (!are_codes(weights, codes, shape->images * shape->height * shape->width * shape->channels))
    return SLIPSTREAM_INVALID;
  const int64_t ldp = out_channels + (epilogue->binary ? 1 : 0);
  const bool pointwise = is_pointwise(*shape);
  // Blocks of about equal size, so that the last one is not a remnant.
  const int64_t fits = std::max(kLeastRows, kBlockBytes / (k + 4 * ldp)) * std::max(threads, 1);
  const int64_t blocks = (total + fits - 1) / fits;
  const int64_t block = std::min(total, ((total + blocks - 1) / blocks + 15) / 16 * 16);
  const std::unique_ptr<uint8_t[]> rows(pointwise ? nullptr
                                                  : new (std::nothrow) uint8_t[block * k]);
  const std::unique_ptr<int32_t[]> products(new (std::nothrow) int32_t[block * ldp]);
  Finish finish(around(wide), *epilogue, out_channels, *result);
  if (!products || (!rows && !pointwise) || !finish.ready()) return SLIPSTREAM_NO_MEMORY;
  for (int64_t first = 0; first < total; first += block) {
    const int64_t last = std::min(first + block, total);
    const uint8_t* a = codes + first * k;
    if (!pointwise) {
      patches(*shape, codes, static_cast<uint8_t>(activation_zero), first, last, rows.get());
      a = rows.get();
    }
    const int32_t status =
        multiply_codes(weights, a, last - first, activation_zero, products.get(), ldp, threads);
    if (status != SLIPSTREAM_OK) return status;
    finish(products.get(), ldp, first, last);
  }
  return SLIPSTREAM_OK;
}

int32_t slipstream_depthwise(int32_t wide, const slipstream_convolution* shape,
                             const uint8_t* codes, int32_t activation_zero, int32_t activation_bits,
                             const int16_t* weights, const slipstream_epilogue* epilogue,
                             const slipstream_result* result, int32_t threads) {
  const slipstream_convolution& s = *shape;
  const Around& with = around(wide);
  const int64_t n = s.channels, total = s.images * s.out_height * s.out_width;
  if (activation_bits < 8 &&
      with.summarise(codes, s.images * s.height * s.width * n).any >> activation_bits != 0)
    return SLIPSTREAM_INVALID;
  const int64_t pairs = (s.kernel_height * s.kernel_width + 1) / 2, tasks = std::max(threads, 1);
  const int64_t block = std::min(total, std::max(kLeastRows, kBlockBytes / (4 * n)) * tasks);
  const std::unique_ptr<uint8_t[]> outside(new (std::nothrow) uint8_t[n]);
  const std::unique_ptr<const uint8_t*[]> seen(new (std::nothrow)
                                                   const uint8_t*[2 * pairs * tasks]);
  const std::unique_ptr<int32_t[]> start(new (std::nothrow) int32_t[2 * n]);
  const std::unique_ptr<int32_t[]> products(new (std::nothrow) int32_t[block * n]);
  Finish finish(with, *epilogue, n, *result);
  if (!outside || !seen || !start || !products || !finish.ready()) return SLIPSTREAM_NO_MEMORY;
  std::memset(outside.get(), activation_zero, n);
  std::fill_n(seen.get(), 2 * pairs * tasks, outside.get());
  // Where all is outside, the sum has to be 0.
  std::memset(start.get(), 0, 4 * n);
  with.depthwise(seen.get(), pairs, weights, start.get(), n, start.get() + n);
  for (int64_t j = 0; j < n; ++j) start[j] = -start[n + j];
  Depthwise layer{with,  s,          codes, outside.get(), weights, start.get(),
                  pairs, seen.get(), 0,     0,             0,       products.get()};
  for (; layer.first < total; layer.first = layer.last) {
    layer.last = std::min(layer.first + block, total);
    layer.at_once = (layer.last - layer.first + tasks - 1) / tasks;
    slipstream::parallel_for(tasks, static_cast<int>(tasks), Depthwise::task, &layer);
    finish(products.get(), n, layer.first, layer.last);
  }
  return SLIPSTREAM_OK;
}

int32_t slipstream_max_pool(int32_t wide, const slipstream_convolution* shape, const uint8_t* codes,
                            uint8_t* out) {
  const slipstream_convolution& s = *shape;
  const auto enlarge = around(wide).enlarge;
  const int64_t line = s.width * s.channels;
  // First over the lines of a window: these are long runs, shared by neighbouring windows.
  const std::unique_ptr<uint8_t[]> greatest(new (std::nothrow) uint8_t[line]);
  if (!greatest) return SLIPSTREAM_NO_MEMORY;
  for (int64_t image = 0; image < s.images; ++image, codes += s.height * line) {
    for (int64_t y = 0; y < s.out_height; ++y) {
      const int64_t top = y * s.stride_height - s.padding_height;
      const Steps rows(top, s.kernel_height, s.dilation_height, s.height);
      std::memset(greatest.get(), 0, line);
      for (int64_t i = rows.first; i < rows.last; ++i)
        enlarge(greatest.get(), codes + (top + i * s.dilation_height) * line, line);
      for (int64_t x = 0; x < s.out_width; ++x, out += s.channels) {
        const int64_t left = x * s.stride_width - s.padding_width;
        const Steps columns(left, s.kernel_width, s.dilation_width, s.width);
        std::memset(out, 0, s.channels);
        for (int64_t j = columns.first; j < columns.last; ++j)
          enlarge(out, greatest.get() + (left + j * s.dilation_width) * s.channels, s.channels);
      }
    }
  }
  return SLIPSTREAM_OK;
}

}  // extern "C"
