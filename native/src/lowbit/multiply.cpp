// The driver of all kernels: packs weights, cuts a product into tasks for threads, checks the range
// of activations, and corrects for zero points.
//
// With a' = a - za and w' = w - zw[j], S = sum of a * w, and sums over k of a and w:
//     sum of a' * w' = S - zw[j] * sum(a) - za * sum(w) + k * za * zw[j].
// A kernel gives S - offset * sum(a). All of this is modulo 2^32, hence the unsigned arithmetic.

#include <atomic>
#include <limits>
#include <new>
#include <vector>

#include "huge_pages.h"
#include "lowbit/around.h"
#include "lowbit/multiply.h"
#include "lowbit/registry.h"
#include "slipstream/lowbit.h"
#include "threads.h"

using slipstream::HugePagedVector;
using slipstream::lowbit::Around;
using slipstream::lowbit::Kernel;
using slipstream::lowbit::kRowBlock;
using slipstream::lowbit::Problem;
using slipstream::lowbit::RowSummary;

struct slipstream_lowbit_weights {
  const Kernel* kernel;
  const Around* around;
  Problem problem;  // with m = 0
  HugePagedVector<uint8_t> packed;
  std::vector<uint32_t> zero_points;  // [n]
  std::vector<uint32_t> column_sums;  // [n], of the unsigned values
  bool same_zero_point;               // for all columns

  Problem with_rows(int64_t m) const {
    Problem rows = problem;
    rows.m = m;
    return rows;
  }

  // Whether sums of rows of activations enter the result.
  bool needs_sums(const Problem& rows) const {
    return !same_zero_point ||
           zero_points[0] != static_cast<uint32_t>(kernel->weight_offset(rows));
  }
};

namespace {

constexpr int64_t kSlack = 64;            // bytes that may be read past a packed buffer
constexpr int64_t kOutputBytes = 1 << 17; // of products that are corrected while in cache
constexpr int64_t kActivationBytes = 224 << 10;  // of a block, packed: part of a second-level cache
constexpr double kWorthAThread = 1e6;     // multiply-accumulates

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Memory a thread keeps from one call to the next.
class Workspace {
 public:
  ~Workspace() { ::operator delete(memory_, std::align_val_t{64}); }

  uint8_t* reserve(int64_t bytes) {
    if (bytes > capacity_) {
      ::operator delete(memory_, std::align_val_t{64});
      memory_ = nullptr;
      capacity_ = 0;
      memory_ = static_cast<uint8_t*>(
          ::operator new(static_cast<std::size_t>(bytes), std::align_val_t{64}, std::nothrow));
      if (memory_ == nullptr) return nullptr;
      capacity_ = bytes;
    }
    return memory_;
  }

 private:
  uint8_t* memory_ = nullptr;
  int64_t capacity_ = 0;
};

// Two of them, because in column mode a thread multiplies while activations of the whole product
// lie in its caller's memory.
thread_local Workspace activations_workspace, products_workspace;

// One call: integers a to integers out, or floats x to floats y.
struct Product {
  const slipstream_lowbit_weights* weights;
  int64_t m;
  int threads;

  const uint8_t* a = nullptr;
  bool is_signed = false;
  bool in_range = false;  // known beforehand
  int64_t lda = 0;
  uint32_t zero = 0;  // of activations, as unsigned values
  int32_t* out = nullptr;
  int64_t ldo = 0;

  const float* x = nullptr;
  int64_t ldx = 0;
  float activation_scale = 1;
  const float* scale = nullptr;
  const float* bias = nullptr;
  float floor = 0;
  float* y = nullptr;
  int64_t ldy = 0;

  std::atomic<int32_t> status{SLIPSTREAM_OK};

  // In column mode: what was packed of all rows.
  uint8_t* prepared = nullptr;

  // Whether kernels read a copy of the rows.
  bool copies() const { return is_signed || x != nullptr; }

  int64_t row_block = kRowBlock;

  // One thread takes as many rows at a time as its cache holds, for each time the weights come from
  // memory and are unpacked; several share blocks that are small.
  void choose_blocks() {
    if (threads > 1) return;
    const int64_t bytes = weights->kernel->activation_bytes(weights->with_rows(kRowBlock));
    const int64_t fit = kActivationBytes / (bytes < 1 ? 1 : bytes);
    row_block = kRowBlock * (fit < 1 ? 1 : fit > 8 ? 8 : fit);
  }

  int64_t blocks() const { return (m + row_block - 1) / row_block; }
  int64_t block_rows(int64_t block) const {
    const int64_t left = m - block * row_block;
    return left < row_block ? left : row_block;
  }
};

// Memory of the data prepared for a block of rows.
struct Layout {
  int64_t packed;   // activations, behind the rows' values as unsigned bytes
  int64_t sums;     // of rows
  int64_t strange;  // rows of floats that contain NaN
  int64_t bytes;

  Layout(const Product& product, int64_t rows) {
    const auto& weights = *product.weights;
    const Problem problem = weights.with_rows(rows);
    packed = product.copies() ? round_up(rows * problem.k + kSlack, 64) : 0;
    sums = packed + round_up(weights.kernel->activation_bytes(problem) + kSlack, 64);
    strange = sums + round_up(rows * 4, 64);
    bytes = strange + round_up(rows, 64);
  }
};

struct Prepared {
  uint8_t* values;
  uint8_t* packed;
  uint32_t* sums;
  uint8_t* strange;

  Prepared(const Layout& layout, uint8_t* memory)
      : values(memory),
        packed(memory + layout.packed),
        sums(reinterpret_cast<uint32_t*>(memory + layout.sums)),
        strange(memory + layout.strange) {}
};

void prepare(Product& product, int64_t block, const Prepared& to) {
  const auto& weights = *product.weights;
  const Around& around = *weights.around;
  const int64_t rows = product.block_rows(block), first = block * product.row_block, k = weights.problem.k;
  const int abits = weights.problem.abits;
  const uint8_t middle = static_cast<uint8_t>(1 << (abits - 1));
  uint8_t any = 0;
  const bool looks = !product.in_range || weights.needs_sums(weights.with_rows(rows));
  for (int64_t i = 0; looks && i < rows; ++i) {
    RowSummary summary;
    uint8_t* copy = to.values + i * k;
    if (product.x != nullptr) {
      to.strange[i] = !around.quantise(product.x + (first + i) * product.ldx, k,
                                       product.activation_scale,
                                       static_cast<int32_t>(product.zero), (1 << abits) - 1, copy);
      summary = around.summarise(copy, k);
    } else {
      const uint8_t* row = product.a + (first + i) * product.lda;
      summary = product.is_signed ? around.shift(row, k, middle, copy) : around.summarise(row, k);
    }
    to.sums[i] = summary.sum;
    any = static_cast<uint8_t>(any | summary.any);
  }
  if (any >> abits) {
    product.status.store(SLIPSTREAM_INVALID, std::memory_order_relaxed);
    return;
  }
  weights.kernel->pack_activations(
      weights.with_rows(rows), product.copies() ? to.values : product.a + first * product.lda,
      product.copies() ? k : product.lda, to.packed);
}

// Columns first <= j < last of a block of rows, corrected and, if asked for, rescaled.
void finish_columns(Product& product, int64_t block, const Prepared& from, int64_t first,
                    int64_t last) {
  const auto& weights = *product.weights;
  const Kernel& kernel = *weights.kernel;
  const Around& around = *weights.around;
  const int64_t rows = product.block_rows(block), top = block * product.row_block;
  const Problem problem = weights.with_rows(rows);
  int64_t step = kOutputBytes / 4 / rows / kernel.panel * kernel.panel;
  if (step < kernel.panel) step = kernel.panel;
  if (step > last - first) step = last - first;

  const bool floats = product.x != nullptr;
  const int64_t scratch_bytes = round_up(kernel.scratch_bytes(problem) + kSlack, 64);
  const int64_t product_bytes = floats ? round_up(rows * step * 4, 64) : 0;
  const int64_t column_bytes = round_up(step * 4, 64);
  uint8_t* memory = products_workspace.reserve(scratch_bytes + product_bytes + 2 * column_bytes);
  if (memory == nullptr) {
    product.status.store(SLIPSTREAM_NO_MEMORY, std::memory_order_relaxed);
    return;
  }
  int32_t* products = reinterpret_cast<int32_t*>(memory + scratch_bytes);
  uint32_t* multiplier = reinterpret_cast<uint32_t*>(memory + scratch_bytes + product_bytes);
  uint32_t* addend = multiplier + column_bytes / 4;

  const uint32_t offset = static_cast<uint32_t>(kernel.weight_offset(problem));
  const uint32_t k = static_cast<uint32_t>(problem.k), zero = product.zero;
  const bool summed = weights.needs_sums(problem), corrects = zero != 0 || summed;
  for (int64_t column = first; column < last; column += step) {
    const int64_t count = column + step < last ? step : last - column;
    int32_t* out = floats ? products : product.out + top * product.ldo + column;
    const int64_t ldo = floats ? count : product.ldo;
    kernel.multiply(problem, from.packed, weights.packed.data(), column, column + count, memory,
                    out, ldo);
    if (corrects) {
      for (int64_t j = 0; j < count; ++j) {
        const uint32_t zw = weights.zero_points[static_cast<std::size_t>(column + j)];
        multiplier[j] = offset - zw;
        addend[j] = zero * (k * zw - weights.column_sums[static_cast<std::size_t>(column + j)]);
      }
      for (int64_t i = 0; i < rows; ++i)
        around.correct(out + i * ldo, count, summed ? from.sums[i] : 0, multiplier, addend);
    }
    if (!floats) continue;
    for (int64_t i = 0; i < rows; ++i) {
      float* y = product.y + (top + i) * product.ldy + column;
      around.rescale(out + i * ldo, count, product.scale + column,
                     product.bias == nullptr ? nullptr : product.bias + column, nullptr,
                     product.floor, std::numeric_limits<float>::infinity(), y);
      if (from.strange[i])
        for (int64_t j = 0; j < count; ++j) y[j] = std::numeric_limits<float>::quiet_NaN();
    }
  }
}

// Tall products: each task packs a block of rows into its own cache and multiplies all columns.
void row_task(void* context, int64_t block) {
  Product& product = *static_cast<Product*>(context);
  if (product.status.load(std::memory_order_relaxed) != SLIPSTREAM_OK) return;
  const int64_t rows = product.block_rows(block);
  const Layout layout(product, rows);
  uint8_t* memory = activations_workspace.reserve(layout.bytes);
  if (memory == nullptr) {
    product.status.store(SLIPSTREAM_NO_MEMORY, std::memory_order_relaxed);
    return;
  }
  const Prepared prepared(layout, memory);
  prepare(product, block, prepared);
  if (product.status.load(std::memory_order_relaxed) != SLIPSTREAM_OK) return;
  finish_columns(product, block, prepared, 0, product.weights->problem.n);
}

// Others: the caller has packed all rows, and each task multiplies some columns of a block.
struct ColumnTasks {
  Product& product;
  int64_t block_bytes;  // of what was prepared for a block
  int64_t step;         // columns
  int64_t tasks_a_block;

  Prepared prepared(int64_t block) const {
    return Prepared(Layout(product, product.block_rows(block)),
                    product.prepared + block * block_bytes);
  }
};

void prepare_task(void* context, int64_t block) {
  const ColumnTasks& tasks = *static_cast<ColumnTasks*>(context);
  prepare(tasks.product, block, tasks.prepared(block));
}

void column_task(void* context, int64_t index) {
  const ColumnTasks& tasks = *static_cast<ColumnTasks*>(context);
  const int64_t block = index / tasks.tasks_a_block, n = tasks.product.weights->problem.n;
  const int64_t first = index % tasks.tasks_a_block * tasks.step;
  const int64_t last = first + tasks.step < n ? first + tasks.step : n;
  finish_columns(tasks.product, block, tasks.prepared(block), first, last);
}

int32_t run(Product& product) {
  const auto& weights = *product.weights;
  const Problem& problem = weights.problem;
  const double work = static_cast<double>(product.m) * static_cast<double>(problem.n) *
                      static_cast<double>(problem.k);
  const double worth = work / kWorthAThread;
  if (product.threads > worth) product.threads = worth < 1 ? 1 : static_cast<int>(worth);

  product.choose_blocks();
  const int64_t blocks = product.blocks();
  if (product.threads <= 1 || blocks >= 2 * product.threads) {
    slipstream::parallel_for(blocks, product.threads, row_task, &product);
    return product.status.load();
  }
  ColumnTasks tasks{product, Layout(product, product.block_rows(0)).bytes, 0, 0};
  product.prepared = activations_workspace.reserve(blocks * tasks.block_bytes);
  if (product.prepared == nullptr) return SLIPSTREAM_NO_MEMORY;
  const int64_t panel = weights.kernel->panel, panels = (problem.n + panel - 1) / panel;
  // A few tasks for each thread, so that one that is late does not keep the others waiting.
  const int64_t wanted = (4 * product.threads + blocks - 1) / blocks;
  tasks.step = (panels + wanted - 1) / wanted * panel;
  tasks.tasks_a_block = (problem.n + tasks.step - 1) / tasks.step;
  slipstream::parallel_for(blocks, product.threads, prepare_task, &tasks);
  if (product.status.load() == SLIPSTREAM_OK)
    slipstream::parallel_for(blocks * tasks.tasks_a_block, product.threads, column_task, &tasks);
  return product.status.load();
}

const Around* around_here() {
#if defined(SLIPSTREAM_AROUND_WIDE)
  if (slipstream_cpu_features() & SLIPSTREAM_CPU_AVX2) return &slipstream::lowbit::around_wide;
#endif
  return &slipstream::lowbit::around_baseline;
}

}  // namespace

int32_t slipstream::lowbit::multiply_codes(const slipstream_lowbit_weights* weights,
                                           const uint8_t* a, int64_t m, int32_t activation_zero,
                                           int32_t* out, int64_t ldo, int32_t threads) {
  Product product{weights, m, threads};
  product.a = a;
  product.in_range = true;
  product.lda = weights->problem.k;
  product.zero = static_cast<uint32_t>(activation_zero);
  product.out = out;
  product.ldo = ldo;
  return run(product);
}

bool slipstream::lowbit::are_codes(const slipstream_lowbit_weights* weights, const uint8_t* a,
                                   int64_t count) {
  return weights->around->summarise(a, count).any >> weights->problem.abits == 0;
}

extern "C" {

int32_t slipstream_lowbit_pack(int32_t index, int64_t n, int64_t k, int32_t wbits, int32_t abits,
                               const uint8_t* w, int64_t ldw, const int32_t* zero_points,
                               slipstream_lowbit_weights** out) {
  *out = nullptr;
  const Kernel* kernel = slipstream::lowbit::find(index);
  if (kernel == nullptr || n < 1 || k < 1 || ldw < k ||
      !slipstream_lowbit_supports(index, wbits, abits))
    return SLIPSTREAM_INVALID;
  try {
    auto* made = new slipstream_lowbit_weights{
        kernel, around_here(), Problem{0, n, k, wbits, abits}, {}, {}, {}, true};
    *out = made;
    made->packed.resize(static_cast<std::size_t>(kernel->weight_bytes(made->problem) + kSlack));
    made->zero_points.assign(static_cast<std::size_t>(n), 0);
    made->column_sums.resize(static_cast<std::size_t>(n));
    for (int64_t j = 0; j < n; ++j) {
      const std::size_t at = static_cast<std::size_t>(j);
      made->column_sums[at] = made->around->summarise(w + j * ldw, k).sum;
      if (zero_points != nullptr) made->zero_points[at] = static_cast<uint32_t>(zero_points[j]);
      if (made->zero_points[at] != made->zero_points[0]) made->same_zero_point = false;
    }
    if (made->same_zero_point) made->problem.center = static_cast<int32_t>(made->zero_points[0]);
    kernel->pack_weights(made->problem, w, ldw, made->packed.data());
    return SLIPSTREAM_OK;
  } catch (const std::bad_alloc&) {
    delete *out;
    *out = nullptr;
    return SLIPSTREAM_NO_MEMORY;
  }
}

void slipstream_lowbit_free(slipstream_lowbit_weights* weights) { delete weights; }

int64_t slipstream_lowbit_bytes(const slipstream_lowbit_weights* weights) {
  return static_cast<int64_t>(weights->packed.size()) - kSlack;
}

int32_t slipstream_lowbit_multiply(const slipstream_lowbit_weights* weights, const uint8_t* a,
                                   int32_t is_signed, int64_t m, int64_t lda,
                                   int32_t activation_zero, int32_t* out, int64_t ldo,
                                   int32_t threads) {
  Product product{weights, m, threads};
  product.a = a;
  product.is_signed = is_signed != 0;
  product.lda = lda;
  product.zero = static_cast<uint32_t>(activation_zero);
  if (product.is_signed) product.zero += 1u << (weights->problem.abits - 1);
  product.out = out;
  product.ldo = ldo;
  return run(product);
}

int32_t slipstream_lowbit_linear(const slipstream_lowbit_weights* weights, const float* x,
                                 int64_t m, int64_t ldx, float activation_scale,
                                 int32_t activation_zero, const float* scale, const float* bias,
                                 float floor, float* y, int64_t ldy, int32_t threads) {
  Product product{weights, m, threads};
  product.x = x;
  product.ldx = ldx;
  product.activation_scale = activation_scale;
  product.zero = static_cast<uint32_t>(activation_zero);
  product.scale = scale;
  product.bias = bias;
  product.floor = floor;
  product.y = y;
  product.ldy = ldy;
  return run(product);
}

}  // extern "C"
