"""One of several gloo processes that train a small decoder together, each in one of the ways of torch.distributed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.ranks_decoder import BATCH, STEPS, WATCH, Block, Decoder, Watching, batch, decoder, held, loss_of, train
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
    SplitPoint,
)  # fmt: skip
from torch.distributed.pipelining import pipeline as trace
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)  # fmt: skip
from torch.nn.parallel import DistributedDataParallel

import attnwatch
from attnwatch import Monitor


def part(rank: int, ranks: int) -> slice:
    return slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)


def mine() -> slice:
    """This rank's share of the batch, where each has one."""
    return part(dist.get_rank(), dist.get_world_size())


def accumulate(
    synced: Callable[[nn.Module, bool], AbstractContextManager[None]], model: nn.Module, tokens: Tensor, target: Tensor
) -> Tensor:
    """A step in micro-batches of one sequence. synced: whether gradients are reduced meanwhile: in the last one."""
    losses = []
    for n in range(len(tokens)):
        with synced(model, n == len(tokens) - 1):
            loss = loss_of(model(tokens[n : n + 1]), target[n : n + 1]) / len(tokens)
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


# --- by data ----------------------------------------------------------------------------------------------------------


def ddp(watching: Watching) -> list[Tensor]:
    return train(DistributedDataParallel(decoder()), mine(), watching)


def ddp_no_sync(watching: Watching) -> list[Tensor]:
    def synced(model: Any, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else model.no_sync()  # type: ignore[no-any-return]

    return train(DistributedDataParallel(decoder()), mine(), watching, partial(accumulate, synced))


def ddp_static_graph(watching: Watching) -> list[Tensor]:
    """Blocks are computed again in the backward pass."""
    return train(DistributedDataParallel(checkpointed(decoder()), static_graph=True), mine(), watching)


def ddp_compiled(watching: Watching) -> list[Tensor]:
    model: Any = torch.compile(DistributedDataParallel(decoder()), backend="eager")
    return train(model, mine(), watching)


def checkpointed(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        fully_shard(block, **options)
    return fully_shard(model, **options)


def fsdp(watching: Watching, **options: Any) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return train(shard(decoder(), mesh=mesh, **options), mine(), watching)


def fsdp_kept(watching: Watching) -> list[Tensor]:
    """Parameters stay whole after the forward."""
    return fsdp(watching, reshard_after_forward=False)


def fsdp_bfloat16(watching: Watching) -> list[Tensor]:
    return fsdp(watching, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def fsdp_checkpointed(watching: Watching) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return train(shard(checkpointed(decoder()), mesh=mesh), mine(), watching)


def fsdp_accumulated(watching: Watching) -> list[Tensor]:
    def synced(model: Any, is_last: bool) -> AbstractContextManager[None]:
        model.set_requires_gradient_sync(is_last)
        return nullcontext()

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return train(shard(decoder(), mesh=mesh), mine(), watching, partial(accumulate, synced))


def fsdp_each_projection(watching: Watching) -> list[Tensor]:
    """Queries' weights are in pieces again when attention is called."""
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), decoder()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh)
    return train(shard(model, mesh=mesh), mine(), watching)


def fsdp_flat(watching: Watching, unit: type[nn.Module] = Block) -> list[Tensor]:
    """The first FSDP: the parameters of a block are one flat tensor outside of its forward."""
    model = FullyShardedDataParallel(
        decoder(), auto_wrap_policy=ModuleWrapPolicy({unit}), device_id=torch.device("cpu")
    )
    return train(model, mine(), watching)


def fsdp_flat_each_projection(watching: Watching) -> list[Tensor]:
    return fsdp_flat(watching, nn.Linear)


def fsdp_hybrid(watching: Watching) -> list[Tensor]:
    """Sharded over pairs of ranks, and two copies of that."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    return train(shard(decoder(), mesh=mesh), mine(), watching)


# --- by heads ---------------------------------------------------------------------------------------------------------


def split_heads(model: nn.Module, mesh: Any) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        plan = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v")}
        parallelize_module(block, mesh, {**plan, "attention.out": RowwiseParallel()})
    return model


def tensor_parallel(watching: Watching) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return train(split_heads(decoder(), mesh), slice(None), watching)


def sequence_and_loss_parallel(watching: Watching) -> list[Tensor]:
    """Between attention calls each rank has some of the positions, and of the logits some of the vocabulary."""
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)), decoder()
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for block in model.blocks.values():
        plan = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v")}
        out = RowwiseParallel(output_layouts=Shard(1))
        parallelize_module(block, mesh, {"norm": SequenceParallel(), "attention": whole, **plan, "attention.out": out})
    with loss_parallel():
        return train(parallelize_module(model, mesh, ends), slice(None), watching)


def fsdp_and_tensor_parallel(watching: Watching) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = shard(split_heads(decoder(), mesh["tp"]), mesh=mesh["dp"])
    return train(model, part(mesh["dp"].get_local_rank(), 2), watching)


def ddp_over_tensor_parallel(watching: Watching) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = DistributedDataParallel(split_heads(decoder(), mesh["tp"]), device_mesh=mesh["dp"])
    return train(model, part(mesh["dp"].get_local_rank(), 2), watching)


# --- by layers --------------------------------------------------------------------------------------------------------


def stages(count: int, *numbers: int) -> list[Decoder]:
    """These of so many stages, a block each."""
    models = [decoder(count) for _ in numbers]
    for model, number in zip(models, numbers, strict=True):
        model.blocks = nn.ModuleDict({str(number): model.blocks[str(number)]})
        model.embedding = model.embedding if number == 0 else None  # type: ignore[assignment]
        model.head = model.head if number == count - 1 else None  # type: ignore[assignment]
    return models


def in_stages(watching: Watching, models: list[Decoder], watched: nn.Module, schedule: Any) -> list[Tensor]:
    optimizer = torch.optim.AdamW([x for model in models for x in model.parameters()], lr=1e-2)
    monitor = watching(watched)
    left: list[Tensor] = []
    for step in range(STEPS):
        tokens, target = batch(step)
        losses: list[Tensor] = []
        given = (tokens,) if any(getattr(model, "embedding", None) is not None for model in models) else ()
        is_last = any(getattr(model, "head", None) is not None for model in models)
        schedule.step(*given, **({"target": target, "losses": losses} if is_last else {}))
        optimizer.step()
        optimizer.zero_grad()
        left += losses
        if monitor is not None:
            monitor.step(**({"loss": torch.stack(losses).mean()} if losses else {}))
    if monitor is not None:
        monitor.close()
    return left + held(models)


def pipeline(watching: Watching, kind: Any = ScheduleGPipe, micro: int = 2) -> list[Tensor]:
    """A stage a rank, two micro-batches a step."""
    rank = dist.get_rank()
    (model,) = stages(2, rank)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    return in_stages(watching, [model], model, kind(stage, micro, loss_fn=loss_of))


def pipeline_1f1b(watching: Watching) -> list[Tensor]:
    return pipeline(watching, Schedule1F1B, 4)


def pipeline_traced(watching: Watching) -> list[Tensor]:
    """Stages cut out of the traced model: their code calls operators."""
    micro = batch(0)[0][: BATCH // 2]
    cut = trace(decoder(), mb_args=(micro,), split_spec={"blocks.1": SplitPoint.BEGINNING})
    stage = cut.build_stage(dist.get_rank(), torch.device("cpu"))
    model: Any = stage.submod
    return in_stages(watching, [model], model, ScheduleGPipe(stage, 2, loss_fn=loss_of))


def pipeline_interleaved(watching: Watching) -> list[Tensor]:
    """Stages 0 and 2 on the first rank, 1 and 3 on the second."""
    return several_stages(watching, ScheduleInterleaved1F1B, (dist.get_rank(), dist.get_rank() + 2))


def pipeline_in_v(watching: Watching) -> list[Tensor]:
    """Stages 0 and 3 on the first rank, 1 and 2 on the second."""
    return several_stages(watching, ScheduleZBVZeroBubble, (dist.get_rank(), 3 - dist.get_rank()))


def several_stages(watching: Watching, kind: Any, numbers: tuple[int, ...]) -> list[Tensor]:
    models = stages(4, *numbers)
    held_here = [
        PipelineStage(model, number, 4, torch.device("cpu")) for model, number in zip(models, numbers, strict=True)
    ]
    return in_stages(watching, models, nn.ModuleList(models), kind(held_here, 4, loss_fn=loss_of))


Way = Callable[[Watching], list[Tensor]]
OF_TWO: tuple[Way, ...] = (
    ddp, ddp_no_sync, ddp_static_graph, ddp_compiled, fsdp, fsdp_kept, fsdp_bfloat16, fsdp_checkpointed,
    fsdp_accumulated, fsdp_each_projection, fsdp_flat, fsdp_flat_each_projection, tensor_parallel,
    sequence_and_loss_parallel, pipeline, pipeline_1f1b, pipeline_traced, pipeline_interleaved, pipeline_in_v,
)  # fmt: skip
OF_FOUR: tuple[Way, ...] = (fsdp_hybrid, fsdp_and_tensor_parallel, ddp_over_tensor_parallel)
RANKS = {**{way.__name__: 2 for way in OF_TWO}, **{way.__name__: 4 for way in OF_FOUR}}


def compare(place: Path, way: Way) -> None:
    """Train unwatched, then watched: every rank says whether each bit is the same."""
    unwatched = way(lambda _: None)
    monitors: list[Monitor] = []

    def watching(model: nn.Module) -> Monitor:
        monitors.append(attnwatch.watch(model, run=place / way.__name__, **WATCH))
        return monitors[0]

    watched = way(watching)
    same = len(watched) == len(unwatched) and all(map(torch.equal, watched, unwatched))
    problems = [(problem.where, problem.text) for problem in monitors[0].problems]
    coverage = [(layer.name, layer.state, layer.heads) for layer in monitors[0].coverage]
    last = monitors[0].last
    told = {"same": same, "problems": problems, "coverage": coverage, "values": None if last is None else last.values}
    torch.save({**told, "run": str(monitors[0].run)}, place / f"{way.__name__}-{dist.get_rank()}.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for each in OF_TWO if dist.get_world_size() == 2 else OF_FOUR:
        compare(Path(sys.argv[1]), each)
    dist.destroy_process_group()
