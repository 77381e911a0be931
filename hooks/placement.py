"""Which saved tensors are W_q and W_k, told from names, shapes and the model's config; nothing is run, nothing guessed.

A live run proves the place of every row (weights.py). Here there is only what was saved, so what these do not settle is
named with the option that would: a layer comes back `Placed` or `Unplaced`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from attnwatch.hooks.facts import FUSED, GATED, Facts, Unsettled, facts_of
from attnwatch.hooks.layouts import Layout, Shape, layouts
from attnwatch.hooks.weight_files import Entry

LAYOUTS = {
    "blocks": "all queries, all keys, all values",
    "groups": "by key head: its queries, its key, its value",
    "features": "by head and feature: query, key, value",
}
"""How one weight can hold q, k and v: what `--layout` takes."""

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_NOT_WEIGHTS = re.compile(r"(?:^|\.)(?:optim\w*|exp_avg\w*)\.")
_QUERY = {"q": "k", "query": "key", "queries": "keys", "wq": "wk", "qs": "ks"}
_KEY = set(_QUERY.values())
_VALUE = {"v", "value", "values", "wv"}
_FUSED_NAMES = {"c_attn", "w_pack", "att_proj", "in_proj"}
_PLAIN = {"to", "proj", "w", "lin", "linear", "layer", "fc", "in", "attn", "self", "weight", "dense", "c"}
"""Words beside "q" that say no more than that this is a projection."""


class Part(NamedTuple):
    """One side's rows. name: of the tensor. transposed: it is `[in, out]`."""

    name: str
    layout: Layout
    transposed: bool

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """`[Hx, d, in]`, of the dtype that was saved."""
        weight = tensors[self.name]
        weight = weight if self.transposed else weight.t()
        return self.layout.take(weight).permute(1, 2, 0)


class Gain(NamedTuple):
    """Learned gain of a QK-norm: `offset` plus the tensor. across: of a norm over all heads together."""

    name: str
    offset: float
    across: bool

    def of(self, tensors: Mapping[str, Tensor], d: int) -> Tensor:
        """float32 `[1 or Hx, d, 1]`."""
        return (self.offset + tensors[self.name].float()).reshape(-1, d, 1)


class Placed(NamedTuple):
    """Where the weights of one layer are. scale: what q.k is multiplied by. note: why these, in words."""

    layer: str
    q: Part
    k: Part
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    scale: float
    gains: tuple[Gain, Gain] | None
    note: str

    @property
    def names(self) -> list[str]:
        """The tensors to read."""
        return list(dict.fromkeys([self.q.name, self.k.name, *(gain.name for gain in self.gains or ())]))

    @property
    def qk_norm(self) -> str:
        return "" if self.gains is None else "across heads" if self.gains[0].across else "per head"


class Unplaced(NamedTuple):
    """A layer of attention whose weights could not be told: why, and what would settle it."""

    layer: str
    note: str


class _Group(NamedTuple):
    """The tensors of one module: role -> leaf -> (rest of the name -> full name)."""

    layer: str
    roles: dict[str, dict[str, dict[str, str]]]


def place(
    tensors: Mapping[str, Entry],
    config: Mapping[str, Any],
    heads: int | None = None,
    kv_heads: int | None = None,
    layout: str | None = None,
) -> list[Placed | Unplaced]:
    """Every layer of attention among the tensors, in natural order of name.

    config: of config.json. heads, kv_heads, layout: what the user says; it wins over the config.
    """
    found: list[Placed | Unplaced] = []
    for group in _groups(tensors):
        facts = facts_of(group.layer, config, heads, kv_heads, layout)
        found += _Placer(tensors, group, facts).layers()
    return sorted(found, key=lambda each: natural(each.layer))


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _groups(tensors: Mapping[str, Entry]) -> list[_Group]:
    groups: dict[str, _Group] = {}
    plain = {name: _WRAPPERS.sub("", name) for name in tensors if not _NOT_WEIGHTS.search(name)}
    if len(set(plain.values())) < len(plain):  # a model and its average, which differ in these words alone
        plain = {name: name for name in plain}
    for name, short in plain.items():
        parts = short.split(".")
        for at, part in enumerate(parts):
            role = _role(part, ".".join(parts[:at]))
            if role:
                layer = ".".join(parts[:at]) or "model"
                group = groups.setdefault(layer, _Group(layer, {}))
                rest = ".".join(parts[at + 1 :])
                group.roles.setdefault(role, {}).setdefault(part, {})[rest] = name
                break
    return list(groups.values())


def _role(part: str, before: str) -> str | None:
    """What a component of a name stands for: "q", "k", "qkv", "kv", "q_norm", "k_norm", "latent", or nothing."""
    name = part.lower().removesuffix("_weight")
    words = set(name.split("_"))
    if name.endswith("_bias") or words & {"pos", "relative", "rel"}:
        return None
    if "norm" in name or "ln" in words:
        words |= set(re.sub(r"layer|rms|norm|ln", "_", name).split("_"))
        if not words.isdisjoint(("a", "b", "kv")):
            return None
        return "q_norm" if words & set(_QUERY) else "k_norm" if words & _KEY else None
    if words & {"qkv", "wqkv"} or name in _FUSED_NAMES or (words & set(_QUERY) and words & _KEY and words & _VALUE):
        attends = name != "in_proj" or part != name or re.search(r"att[^.]*(?:\.[^.]*)?$", before.lower())
        return "qkv" if attends else None
    both = words & {"kv", "wkv"} or (words & _KEY and words & _VALUE)
    if (both or words & set(_QUERY)) and words & {"a", "b", "compress", "down", "up"}:
        return "latent"
    return "kv" if both else "q" if words & set(_QUERY) else "k" if words & _KEY else None


class _Placer:
    """One module's layers."""

    def __init__(self, tensors: Mapping[str, Entry], group: _Group, facts: Facts) -> None:
        self._tensors, self._group, self._facts = tensors, group, facts

    def layers(self) -> list[Placed | Unplaced]:
        roles = self._group.roles
        if not roles.keys() & {"q", "qkv", "latent"}:
            return []  # keys without queries: no attention that this could speak of
        projections = [leaf for role in ("q", "k", "qkv", "latent") for leaf in roles.get(role, {}).items()]
        adapted = [leaf for leaf, rests in projections if any("lora_" in rest.lower() for rest in rests)]
        try:
            if adapted:
                raise Unsettled(f"a LoRA adapter on {', '.join(adapted)}: the model runs on both; merge it first")
            if "latent" in roles:
                return [self._latent()]
            found = {leaf: self._fused(leaf) for leaf in roles.get("qkv", ())} | self._separate()
        except Unsettled as error:
            return [Unplaced(self._group.layer, str(error))]
        # Several in one module, as of two streams of tokens: from the second on they have their weight's name too.
        names = [self._group.layer if at == 0 else f"{self._group.layer}.{leaf}" for at, leaf in enumerate(found)]
        return [placed._replace(layer=name) for name, placed in zip(names, found.values(), strict=True)]

    def _separate(self) -> dict[str, Placed]:
        """By the name of the queries' projection."""
        found = {}
        keys = {leaf.lower(): leaf for leaf in self._group.roles.get("k", {})}
        for leaf in self._group.roles.get("q", {}):
            words = [_QUERY.get(word, word) for word in leaf.lower().split("_")]
            partner = keys.get("_".join(words))
            if partner is None:
                if set(leaf.lower().split("_")) - _PLAIN - set(_QUERY):
                    continue  # an embedding of queries, say
                beside = ", ".join([*self._group.roles.get("kv", {}), *self._group.roles.get("qkv", {})]) or "none"
                raise Unsettled(
                    f"{leaf} without a key weight of its own (beside it: {beside}); "
                    "only separate q and k, or one weight of q, k and v, are read"
                )
            found[leaf] = self._pair(leaf, partner)
        return found

    def _pair(self, query: str, key: str) -> Placed:
        """Queries and keys in weights of their own: `[out, in]` as torch.nn.Linear has them."""
        names = self._weight("q", query), self._weight("k", key)
        (out_q, _), (out_k, _) = (self._tensors[name].shape for name in names)
        is_gated = self._facts.model_type in GATED
        heads, kv_heads, d = self._facts.of_separate(out_q // 2 if is_gated else out_q, out_k)
        labels = f"{heads} heads of [{d} q, {d} gate]" if is_gated else "whole", "whole"
        parts = [
            Part(name, _layout(Shape(side, heads, n, d, 0), out, query, label), False)
            for side, name, n, out, label in zip("qk", names, (heads, kv_heads), (out_q, out_k), labels, strict=True)
        ]
        return self._placed(parts, heads, kv_heads, d, f"{query}, {key}")

    def _fused(self, leaf: str) -> Placed:
        name = self._weight("qkv", leaf)
        layout = self._facts.layout or ("blocks" if leaf == "in_proj_weight" else FUSED.get(self._facts.model_type))
        if layout is None:
            known = f"model_type {self._facts.model_type!r} does not tell" if self._facts.model_type else "is not known"
            raise Unsettled(
                f"{leaf} holds q, k and v in an order that {known}; give {'' if self._facts.heads else '--heads, and '}"
                "--layout " + ", ".join(f"{key} ({text})" for key, text in LAYOUTS.items())
            )
        shape = self._tensors[name].shape
        heads, kv_heads, d, transposed = self._facts.of_fused(leaf, shape)
        out = shape[1] if transposed else shape[0]
        labels = {
            "blocks": (f"rows 0 to {heads * d}", f"rows {heads * d} to {(heads + kv_heads) * d}"),
            "groups": (f"{kv_heads} groups of [{heads // kv_heads} q, k, v]",) * 2,
            "features": ("head, feature, [q k v]",) * 2,
        }[layout]
        if layout == "features" and kv_heads != heads:
            raise Unsettled(f"{leaf}: --layout features is for as many key heads as query heads, found {kv_heads}")
        sides = zip("qk", (heads, kv_heads), labels, strict=True)
        parts = [
            Part(name, _layout(Shape(side, heads, n, d, 0), out, leaf, label), transposed) for side, n, label in sides
        ]
        why = "as torch.nn.MultiheadAttention has it" if leaf == "in_proj_weight" else self._facts.layout_from
        order = f"{leaf} in {layout}{', transposed' if transposed else ''} ({why})"
        return self._placed(parts, heads, kv_heads, d, order)

    def _latent(self) -> Placed:
        """Multi-head latent attention: of queries and keys the features without position, as a live run compares them.

        Their layout is in the sizes that the config of such models gives."""
        latent, separate = self._group.roles["latent"], self._group.roles.get("q", {})
        role, query = ("latent", "q_b_proj") if "q_b_proj" in latent else ("q", "q_proj")
        sizes, heads = self._facts.latent, self._facts.heads
        if sizes is None or heads is None or "kv_b_proj" not in latent or query not in {**latent, **separate}:
            found = ", ".join(latent)
            raise Unsettled(f"latent attention ({found}) without the sizes of its heads in config.json; watch it live")
        plain, turned, value = sizes
        left_out = f"; {turned} features that all heads share are left out"
        sides = (
            ("q", self._weight(role, query), "whole"),
            ("k", self._weight("latent", "kv_b_proj"), f"{heads} heads of [{plain} k, {value} v]{left_out}"),
        )
        parts = []
        for side, name, label in sides:
            shape = Shape(side, heads, heads, plain + turned, value)
            parts.append(Part(name, _layout(shape, self._tensors[name].shape[0], name, label), False))
        placed = self._placed(parts, heads, heads, plain + turned, f"{query}, kv_b_proj")
        return placed._replace(note=placed.note + left_out)

    def _placed(self, parts: list[Part], heads: int, kv_heads: int, d: int, names: str) -> Placed:
        gains, note = self._gains(heads, kv_heads, d)
        q, k = parts
        scale = d**-0.5 if self._facts.scale is None else self._facts.scale
        text = f"placed by name and shape, not proved: {names}; heads from {self._facts.heads_from}{note}"
        dtype = self._tensors[q.name].dtype
        return Placed(self._group.layer, q, k, heads, kv_heads, d, dtype, scale, gains, text)

    def _gains(self, heads: int, kv_heads: int, d: int) -> tuple[tuple[Gain, Gain] | None, str]:
        if not self._group.roles.keys() & {"q_norm", "k_norm"}:
            if self._facts.normed:
                raise Unsettled(
                    f"expected the gains of a QK-norm ({self._facts.normed} in config.json), found none; watch it live"
                )
            return None, ""
        sides = []
        for role, n in (("q_norm", heads), ("k_norm", kv_heads)):
            leaves = self._group.roles.get(role, {})
            names = [rests["weight"] for rests in leaves.values() if "weight" in rests]
            if len(names) != 1 or len(leaves) != 1:
                found = ", ".join(f"{leaf}.{rest}" for leaf, rests in leaves.items() for rest in rests) or "none"
                raise Unsettled(f"expected a QK-norm with one gain a side, found {found[:80]}; watch it live")
            size = _size(self._tensors[names[0]])
            if size not in (d, n * d):
                raise Unsettled(f"a gain {names[0].rsplit('.', 2)[-2]} of {size} numbers for {n} heads of {d}")
            across = size == n * d != d and len(self._tensors[names[0]].shape) == 1
            sides.append(Gain(names[0], self._facts.gain_offset, across))
        stored = "1 + its gain" if self._facts.gain_offset else "its gain as stored"
        unsure = "" if self._facts.model_type else " (without config.json; some families mean 1 + gain)"
        return (sides[0], sides[1]), f"; QK-norm with {stored}{unsure}"

    def _weight(self, role: str, leaf: str) -> str:
        """Full name of the matrix behind a leaf. Raises Unsettled for what is no plain matrix of numbers."""
        rests = self._group.roles[role][leaf]
        packed = next((r for r in rests if re.search(r"qweight|qzeros|scales?$|scale_inv|absmax|quant_|SCB", r)), None)
        name = rests.get("weight", rests.get(""))
        if name and self._tensors[name].dtype == "meta":
            raise Unsettled(f"{leaf} has no numbers: saved from the meta device; save the model after it was filled")
        if packed or (name and not self._tensors[name].is_float):
            kind = f"beside {packed}" if packed else f"of {self._tensors[name or ''].dtype}"
            raise Unsettled(f"{leaf} is quantised ({kind}), which is not read; save it dequantised")
        if name is None:
            raise Unsettled(f"{leaf} has no weight, only {', '.join(rests)}")
        shape = self._tensors[name].shape
        if len(shape) != 2 or 0 in shape:
            found = f"{list(shape)}" + (", empty: sharded when it was saved" if 0 in shape else "")
            raise Unsettled(f"expected {leaf} as a matrix, found shape {found}; save it whole, as [out, in]")
        return name


def _layout(shape: Shape, out: int, name: str, label: str) -> Layout:
    """The layout of that label. Raises Unsettled where the numbers do not allow it."""
    found = next((each for each in layouts(shape, out, name) if each.label == label), None)
    if found is None:
        raise Unsettled(f"{out} rows of {name} cannot hold {label} of {shape.d} features; check --heads, --kv-heads")
    return found


def _size(entry: Entry) -> int:
    size = 1
    for n in entry.shape:
        size *= n
    return size
