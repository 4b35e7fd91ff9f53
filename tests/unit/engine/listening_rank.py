"""One of two ranks that join a group, and print where they listen: `listening_rank.py ADDRESS RANK`."""

import json
import sys

import psutil


def listeners() -> list[tuple[str, int]]:
    """Addresses and ports at which this process takes TCP connections, as the kernel lists them."""
    return sorted((each.laddr.ip, each.laddr.port) for each in psutil.Process().net_connections("tcp")
                  if each.status == psutil.CONN_LISTEN)


def main(address: str, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from rlhf_ray.engine import distributed

    distributed.join(address, rank, 2, 60.0)
    total = torch.ones(2)
    dist.all_reduce(total, group=dist.new_group([0, 1]))
    assert total.tolist() == [2.0, 2.0]
    print(json.dumps(listeners()), flush=True)
    dist.barrier()
    distributed.leave()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
