"""What the models read: the source of Python's standard library as bytes, and scikit-learn's digits.

A source takes batch, length, step and a generator, and gives a `Batch`.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator, Tensor

IGNORED = -100
START = 1
"""A byte that no source file holds: begins every sequence of the source "started"."""

MASK = 2
"""Another one: stands where the source "masked" asks."""

BURST = range(300, 400)
"""Steps at which the source "burst" gives noise instead of text."""


class Batch(NamedTuple):
    """inputs: int64 `[B, T]` of bytes or float32 `[B, T, pixels]` of patches; targets: int64 `[B, T]` or `[B]` of
    classes, IGNORED where none is asked; padding: bool `[B, T]`, True where a position is empty, None without."""

    inputs: Tensor
    targets: Tensor
    padding: Tensor | None = None


@cache
def corpus(pattern: str) -> Tensor:
    """Files of the standard library of this Python as one uint8 tensor."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob(pattern))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


@cache
def digits(patch: int) -> tuple[Tensor, Tensor]:
    """`[1797, T, patch * patch]` in -1 to 1, and classes `[1797]`."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32) / 8 - 1
    patches = images.unfold(1, patch, patch).unfold(2, patch, patch)
    return patches.reshape(len(images), -1, patch * patch), torch.tensor(found.target)


def _windows(pattern: str, batch: int, length: int, generator: Generator) -> Tensor:
    text = corpus(pattern)
    starts = torch.randint(0, len(text) - length, (batch,), generator=generator)
    return torch.stack([text[start : start + length] for start in starts]).long()


def text(batch: int, length: int, step: int, generator: Generator) -> Batch:
    """The modules at the top of the library."""
    x = _windows("*.py", batch, length + 1, generator)
    return Batch(x[:, :-1], x[:, 1:])


def prose(batch: int, length: int, step: int, generator: Generator) -> Batch:
    """The language reference that `help()` shows: mostly English."""
    x = _windows("pydoc_data/topics.py", batch, length + 1, generator)
    return Batch(x[:, :-1], x[:, 1:])


def started(batch: int, length: int, step: int, generator: Generator) -> Batch:
    """Text, with the byte START before every sequence."""
    x = _windows("*.py", batch, length, generator)
    return Batch(torch.cat([torch.full((batch, 1), START), x[:, :-1]], 1), x)


def padded(batch: int, length: int, step: int, generator: Generator) -> Batch:
    """Text of which each sequence keeps an eighth to all; on average half of the batch is empty."""
    inputs, targets, _ = text(batch, length, step, generator)
    kept = torch.randint(length // 8, length + 1, (batch, 1), generator=generator)
    padding = torch.arange(length) >= kept
    return Batch(inputs.masked_fill(padding, 0), targets.masked_fill(padding, IGNORED), padding)


def masked(batch: int, length: int, step: int, generator: Generator) -> Batch:
    """Text of which each sequence keeps a half to all and a seventh is MASK, to be told from both sides."""
    x = _windows("*.py", batch, length, generator)
    padding = torch.arange(length) >= torch.randint(length // 2, length + 1, (batch, 1), generator=generator)
    asked = (torch.rand(x.shape, generator=generator) < 1 / 7) & ~padding
    return Batch(x.masked_fill(asked, MASK).masked_fill(padding, 0), x.masked_fill(~asked, IGNORED), padding)


def continued(batch: int, length: int, step: int, generator: Generator) -> Batch:
    """Text of which the second half is asked for."""
    inputs, targets, _ = text(batch, length, step, generator)
    return Batch(inputs, targets.masked_fill(torch.arange(length) < length // 2, IGNORED))


def repeated(batch: int, length: int, step: int, generator: Generator) -> Batch:
    """Text in which half of the sequences are one byte over and over."""
    inputs, targets, _ = text(batch, length, step, generator)
    half = batch // 2
    byte = inputs[:half, :1].expand(-1, length)
    return Batch(torch.cat([byte, inputs[half:]]), torch.cat([byte, targets[half:]]))


def periodic(batch: int, length: int, step: int, generator: Generator) -> Batch:
    """Random pieces of 3 to 8 bytes, each repeated to the end: to be continued by looking back one period."""
    piece = torch.randint(32, 127, (batch, 8), generator=generator)
    period = torch.randint(3, 9, (batch, 1), generator=generator)
    x = piece.gather(1, torch.arange(length + 1) % period)
    return Batch(x[:, :-1], x[:, 1:])


def burst(batch: int, length: int, step: int, generator: Generator) -> Batch:
    """Text; in BURST random targets, as a broken shard of the data set would give."""
    inputs, targets, _ = text(batch, length, step, generator)
    noise = torch.randint(0, 256, targets.shape, generator=generator)
    return Batch(inputs, noise if step in BURST else targets)


def copy_previous(batch: int, length: int, step: int, generator: Generator) -> Batch:
    """Text whose target is the byte before."""
    inputs = _windows("*.py", batch, length, generator)
    return Batch(inputs, torch.cat([inputs[:, :1], inputs[:, :-1]], 1))


def copy_self(batch: int, length: int, step: int, generator: Generator) -> Batch:
    inputs = _windows("*.py", batch, length, generator)
    return Batch(inputs, inputs)


def _digits(batch: int, patch: int, generator: Generator) -> Batch:
    images, classes = digits(patch)
    chosen = torch.randint(0, len(images), (batch,), generator=generator)
    return Batch(images[chosen], classes[chosen])


def digits_4(batch: int, length: int, step: int, generator: Generator) -> Batch:
    """Handwritten digits as 4 patches of 4 x 4 pixels."""
    return _digits(batch, 4, generator)


def digits_2(batch: int, length: int, step: int, generator: Generator) -> Batch:
    """The same as 16 patches of 2 x 2 pixels."""
    return _digits(batch, 2, generator)


def digits_1(batch: int, length: int, step: int, generator: Generator) -> Batch:
    """The same as 64 single pixels."""
    return _digits(batch, 1, generator)


Source = Callable[[int, int, int, Generator], Batch]
SOURCES: dict[str, Source] = {
    source.__name__: source
    for source in (
        text,
        prose,
        started,
        padded,
        masked,
        continued,
        repeated,
        periodic,
        burst,
        copy_previous,
        copy_self,
        digits_4,
        digits_2,
        digits_1,
    )
}
