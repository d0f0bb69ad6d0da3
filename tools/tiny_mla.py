"""A small language model with the real MLA geometry, for tools/train_tiny_mla.py (needs torch).

Every layer has what a DeepSeek layer has: 16 heads whose query is 128 content and 64 RoPE values,
a latent of 512 values (normalised) and one shared RoPE key of 64 a token, and 128 value channels a
head that come out of the latent. Dense SwiGLU instead of experts, bytes instead of a tokenizer.

Training uses the heads' own keys and values; decoding the absorbed form, in which queries are 576
wide and attention runs over the cached latents: what FlashMLA and this project compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

KV_LORA_RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128

# (layer, q bf16 [b, 1, h, 576], kv_c bf16 [b, 512], k_pe bf16 [b, 64]) -> out [b, 1, h, 512]
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TinyConfig:
    """Sizes; the geometry of a head is fixed."""

    layers: int = 6
    hidden: int = 768
    heads: int = 16
    mlp: int = 2048
    vocab: int = 256  # bytes
    theta: float = 10000.0

    @property
    def softmax_scale(self) -> float:
        return float((NOPE + ROPE) ** -0.5)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer on x in the type of its weights: float32 under autocast, bf16 when decoding."""
    return F.linear(x.to(layer.weight.dtype), layer.weight)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), 1e-6)


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """RoPE on pairs of neighbours: x [..., t, 64] or [b, h, t, 64], angle [t, 32]; float32."""
    even, odd = x.float()[..., 0::2], x.float()[..., 1::2]
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class Attend(nn.Module):
    """Multi-head Latent Attention."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.heads = config.heads
        hidden, heads = config.hidden, config.heads
        self.query = nn.Linear(hidden, heads * (NOPE + ROPE), bias=False)
        self.down = nn.Linear(hidden, KV_LORA_RANK + ROPE, bias=False)
        self.norm = nn.Parameter(torch.ones(KV_LORA_RANK))
        self.up = nn.Linear(KV_LORA_RANK, heads * (NOPE + VALUE), bias=False)
        self.out = nn.Linear(heads * VALUE, hidden, bias=False)

    def cached(self, x: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
        """What a token leaves in the cache: latents [..., t, 512], rotated keys [..., t, 64]."""
        latent, rope = _linear(self.down, x).split([KV_LORA_RANK, ROPE], dim=-1)
        return _rms_norm(latent, self.norm), rotate(rope, angle)

    def queries(self, x: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
        """Content [b, h, t, 128] and rotated RoPE [b, h, t, 64] parts of x [b, t, hidden]."""
        q = _linear(self.query, x).unflatten(-1, (self.heads, NOPE + ROPE)).transpose(1, 2)
        nope, rope = q.split([NOPE, ROPE], dim=-1)
        return nope, rotate(rope, angle)

    def absorbed(self, x: Tensor, angle: Tensor) -> Tensor:
        """Queries over the latents: bf16 [b, t, h, 576]."""
        nope, rope = self.queries(x, angle)
        keys, _ = self._halves()
        latent = torch.matmul(nope.to(keys.dtype), keys)  # [b, h, t, 512]
        return torch.cat([latent.bfloat16(), rope.bfloat16()], dim=-1).transpose(1, 2)

    def _halves(self) -> tuple[Tensor, Tensor]:
        """Of `up`: keys [h, 128, 512] and values [h, 128, 512]."""
        weight = self.up.weight.unflatten(0, (self.heads, NOPE + VALUE))
        return weight[:, :NOPE], weight[:, NOPE:]

    def project(self, mixed: Tensor) -> Tensor:
        """Attention over latents, [b, t, h, 512], to the residual stream."""
        _, values = self._halves()
        heads = torch.einsum("bthc,hvc->bthv", mixed.to(values.dtype), values)
        return _linear(self.out, heads.flatten(-2))

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:
        """Causal attention over x [b, t, hidden] with the heads' own keys and values."""
        q_nope, q_rope = self.queries(x, angle)
        latent, k_rope = self.cached(x, angle)
        kv = _linear(self.up, latent).unflatten(-1, (self.heads, NOPE + VALUE)).transpose(1, 2)
        k_nope, value = kv.split([NOPE, VALUE], dim=-1)
        k_rope = k_rope[:, None].expand(-1, self.heads, -1, -1)
        q = torch.cat([q_nope, q_rope.to(q_nope.dtype)], dim=-1)
        k = torch.cat([k_nope, k_rope.to(k_nope.dtype)], dim=-1)
        padded = F.pad(value, (0, NOPE + ROPE - VALUE))  # one head size: the fused kernels ask it
        mixed = F.scaled_dot_product_attention(q, k, padded, is_causal=True)
        return _linear(self.out, mixed[..., :VALUE].transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.attention_norm = nn.Parameter(torch.ones(config.hidden))
        self.attention = Attend(config)
        self.mlp_norm = nn.Parameter(torch.ones(config.hidden))
        self.gate = nn.Linear(config.hidden, 2 * config.mlp, bias=False)
        self.down = nn.Linear(config.mlp, config.hidden, bias=False)

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = _linear(self.gate, _rms_norm(x, self.mlp_norm)).chunk(2, dim=-1)
        return _linear(self.down, F.silu(gate) * up)


class TinyMLA(nn.Module):
    """The model: residual stream in float32, weights in float32 or, `for_decoding`, in bf16."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.ones(config.hidden))
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self._start()

    def _start(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        for layer in self.layers:
            for last in (layer.attention.out, layer.down):  # type: ignore[union-attr]
                last.weight.data /= math.sqrt(2 * self.config.layers)  # type: ignore[operator]

    def for_decoding(self) -> TinyMLA:
        """The same model with its matrices in bf16, in place."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.bfloat16()
        return self.eval()

    def angles(self, positions: Tensor) -> Tensor:
        """RoPE angles [t, 32] of positions [t]."""
        pairs = torch.arange(0, ROPE, 2, device=positions.device, dtype=torch.float64) / ROPE
        return (positions.double()[:, None] * self.config.theta**-pairs).float()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [b, t, vocab] of tokens [b, t]."""
        return self._run(tokens, None)

    def captured(self, tokens: Tensor, last: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each layer for tokens [b, t]: q bf16 [b, last, h, 576] of the last tokens, kv_c bf16
        [b, t, 512] and k_pe bf16 [b, t, 64] of all."""
        found: list[tuple[Tensor, Tensor, Tensor]] = []

        def keep(layer: Layer, x: Tensor, angle: Tensor) -> None:
            kv_c, k_pe = layer.attention.cached(x, angle)
            q = layer.attention.absorbed(x[:, x.shape[1] - last :], angle[x.shape[1] - last :])
            found.append((q, kv_c.bfloat16(), k_pe.bfloat16()))

        self._run(tokens, keep)
        return found

    def _run(self, tokens: Tensor, keep: Callable[[Any, Tensor, Tensor], None] | None) -> Tensor:
        x = self.embed(tokens).float()
        angle = self.angles(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            normed = _rms_norm(x, layer.attention_norm)  # type: ignore[arg-type]
            if keep is not None:
                keep(layer, normed, angle)
            x = x + layer.attention(normed, angle)  # type: ignore[operator]
            x = x + layer.mlp(x)  # type: ignore[operator]
        return _linear(self.head, _rms_norm(x, self.norm))

    def decode(self, tokens: Tensor, position: Tensor, attention: Attention) -> Tensor:
        """Logits float32 [b, vocab] after one more token of each sequence.

        tokens [b], position [1]: where they stand. `attention` appends to the cache and attends.
        """
        x = self.embed(tokens)[:, None].float()
        angle = self.angles(position)
        for index, layer in enumerate(self.layers):
            normed = _rms_norm(x, layer.attention_norm)  # type: ignore[arg-type]
            attend: Attend = layer.attention  # type: ignore[assignment]
            kv_c, k_pe = attend.cached(normed, angle)
            q = attend.absorbed(normed, angle)
            mixed = attention(index, q, kv_c[:, 0].bfloat16(), k_pe[:, 0].bfloat16())
            x = x + attend.project(mixed)
            x = x + layer.mlp(x)  # type: ignore[operator]
        return _linear(self.head, _rms_norm(x, self.norm))[:, 0].float()
