// Priorities of transfers as ranks 0, 1, ..., the most urgent first.
#pragma once

#include <algorithm>
#include <vector>

#include "internal.h"

namespace slipstream {

// How many ranks there are; `rank_of_task` stays empty when there is one.
inline int32_t rank_by_priority(const slipstream_program &program,
                                std::vector<int32_t> &rank_of_task) {
  if (program.priority_by_id.empty()) return 1;
  std::vector<int32_t> classes;
  for (int32_t t = 0; t < program.tasks; ++t)
    if (program.flows.bytes[t] > 0.0) classes.push_back(program.priority_by_id[t]);
  std::sort(classes.begin(), classes.end());
  classes.erase(std::unique(classes.begin(), classes.end()), classes.end());
  if (classes.size() < 2) return 1;
  rank_of_task.assign(static_cast<std::size_t>(program.tasks), 0);
  for (int32_t t = 0; t < program.tasks; ++t)
    rank_of_task[t] = static_cast<int32_t>(
        std::lower_bound(classes.begin(), classes.end(), program.priority_by_id[t]) -
        classes.begin());
  return static_cast<int32_t>(classes.size());
}

}  // namespace slipstream
