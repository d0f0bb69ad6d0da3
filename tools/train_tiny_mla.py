"""Train a small MLA language model on real text, capture it, measure what FP8 costs it.

    apt-get download python3.11-doc && dpkg-deb -x python3.11-doc_*.deb DOC
    python tools/train_tiny_mla.py prepare DOC            writes .tiny_mla/ (ignored by git)
    python tools/train_tiny_mla.py run --out DIR --time-budget-s 120
    python tools/train_tiny_mla.py run --out DIR --tiny   the same in a minute or two without a GPU

The text: the reStructuredText sources of the documentation of Python 3.11, as Debian's package
python3.11-doc ships them (licence: PSF-2.0, examples 0BSD). Every 25th document is held out.

`run` writes capture.safetensors (every layer on held-out text; `snapmla decode` and `snapmla audit`
read it), evaluation.json (training, perplexity, greedy tokens of every cache) and log.txt. It needs
torch; the SnapMLA arms are this project's kernels on a Hopper GPU and its reference elsewhere. The
seed fixes weights and batches, the time budget the number of steps: --steps repeats a run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
for _path in (ROOT, ROOT / "tools"):
    if str(_path) not in sys.path:  # run as a file from a bare checkout
        sys.path.insert(0, str(_path))

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

TEXT = ROOT / ".tiny_mla"
PACKAGE = "python3.11-doc"
SOURCES = f"usr/share/doc/{PACKAGE.removesuffix('-doc')}/html/_sources"
LICENCE = "PSF-2.0 (documentation and text), 0BSD (examples)"
HELD_OUT_EVERY = 25
MAX_SAMPLE_BYTES = 8_000_000


# --- Text ----------------------------------------------------------------------------------------


def prepare(source: Path, target: Path = TEXT) -> dict[str, Any]:
    """Write train.txt, held_out.txt and source.json from an unpacked (or the installed) package."""
    folder = source / SOURCES
    documents = sorted(folder.rglob("*.rst.txt"))
    if not documents:
        raise SystemExit(f"{folder}: expected the .rst.txt sources of {PACKAGE}, found none")
    held_out = documents[::HELD_OUT_EVERY]
    parts = {"train": [d for d in documents if d not in held_out], "held_out": held_out}
    target.mkdir(exist_ok=True)
    about: dict[str, Any] = {
        "package": PACKAGE,
        "version": package_version(source),
        "licence": LICENCE,
        "documents": len(documents),
        "held_out_documents": [str(d.relative_to(folder)) for d in held_out],
    }
    for name, chosen in parts.items():
        text = b"\n".join(d.read_bytes() for d in chosen)
        (target / f"{name}.txt").write_bytes(text)
        about[f"{name}_bytes"] = len(text)
        about[f"{name}_sha256"] = hashlib.sha256(text).hexdigest()
    (target / "source.json").write_text(json.dumps(about, indent=1) + "\n")
    return about


def package_version(source: Path) -> str:
    """Version of the package, from the name of the archive beside the unpacked folder or dpkg."""
    for archive in (*source.glob("*.deb"), *source.parent.glob(f"{PACKAGE}_*.deb")):
        return archive.name.split("_")[1]
    status = Path("/var/lib/dpkg/status")
    text = status.read_text(errors="replace") if status.is_file() else ""
    found = re.search(rf"^Package: {re.escape(PACKAGE)}\n(?:.+\n)*?Version: (.+)$", text, re.M)
    return found.group(1) if found else "unknown"


def read_text(folder: Path) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """source.json and the bytes of train.txt and held_out.txt."""
    if not (folder / "source.json").is_file():
        raise SystemExit(f"{folder}: no text; run `python tools/train_tiny_mla.py prepare` first")
    about = json.loads((folder / "source.json").read_text())
    texts = []
    for name in ("train", "held_out"):
        data = (folder / f"{name}.txt").read_bytes()
        if hashlib.sha256(data).hexdigest() != about[f"{name}_sha256"]:
            raise SystemExit(f"{folder / name}.txt: not the text that source.json describes")
        texts.append(np.frombuffer(data, np.uint8))
    return about, texts[0], texts[1]


# --- Settings ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """One run. Sequences are `short` bytes long, and `long` for the last part of the training."""

    layers: int = 6
    hidden: int = 768
    mlp: int = 2048
    short: int = 1024
    long: int = 2048
    long_share: float = 0.25
    batch_tokens: int = 32768
    learning_rate: float = 1e-3
    seed: int = 0
    windows: int = 32
    prompt: int = 1024
    decoded: int = 512
    prompts: int = 8
    generated: int = 250
    capture_tokens: int = 960
    capture_steps: int = 8


TINY = Settings(
    layers=2,
    hidden=128,
    mlp=256,
    short=128,
    long=192,
    batch_tokens=1024,
    windows=2,
    prompt=64,
    decoded=8,
    prompts=2,
    generated=6,
    capture_tokens=128,
    capture_steps=4,
)


class Log:
    """Prints lines with the time and keeps them for log.txt."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def __call__(self, text: str) -> None:
        self.lines.append(f"{self.seconds:7.1f} s  {text}")
        print(self.lines[-1], flush=True)


# --- Training ------------------------------------------------------------------------------------


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over 3 % of the training, then a cosine down to a tenth."""
    if progress < 0.03:
        return peak * (progress / 0.03 + 0.01)
    along = min((progress - 0.03) / 0.97, 1.0)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * along)))


def train(
    model: Any,
    text: np.ndarray,
    settings: Settings,
    progress_of: Callable[[int], float],
    log: Callable[[str], None],
) -> dict[str, Any]:
    """AdamW in bf16 autocast until progress_of(step) reaches 1; the curve as plain values."""
    import torch

    device = next(model.parameters()).device
    data = torch.from_numpy(text.copy()).to(device)
    generator = torch.Generator().manual_seed(settings.seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device.type == "cuda")
    curve: list[dict[str, Any]] = []
    step = seen = 0
    while (progress := progress_of(step)) < 1.0:
        length = settings.long if progress > 1 - settings.long_share else settings.short
        batch = max(settings.batch_tokens // length, 1)
        starts = torch.randint(len(text) - length - 1, (batch,), generator=generator)
        index = starts.to(device)[:, None] + torch.arange(length + 1, device=device)
        tokens = data[index].long()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, settings.learning_rate)
        # without a GPU bf16 is slower than float32, and only tiny models are tried there
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), tokens[:, 1:].flatten()
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, seen = step + 1, seen + batch * length
        if step % 20 == 0 or step == 1:
            value = float(loss.detach())  # waits for the GPU: the budget is real time
            curve.append({"step": step, "bytes": seen, "length": length, "loss": round(value, 4)})
            if step % 100 == 0 or step == 1:
                log(f"step {step:5d}  {seen / 1e6:6.2f} MB  loss {value:.4f} nats a byte")
    return {"steps": step, "bytes": seen, "curve": curve}


def budget_progress(log: Log, end: float, steps: int | None) -> Callable[[int], float]:
    """Share of the training done: of `steps`, or of the time until `end` seconds of the run."""
    if steps is not None:
        return lambda step: step / steps
    begin = log.seconds
    return lambda step: (log.seconds - begin) / max(end - begin, 1e-9)


# --- Capture -------------------------------------------------------------------------------------


def windows_of(text: np.ndarray, count: int, length: int) -> np.ndarray:
    """`count` windows of `length` bytes, evenly spread over the text, int64 [count, length]."""
    starts = np.linspace(0, len(text) - length, count).astype(np.int64)
    return text[starts[:, None] + np.arange(length)].astype(np.int64)


def capture(model: Any, text: np.ndarray, settings: Settings) -> dict[str, np.ndarray]:
    """All layers on the middle of the held-out text, as a capture's named arrays."""
    import torch

    length = settings.capture_tokens
    start = len(text) // 2
    tokens = torch.from_numpy(text[start : start + length].astype(np.int64))[None]
    device = next(model.parameters()).device
    arrays: dict[str, np.ndarray] = {}
    with torch.no_grad():
        layers = model.captured(tokens.to(device), settings.capture_steps)
    for index, (q, kv_c, k_pe) in enumerate(layers):
        arrays[f"layers.{index}.q"] = _bf16(q[0][:, None])  # [steps, 1, h, 576]
        arrays[f"layers.{index}.kv_c"] = _bf16(kv_c[0])
        arrays[f"layers.{index}.k_pe"] = _bf16(k_pe[0])
    arrays["softmax_scale"] = np.array([model.config.softmax_scale], np.float64)
    return arrays


def _bf16(x: Any) -> np.ndarray:
    import torch

    return x.contiguous().view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)


# --- The run -------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    log = Log()
    import torch
    from evaluate_tiny_mla import evaluate
    from tiny_mla import TinyConfig, TinyMLA

    import snapmla_rt  # compiles its kernels in the background while the model trains
    from snapmla_rt.capture import encode_safetensors, layers_of

    settings = TINY if args.tiny else Settings()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    about, train_text, held_out = read_text(args.text)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(settings.seed)
    config = TinyConfig(layers=settings.layers, hidden=settings.hidden, mlp=settings.mlp)
    model = TinyMLA(config).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    log(f"{parameters / 1e6:.1f} M parameters, {len(train_text) / 1e6:.1f} MB of text, {name}")
    end = args.time_budget_s - args.evaluation_s
    progress_of = budget_progress(log, end, args.steps)
    begin = log.seconds
    training = train(model, train_text, settings, progress_of, log)
    training |= {"seconds": round(log.seconds - begin, 1)}
    log(f"trained {training['steps']} steps, {training['bytes'] / 1e6:.1f} MB")

    model.for_decoding()
    arrays = capture(model, held_out, settings)
    layers_of(arrays)  # says what is wrong before anything is written
    encoded = encode_safetensors(arrays)
    if len(encoded) > MAX_SAMPLE_BYTES:
        log(f"the capture has {len(encoded)} bytes, more than {MAX_SAMPLE_BYTES}")
    (args.out / "capture.safetensors").write_bytes(encoded)
    log(f"capture of {settings.layers} layers: {len(encoded) / 1e6:.2f} MB")

    result: dict[str, Any] = {
        "what": "a small MLA language model: trained for minutes on a few megabytes, byte by byte",
        "text": about,
        "model": {**asdict(config), "parameters": parameters},
        "settings": asdict(settings),
        "device": name,
        "torch": torch.__version__,
        "snapmla_rt": snapmla_rt.__version__,
        "training": training,
        "capture_sha256": hashlib.sha256(encoded).hexdigest(),
    }
    _write(args.out, result, log)  # a run that is cut off keeps its training
    windows = windows_of(held_out, settings.windows, settings.prompt + settings.decoded + 1)
    begin = log.seconds

    def keep(found: dict[str, Any]) -> None:
        result["evaluation"] = {**found, "seconds": round(log.seconds - begin, 1)}
        _write(args.out, result, log)

    found = evaluate(
        model,
        torch.from_numpy(windows).to(device),
        settings.prompt,
        (settings.prompts, settings.generated),
        log,
        keep,
    )
    wrong = [name for name, arm in found["arms"].items() if not math.isfinite(arm["perplexity"])]
    log(f"NaN or infinity from {', '.join(wrong)}" if wrong else f"written to {args.out}")
    _write(args.out, result, log)
    return 1 if wrong else 0


def _write(folder: Path, result: dict[str, Any], log: Log) -> None:
    (folder / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "log.txt").write_text("\n".join(log.lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    first = commands.add_parser("prepare", help="the text, from an unpacked package")
    first.add_argument("source", type=Path, nargs="?", default=Path("/"), help="/: the installed")
    first.set_defaults(run=lambda args: print(json.dumps(prepare(args.source), indent=1)) or 0)
    second = commands.add_parser("run", help="train, capture, evaluate")
    second.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "tiny_mla_run")))
    second.add_argument("--text", type=Path, default=TEXT, help="what `prepare` wrote")
    second.add_argument("--time-budget-s", type=float, default=120.0, help="for everything")
    second.add_argument("--evaluation-s", type=float, default=50.0, help="of it, not for training")
    second.add_argument("--steps", type=int, help="training steps, instead of a time budget")
    second.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    second.add_argument("--tiny", action="store_true", help="tiny sizes, for a try without a GPU")
    second.set_defaults(run=run)
    args = parser.parse_args()
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
