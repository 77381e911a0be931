"""Seeing the attention call: a torch function mode that stands only while a watched forward runs.

Module hooks keep a stack of *frames* (which module runs); the mode sees every torch function called meanwhile. A
call belongs to the innermost frame whose module owns a weight matrix: the *site*. Three ways of attention are seen:
`F.scaled_dot_product_attention`, `F.multi_head_attention_forward`, and a product of two activations followed by a
softmax. What is needed is taken at once: a model may overwrite its tensors right after the call.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from attnwatch.hooks.attention import Attention
from attnwatch.hooks.transforms import is_mapped, outside

CLOCK = itertools.count(1)  # order of products and norms: a norm before a projection is not one of its output
KEPT = 64  # products and norms remembered per frame: enough for any attention layer, bounded for a whole model


class Product(NamedTuple):
    """A projection as it was computed. weight: `[out, in]`, a view of the parameter. lead: shape of the tokens. rows:
    `[n, out]` of its output, every `stride`-th token from the first; None unless the weights are looked at. name: what
    to call it where it is no parameter. at: when, by CLOCK. made: the output itself, held so that a projection of it is
    known as one; like rows None unless the weights are looked at. parts: into how many its output is split; this rank
    holds one."""

    weight: Tensor
    lead: torch.Size
    stride: int
    rows: Tensor | None
    name: str = ""
    at: int = 0
    made: Tensor | None = None
    parts: int = 1

    @property
    def tokens(self) -> int:
        return self.lead.numel()


class Norm(NamedTuple):
    """A normalisation as it was called: `apply` repeats it on other rows. size: features it normalises over, 0 if
    unknown. functional: a torch function, which may stand inside a module that knows more of the gain. at: when, by
    CLOCK."""

    label: str
    apply: Callable[[Tensor], Tensor]
    size: int
    functional: bool
    at: int = sys.maxsize


class Pair(NamedTuple):
    """A product of two activations that may be attention scores: `[..., Tq, d]` and `[..., Tk, d]`."""

    q: Tensor
    k: Tensor
    shape: torch.Size


class Packed(NamedTuple):
    """Sequences packed into one without a mask. document: int64 `[B, T]`, which one a position is of; by: what told."""

    document: Tensor
    by: str


class Seen(NamedTuple):
    """One attention call. value `[B, Hk, Tk, dv]` and output `[B, H, Tq, dv]` (`[Tq, B, E]` after its projection)
    serve the proof that the call was understood. weights: `W_q [H, d, in]` and `W_k [Hk, d, in]` where they are named,
    and by what (source).
    dropped: attention dropout was on. folded: heads could not be told from sequences. channels: the "positions" are
    channels of the features."""

    attention: Attention
    value: Tensor | None = None
    output: Tensor | None = None
    projection: tuple[Tensor, Tensor | None] | None = None
    dropped: bool = False
    weights: tuple[Tensor, Tensor] | None = None
    source: str = ""
    folded: bool = False
    packed: Packed | None = None
    channels: bool = False


@dataclass
class Frame:
    """A module that is running now, and what was seen in it so far."""

    name: str
    module: nn.Module
    owner: bool
    products: list[Product] = field(default_factory=list)
    norms: list[Norm] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    visible: list[Tensor] = field(default_factory=list)
    shifts: list[Tensor] = field(default_factory=list)  # constants of a row that the code took from its scores
    map_shape: torch.Size | None = None  # of a softmax by hand whose product with the values is still to come
    seen: int = 0
    used: bool = False  # the projections belong to a call that was seen; the next one starts anew
    adapter: Any = None  # the user's own, if one matches the module
    part: tuple[int, int] = (0, 1)  # which part, of how many, of the heads this rank holds (tensor parallelism)

    def project(self, products: list[Product]) -> None:
        """Keep projections. Calls without new ones between them (a loop over heads) share the same."""
        if self.used and products:
            self.products, self.norms, self.used = [], [], False
        self.products = (self.products + products)[-KEPT:]

    def hand_up(self, parent: Frame) -> None:
        """What a module without attention of its own computed (a projection, a norm) belongs to its caller."""
        if not self.seen:
            parent.project(self.products)
            parent.norms = (parent.norms + self.norms)[-KEPT:]
            parent.pairs = (parent.pairs + self.pairs)[-4:]
            parent.part = self.part if self.part[1] > 1 else parent.part


class Tap(TorchFunctionMode):
    """Sees the torch functions of one forward in one thread.

    handlers: what to do after a torch function, by its name. sink(frame, seen, index): called for every attention
    call; index counts the calls of that module in this forward.
    failed(site, error): a handler could not cope; training goes on. choose(batch): which sequences are measured.
    look: projections and norms are recorded too (the weights are looked at in this step).
    """

    def __init__(
        self,
        handlers: Mapping[str, Callable[..., None]],
        sink: Callable[[Frame, Seen, int], None],
        failed: Callable[[str, Exception], None],
        choose: Callable[[int], list[int]],
        look: bool,
    ):
        super().__init__()
        self.frames: list[Frame] = []
        self.calls: dict[str, int] = {}
        self.handlers = handlers
        self.sink = sink
        self.failed = failed
        self.choose = choose
        self.look = look
        self.parts = 1  # of the whole call, one of which is looked at (sharded.py)
        self._mute = 0
        self._caller: FrameType | None = None  # the Python frame of the outermost forward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        # Traced code (torch.export, torch.distributed.pipelining.pipeline) calls operators: `name.overload`.
        handler = self.handlers.get(getattr(func, "__name__", "").partition(".")[0])
        if handler is not None and any(type(x).__name__ == "DTensor" for x in (*args, *kwargs.values(), out)):
            # Looking at a sharded tensor may be a collective, which the other ranks would not join.
            self.handle(self.handlers["sharded"], handler, func, args, kwargs, out)
        elif self.frames and self.site.adapter is not None:
            self.handle(self.handlers["adapter"], handler, func, args, kwargs, out)
        elif handler is not None:
            self.handle(handler, func, args, kwargs, out)
        return out

    def handle(self, handler: Callable[..., None], *call: Any) -> None:
        """Let a handler look at a call: the observer never breaks the observed."""
        if self._mute or not self.frames or is_mapped():
            return
        if not self.running():  # the forward was interrupted: what runs now is not the model
            self.frames.clear()
            return
        try:
            # No mode, of another probe either, sees it.
            with torch.no_grad(), torch._C.DisableTorchFunction(), outside(call) as plain:
                handler(self, *plain)
        except Exception as error:
            self.failed(self.site.name, error)

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """While a call is seen as a whole, what it is made of is not."""
        self._mute += 1
        try:
            yield
        finally:
            self._mute -= 1

    @property
    def site(self) -> Frame:
        """The innermost running module that owns a weight matrix (the outermost one if none does)."""
        return next((frame for frame in reversed(self.frames) if frame.owner), self.frames[0])

    def running(self) -> bool:
        """Whether the outermost forward is still under way: KeyboardInterrupt ends one without any hook."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self._caller:
            frame = frame.f_back
        return frame is not None

    def abandon(self) -> None:
        """Take the mode off after a forward that ended without its hooks."""
        self.frames.clear()
        standing = _get_current_function_mode_stack()
        if standing and standing[-1] is self:
            self.__exit__(None, None, None)

    def enter(self, frame: Frame, caller: FrameType | None) -> None:
        """A module's forward begins; caller: the Python frame that will run it."""
        self.frames.append(frame)
        if len(self.frames) == 1:
            self._caller = caller
            self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self, module: nn.Module, output: Any, arguments: Any) -> None:
        """Close a module's frame (and any left open below it by an exception)."""
        while self.frames:
            frame = self.frames.pop()
            if self.frames:
                self.handle(self.handlers["module left"], frame, arguments, output)
                frame.hand_up(self.site)
            else:
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if frame.module is module:
                break

    def report(self, seen: Seen, frame: Frame | None = None) -> None:
        """An attention call was seen; it belongs to `frame`, or to the innermost owner of weights."""
        site = frame or self.site
        index = self.calls.get(site.name, 0)
        self.calls[site.name] = index + 1
        site.seen += 1
        site.used = True
        self.sink(site, seen, index)
