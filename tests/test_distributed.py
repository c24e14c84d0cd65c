"""Two processes train a converted model as they train the stock one.

DistributedDataParallel and FSDP2 on two gloo processes: equal gradients and buffers, with frozen
parameters, and whether converted before or after wrapping; and layers called on DTensors.
"""

import os
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory

import helpers
import pytest
import torch
import torch.distributed as dist
from helpers import same
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.nn.parallel import DistributedDataParallel

import memsave
import memsave.nn

SECONDS = 120


def _process(rank: int, meeting: str, work: Callable[[int], None]) -> None:
    """One of two processes; without the network, hence on the loopback interface. They meet in a
    file, as a port that is free now may not be when they have started.
    """
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    try:
        work(rank)
    finally:
        dist.destroy_process_group()
    # A gloo thread that lets go of a collective's result while the interpreter shuts down aborts
    # the process (with stock layers too): a process that has done its work shuts nothing down.
    os._exit(0)


def on_two_processes(work: Callable[[int], None]) -> None:
    """Run ``work(rank)``, a function of this module; a failure of either is a failure here."""
    with TemporaryDirectory() as folder:
        processes = multiprocessing.start_processes(
            _process, (f"{folder}/meeting", work), nprocs=2, join=False, start_method="spawn"
        )
        deadline = time.monotonic() + SECONDS
        try:
            while not processes.join(timeout=1):
                if time.monotonic() > deadline:
                    pytest.fail(f"two processes took more than {SECONDS} s")
        finally:
            for process in processes.processes:
                process.kill()


def network(frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = helpers.ConvNet(0.0).double()
    if frozen:
        model.features[4].requires_grad_(False)
        model.features[1].weight.requires_grad_(False)
    return model


def gradients(model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """Each process has a batch of its own; two steps, as in training."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        x = torch.randn(3, 3, 8, 8, generator=generator).double()
        model.zero_grad()
        model(x).square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found.update(model.named_buffers())
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in found.items()}


def _ddp(rank: int) -> None:
    for frozen in (False, True):
        for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
            wrapped = DistributedDataParallel(network(frozen), **options)
            expected = gradients(wrapped, rank)
            before = DistributedDataParallel(memsave.convert(network(frozen)), **options)
            after = memsave.convert(DistributedDataParallel(network(frozen), **options))
            assert type(after.module.features[0]) is memsave.nn.Conv2d
            same(gradients(before, rank), expected)
            same(gradients(after, rank), expected)
    # A dry run prepares no reducer for a backward that never comes, and tells the others nothing.
    wrapped = DistributedDataParallel(network(True), find_unused_parameters=True)
    expected = gradients(wrapped, rank)
    wrapped = DistributedDataParallel(network(True), find_unused_parameters=True)
    x = torch.ones(3, 3, 8, 8).double()
    if rank == 0:
        memsave.report(wrapped, x)
    memsave.convert(wrapped, x)
    with wrapped.no_sync():
        wrapped(x).sum().backward()
    dist.barrier()
    fresh = memsave.convert(DistributedDataParallel(network(True)), x)
    same(gradients(fresh, rank), expected)


def _sharded(model: nn.Module) -> nn.Module:
    for layer in (model.features[0], model.features[8], model.head):
        fully_shard(layer)
    return fully_shard(model)


def _fsdp(rank: int) -> None:
    expected = gradients(_sharded(network()), rank)
    model = _sharded(memsave.convert(network()))
    same(gradients(model, rank), expected)
    after = memsave.convert(_sharded(network()))
    same(gradients(after, rank), expected)
    # fully_shard gives modules classes of its own.
    for converted in (model, after):
        listed = {entry.name: entry for entry in memsave.coverage(converted)}
        assert listed["features.0"].status == listed["features.1"].status == "converted"
        memsave.revert(converted)
        assert not any(isinstance(m, memsave.nn.Conv2d) for m in converted.modules())
        assert isinstance(converted.features[0], FSDPModule)
        same(gradients(converted, rank)["head.bias"], expected["head.bias"])
    sharded, x = _sharded(network()), torch.ones(3, 3, 8, 8).double()
    for dry_run in (memsave.report, memsave.convert):
        with pytest.raises(RuntimeError, match="before the model is sharded"):
            dry_run(sharded, x)
    same(gradients(sharded, rank), expected)


def _dtensor(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(4, 6, generator=generator)

    def run(change, placement):
        torch.manual_seed(0)
        model = change(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)))
        x = distribute_tensor(whole, mesh, [placement]).requires_grad_()
        y = distribute_module(model, mesh)(x)
        assert isinstance(y, DTensor)
        y.square().sum().backward()
        return y.full_tensor(), x.grad.full_tensor(), model[0].weight.grad.full_tensor()

    for placement in (Replicate(), Shard(0)):
        same(run(memsave.convert, placement), run(lambda model: model, placement))


@pytest.mark.parametrize("work", [_ddp, _fsdp, _dtensor], ids=["DDP", "FSDP2", "DTensor"])
def test_two_processes_agree_with_stock(work: Callable[[int], None]) -> None:
    """A model alone (every other test) never shows reducers that wait for gradients in order."""
    on_two_processes(work)
