"""Decode a model of tools/tiny_mla.py through each KV cache and compare with BF16 (needs torch).

What runs, on the same weights, prompts and code but for the attention:

    bf16                       queries, cache and P in bf16: what FlashMLA computes
    snapmla, snapmla_pow2      this project's calls: append_kv, quantize_q, plan_decode, mla_decode
    A, A_split, B, C, D, ...   reference/quant_configs.py in torch: the cache of that configuration,
                               queries and P in e4m3 as SnapMLA has them (a test compares the two)

Prompts are prefilled by the model itself in bf16; the caches then hold what it left there.
Measured: perplexity and the distance of the distributions over held-out text, one decode step a
byte; and 2,000 greedy tokens, both running freely and asked again along the text that BF16 wrote.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from tiny_mla import KV_LORA_RANK, ROPE, TinyMLA
from torch import Tensor
from torch.nn import functional as F

from snapmla_rt.api import append_kv, mla_decode, plan_decode, quantize_q
from snapmla_rt.config import BLOCK_SIZE, FP8_MAX, ROPE_GUARD, SCALE_MIN

EMULATED = ("A", "A_split", "B", "C", "D", "D_1x128")
ARMS = ("bf16", "snapmla", "snapmla_pow2", *EMULATED)

Caches = list[tuple[Tensor, Tensor]]  # per layer: kv_c bf16 [b, t, 512], k_pe bf16 [b, t, 64]


# --- Quantisers in torch -------------------------------------------------------------------------


def e4m3(x: Tensor) -> Tensor:
    """float32 rounded to e4m3, saturating, as float32."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()


def _over_448(amax: Tensor) -> Tensor:
    # a tensor as divisor: torch turns division by a Python number into a product on a GPU
    return (amax / torch.full_like(amax, FP8_MAX)).clamp_min(SCALE_MIN)


def snapmla_rows(x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[Q1] to [Q4] on float32 rows: dequantised latent and RoPE, and the scale [..., 1]."""
    scale = _over_448(x.abs().amax(-1, keepdim=True))
    scale = torch.maximum(scale, rope.abs().amax(-1, keepdim=True) * ROPE_GUARD)
    return e4m3(x / scale) * scale, (rope / scale).bfloat16().float() * scale, scale


def quantize_tokens(config: str, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The cache of `config` over tokens x [b, n, 512] and rope [b, n, 64], float32, whose first
    token starts a block of 64: dequantised latent, RoPE, and value scales [b, n, groups]."""
    if config == "bf16":
        return x, rope, torch.ones_like(x[..., :1])
    if config == "snapmla":
        return snapmla_rows(x, rope)
    if config == "A":
        both = torch.cat([x, rope], dim=-1)
        scale = _over_448(both.abs().amax(-1, keepdim=True))
        both = e4m3(both / scale) * scale
        return both[..., :KV_LORA_RANK], both[..., KV_LORA_RANK:], scale
    if config == "A_split":
        scale = _over_448(x.abs().amax(-1, keepdim=True))
        rope_scale = _over_448(rope.abs().amax(-1, keepdim=True))
        return e4m3(x / scale) * scale, e4m3(rope / rope_scale) * rope_scale, scale
    scale = _scales(config, x)
    wide = scale.repeat_interleave(KV_LORA_RANK // scale.shape[-1], dim=-1)
    return e4m3(x / wide) * wide, rope, scale


def _scales(config: str, x: Tensor) -> Tensor:
    """Scales [b, n, groups] of the configurations that keep RoPE."""
    batch, count, _ = x.shape
    if config == "B":
        return torch.ones_like(x[..., :1])
    if config == "C":
        return _over_448(x.abs().amax((1, 2), keepdim=True)).expand(-1, count, 1)
    if config == "D_1x128":
        return _over_448(x.abs().unflatten(-1, (4, 128)).amax(-1))
    padded = F.pad(x.abs(), (0, 0, 0, -count % BLOCK_SIZE))
    tiles = padded.reshape(batch, -1, BLOCK_SIZE, KV_LORA_RANK // 64, 64)
    return _over_448(tiles.amax((2, 4))).repeat_interleave(BLOCK_SIZE, dim=1)[:, :count]


# Where a new token changes the codes of older ones: the first of them, for a token at position t.
_CHANGED_FROM: dict[str, Callable[[int], int]] = {
    "C": lambda t: 0,
    "D": lambda t: t - t % BLOCK_SIZE,
}
_CONSTANT_IN_BLOCKS = ("B", "C", "D")  # their P needs no fused scale


def attend_emulated(
    config: str, q: Tensor, keys: Tensor, values: Tensor, scale: Tensor, softmax_scale: float
) -> Tensor:
    """Attention of q [b, h, 576] over dequantised keys [b, n, 576] and values [b, n, 512] in
    float32, P rounded as `config` has it. Returns [b, h, 512] float32."""
    scores = torch.matmul(q, keys.transpose(1, 2)) * softmax_scale
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    if config == "bf16":
        return torch.matmul(weights.bfloat16().float(), values) / total
    if config in _CONSTANT_IN_BLOCKS:
        return torch.matmul(_rounded_p(weights), values) / total
    width = KV_LORA_RANK // scale.shape[-1]
    parts = []
    for group in range(scale.shape[-1]):
        own = scale[..., group]
        part = values[..., group * width : (group + 1) * width] / own[..., None]
        parts.append(torch.matmul(_rounded_p(weights * own[:, None]), part))
    return torch.cat(parts, dim=-1) / total


def _rounded_p(fused: Tensor) -> Tensor:
    """[b, h, n] rounded to e4m3 per row and block of 64 tokens."""
    count = fused.shape[-1]
    tiles = F.pad(fused, (0, -count % BLOCK_SIZE)).unflatten(-1, (-1, BLOCK_SIZE))
    top = tiles.amax(-1, keepdim=True)
    scale = top / torch.full_like(top, FP8_MAX)
    # A block far below the row's maximum: its weights are below what float32 divides, or all zero.
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (e4m3(tiles / scale) * scale).flatten(-2)[..., :count]


# --- Arms ----------------------------------------------------------------------------------------


class EmulatedArm:
    """A cache of dequantised values, quantised again wherever a new token changes a scale."""

    def __init__(self, config: str, caches: Caches, capacity: int, softmax_scale: float) -> None:
        self.config, self.softmax_scale = config, softmax_scale
        self.length = caches[0][0].shape[1]
        self.raw, self.seen = [], []
        for kv_c, k_pe in caches:
            both = torch.cat([kv_c, k_pe], dim=-1).float()
            raw = F.pad(both, (0, 0, 0, capacity - self.length))
            latent, rope, scale = quantize_tokens(config, *self._parts(raw[:, : self.length]))
            seen = F.pad(torch.cat([latent, rope], dim=-1), (0, 0, 0, capacity - self.length))
            scale = F.pad(scale, (0, 0, 0, capacity - self.length), value=1.0)
            self.raw.append(raw)
            self.seen.append((seen, scale))

    @staticmethod
    def _parts(both: Tensor) -> tuple[Tensor, Tensor]:
        return both[..., :KV_LORA_RANK], both[..., KV_LORA_RANK:]

    def begin_step(self) -> None:
        self.length += 1

    def __call__(self, layer: int, q: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        end, raw = self.length, self.raw[layer]
        seen, scales = self.seen[layer]
        raw[:, end - 1] = torch.cat([kv_c, k_pe], dim=-1).float()
        first = _CHANGED_FROM.get(self.config, lambda t: t)(end - 1)
        latent, rope, scale = quantize_tokens(self.config, *self._parts(raw[:, first:end]))
        seen[:, first:end] = torch.cat([latent, rope], dim=-1)
        scales[:, first:end] = scale
        query = q[:, 0].float()
        if self.config != "bf16":
            query = torch.cat(snapmla_rows(*self._parts(query))[:2], dim=-1)
        keys = seen[:, :end]
        values, scale = keys[..., :KV_LORA_RANK], scales[:, :end]
        out = attend_emulated(self.config, query, keys, values, scale, self.softmax_scale)
        return out.bfloat16()[:, None]


class SnapMLAArm:
    """The project's own calls on a paged FP8 cache with shuffled blocks."""

    def __init__(
        self, caches: Caches, capacity: int, heads: int, softmax_scale: float, rounding: str
    ) -> None:
        kv_c, _ = caches[0]
        self.batch, self.length, _ = kv_c.shape
        self.heads, self.softmax_scale, self.rounding = heads, softmax_scale, rounding
        self.device, blocks = kv_c.device, -(-capacity // BLOCK_SIZE)
        order = torch.randperm(self.batch * blocks, generator=torch.Generator().manual_seed(0))
        self.table = order.to(torch.int32).reshape(self.batch, blocks).to(self.device)
        self.caches = [self._empty(self.batch * blocks) for _ in caches]
        slots = torch.cat([self._slots(t) for t in range(self.length)])
        for (latent, rope), cache in zip(caches, self.caches, strict=True):
            by_position = latent.transpose(0, 1).reshape(-1, KV_LORA_RANK)
            keys = rope.transpose(0, 1).reshape(-1, ROPE)
            append_kv(by_position, keys, *cache, slots, scale_rounding=rounding)
        self.plan: Any = None

    def _empty(self, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
        shape = (blocks, BLOCK_SIZE)
        return (
            torch.zeros(*shape, KV_LORA_RANK, dtype=torch.uint8, device=self.device).view(
                torch.float8_e4m3fn
            ),
            torch.zeros(shape, device=self.device),
            torch.zeros(*shape, ROPE, dtype=torch.bfloat16, device=self.device),
        )

    def _slots(self, position: int) -> Tensor:
        block = self.table[:, position // BLOCK_SIZE].long()
        return block * BLOCK_SIZE + position % BLOCK_SIZE

    def begin_step(self) -> None:
        self.slots = self._slots(self.length)
        self.length += 1
        seqlens = torch.full((self.batch,), self.length, dtype=torch.int32, device=self.device)
        self.seqlens = seqlens
        self.plan = plan_decode(seqlens, self.heads, 1, out=self.plan)

    def __call__(self, layer: int, q: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        cache = self.caches[layer]
        append_kv(kv_c, k_pe, *cache, self.slots, scale_rounding=self.rounding)
        query = quantize_q(q.contiguous(), scale_rounding=self.rounding)
        out: Tensor = mla_decode(
            *query,
            *cache,
            self.table,
            self.seqlens,
            self.plan,
            self.softmax_scale,
            return_lse=False,
        )
        return out


def make_arm(name: str, model: TinyMLA, caches: Caches, capacity: int) -> Any:
    """The attention of arm `name` over the prefilled `caches`, with room for `capacity` tokens."""
    config = model.config
    if name.startswith("snapmla"):
        rounding = "pow2" if name.endswith("pow2") else "exact"
        return SnapMLAArm(caches, capacity, config.heads, config.softmax_scale, rounding)
    return EmulatedArm(name, caches, capacity, config.softmax_scale)


# --- Runs ----------------------------------------------------------------------------------------


class Decoder:
    """Steps of one batch through one arm."""

    def __init__(self, name: str, model: TinyMLA, caches: Caches, capacity: int) -> None:
        self.model, self.arm = model, make_arm(name, model, caches, capacity)

    def step(self, tokens: Tensor) -> Tensor:
        """Feed tokens [b]; float32 logits [b, 256] of the next ones."""
        position = torch.tensor([self.arm.length], device=tokens.device)
        self.arm.begin_step()
        return self.model.decode(tokens, position, self.arm)


def prefill(model: TinyMLA, tokens: Tensor) -> Caches:
    """What tokens [b, t] leave in the cache of each layer."""
    return [(kv_c, k_pe) for _, kv_c, k_pe in model.captured(tokens, 1)]


def teacher_forced(name: str, model: TinyMLA, caches: Caches, tokens: Tensor) -> Tensor:
    """Log-probabilities [b, n, 256] float32 after each of tokens [b, n], one decode step each."""
    decoder = Decoder(name, model, caches, caches[0][0].shape[1] + tokens.shape[1])
    return torch.stack([decoder.step(t).log_softmax(-1) for t in tokens.unbind(1)], dim=1)


def greedy(name: str, model: TinyMLA, caches: Caches, first: Tensor, count: int) -> Tensor:
    """`count` greedy tokens [b, count] after feeding first [b]."""
    decoder = Decoder(name, model, caches, caches[0][0].shape[1] + count)
    found, token = [], first
    for _ in range(count):
        token = decoder.step(token).argmax(-1)
        found.append(token)
    return torch.stack(found, dim=1)


# --- Measures ------------------------------------------------------------------------------------


def text_measures(logp: Tensor, truth: Tensor, baseline: Tensor) -> dict[str, float]:
    """Log-probabilities [b, n, 256] against the text truth [b, n] and the BF16 arm's."""
    nll = -logp.gather(-1, truth[..., None])[..., 0].double()
    own = -baseline.gather(-1, truth[..., None])[..., 0].double()
    by_window = (nll - own).mean(1)
    kl = (baseline.double().exp() * (baseline.double() - logp.double())).sum(-1)
    same = logp.argmax(-1) == baseline.argmax(-1)
    error = by_window.std() / math.sqrt(len(by_window)) if len(by_window) > 1 else math.nan
    return {
        "nll_nats": float(nll.mean()),
        "perplexity": float(nll.mean().exp()),
        "nll_above_bf16": float(by_window.mean()),
        "nll_above_bf16_standard_error": float(error),
        "kl_from_bf16": float(kl.mean()),
        "top1_agreement": float(same.double().mean()),
    }


def greedy_measures(free: Tensor, along: Tensor, baseline: Tensor) -> dict[str, Any]:
    """Free-running tokens and those asked along BF16's text, both [b, n], against BF16's."""
    same = free == baseline
    agreed = same.long().cumprod(1).sum(1)
    return {
        "tokens": int(baseline.numel()),
        "agreement_along_bf16_text": float((along == baseline).double().mean()),
        "free_running_agreement": float(same.double().mean()),
        "tokens_before_first_difference": [int(n) for n in agreed],
        "identical_sequences": int((agreed == baseline.shape[1]).sum()),
    }


@torch.no_grad()
def evaluate(
    model: TinyMLA,
    windows: Tensor,
    prompt: int,
    generate: tuple[int, int],
    log: Callable[[str], None] = print,
    keep: Callable[[dict[str, Any]], None] | None = None,
    arms: tuple[str, ...] = ARMS,
) -> dict[str, Any]:
    """All arms over windows int64 [b, prompt + n + 1] of held-out bytes.

    The first `prompt` bytes are prefilled and the rest is decoded a byte at a time; the first
    generate[0] windows are prompts for generate[1] greedy tokens each. Returns plain values; `keep`
    gets what there is after every arm.
    """
    caches = prefill(model, windows[:, :prompt])
    inputs, truth = windows[:, prompt:-1], windows[:, prompt + 1 :]
    some = [(kv_c[: generate[0]], k_pe[: generate[0]]) for kv_c, k_pe in caches]
    first = windows[: generate[0], prompt]
    result: dict[str, Any] = {
        "windows": windows.shape[0],
        "prompt_tokens": prompt,
        "decoded_tokens": int(truth.numel()),
        "generated_tokens": generate[0] * generate[1],
        "call_against_emulation": first_step_difference(model, caches, inputs[:, 0]),
        "arms": {},
    }
    baseline = wrote = along_inputs = torch.empty(0)
    for name in ("bf16", *(arm for arm in arms if arm != "bf16")):
        start = time.perf_counter()
        logp = teacher_forced(name, model, caches, inputs)
        free = greedy(name, model, some, first, generate[1])
        if name == "bf16":
            baseline, wrote = logp, free
            along_inputs = torch.cat([first[:, None], wrote[:, :-1]], dim=1)
            result["bf16_wrote"] = bytes(wrote[0].tolist()).decode("utf-8", "replace")
        along = teacher_forced(name, model, some, along_inputs).argmax(-1)
        result["arms"][name] = {
            **text_measures(logp, truth, baseline),
            "greedy": greedy_measures(free, along, wrote),
            "seconds": round(time.perf_counter() - start, 2),
        }
        log(f"{name:<13} {describe(result['arms'][name])}")
        if keep is not None:
            keep(result)
    return result


def describe(result: dict[str, Any]) -> str:
    """One line of an arm's results."""
    own = result["greedy"]
    return (
        f"perplexity {result['perplexity']:.4f}  nll {result['nll_above_bf16']:+.2e} "
        f"(se {result['nll_above_bf16_standard_error']:.1e})  KL {result['kl_from_bf16']:.2e}  "
        f"top-1 {result['top1_agreement']:.4f}  greedy {own['agreement_along_bf16_text']:.4f} "
        f"(free {own['free_running_agreement']:.4f})  {result['seconds']} s"
    )


def first_step_difference(model: TinyMLA, caches: Caches, tokens: Tensor) -> list[float]:
    """Per layer, relative L2 between the project's call and the emulation of the same
    configuration on the same inputs: the two arms differ by their arithmetic alone."""
    capacity = caches[0][0].shape[1] + 1
    called = Decoder("snapmla", model, caches, capacity)
    emulated = EmulatedArm("snapmla", caches, capacity, model.config.softmax_scale)
    emulated.begin_step()
    differences: list[float] = []
    call = called.arm

    class Both:
        length = call.length

        def begin_step(self) -> None:
            call.begin_step()

        def __call__(self, layer: int, q: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
            out: Tensor = call(layer, q, kv_c, k_pe)
            other = emulated(layer, q, kv_c, k_pe).double()
            differences.append(float((out.double() - other).norm() / other.norm()))
            return out

    called.arm = Both()
    called.step(tokens)
    return differences
