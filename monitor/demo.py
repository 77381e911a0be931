"""The same small model trained twice on real text, without and with query-key norm, watched both times.

An attention-only decoder reads the Python standard library's own source as bytes, at a learning rate that climbs far
too high. Without QK-norm its attention collapses and the loss follows; with QK-norm the same recipe holds.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnwatch.monitor.journal import Output
from attnwatch.monitor.watching import watch

LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 12, 64, 4, 32, 16
STEPS, PEAK_RATE, RAMP = 800, 0.1, 1500  # the rate climbs linearly and is still climbing when the run ends
EVERY = 10
VARIANTS = ("plain", "qk_norm")


class Attention(nn.Module):
    """Causal self-attention; `qk_norm` puts an RMSNorm with a learned gain on every head's queries and keys."""

    def __init__(self, qk_norm: bool):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (_matrix(WIDTH, WIDTH) for _ in range(4))
        head = WIDTH // HEADS
        self.q_norm = nn.RMSNorm(head, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head, eps=1e-6) if qk_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # [B, T, width]
        q, k, v = (
            proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(-2))
        return out


class Decoder(nn.Module):
    """Bytes in, next byte out: embedding, pre-norm attention layers, no feed-forward layers."""

    def __init__(self, qk_norm: bool):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.3)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(LAYERS))
        self.layers = nn.ModuleList(Attention(qk_norm) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = _matrix(WIDTH, 256, 0.5)

    def forward(self, text: Tensor) -> Tensor:  # [B, T + 1] -> mean loss in nats a byte
        x = self.embedding(text[:, :-1]) + self.position
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())


def _matrix(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(linear.weight, std=gain * inputs**-0.5)
    return linear


def corpus() -> Tensor:
    """Every module at the top of the standard library of this Python, as one uint8 tensor."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def train(variant: str, run: Path, outputs: Sequence[Output] = (), seed: int = 1, steps: int = STEPS) -> None:
    """One watched run into the directory `run`; `outputs` are told of every step. Raises UsageError as `watch` does."""
    torch.manual_seed(seed)
    model = Decoder(qk_norm=variant == "qk_norm")
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.95))
    text, order = corpus(), torch.Generator().manual_seed(1000 + seed)
    with watch(model, run=run, every=EVERY, outputs=outputs, report=False) as monitor:
        for step in range(steps):
            rate = optimizer.param_groups[0]["lr"] = PEAK_RATE * (step + 1) / RAMP
            starts = torch.randint(0, len(text) - CONTEXT - 1, (BATCH,), generator=order)
            batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
            optimizer.step()
            monitor.step(loss=loss, grad_norm=norm, lr=rate)


def one_thread() -> None:
    """The model is so small that a second thread costs more than it brings."""
    torch.set_num_threads(1)
