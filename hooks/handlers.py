"""Which torch functions are looked at, by name: a name covers `F.softmax`, `torch.softmax` and `Tensor.softmax`.

A handler gets the tap, the function, its arguments and its result, under `no_grad`, and must not wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable

from attnwatch.hooks import adapters, by_hand, einsum, flash, flex, fused, projections, sharded

HANDLERS: dict[str, Callable[..., None]] = {
    "module left": projections.module_left,  # no function: a module inside the site is done
    "adapter": adapters.adapted,  # no function: a call in a module that has an adapter
    "sharded": sharded.sharded,  # no function: a call on DTensors
    "scaled_dot_product_attention": fused.sdpa,
    "multi_head_attention_forward": fused.mha,
    "flex_attention": flex.flex_attention,
    "_flash_attn_forward": flash.forward,
    "_flash_attn_varlen_forward": flash.varlen_forward,
    "softmax": by_hand.softmax,
    "matmul": by_hand.matmul,
    "__matmul__": by_hand.matmul,
    "mm": by_hand.matmul,
    "bmm": by_hand.matmul,
    "baddbmm": by_hand.matmul,
    "einsum": einsum.einsum,
    "linear": projections.linear,
    "addmm": projections.addmm,
    "layer_norm": projections.layer_norm,
    "rms_norm": projections.layer_norm,
    "normalize": projections.normalize,
    "masked_fill": by_hand.masked_fill,
    "masked_fill_": by_hand.masked_fill,
    "where": by_hand.where,
    "add": by_hand.add,
    "add_": by_hand.add,
    "__add__": by_hand.add,
    "__iadd__": by_hand.add,
    "__radd__": by_hand.add,
    "sub": by_hand.sub,
    "sub_": by_hand.sub,
    "__sub__": by_hand.sub,
    "__isub__": by_hand.sub,
}
