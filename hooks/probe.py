"""One sampled step: arm the hooks, gather on the device, one copy to the host, disarm.

Between samples the model carries nothing of ours. In a sampled step every module that may lead to attention has a hook
before and after its forward; they keep the tap's stack. Evaluation passes and the recomputation of activation
checkpoints are not counted. Micro-batches merge. Nothing here raises into the model.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attnwatch.hooks import sites, weights
from attnwatch.hooks.adapters import adapter_for, check, given_weights
from attnwatch.hooks.attention import Attention
from attnwatch.hooks.compiled import EagerStep
from attnwatch.hooks.counted import in_backward, is_rehearsed
from attnwatch.hooks.graph import BLIND, GraphRoute
from attnwatch.hooks.handlers import HANDLERS
from attnwatch.hooks.huggingface import Interface
from attnwatch.hooks.inert import Enter, Leave
from attnwatch.hooks.layers import METRICS, Draft, Layer, complete, draft, has_turn, settle, solve
from attnwatch.hooks.layouts import Shape
from attnwatch.hooks.normalisers import every_row
from attnwatch.hooks.precision import computed_in, full_precision
from attnwatch.hooks.statistics import ATTENTION, sample_rows, sample_sequences
from attnwatch.hooks.tap import Frame, Seen, Tap
from attnwatch.hooks.together import Together
from attnwatch.hooks.transforms import is_mapped

PATIENCE = 3  # failures of a layer: one side computation in a forward, such as a trace, is not the end of it
_GOLDEN = 0.6180339887498949  # phases of successive samples fill [0, 1) evenly
_ARMED: weakref.WeakSet[Probe] = weakref.WeakSet()  # what a model holds that is dropped goes with it
KEPT = 2**28
"""Most bytes of weights that wait for the optimizer's step, and of matrices for their eigenvalues: a sample must not
fill the memory that training needs. Of matrices four times as much on an accelerator, where what finds no room makes
the host wait."""


class Reading(NamedTuple):
    """A sampled step on the host. values: float32 `[M, L, H]` over `measured`; layers: all known, uncovered ones too.

    pairs: float64 `[2, A, L, H]`, what the first A metrics were made of: values and weights, 0 where not measured.
    extras: the scalars that travelled along. problems: (where, what), each said once. seconds: cost of this sample."""

    measured: tuple[str, ...]
    layers: tuple[Layer, ...]
    values: NDArray[np.float32]
    pairs: NDArray[np.float64]
    extras: NDArray[np.float64]
    problems: tuple[tuple[str, str], ...]
    seconds: float


class Probe:
    """Measures the attention of one model on the steps it is armed for.

    rows, sequences: how many query rows of how many sequences of a batch are measured (None: all rows). graph: look
    inside compiled graphs (graph.py) instead of running sampled steps eagerly. context: keys of a longer row, for
    `forecast_sharpness`. every_row: entropy and first-key mass are of every row, by the fused kernel (normalisers.py),
    whatever `rows` says. share: at most so many layers are looked at in one look, in turn (None: all). `close` at the
    end. Raises ValueError, one line, for what is no adapter.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: int | None = 64,
        sequences: int = 4,
        adapters: Sequence[Any] = (),
        graph: bool = False,
        context: int | None = None,
        every_row: bool = False,
        share: int | None = None,
    ):
        check(adapters, sites.hookable(model))
        self.model = model
        self.rows = rows
        self.sequences = sequences
        self.adapters = adapters
        self.context = context
        self.every_row = every_row
        self.share = share
        self.layers: dict[str, Layer] = {}
        self._expects = bool(adapters) or sites.may_hold_attention(model)
        self._turn = 0
        self._looks = 0
        self._look = False
        self._room = KEPT
        self._together = Together(KEPT)
        self._drafts: dict[str, Draft] = {}
        self._handles: list[Any] = []
        self._names: dict[int, str] = {}
        self._adapted: dict[str, Any] = {}
        self._owners: set[str] = set()
        self._local = threading.local()
        self._interface = Interface(partial(getattr, self._local, "tap", None))  # stands in a list of all: not `self`
        self._eager = EagerStep()
        self._graph = GraphRoute(self) if graph else None
        self._lock = threading.Lock()
        self._broken: set[str] = set()  # not measured in this step
        self._failures: Counter[str] = Counter()
        self._silent: set[str] = set()
        self._problems: list[tuple[str, str]] = []
        self._seconds = 0.0

    # --- arm and disarm -----------------------------------------------------------------------------------------------

    def arm(self, look: bool) -> None:
        """Hooks on, for the next optimizer step. look: the weights are looked at too (spectrum, proofs)."""
        start = time.perf_counter()
        self.disarm()
        self._look = look
        self._room, self._together = KEPT, Together(KEPT * (1 if sites.on_host(self.model) else 4))
        self._drafts = {}
        self._broken = {where for where, times in self._failures.items() if times >= PATIENCE}
        if self._graph is not None:
            self._graph.start()
        else:
            self._hook()
        self._seconds = time.perf_counter() - start

    def _hook(self) -> None:
        self._owners = sites.owners(self.model)
        for name, module in sites.hookable(self.model):
            self._names[id(module)] = name
            self._adapted[name] = adapter_for(self.adapters, name, module)
            self._handles += [
                module.register_forward_pre_hook(Enter(self, name)),
                module.register_forward_hook(Leave(self, name), always_call=True),
            ]
        self._interface.install()
        self._eager.start()
        _ARMED.add(self)

    def disarm(self) -> None:
        """Hooks off; idempotent."""
        if self._graph is not None:
            self._graph.stop()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._names = {}
        self._interface.remove()
        self._eager.stop()
        _ARMED.discard(self)
        self._unwind()

    def close(self) -> None:
        """Nothing of ours is left, in the model or in the compiler; idempotent."""
        self.disarm()
        if self._graph is not None:
            self._graph.close()

    def _unwind(self) -> None:
        """Leave what a forward that was interrupted (KeyboardInterrupt skips hooks) left standing in this thread."""
        tap = getattr(self._local, "tap", None)
        if tap is not None:
            tap.abandon()
        self._local.tap = None

    # --- in the forward -----------------------------------------------------------------------------------------------

    def enter(self, name: str, module: nn.Module) -> None:
        tap = getattr(self._local, "tap", None)
        if tap is not None and not tap.running():  # an interrupted forward (Ctrl-C skips hooks) left it standing
            self._unwind()
            tap = None
        if not self.counts or (tap is None and is_rehearsed(sys._getframe(2))):
            return
        if tap is None:
            tap = self._local.tap = Tap(HANDLERS, self.gather, self.failed, self._choose, self._look)
        adapter = self._adapted.get(name)
        frame = Frame(name, module, name in self._owners or hasattr(adapter, "match"), adapter=adapter)
        tap.enter(frame, sys._getframe(2))  # of the module's call, above this method and its hook

    def leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        tap = getattr(self._local, "tap", None)
        if tap is None or in_backward() or not any(frame.module is module for frame in tap.frames):
            return
        tap.leave(module, output, arguments)
        if not tap.frames:
            self._local.tap = None

    def observe(self, module: nn.Module, attention: Attention) -> None:
        name = self._names.get(id(module))
        if name is None or not self.counts:
            return
        tap = getattr(self._local, "tap", None)
        if tap is None:  # its forward was called directly, and no hook ran
            self.gather(Frame(name, module, True), Seen(attention), 0)
        else:
            frame = next((f for f in reversed(tap.frames) if f.module is module), Frame(name, module, True))
            tap.handle(lambda tap: tap.report(Seen(attention), frame))

    @property
    def counts(self) -> bool:
        """Whether the forward that runs now is one of training, and not the recomputation of a checkpoint."""
        return self.model.training and not in_backward() and not is_mapped()

    @property
    def looking(self) -> bool:
        """Whether the weights are looked at in this step."""
        return self._look

    def _choose(self, batch: int) -> list[int]:
        return sample_sequences(batch, self.sequences, self._turn)

    def gather(self, frame: Frame, seen: Seen, index: int) -> None:
        start = time.perf_counter()
        name = (frame.name or type(self.model).__name__) + (f"#{index}" if index else "")
        if name in self._broken or 0 in (seen.attention.batch, seen.attention.queries, seen.attention.keys):
            return
        try:
            self._add(name, frame, seen)
        except Exception as error:
            self.failed(name, error)
        self._seconds += time.perf_counter() - start

    def _add(self, name: str, frame: Frame, seen: Seen) -> None:
        attention = seen.attention
        rows = sample_rows(attention.queries, self.rows, self._turn * _GOLDEN % 1.0)
        layer = self._layer(name, attention, frame.part)
        asked = replace(attention, dtype=computed_in(attention), context=self.context)
        look = self._look and name not in self._drafts and has_turn(layer, self.layers, self._looks, self.share)
        with torch.no_grad():
            if look and hasattr(frame.adapter, "weights"):
                pair_of_weights, source = given_weights(frame.adapter, frame.module, attention)
                seen = seen._replace(weights=pair_of_weights, source=source)
            # In the caller's autocast, in which the norms were called.
            sides = self._sides(layer, frame, seen) if look else {}
            with full_precision(attention.device):
                sequences = self._choose(attention.batch)
                share = self._together.add(asked, sequences, rows, at_once=self.every_row)
                if self.every_row:
                    share.batch.pair = every_row(asked, sequences, share.pair)
                seen = seen._replace(channels=look and weights.over_channels(frame, attention))
                fresh = draft(seen, share, sides, look, layer, frame.module)
                if fresh.factors is not None and not self._together.takes(fresh.factors.bytes):
                    solve([fresh])
        with self._lock:
            if fresh.kept is not None:
                self._room -= fresh.kept.bytes
                fresh.kept = fresh.kept if self._room >= 0 else None
            known = self._drafts.setdefault(name, fresh)
            if known is not fresh:
                known.shares += fresh.shares

    def _layer(self, name: str, attention: Attention, part: tuple[int, int]) -> Layer:
        layer = self.layers.setdefault(name, Layer(name))
        layer.heads, layer.head_dim = int(attention.heads), int(attention.head_dim)  # tensors in torch.jit.trace
        layer.kv_heads = layer.kv_heads or int(attention.kv_heads)
        layer.part = part
        layer.dtype = str(computed_in(attention)).removeprefix("torch.")
        return layer

    def _sides(self, layer: Layer, frame: Frame, seen: Seen) -> dict[str, weights.Side]:
        """Both sides' weights, or none."""
        attention = seen.attention
        if seen.weights is not None or seen.folded or attention.q is None or attention.k is None:
            return {}
        found = {}
        value_dim = 0 if seen.value is None else seen.value.shape[-1]
        for side, x in (("q", attention.q), ("k", attention.k)):
            shape = Shape(side, attention.heads, x.shape[1], x.shape[3], value_dim)
            answer = weights.look(shape, x.detach(), frame, layer.keys.get(side))
            if answer is None:
                return {}
            found[side] = answer
        return found

    def failed(self, where: str, error: Exception) -> None:
        """A layer whose measuring failed is off for this step, after PATIENCE steps for good; said once."""
        where = where or type(self.model).__name__
        with self._lock:
            first = where not in self._broken and not self._failures[where]
            self._failures[where] += where not in self._broken
            self._broken.add(where)
            layer = self.layers.get(where, Layer(where))
            layer.due = self._failures[where] < PATIENCE  # the next sample says whether it works again
            if first:
                reason = f"measuring failed and is off for this layer: {type(error).__name__}: "
                reason += " ".join(str(error).split())[:300]
                self._problems.append((where, reason))
                layer.state, layer.note = "uncovered", reason

    # --- after the step -----------------------------------------------------------------------------------------------

    def finish(self, extras: Sequence[Tensor] = ()) -> Reading:
        """Disarm and bring everything gathered, and the 0-d tensors of `extras`, to the host in one copy a device."""
        start = time.perf_counter()
        self.disarm()
        self._turn += 1
        self._looks += self._look
        drafts, self._drafts = self._drafts, {}
        parts = [x.detach().reshape(-1) for x in extras]
        self._together.finish()
        complete(drafts, self.failed)
        for made in drafts.values():
            parts += made.parts
        numbers = iter(_to_host(parts))
        extra = np.array([next(numbers)[0] for _ in extras])
        rows = {name: settle(self.layers[name], made, numbers) for name, made in drafts.items()}
        unseen = self._unseen()
        self._name_silent(set(drafts), unseen)
        measured = tuple(self.layers)
        width = max((layer.heads for layer in self.layers.values()), default=0)
        values = np.full((len(METRICS), len(measured), width), np.nan, np.float32)
        pairs = np.zeros((2, len(ATTENTION), len(measured), width))
        for name, row in rows.items():
            at, heads = measured.index(name), row.values.shape[1]
            values[:, at, :heads], pairs[:, :, at, :heads] = row
        problems, self._problems = tuple(self._problems), []
        layers = (*self.layers.values(), *unseen)
        seconds = self._seconds + time.perf_counter() - start
        return Reading(measured, layers, values, pairs, extra, problems, seconds)

    @property
    def due(self) -> bool:
        """Whether some layer's weights wait to be looked at in the next sample."""
        return any(layer.due for layer in self.layers.values())

    def _name_silent(self, gave: set[str], unseen: Sequence[Layer]) -> None:
        """A layer that was measured before and gave nothing is named, once until it gives again. So is one that was
        never seen inside a compiled graph: with hooks it would have been."""
        silent = set(self.layers) - gave - self._broken
        if self._graph is not None:
            silent |= {layer.name for layer in unseen}
        if self._expects and not gave and self._broken.isdisjoint(self.layers):
            self._problems.append(("model", f"no attention call was seen in this step: {self._reason()}"))
        else:
            reason = BLIND if self._graph is not None else "it did not run, or was not seen"
            for name in sorted(silent - self._silent):
                self._problems.append((name, f"gave nothing in this sampled step: {reason}"))
        self._silent = silent

    def _unseen(self) -> list[Layer]:
        """Modules that look like attention, and in which no call was ever seen."""
        names, note = list(map(sites.module_of, self.layers)), "looks like attention, but no call was seen in it: "
        return [
            Layer(name or type(self.model).__name__, note=note + self._reason())
            for name in sites.expected_sites(self.model)
            if not any(sites.inside(name, seen) or sites.inside(seen, name) for seen in names)
        ]

    def _reason(self) -> str:
        if not self.model.training:
            return "the model is in eval mode (call model.train() for training steps)"
        if self._graph is not None:
            return BLIND
        if not self._eager.held:
            return "torch.compiler.set_stance was called while the step ran; call it before watch()"
        if sites.is_compiled(self.model):
            return "the model is compiled, and hooks do not run inside a compiled graph"
        return "no softmax over a product of queries and keys, no forward, an empty batch, vmap, or an unknown kernel"


def observe(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    *,
    scale: float | Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
) -> None:
    """Tell attnwatch of an attention that has no softmax call to see. Free when no sample is being taken.

    module: the attention module, part of a watched model. q: `[B, H, Tq, d]`, k: `[B, Hk, Tk, d]`, any float dtype, as
    they enter the dot product. scale: None is `1/sqrt(d)`. mask: broadcastable to `[B, H, Tq, Tk]`, bool (True:
    visible) or float (added). causal: key j is visible to row i if `j <= i`. Call it inside the module's forward. Never
    raises.
    """
    for probe in list(_ARMED):
        probe.observe(module, Attention(q=q, k=k, scale=scale, mask=mask, causal=causal))


def _to_host(parts: list[Tensor]) -> list[NDArray[np.float64]]:
    """The one place where a sample waits for its devices: one copy each."""
    found: list[NDArray[np.float64] | None] = [None] * len(parts)
    for device in dict.fromkeys(part.device for part in parts):
        mine = [i for i, part in enumerate(parts) if part.device == device]
        flat = torch.cat([parts[i].reshape(-1).double() for i in mine]).cpu().numpy()
        for i, piece in zip(mine, np.split(flat, np.cumsum([parts[i].numel() for i in mine])[:-1]), strict=True):
            found[i] = piece
    return [piece for piece in found if piece is not None]
