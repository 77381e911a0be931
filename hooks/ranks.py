"""Ranks that train one model watch it as one: they meet at every sampled step and merge what each of them holds.

They meet at the store of torch.distributed's default group, where each says that it came; the last one opens the door,
and a rank that leaves, or that has waited too long, shuts it: the first word counts, for all. Only behind an open door
are collectives entered, so that nobody waits in one for a rank that will not come. They go over a gloo group of their
own and hold numbers of the host, whatever the model's devices are: two all-to-alls a sample. In the first each rank
gets one slice of what all hold, merges it by sums and by largest values, and in the second gives it to all. All-reduces
would be one for each kind of merge, and pass their numbers from rank to rank, one after another.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from attnwatch.hooks.layers import METRICS
from attnwatch.hooks.packing import (
    Held,
    Layout,
    Packed,
    held,
    joined,
    lay_out,
    merged,
    of_weights,
    pack,
    sliced,
    unpack,
)
from attnwatch.hooks.probe import Reading
from attnwatch.hooks.statistics import ATTENTION

LOG = logging.getLogger("attnwatch")

START = 2.0
"""Seconds that the first sample waits for ranks that have not called `watch`: a step of training needs them all, so
that a rank that comes later hardly exists."""

SPEAK = 2.0
"""Seconds after which a rank that waits says so in the log."""

POLL = 0.25
"""Seconds between two looks at whether the others have come, after SPEAK."""

PATIENCE = 120.0
"""Seconds that a rank waits for another before ranks part, or half of what training's own collectives wait for, where
that is less: they must not give up before."""

_OPEN, _WIDE = "open", "open wide"  # without and with numbers of weights
_OF_WEIGHTS = 1 << 32  # what a rank with such adds to the count of those that came
_CHANGED = -5  # the first of the signals, at the end of what merges by the largest
_TIMES: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
_WATCHES = itertools.count(1)

OUTLIVED = "processes that ended left their entries in torch's store, gloo's too; to restart, call torchrun with "
OUTLIVED += "--rdzv-backend c10d and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


class Given(NamedTuple):
    """What one rank brings to a sampled step. scalars: of this step. look: it asks for the weights in the next sample.
    interval: steps to the next sample; rank 0's counts. news: anything that pickles, told to the others; None: none."""

    step: int
    reading: Reading
    scalars: Mapping[str, float]
    look: bool
    interval: int
    news: Any = None


class Agreed(NamedTuple):
    """What all ranks know after it, the same on each. reading: the merged sample; its problems name the ranks. scalars:
    means over the ranks that gave one. news: by rank, None where there is none."""

    reading: Reading
    scalars: dict[str, float]
    look: bool
    interval: int
    news: tuple[Any, ...] = ()


class PartedError(RuntimeError):
    """Ranks no longer merge, or never began to; the message says why, on all ranks the same."""

    def __init__(self, why: str, began: bool):
        super().__init__(why)
        self.began = began


class _Message(NamedTuple):
    """What a rank says when something changed."""

    held: Held
    notes: dict[str, str]
    problems: tuple[tuple[str, str], ...]
    news: Any


def nothing(extras: Sequence[float]) -> Reading:
    """Of a sampled step whose measuring failed."""
    return Reading(
        (),
        (),
        np.zeros((len(METRICS), 0, 0), np.float32),
        np.zeros((2, len(ATTENTION), 0, 0)),
        np.array(extras),
        (),
        0.0,
    )


def several() -> bool:
    """Whether this process is one of several that train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def announced() -> int:
    """As how many processes a launcher started the training, torchrun say; 1 if none says so."""
    number = os.environ.get("WORLD_SIZE", "")
    return int(number) if number.isdecimal() else 1


class Ranks:
    """This rank among all. name: of what they watch; ranks that say the same one meet, at the n-th time the n-th.

    Raises RuntimeError for a store that an ended process of this rank has used: the others would be looked for where
    those of its time were."""

    def __init__(self, name: str) -> None:
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store  # not every torch has it

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        store = _get_default_store()
        waits: timedelta = getattr(store, "timeout", timedelta.max)  # as `init_process_group` was told
        self._training = waits.total_seconds()
        # A connection of its own: a wait holds it, and torch's own threads use the other.
        store = store.clone() if hasattr(store, "clone") else store
        self._store = PrefixStore(f"attnwatch/{name}/{next(_TIMES[name])}", store)
        self._group: dist.ProcessGroup | None = None
        self._layout = Layout()
        self._held = Held((), (), ())
        self._said: set[tuple[str, str]] = set()
        self._next = 0  # the sample at which ranks meet next
        self._parted = False
        self._store.set(f"watches/{self.rank}", "0")
        if store.add(f"attnwatch/{self.rank}", 1) > next(_WATCHES):
            self._shut(0, OUTLIVED)  # a rank that comes here for the first time
            raise RuntimeError(OUTLIVED)

    # --- one sample ---------------------------------------------------------------------------------------------------

    def merge(self, given: Given) -> Agreed:
        """Meet the other ranks and merge. Raises PartedError, once, on every rank that is still there."""
        mine = held(given.reading, given.scalars)
        if not given.reading.layers:  # it failed: the others know where its layers belong
            mine = self._held._replace(scalars=mine.scalars)
        fresh = tuple(problem for problem in given.reading.problems if problem not in self._said)
        changed = mine != self._held or bool(fresh) or given.news is not None
        share = self._pack(given, changed)
        try:
            is_wide = self._meet(given.step, of_weights(given.reading))
            start = time.perf_counter()  # training would have waited for the others too
            told: list[_Message] = []
            total = self._reduce(share, is_wide)
            if total.tops[_CHANGED] > 0:
                notes = {layer.name: layer.note for layer in given.reading.layers}
                told = self._tell(_Message(mine, notes, fresh, given.news))
                self._held = mine
                self._said.update(fresh)
                self._layout = lay_out([message.held for message in told], [message.notes for message in told])
                total = self._reduce(self._pack(given, False), is_wide)
        except PartedError:
            self._part()
            raise
        except Exception as error:  # the network, or a rank that died in the middle
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            self._shut(self._next + 1, text)  # a rank that had all it needed waits there
            self._part()
            raise PartedError(text, self._next > 0) from error
        self._next += 1
        return self._agreed(given, total, told, time.perf_counter() - start)

    def own(self, given: Given) -> Reading:
        """This rank's share in the shape that merged samples had: heads and layers of other ranks are unmeasured."""
        known = unpack(self._layout, self._pack(given, False))
        merged = Reading(self._layout.measured, self._layout.layers, known.values, known.pairs, *given.reading[4:])
        return merged if self._layout.measured else given.reading

    def _pack(self, given: Given, changed: bool) -> Packed:
        interval = given.interval if self.rank == 0 else 0
        signals = (changed, given.look, interval, given.step, -given.step)
        return pack(self._layout, given.reading, given.scalars, signals)

    def _agreed(self, given: Given, total: Packed, told: list[_Message], seconds: float) -> Agreed:
        known = unpack(self._layout, total)
        _, look, interval, last, first = known.signals
        others = {rank: message.problems for rank, message in enumerate(told) if rank != self.rank}
        problems = [*given.reading.problems, *_of_others(others)]
        torn = "ranks hold different weights under this name, and are measured as one: give their modules other names"
        problems += [(name, torn) for name in known.torn]
        if last != -first:
            problems.append(("step", f"ranks count steps differently, {int(last + first)} apart; count alike on all"))
        reading = Reading(
            self._layout.measured,
            self._layout.layers,
            known.values,
            known.pairs,
            given.reading.extras,
            tuple(problems),
            given.reading.seconds + seconds,
        )
        return Agreed(reading, known.scalars, look > 0, int(interval), tuple(message.news for message in told))

    # --- meeting ------------------------------------------------------------------------------------------------------

    def _meet(self, step: int, is_wide: bool) -> bool:
        """Returns on all ranks, or raises PartedError on all. Whether one of them has numbers of weights, and so what
        all are to send."""
        n = self._next
        door, came = f"{n}/door", f"{n}/came"
        self._store.set(f"came/{self.rank}", str(n))
        wide, count = divmod(self._store.add(came, 1 + is_wide * _OF_WEIGHTS), _OF_WEIGHTS)
        if count == self.size:
            self._store.compare_set(door, "", _WIDE if wide else _OPEN)
            for key in (f"{n - 1}/door", f"{n - 1}/came"):  # all have passed it
                self._store.delete_key(key)
        elif n == 0 and not self._waited([f"watches/{rank}" for rank in range(self.size)], START):
            absent = _named(self._absent("watches", 0))
            self._store.compare_set(door, "", f"{absent} did not call attnwatch.watch for this run")
        elif not self._waited([door], SPEAK):
            missing = _named(self._absent("came", n))
            patience = self._patience
            LOG.warning("attnwatch: waiting for %s at the sample of step %d, %.0f s at most", missing, step, patience)
            if not self._waited([door], patience - SPEAK):
                late = f"{_named(self._absent('came', n))} did not come to the sample of step {step}"
                self._store.compare_set(door, "", f"{late} within {patience:.0f} s")
        answer = self._store.get(door).decode()
        if answer not in (_OPEN, _WIDE):
            raise PartedError(answer, n > 0)
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._patience))
        return answer == _WIDE

    def _waited(self, keys: list[str], seconds: float) -> bool:
        """Whether the keys were set in that time."""
        end = time.monotonic() + seconds
        with suppress(RuntimeError):  # of several kinds, by kind of store
            self._store.wait(keys, timedelta(seconds=min(seconds, SPEAK)))
            return True
        while not (there := self._store.check(keys)) and time.monotonic() < end:
            time.sleep(POLL)  # a wait of the store's is deaf to Ctrl-C, and writes two lines to the log when it ends
        return there

    @property
    def _patience(self) -> float:
        return min(PATIENCE, self._training / 2)

    def _absent(self, place: str, number: int) -> list[int]:
        """Ranks that did not say this number, or a later one, there."""
        keys = {rank: f"{place}/{rank}" for rank in range(self.size)}
        return [
            rank
            for rank, key in keys.items()
            if not self._store.check([key]) or int(self._store.get(key).decode()) < number
        ]

    def leave(self) -> None:
        """This rank comes to no sample any more. Idempotent; nobody waits for anybody."""
        if not self._parted:
            self._shut(self._next, f"rank {self.rank} closed its monitor")
            self._part()

    def _shut(self, n: int, why: str) -> None:
        with suppress(Exception):  # the store is gone where rank 0 has ended
            self._store.compare_set(f"{n}/door", "", why)

    def _part(self) -> None:
        self._parted = True
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with suppress(Exception):  # one that failed
                dist.destroy_process_group(group)

    # --- collectives --------------------------------------------------------------------------------------------------

    def _reduce(self, share: Packed, is_wide: bool) -> Packed:
        """Each rank merges one slice of what all hold, and gives it to all."""
        share = share if is_wide else share._replace(last=share.last[:0])
        mine, adding = sliced(share, self.size)
        whole = self._exchange(np.tile(merged(self._exchange(mine), adding), (self.size, 1)))
        return joined(whole, adding, share)

    def _exchange(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """`[ranks, n]`: a row for each rank, to one from each."""
        found = torch.empty(rows.shape, dtype=torch.float64)
        dist.all_to_all_single(found, torch.from_numpy(rows), group=self._group)
        return found.numpy()

    def _tell(self, message: _Message) -> list[_Message]:
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, message, self._group)
        return told


def _of_others(problems: Mapping[int, Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Problems by rank, one line for all ranks that say the same: a thousand of them may."""
    who: dict[tuple[str, str], list[int]] = {}
    for rank, said in problems.items():
        for problem in said:
            who.setdefault(problem, []).append(rank)
    return [(where, f"{_named(ranks)}: {text}") for (where, text), ranks in who.items()]


def _named(ranks: list[int], most: int = 8) -> str:
    names = ", ".join(map(str, ranks[:most])) + (f" and {len(ranks) - most} more" if len(ranks) > most else "")
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
