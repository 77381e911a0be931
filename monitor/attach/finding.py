"""Which models are being trained in this process: by the garbage collector, by type, and by the optimizers' parameters.

Other people's objects are only asked for their type: an `isinstance` would wake lazy ones.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from attnwatch.hooks import sites
from attnwatch.monitor.attach.crossing import callers
from attnwatch.monitor.session import Monitor


class Trained(NamedTuple):
    """A model and the optimizers that train it, the one with most parameters first.

    is_watched: by a monitor, of the script itself perhaps."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    is_watched: bool = False

    @property
    def parameters(self) -> int:
        return _size(self.model)[0]

    @property
    def has_attention(self) -> bool:
        return sites.may_hold_attention(self.model)


class Found(NamedTuple):
    """What lives in this process. scaled: by a `GradScaler`, which multiplies losses before `backward`."""

    trained: tuple[Trained, ...]
    scaled: bool


def find() -> Found:
    """Models that an optimizer trains, the largest first. Call it between two steps."""
    objects = _live(nn.Module, Optimizer, torch.amp.GradScaler, Monitor)

    def live(kind: type) -> list[Any]:
        return [x for x in objects if issubclass(type(x), kind)]

    # A module whose class forgot, or has not yet reached, the constructor has none of the attributes of one.
    modules = [x for x in live(nn.Module) if "_modules" in _attributes(x)]
    # Wrappers as Accelerate's are optimizers by class only: their steps call the step of the real one.
    optimizers = [x for x in live(Optimizer) if "_optimizer_step_post_hooks" in _attributes(x)]
    scaled = any(x.is_enabled() for x in live(torch.amp.GradScaler))
    # A closed monitor has let go of its probe.
    probes = [_attributes(x)["_probe"] for x in live(Monitor) if "_probe" in _attributes(x)]
    probed = {id(_unwrapped(probe.model)) for probe in probes}
    trained = trained_models(modules, optimizers)
    return Found(tuple(each._replace(is_watched=id(each.model) in probed) for each in trained), scaled)


def _live(*kinds: type) -> list[Any]:
    """Every live object of these types and of those derived from them."""
    fitting = {id(kind) for base in kinds for kind in _derived(base)}  # others' classes may have a hash that fails
    found = {id(x): x for x in gc.get_objects() if id(type(x)) in fitting}
    if gc.get_freeze_count():  # a trainer that froze the collector's heap hides what was made before
        found |= {id(x): x for x in _in_frames() if id(type(x)) in fitting}
    return list(found.values())


def _attributes(x: object) -> dict[str, Any]:
    """Of a module, an optimizer, ...: past what its class does when it is asked."""
    found: dict[str, Any] = object.__getattribute__(x, "__dict__")
    return found


def _derived(kind: type) -> Iterator[type]:
    yield kind
    below: type
    for below in type.__subclasses__(kind):
        yield from _derived(below)


def _in_frames() -> Iterator[object]:
    """What the functions that run now hold: their variables, and what is kept in objects among these."""
    for frame in sys._current_frames().values():
        for at in callers(frame):
            values = (*at.f_locals.values(), *at.f_globals.values())
            yield from values
            for value in values:
                with suppress(AttributeError):
                    yield from tuple(_attributes(value).values())


def trained_models(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Iterator[Trained]:
    """One model for all optimizers whose parameters lie within each other; a model each where they lie apart.

    The model is the outermost module, except that of several which lie apart in one (a generator and its
    discriminator) each that holds attention is a model of its own.
    """
    children = {id(child) for module in modules for child in _attributes(module)["_modules"].values()}
    roots = [module for module in modules if id(module) not in children]
    homes: dict[int, tuple[nn.Module, list[Optimizer]]] = {}
    for optimizer in optimizers:
        home = _home(roots, parameters_of(optimizer))
        if home is not None:
            homes.setdefault(id(home), (home, []))[1].append(optimizer)
    found = [each for root, own in homes.values() for each in _apart(root, own)]
    yield from sorted(found, key=lambda each: -each.parameters)


def parameters_of(optimizer: Optimizer) -> dict[int, int]:
    """Sizes by id."""
    return {id(x): _numel(x) for group in optimizer.param_groups for x in group["params"]}


def _numel(parameter: Tensor) -> int:
    return 0 if is_lazy(parameter) else parameter.numel()


def _within(module: nn.Module, wanted: dict[int, int]) -> int:
    """How many of the wanted numbers belong to the module."""
    try:
        return sum(wanted.get(id(parameter), 0) for parameter in module.parameters())
    except Exception:  # other people's modules have a `parameters` of their own: what fails is not in training
        return 0


def _size(module: nn.Module) -> tuple[int, int]:
    return sum(map(_numel, module.parameters())), sum(1 for _ in module.modules())


def _home(roots: Sequence[nn.Module], wanted: dict[int, int]) -> nn.Module | None:
    """The root that holds most of these parameters, and of several the smallest; rather not what a compiler made."""
    held = [(root, _within(root, wanted)) for root in roots]
    most = max((count for _, count in held), default=0)
    best = [root for root, count in held if count == most]
    return min(best, key=lambda root: (isinstance(root, GraphModule), _size(root))) if most else None


def _apart(root: nn.Module, optimizers: list[Optimizer]) -> list[Trained]:
    optimizers = sorted(optimizers, key=lambda optimizer: -sum(parameters_of(optimizer).values()))
    parts: list[tuple[nn.Module, list[Optimizer]]] = []  # apart from each other, the larger first
    for part, optimizer in sorted(
        ((_part(root, o), o) for o in optimizers), key=lambda pair: _size(pair[0])[::-1], reverse=True
    ):
        around = next((own for module, own in parts if any(part is x for x in module.modules())), None)
        if around is None:
            parts.append((part, [optimizer]))
        else:
            around.append(optimizer)
    with_attention = [part for part, _ in parts if sites.may_hold_attention(part)]
    if len(with_attention) < 2:
        own = next((own for part, own in parts if any(part is x for x in with_attention)), optimizers)
        return [Trained(_unwrapped(root), tuple(sorted(own, key=optimizers.index)))]
    return [Trained(_unwrapped(part), tuple(sorted(own, key=optimizers.index))) for part, own in parts]


def _part(root: nn.Module, optimizer: Optimizer) -> nn.Module:
    """The smallest module inside the root with all of the optimizer's parameters that the root has.

    Modules in a list are layers of one model, also where each has an optimizer of its own: the list is the smallest.
    """
    wanted = parameters_of(optimizer)
    most = _within(root, wanted)
    part = root
    while not isinstance(part, nn.ModuleList | nn.Sequential):
        inner = next((x for x in part.children() if _within(x, wanted) == most), None)
        if inner is None:
            break
        part = inner
    return part


def _unwrapped(model: nn.Module) -> nn.Module:
    """Without what DDP and torch.compile put around it."""
    names = [name for name, _ in model.named_children()]
    return _unwrapped(model.get_submodule(names[0])) if len(names) == 1 and names[0] in sites.WRAPPERS else model
