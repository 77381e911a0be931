"""One of several gloo processes that train a small decoder together, each in one of the ways of torch.distributed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import attnwatch
from attnwatch import Monitor

WIDTH, HEADS, KV_HEADS, LENGTH, BATCH, TOKENS, STEPS = 32, 4, 2, 12, 4, 50, 4
WATCH: dict[str, Any] = {"every": 2, "spectrum_every": 1, "rows": None, "sequences": 1000, "report": False}


class Attention(nn.Module):
    """As many heads as the projections make: fewer on each rank of tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        d = WIDTH // HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * d, bias=False) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, width]
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.attention(self.norm(x))
        return out


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.blocks = nn.ModuleDict({str(n): Block() for n in range(2)})

    def forward(self, x: Tensor) -> Tensor:  # int64 [B, T] to logits [B, T, tokens]; a stage has only some of these
        x = self.embedding(x) if self.embedding is not None else x
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def decoder() -> Decoder:
    torch.manual_seed(0)
    model = Decoder()
    with torch.no_grad():
        for block in model.blocks.values():
            block.get_submodule("attention.q").weight.mul_(8)  # maps that are not uniform
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step: tokens and the ones that follow."""
    tokens = torch.randint(TOKENS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def train(
    model: nn.Module, share: slice, watching: Callable[[nn.Module], Monitor | None], steps: Iterable[int] = range(STEPS)
) -> list[Tensor]:
    """Losses, and at the end the weights that this rank holds. share: of the batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = watching(model)
    left = []
    for step in steps:
        tokens, target = (x[share] for x in batch(step))
        loss = loss_of(model(tokens), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        left.append(loss.detach())
        if monitor is not None:
            monitor.step(loss=loss)
    if monitor is not None:
        monitor.close()
    return left + [local(x) for x in model.state_dict().values()]


def local(x: Any) -> Tensor:
    return (x.to_local() if hasattr(x, "to_local") else x).detach().clone()


def part(rank: int, ranks: int) -> slice:
    return slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)


# --- the ways of training together ------------------------------------------------------------------------------------


def ddp(watching: Callable[[nn.Module], Monitor | None]) -> list[Tensor]:
    return train(DistributedDataParallel(decoder()), part(dist.get_rank(), dist.get_world_size()), watching)


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        fully_shard(block, **options)
    return fully_shard(model, **options)


def fsdp(watching: Callable[[nn.Module], Monitor | None]) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return train(shard(decoder(), mesh=mesh), part(dist.get_rank(), dist.get_world_size()), watching)


def fsdp_kept(watching: Callable[[nn.Module], Monitor | None]) -> list[Tensor]:
    """Parameters stay whole after the forward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = shard(decoder(), mesh=mesh, reshard_after_forward=False)
    return train(model, part(dist.get_rank(), dist.get_world_size()), watching)


def fsdp_bfloat16(watching: Callable[[nn.Module], Monitor | None]) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(decoder(), mesh=mesh, mp_policy=policy)
    return train(model, part(dist.get_rank(), dist.get_world_size()), watching)


def fsdp_flat(watching: Callable[[nn.Module], Monitor | None]) -> list[Tensor]:
    """The first FSDP: the parameters of a block are one flat tensor outside of its forward."""
    model = FullyShardedDataParallel(
        decoder(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
    )
    return train(model, part(dist.get_rank(), dist.get_world_size()), watching)


def split_heads(model: nn.Module, mesh: Any) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        plan = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v")}
        parallelize_module(block, mesh, {**plan, "attention.out": RowwiseParallel()})
    return model


def tensor_parallel(watching: Callable[[nn.Module], Monitor | None]) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return train(split_heads(decoder(), mesh), slice(None), watching)


def fsdp_and_tensor_parallel(watching: Callable[[nn.Module], Monitor | None]) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = shard(split_heads(decoder(), mesh["tp"]), mesh=mesh["dp"])
    return train(model, part(mesh["dp"].get_local_rank(), 2), watching)


def pipeline(watching: Callable[[nn.Module], Monitor | None]) -> list[Tensor]:
    """A block a stage, two micro-batches a step."""
    rank, model = dist.get_rank(), decoder()
    del model.blocks[str(1 - rank)]
    if rank == 0:
        model.head = None  # type: ignore[assignment]
    else:
        model.embedding = None  # type: ignore[assignment]
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = watching(model)
    left: list[Tensor] = []
    for step in range(STEPS):
        tokens, target = batch(step)
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=target, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        left += losses
        if monitor is not None:
            monitor.step(**({"loss": torch.stack(losses).mean()} if losses else {}))
    if monitor is not None:
        monitor.close()
    return left + [local(x) for x in model.state_dict().values()]


WAYS = {way.__name__: way for way in (ddp, fsdp, fsdp_kept, fsdp_bfloat16, fsdp_flat, tensor_parallel, pipeline)}
MESH = {way.__name__: way for way in (fsdp_and_tensor_parallel,)}


def compare(place: Path, name: str, way: Callable[[Callable[[nn.Module], Monitor | None]], list[Tensor]]) -> None:
    """Train unwatched, then watched: every rank says whether each bit is the same."""
    unwatched = way(lambda _: None)
    monitors: list[Monitor] = []

    def watching(model: nn.Module) -> Monitor:
        monitors.append(attnwatch.watch(model, run=place / name, **WATCH))
        return monitors[0]

    watched = way(watching)
    same = len(watched) == len(unwatched) and all(map(torch.equal, watched, unwatched))
    problems = [(problem.where, problem.text) for problem in monitors[0].problems]
    coverage = [(layer.name, layer.state, layer.heads) for layer in monitors[0].coverage]
    last = monitors[0].last
    told = {"same": same, "problems": problems, "coverage": coverage, "values": None if last is None else last.values}
    torch.save({**told, "run": str(monitors[0].run)}, place / f"{name}-{dist.get_rank()}.pt")


if __name__ == "__main__":
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    dist.init_process_group("gloo")
    for name in names:
        compare(folder, name, {**WAYS, **MESH}[name])
    dist.destroy_process_group()
