"""One rank of a measured step: builds a model of the bench, wraps it, times its steps.

Started by `slipstream_bench.systems.scale.ranks`; reads what to do from standard input, answers
with one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Time `steps` steps of ``models()[model]`` under DistributedDataParallel."""
    import torch.distributed as dist

    from slipstream.ranks.launch import join
    from slipstream.techniques.distributed.ddp import DDP
    from slipstream.workload import build_from
    from slipstream_bench.systems.scale.ranks import model_named

    asked = json.load(sys.stdin)
    join(asked)
    built = build_from(model_named(asked["model"]), (DDP(asked["world"]),), 0, asked["model"])
    times = []
    for number in range(asked["warmup"] + asked["steps"]):
        dist.barrier()
        begin = time.perf_counter()
        built.step()
        if number >= asked["warmup"]:
            times.append(time.perf_counter() - begin)
    dist.destroy_process_group()
    print(json.dumps({"times_s": times}))


if __name__ == "__main__":
    main()
