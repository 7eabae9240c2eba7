"""DDP and FSDP2 on two processes give the losses of one."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn.parallel import DistributedDataParallel

from tests.factories import left_padding, make_belief, make_encoder

STEPS, BATCH = 4, 4


def train(wrap, rank=0, world=1, of_trace=False):
    """Losses of a few steps on this rank's share of a fixed batch.

    ``of_trace``: of a layer's internals, which no output leads back to.
    """
    torch.manual_seed(0)
    encoder = make_encoder(2, dtype=torch.float32).train()
    model = wrap(encoder)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    hidden = left_padding(BATCH, 5, [5, 3, 4, 2])
    share = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    losses = []
    for seed in range(STEPS):
        belief = make_belief(BATCH, dtype=torch.float32, seed=seed)
        optimizer.zero_grad()
        given = (belief.mean[share], None, hidden[share], True)
        if of_trace:
            loss = model.steps(*given)[1][-1].log_growth.square().mean()
        else:
            loss = (model(*given) - 0.5).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def data_parallel(encoder):
    # the last layer's Q does not reach the mean
    return DistributedDataParallel(encoder, find_unused_parameters=True)


def sharded(encoder):
    for layer in encoder.layers:
        fully_shard(layer)
        register_fsdp_forward_method(layer, "step")
    fully_shard(encoder)
    whole = make_encoder(2, dtype=torch.float32)
    mine = sum(p.to_local().numel() for p in encoder.parameters())
    total = sum(p.numel() for p in whole.parameters())
    assert mine < 0.6 * total
    return encoder


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    result = {}
    for wrap, of_trace in [(data_parallel, 0), (sharded, 0), (sharded, 1)]:
        losses = train(wrap, rank, world, bool(of_trace))
        dist.all_reduce(losses)
        result[f"{wrap.__name__} {of_trace}"] = (losses / world).tolist()
    if rank == 0:
        print("LOSSES", json.dumps(result), flush=True)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one():
    expected = [
        train(lambda encoder: encoder, of_trace=of_trace).tolist()
        for of_trace in [False, True]
    ]
    for losses in expected:
        assert losses[0] - losses[-1] != pytest.approx(0, abs=1e-3)
    done = subprocess.run(
        [
            *[sys.executable, "-m", "torch.distributed.run", "--standalone"],
            *["--nproc-per-node", "2", "-m", "tests.unit.test_distributed"],
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [
        line for line in done.stdout.splitlines() if line.startswith("LOSSES")
    ]
    found = json.loads(line.removeprefix("LOSSES"))
    assert set(found) == {"data_parallel 0", "sharded 0", "sharded 1"}
    for name, losses in found.items():
        # a batch summed in two halves: some roundings of float32, of losses
        # from 50 down to below 1
        assert losses == pytest.approx(expected[int(name[-1])], rel=1e-6)


if __name__ == "__main__":
    main()
