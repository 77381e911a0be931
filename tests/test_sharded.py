"""Calls on DTensors: the local part is looked at only where it is a complete smaller call."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from attnwatch.hooks.projections import linear
from attnwatch.hooks.sharded import sharded
from attnwatch.hooks.tap import Frame, Tap
from attnwatch.monitor.scalars import plain


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """This process is rank 1 of two that do not exist: whoever entered a collective would get nonsense."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def seen(func: Any, out: Tensor, *given: Tensor) -> tuple[list[Tensor], tuple[int, int]] | None:
    """What the handler was given of a call, and which part of the heads; None if it was not called."""
    tap = Tap({}, lambda *_: None, lambda *_: None, list, True)
    tap.frames.append(Frame("site", nn.Identity(), True))
    calls: list[list[Tensor]] = []
    sharded(tap, lambda tap, func, args, kwargs, out: calls.append([*args, out]), func, given, {}, out)
    return (calls[0], tap.site.part) if calls else None


def spread(mesh: DeviceMesh, placement: Placement, *shape: int) -> DTensor:
    return DTensor.from_local(torch.ones(shape), mesh, [placement], run_check=False)


HEADS, BATCH, POSITIONS = Shard(1), Shard(0), Shard(2)


def test_a_scalar_on_several_ranks_is_read_where_it_is_whole(mesh: DeviceMesh) -> None:
    """As the norm of sharded gradients is. In parts it is named: to put it together all ranks would have to help."""
    named: list[tuple[str, str]] = []
    whole, parts = (
        DTensor.from_local(torch.tensor(3.0), mesh, [at], run_check=False) for at in (Replicate(), Partial())
    )
    assert plain("grad_norm", whole, lambda *problem: named.append(problem)) == 3.0
    assert named == []
    assert math.isnan(plain("grad_norm", parts, lambda *problem: named.append(problem)))
    ((where, text),) = named
    assert where == "grad_norm"
    assert text.endswith("pass its .full_tensor()")
    held = plain("grad_norm", whole.to("meta"), lambda *problem: named.append(problem))
    assert type(held) is Tensor  # of a device, until the next sample: it travels with the numbers of hooks


def test_a_projection_split_by_its_output_is_a_projection_of_some_heads(mesh: DeviceMesh) -> None:
    x, weight = spread(mesh, Replicate(), 2, 3, 8), spread(mesh, Shard(0), 4, 8)
    found = seen(F.linear, spread(mesh, Shard(2), 2, 3, 4), x, weight)
    assert found is not None
    assert [tuple(each.shape) for each in found[0]] == [(2, 3, 8), (4, 8), (2, 3, 4)]
    assert not any(isinstance(each, DTensor) for each in found[0])
    assert found[1] == (1, 2)


@pytest.mark.parametrize(("placement", "parts"), [(Shard(0), 2), (Replicate(), 1)])
def test_a_projection_knows_whether_it_is_split(placement: Placement, parts: int, mesh: DeviceMesh) -> None:
    """The keys of multi-query attention are whole on every rank, next to queries that are not."""
    tap = Tap({}, lambda *_: None, lambda *_: None, list, True)
    tap.frames.append(Frame("site", nn.Identity(), True))
    x, w = spread(mesh, Replicate(), 2, 3, 8), spread(mesh, placement, 4, 8)
    sharded(tap, linear, F.linear, (x, w), {}, F.linear(x, w))
    linear(tap, F.linear, (torch.ones(2, 8), torch.ones(4, 8)), {}, torch.ones(2, 4))  # of another call
    assert [product.parts for product in tap.site.products] == [parts, 1]


def test_a_projection_whose_sum_is_split_is_not_looked_at(mesh: DeviceMesh) -> None:
    x, weight = spread(mesh, Shard(2), 2, 3, 4), spread(mesh, Shard(1), 8, 4)
    assert seen(F.linear, spread(mesh, Replicate(), 2, 3, 8), x, weight) is None
    whole = spread(mesh, Replicate(), 2, 3, 8), spread(mesh, Replicate(), 8, 8)
    assert seen(F.linear, spread(mesh, Partial(), 2, 3, 8), *whole) is None


@pytest.mark.parametrize(("placement", "part"), [(HEADS, (1, 2)), (BATCH, (0, 1)), (Replicate(), (0, 1))])
def test_attention_split_by_heads_or_sequences(placement: Placement, part: tuple[int, int], mesh: DeviceMesh) -> None:
    q, k, v, out = (spread(mesh, placement, 2, 4, 6, 8) for _ in range(4))
    found = seen(F.scaled_dot_product_attention, out, q, k, v)
    assert found is not None
    assert found[1] == part


def test_attention_split_by_positions_is_not_looked_at(mesh: DeviceMesh) -> None:
    """Context parallelism: the local keys are not all that a row sees."""
    q, k, v, out = (spread(mesh, POSITIONS, 2, 4, 6, 8) for _ in range(4))
    assert seen(F.scaled_dot_product_attention, out, q, k, v) is None
    whole = spread(mesh, Replicate(), 2, 4, 6, 8)
    assert seen(F.scaled_dot_product_attention, out, q, whole, whole) is None


def test_a_norm_needs_all_of_its_features(mesh: DeviceMesh) -> None:
    weight = spread(mesh, Replicate(), 8)
    heads = spread(mesh, HEADS, 2, 4, 6, 8)
    assert seen(F.rms_norm, heads, heads, weight) is not None
    features = spread(mesh, Shard(3), 2, 4, 6, 8)
    assert seen(F.rms_norm, features, features, weight) is None


def test_another_function_is_not_looked_at(mesh: DeviceMesh) -> None:
    heads = spread(mesh, HEADS, 2, 4, 6, 8)
    assert seen(F.softmax, heads, heads) is None
