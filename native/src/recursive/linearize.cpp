// Heights, numbers and groups of nodes in time linear in nodes and edges, without recursion.

#include "slipstream/recursive.h"

#include <algorithm>
#include <new>
#include <vector>

namespace slipstream {
namespace {

struct Fault {
  int32_t status;
  int64_t node;
};

// Heights by depth-first search, for nodes in any order.
void search_heights(const slipstream_linearization &a, std::vector<int32_t> &height) {
  constexpr int32_t kNew = -1, kOpen = -2;
  std::fill(height.begin(), height.end(), kNew);
  std::vector<std::pair<int64_t, int64_t>> open;  // node, next edge
  for (int64_t root = 0; root < a.nodes; ++root) {
    if (height[root] != kNew) continue;
    open.emplace_back(root, a.offset[root]);
    height[root] = kOpen;
    while (!open.empty()) {
      const int64_t node = open.back().first;
      int64_t &edge = open.back().second;
      const int64_t end = a.offset[node + 1];
      while (edge < end && height[a.child[edge]] >= 0) ++edge;
      if (edge < end) {
        const int64_t child = a.child[edge];
        if (height[child] == kOpen) throw Fault{SLIPSTREAM_LINEARIZE_CYCLE, child};
        height[child] = kOpen;
        open.emplace_back(child, a.offset[child]);
        continue;
      }
      int32_t tallest = -1;
      for (int64_t e = a.offset[node]; e < end; ++e)
        tallest = std::max(tallest, height[a.child[e]]);
      height[node] = tallest + 1;
      open.pop_back();
    }
  }
}

inline int32_t height_of(const slipstream_linearization &a, const std::vector<int32_t> &height,
                         int64_t node) {
  int32_t tallest = -1;
  for (int64_t e = a.offset[node]; e < a.offset[node + 1]; ++e)
    tallest = std::max(tallest, height[a.child[e]]);
  return tallest + 1;
}

void find_heights(const slipstream_linearization &a, std::vector<int32_t> &height) {
  bool before = true, behind = true;
  for (int64_t node = 0; node < a.nodes; ++node) {
    const int64_t first = a.offset[node], end = a.offset[node + 1];
    if (first < 0 || end < first || end - first > a.slots)
      throw Fault{SLIPSTREAM_LINEARIZE_ARITY, node};
    if (a.kind != nullptr && (a.kind[node] < 0 || a.kind[node] >= a.kinds))
      throw Fault{SLIPSTREAM_LINEARIZE_RANGE, node};
    for (int64_t e = first; e < end; ++e) {
      const int64_t child = a.child[e];
      if (child < 0 || child >= a.nodes) throw Fault{SLIPSTREAM_LINEARIZE_RANGE, node};
      before &= child < node;
      behind &= child > node;
    }
  }
  if (before)
    for (int64_t node = 0; node < a.nodes; ++node) height[node] = height_of(a, height, node);
  else if (behind)
    for (int64_t node = a.nodes; node-- > 0;) height[node] = height_of(a, height, node);
  else
    search_heights(a, height);
}

void linearize(slipstream_linearization &a) {
  std::vector<int32_t> height(a.nodes);
  find_heights(a, height);
  int32_t tallest = -1;
  for (const int32_t h : height) tallest = std::max(tallest, h);
  a.levels = tallest + 1;

  const int64_t masks = int64_t{1} << a.mask_slots, keys = a.kinds * masks;
  std::vector<int32_t> key(a.nodes);
  std::vector<int64_t> next(a.levels * keys + 1, 0);
  for (int64_t node = 0; node < a.nodes; ++node) {
    const int64_t first = a.offset[node], count = a.offset[node + 1] - first;
    const int64_t kind = a.kind == nullptr ? count : a.kind[node];
    int64_t mask = 0;
    if (count <= a.mask_slots)
      for (int64_t s = 0; s < count; ++s) {
        const int64_t child = a.child[first + s];
        const int64_t of_child =
            a.kind == nullptr ? a.offset[child + 1] - a.offset[child] : a.kind[child];
        mask |= int64_t{a.tabled[of_child] != 0} << s;
      }
    key[node] = static_cast<int32_t>(kind * masks + mask);
    ++next[height[node] * keys + key[node]];
  }
  // The tallest level comes first in numbers, and last in the table of groups.
  int64_t number = 0, groups = 0;
  for (int32_t level = tallest; level >= 0; --level)
    for (int64_t k = 0; k < keys; ++k) {
      int64_t &slot = next[level * keys + k];
      const int64_t count = slot;
      slot = number;
      number += count;
      groups += count > 0;
    }
  a.group_count = groups;
  if (groups <= a.capacity) {
    int32_t *row = a.groups;
    for (int32_t level = 0; level < a.levels; ++level)
      for (int64_t k = 0; k < keys; ++k) {
        const int64_t first = next[level * keys + k];
        const int64_t last_key = level * keys + k + 1;
        // The next range in numbers: the next key of the level, or the first of the level below.
        int64_t end;
        if (k + 1 < keys) end = next[last_key];
        else end = level > 0 ? next[(level - 1) * keys] : a.nodes;
        if (end == first) continue;
        row[0] = level;
        row[1] = static_cast<int32_t>(k / masks);
        row[2] = static_cast<int32_t>(k % masks);
        row[3] = static_cast<int32_t>(first);
        row[4] = static_cast<int32_t>(end - first);
        row += 5;
      }
  }
  for (int64_t node = 0; node < a.nodes; ++node)
    a.place[node] = static_cast<int32_t>(next[height[node] * keys + key[node]]++);
  for (int64_t node = 0; node < a.nodes; ++node) {
    const int64_t first = a.offset[node], count = a.offset[node + 1] - first;
    const int64_t place = a.place[node];
    for (int64_t s = 0; s < a.slots; ++s)
      a.child_of[s * a.nodes + place] = s < count ? a.place[a.child[first + s]] : -1;
  }
}

}  // namespace
}  // namespace slipstream

extern "C" int32_t slipstream_linearize(slipstream_linearization *args) {
  args->bad_node = -1;
  args->group_count = args->levels = 0;
  if (args->nodes < 0 || args->nodes > INT32_MAX || args->slots < 0 || args->kinds < 1 ||
      args->mask_slots < 0 || args->mask_slots > 8)
    return SLIPSTREAM_INVALID;
  try {
    slipstream::linearize(*args);
  } catch (const slipstream::Fault &fault) {
    args->bad_node = fault.node;
    return fault.status;
  } catch (const std::bad_alloc &) {
    return SLIPSTREAM_NO_MEMORY;
  }
  return SLIPSTREAM_OK;
}
