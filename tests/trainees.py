"""Scripts that train and know nothing of attnwatch: `python tests/trainees.py KIND DIRECTORY [STEPS] [--arm]`.

Into the directory goes `losses`, a line a step, and at the end `left.json`: what is left of a watching. Without STEPS
they train until there is a file `stop` in it. --arm stands for the one line that a trainer may have.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

TOKENS, LENGTH, BATCH, WIDTH, HEADS = 50, 12, 3, 32, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:  # int64 [B, T + 1] -> mean loss
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


class Text(IterableDataset[Tensor]):
    """Endless rows of tokens, the same for every process that reads it first."""

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(5)
        while True:
            yield torch.randint(TOKENS, (LENGTH + 1,), generator=generator)


class Book:
    """What a trainee leaves: its losses step by step, and the end."""

    def __init__(self, folder: Path, steps: int | None):
        self.folder, self.steps, self.done = folder, steps, 0
        self.file = (folder / "losses").open("w")

    def note(self, loss: float) -> None:
        self.done += 1
        print(float(loss).hex(), file=self.file, flush=True)
        if self.steps is None:
            time.sleep(0.01)  # a step of a larger model, so that a test does not wait for thousands of them

    @property
    def is_full(self) -> bool:
        return self.done == self.steps if self.steps is not None else (self.folder / "stop").exists()

    def close(self, model: nn.Module) -> None:
        optimizer = import_module("torch.optim.optimizer")
        left = {
            "forward_hooks": sum(len(x._forward_hooks) + len(x._forward_pre_hooks) for x in model.modules()),
            "optimizer_hooks": len(optimizer._global_optimizer_post_hooks),
            "backward": torch.autograd.backward.__code__.co_filename.endswith("torch/autograd/__init__.py"),
            "threads": sum(thread.name == "attnwatch" for thread in threading.enumerate()),
            "weights": sha256(b"".join(x.detach().numpy().tobytes() for x in model.parameters())).hexdigest(),
        }
        (self.folder / "left.json").write_text(json.dumps(left))
        self.file.close()


def plain(book: Book, workers: int = 0, wrap: Any = lambda model: model) -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    called = wrap(model)
    for batch in DataLoader(Text(), BATCH, num_workers=workers):
        loss = called(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        book.note(loss.item())
        if book.is_full:
            break
    book.close(model)


def worker(book: Book) -> None:
    plain(book, workers=1)


def compiled(book: Book) -> None:
    plain(book, wrap=partial(torch.compile, backend="aot_eager"))


def trainer(book: Book) -> None:
    import_module("vision" if __name__ == "__main__" else "tests.vision")  # beside this script
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Rows(IterableDataset[dict[str, Tensor]]):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            yield from ({"input_ids": row, "labels": row} for row in Text())

    class Note(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **rest: Any) -> None:
            if "loss" in logs:
                book.note(logs["loss"])
                control.should_training_stop = book.is_full

    config = LlamaConfig(
        vocab_size=TOKENS, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, max_position_embeddings=LENGTH + 1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        output_dir=str(book.folder / "out"), max_steps=10**6, per_device_train_batch_size=BATCH, logging_steps=1,
        gradient_accumulation_steps=2, save_strategy="no", use_cpu=True, disable_tqdm=True, report_to=[],
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=Rows(), callbacks=[Note()]).train()
    book.close(model)


def greedy(book: Book) -> None:
    """Beside training a thread allocates blocks of all sizes for ever."""

    def allocate() -> None:
        while True:
            _ = [bytearray(2**size) for size in range(4, 18)], [{} for _ in range(100)]
            time.sleep(0.001)  # the cores are shared

    threading.Thread(target=allocate, daemon=True).start()
    plain(book)


def twins(book: Book) -> None:
    """A generator and a judge in one module, an optimizer each; the loss of the one is ten times the other's."""
    both = nn.ModuleDict({"generator": Decoder(), "judge": Decoder()})
    optimizers = [torch.optim.SGD(both[name].parameters(), lr=0.1) for name in both]
    for batch in DataLoader(Text(), BATCH):
        for model, optimizer, scale in zip(both.values(), optimizers, (1.0, 10.0), strict=True):
            loss = model(batch) * scale
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        book.note(loss.item())
        if book.is_full:
            break
    book.close(both)


def without_attention(book: Book) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while not book.is_full:
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        book.note(loss.item())
    book.close(model)


def begin(kind: str, folder: Path, steps: int | None) -> None:
    torch.manual_seed(0)
    globals()[kind](Book(folder, steps))


if __name__ == "__main__":
    kind, folder, *rest = [word for word in sys.argv[1:] if not word.startswith("--")]
    if "--arm" in sys.argv:
        from attnwatch.monitor.attach.armed import arm

        arm()
    begin(kind, Path(folder), int(rest[0]) if rest else None)
