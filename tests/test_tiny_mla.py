"""The small model of tools/train_tiny_mla.py: its decode path and emulated caches (needs torch).

The emulation in torch is held to reference/quant_configs.py, whose quantisers and attention are
held to the oracle in tests/reference/test_quant_configs.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from snapmla_rt.capture import read_capture
from snapmla_rt.reference.quant_configs import CONFIGS, attend, quantize_kv, quantize_queries

torch = pytest.importorskip("torch", reason="the small model needs torch")
TOOLS = Path(__file__).resolve().parent.parent / "tools"
sys.path.insert(0, str(TOOLS))

import evaluate_tiny_mla as ev  # noqa: E402
import tiny_mla  # noqa: E402
import train_tiny_mla as training  # noqa: E402

CONFIG = tiny_mla.TinyConfig(layers=2, hidden=64, mlp=96)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(1)
    made = tiny_mla.TinyMLA(CONFIG)
    for p in made.parameters():  # as it starts, attention would be flat
        if p.ndim > 1:
            p.data *= 4
    return made


def tokens_of(seed: int, *shape: int) -> Any:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))


def rows(count: int, seed: int = 0) -> tuple[Any, Any]:
    """bf16 latents with quiet and loud tokens, RoPE with loud channels."""
    rng = np.random.default_rng(seed)
    latent = rng.standard_normal((count, 512)) * np.exp(rng.standard_normal((count, 1)))
    rope = rng.standard_t(3, (count, 64)) * np.where(np.arange(64) < 4, 100.0, 1.0)
    return (torch.tensor(x, dtype=torch.float32).bfloat16() for x in (latent, rope))  # type: ignore[return-value]


def numpy_of(x: Any) -> Any:
    return x.float().numpy()


@torch.no_grad()
def test_decoding_step_by_step_gives_what_the_whole_sequence_gives(model: Any) -> None:
    tokens = tokens_of(0, 2, 24)
    whole = model(tokens)[:, 15:-1].log_softmax(-1)
    caches = [(k.float(), r.float()) for k, r in ev.prefill(model, tokens[:, :15])]
    got = ev.teacher_forced("bf16", model, caches, tokens[:, 15:-1])
    # bf16 queries, keys and P: 2^-9 each, on logits of a few nats
    assert (got - whole).abs().max() < 0.1
    assert (got - whole).abs().mean() < 0.01
    wrong = ev.teacher_forced("bf16", model, caches, tokens[:, 14:-2])  # one token off
    assert (wrong - whole).abs().mean() > 0.1  # so the bound above means something


@pytest.mark.parametrize("config", [name for name in CONFIGS if name != "snapmla_pow2"])
@pytest.mark.parametrize("count", [64, 100])
def test_emulated_caches_equal_the_reference(config: str, count: int) -> None:
    latent, rope = rows(count)
    want = quantize_kv(config, numpy_of(latent), numpy_of(rope))
    got = ev.quantize_tokens(config, latent[None].float(), rope[None].float())
    for mine, other in zip(got, (want.latent, want.rope, want.value_scale), strict=True):
        # the same codes; their product with the scale is rounded to float32 here
        np.testing.assert_allclose(mine[0].numpy(), other, rtol=2**-23, atol=0)


@pytest.mark.parametrize("config", [name for name in CONFIGS if name != "snapmla_pow2"])
def test_emulated_attention_equals_the_reference(config: str) -> None:
    latent, rope = rows(150)
    q = torch.randn(4, 576, generator=torch.Generator().manual_seed(2)) * 0.3
    q[:, 512:] *= 0.05
    q = q.bfloat16()
    want_kv = quantize_kv(config, numpy_of(latent), numpy_of(rope))
    keys = np.concatenate([want_kv.latent, want_kv.rope], axis=1)
    query = np.concatenate(quantize_queries(numpy_of(q)), axis=1)
    want, _ = attend(query, keys, want_kv.latent, 192**-0.5, value_scale=want_kv.value_scale)
    arm = ev.EmulatedArm(config, [(latent[None, :149], rope[None, :149])], 192, 192**-0.5)
    arm.begin_step()
    got = arm(0, q[None, None], latent[None, 149], rope[None, 149])[0, 0].double().numpy()
    # the emulation's outputs are bf16; a P on a rounding boundary may fall to the other side
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < 2.5e-3


@pytest.mark.parametrize("config", [name for name in CONFIGS if name != "snapmla_pow2"])
def test_blocks_far_below_the_maximum_add_nothing(config: str) -> None:
    """Weights of whole blocks at the end of float32, where the block's own scale underflows: a
    trained model has such rows (seen on one: every configuration with a rounded P became NaN)."""
    latent, rope = rows(192)
    q = torch.zeros(4, 576)
    q[:, 512] = 1.0
    rope = torch.zeros_like(rope)
    levels = torch.tensor([-87.5, -100.0, -101.5, -103.5, -110.0, -300.0])
    rope[:64, 0] = levels[torch.arange(64) % 2]
    rope[64:128, 0] = levels[2 + torch.arange(64) % 4]
    arm = ev.EmulatedArm(config, [(latent[None, :191], rope[None, :191])], 192, 1.0)
    arm.begin_step()
    got = arm(0, q[None, None].bfloat16(), latent[None, 191], rope[None, 191])[0, 0].float()
    assert torch.isfinite(got).all()
    near = latent[128:].float().mean(0)
    assert float((got - near).norm() / near.norm()) < 0.2  # e4m3 of the values, no more


@torch.no_grad()
def test_old_tokens_are_quantised_again_when_a_scale_changes() -> None:
    latent, rope = (x[None] for x in rows(100))
    for config in ("C", "D"):
        grown = ev.EmulatedArm(config, [(latent[:, :90], rope[:, :90])], 128, 0.07)
        for t in range(90, 100):
            grown.begin_step()
            grown(0, torch.zeros(1, 1, 1, 576), latent[:, t] * 3, rope[:, t])
        louder = torch.cat([latent[:, :90], latent[:, 90:] * 3], dim=1)
        whole = ev.quantize_tokens(config, louder.float(), rope.float())
        assert torch.equal(grown.seen[0][0][:, :100, :512], whole[0])


@torch.no_grad()
def test_the_real_calls_agree_with_the_emulation(model: Any) -> None:
    tokens = tokens_of(3, 2, 71)
    caches = ev.prefill(model, tokens[:, :70])
    differences = ev.first_step_difference(model, caches, tokens[:, 70])
    assert len(differences) == CONFIG.layers
    # beside float32 the call has the tensor core's 14-bit sums (2e-3) and both round to bf16
    assert max(differences) < 6e-3 and min(differences) > 0


def test_a_tiny_run_writes_a_capture_that_decode_reads(tmp_path: Path, model: Any) -> None:
    text = np.random.default_rng(0).integers(97, 123, 5000).astype(np.uint8)
    settings = training.TINY
    arrays = training.capture(model, text, settings)
    from snapmla_rt.capture import encode_safetensors

    path = tmp_path / "capture.safetensors"
    path.write_bytes(encode_safetensors(arrays))
    layers = read_capture(path)
    assert [layer.name for layer in layers] == ["layers.0", "layers.1"]
    assert layers[0].q.shape == (settings.capture_steps, 1, 16, 576)
    assert layers[0].kv_c.shape == (settings.capture_tokens, 512)
    assert layers[0].softmax_scale == pytest.approx(192**-0.5)


def test_training_lowers_the_loss_and_repeats() -> None:
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 200, np.uint8)
    settings = training.Settings(short=32, long=48, batch_tokens=256, learning_rate=1e-2)
    curves = []
    for _ in range(2):
        torch.manual_seed(0)
        small = tiny_mla.TinyMLA(tiny_mla.TinyConfig(layers=1, hidden=32, mlp=48))
        result = training.train(small, text, settings, lambda step: step / 40, lambda _: None)
        curves.append(result["curve"])
    assert result["steps"] == 40 and curves[0][-1]["loss"] < curves[0][0]["loss"] - 1.5
    assert json.dumps(curves[0]) == json.dumps(curves[1])
    assert {point["length"] for point in curves[0]} == {32, 48}


def test_prepare_splits_documents_and_records_where_they_came_from(tmp_path: Path) -> None:
    folder = tmp_path / "doc" / training.SOURCES
    folder.mkdir(parents=True)
    for index in range(30):
        (folder / f"d{index:02d}.rst.txt").write_text(f"document {index}\n")
    (tmp_path / "doc" / f"{training.PACKAGE}_3.11.2-6_all.deb").write_text("")
    about = training.prepare(tmp_path / "doc", tmp_path / "text")
    assert about["version"] == "3.11.2-6" and about["licence"].startswith("PSF-2.0")
    assert about["held_out_documents"] == ["d00.rst.txt", "d25.rst.txt"]
    read, train_text, held_out = training.read_text(tmp_path / "text")
    assert read == about and b"document 25" in held_out.tobytes()
    assert b"document 25" not in train_text.tobytes() and b"document 24" in train_text.tobytes()
    (tmp_path / "text" / "train.txt").write_text("another")
    with pytest.raises(SystemExit, match="not the text"):
        training.read_text(tmp_path / "text")
