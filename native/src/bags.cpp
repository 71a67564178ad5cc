// Checks ids and offsets once, so that no kernel has to.

#include "slipstream/bags.h"

namespace {

template <typename Id>
bool inside(const Id *ids, int64_t begin, int64_t end, int64_t rows, int64_t *where) {
  // The sign of one of the two is set where an id is outside; without a way out in its middle the
  // compiler makes the loop wide.
  const uint64_t last = static_cast<uint64_t>(rows) - 1;
  uint64_t bad = 0;
  for (int64_t i = begin; i < end; ++i) {
    const uint64_t id = static_cast<uint64_t>(static_cast<int64_t>(ids[i]));
    bad |= id | (last - id);
  }
  if (bad >> 63 == 0) return true;
  for (*where = begin; ids[*where] >= 0 && ids[*where] < rows;) ++*where;
  return false;
}

}  // namespace

extern "C" int32_t slipstream_bags_check(const void *ids, int32_t id_bytes, int64_t count,
                                         const int64_t *offsets, int64_t offset_count,
                                         const int64_t *rows, int64_t rows_stride, int64_t tables,
                                         int64_t bags, int64_t *where) {
  if (offsets != nullptr) {
    int64_t before = 0;
    for (int64_t i = 0; i < offset_count; ++i) {
      const int64_t offset = offsets[i];
      if (offset < before || offset > count || (i == 0 && offset != 0)) {
        *where = i;
        return SLIPSTREAM_BAGS_OFFSET;
      }
      before = offset;
    }
  }
  for (int64_t table = 0; table < tables; ++table) {
    int64_t edge[2];
    for (int64_t side = 0; side < 2; ++side) {
      const int64_t bag = (table + side) * bags;
      edge[side] = offsets == nullptr      ? count / tables * (table + side)
                   : bag < offset_count    ? offsets[bag]
                                           : count;
    }
    const int64_t limit = rows[table * rows_stride];
    const bool fine =
        id_bytes == 4
            ? inside(static_cast<const int32_t *>(ids), edge[0], edge[1], limit, where)
            : inside(static_cast<const int64_t *>(ids), edge[0], edge[1], limit, where);
    if (!fine) return SLIPSTREAM_BAGS_ID;
  }
  return SLIPSTREAM_BAGS_FINE;
}
