"""Captures: what is read is what was written, and everything else is refused by name."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapmla_rt.capture import (
    LayerCapture,
    encode_safetensors,
    layers_of,
    paper_distribution,
    read_capture,
    read_safetensors,
)
from snapmla_rt.errors import ArgumentError

BF16 = np.dtype(ml_dtypes.bfloat16)


def small_arrays(dtype: Any = BF16, tokens: int = 10, steps: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "q": rng.standard_normal((steps, 1, 2, 576)).astype(dtype),
        "kv_c": rng.standard_normal((tokens, 512)).astype(dtype),
        "k_pe": rng.standard_normal((tokens, 64)).astype(dtype),
        "softmax_scale": np.array(0.07, np.float32),
    }


def library_safetensors(arrays: dict[str, np.ndarray], metadata: dict[str, str] | None) -> bytes:
    """The file as the format's own library writes it.

    Its NumPy side has no bfloat16: those arrays go through it as uint16, and the header it wrote
    gets the type that its PyTorch side would have written.
    """
    library = pytest.importorskip("safetensors.numpy")
    bits = {k: v.view(np.uint16) if v.dtype == BF16 else v for k, v in arrays.items()}
    written = library.save(bits, metadata=metadata)
    (size,) = struct.unpack("<Q", written[:8])
    header = written[8 : 8 + size].replace(b'"U16"', b'"BF16"')
    return struct.pack("<Q", len(header)) + header + written[8 + size :]


def assert_layer(layer: LayerCapture, arrays: dict[str, np.ndarray]) -> None:
    for field in ("q", "kv_c", "k_pe"):
        got = getattr(layer, field)
        assert got.dtype == arrays[field].dtype
        assert got.tobytes() == arrays[field].tobytes()
    assert layer.softmax_scale == float(arrays["softmax_scale"])


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
@pytest.mark.parametrize("metadata", [None, {"model": "any", "softmax_scale": "no tensor"}])
def test_reads_what_the_safetensors_library_writes(
    tmp_path: Path, dtype: Any, metadata: dict[str, str] | None
) -> None:
    arrays = small_arrays(dtype)
    path = tmp_path / "capture.safetensors"
    path.write_bytes(library_safetensors({**arrays, "ids": np.arange(3)}, metadata))
    (layer,) = read_capture(path)
    assert layer.name == "" and layer.prefill_tokens == 8
    assert_layer(layer, arrays)


def test_the_safetensors_library_reads_what_we_write(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors")
    arrays = {"out": np.zeros((2, 3), BF16), "lse": np.arange(5, dtype=np.float32)}
    path = tmp_path / "out.safetensors"
    path.write_bytes(encode_safetensors(arrays))
    with library.safe_open(str(path), framework="np") as file:
        assert sorted(file.keys()) == ["lse", "out"]
        np.testing.assert_array_equal(file.get_tensor("lse"), arrays["lse"])
        assert file.get_slice("out").get_dtype() == "BF16"
        assert list(file.get_slice("out").get_shape()) == [2, 3]
    ours = read_safetensors(path)
    assert ours["out"].dtype == BF16 and ours["out"].shape == (2, 3)


@pytest.mark.parametrize("form", ["library void", "uint16", "float16", "float32"])
def test_reads_npz_and_its_two_forms_of_bfloat16(tmp_path: Path, form: str) -> None:
    dtype = BF16 if form in ("library void", "uint16") else np.dtype(form)
    arrays = small_arrays(dtype)
    stored = dict(arrays)
    if form == "uint16":
        stored = {k: v.view(np.uint16) if v.dtype == BF16 else v for k, v in arrays.items()}
    np.savez_compressed(tmp_path / "capture.npz", **stored)  # type: ignore[arg-type]
    (layer,) = read_capture(tmp_path / "capture.npz")
    assert_layer(layer, arrays)


def test_layers_come_in_natural_order_and_share_a_softmax_scale() -> None:
    arrays: dict[str, np.ndarray] = {"softmax_scale": np.array([0.5], np.float32)}
    for index in (10, 2, 0):
        for field, array in small_arrays(tokens=3 + index).items():
            if field != "softmax_scale" or index == 2:
                arrays[f"layers.{index}.{field}"] = array
    layers = layers_of(arrays)
    assert [layer.name for layer in layers] == ["layers.0", "layers.2", "layers.10"]
    assert [layer.num_tokens for layer in layers] == [3, 5, 13]
    assert [layer.softmax_scale for layer in layers] == [0.5, float(np.float32(0.07)), 0.5]


def test_first_steps_end_the_capture_early() -> None:
    layer = layers_of(small_arrays(tokens=10, steps=4))[0]
    early = layer.first_steps(3)
    assert (early.num_steps, early.num_tokens, early.prefill_tokens) == (3, 9, 6)
    np.testing.assert_array_equal(early.kv_c, layer.kv_c[:9])
    with pytest.raises(ArgumentError, match=r"--steps: expected 1\.\.4 .*got 5"):
        layer.first_steps(5)


# --- what is refused ------------------------------------------------------------------------------


def _with(**changes: Any) -> dict[str, np.ndarray]:
    arrays: dict[str, Any] = {**small_arrays(), **changes}
    return {name: array for name, array in arrays.items() if array is not None}


def _poked(field: str, index: tuple[int, ...], value: float) -> dict[str, np.ndarray]:
    arrays = small_arrays(np.float32)
    arrays[field][index] = value
    return arrays


REFUSED = {
    "no q": (_with(q=None), "expected arrays q, kv_c, k_pe and softmax_scale, got k_pe"),
    "no kv_c": (_with(kv_c=None), "kv_c: expected an array of this name"),
    "no scale": (_with(softmax_scale=None), "softmax_scale: expected an array of this name"),
    "float64": (_with(k_pe=np.zeros((10, 64))), "k_pe: expected bfloat16, float16 or float32"),
    "integers": (_with(q=np.zeros((2, 1, 2, 576), int)), "q: expected bfloat16.*got int64"),
    "3-d q": (_with(q=np.zeros((2, 2, 576), BF16)), r"q: .*\[steps, s_q, h, 576\].*\[2, 2, 576\]"),
    "q 512": (_with(q=np.zeros((2, 1, 2, 512), BF16)), r"q: .*got \[2, 1, 2, 512\]"),
    "no steps": (_with(q=np.zeros((0, 1, 2, 576), BF16)), r"q: .*at least 1, got \[0,"),
    "129 heads": (_with(q=np.zeros((1, 1, 129, 576), BF16)), "q: .*h <= 128"),
    "kv_c 576": (_with(kv_c=np.zeros((10, 576), BF16)), r"kv_c: .*\[tokens, 512\].*\[10, 576\]"),
    "short k_pe": (
        _with(k_pe=np.zeros((9, 64), BF16)),
        r"k_pe: expected \[10, 64\].*got \[9, 64\]",
    ),
    "steps > tokens": (
        _with(q=np.zeros((11, 1, 2, 576), BF16)),
        r"q: expected steps \* s_q of at most the 10 tokens of kv_c, got 11 \* 1",
    ),
    "NaN latent": (_poked("kv_c", (3, 7), np.nan), r"kv_c: expected finite .*nan at \[3, 7\]"),
    "inf rope": (_poked("k_pe", (9, 63), np.inf), r"k_pe: expected finite .*inf at \[9, 63\]"),
    "NaN query": (_poked("q", (1, 0, 1, 575), np.nan), r"q: .*nan at \[1, 0, 1, 575\]"),
    "scale 0": (_with(softmax_scale=np.float32(0)), "softmax_scale: expected a positive.*got 0.0"),
    "scale NaN": (_with(softmax_scale=np.float32(np.nan)), "softmax_scale: .*got nan"),
    "two scales": (_with(softmax_scale=np.ones(2)), "softmax_scale: expected one positive number"),
    "void scale": (_with(softmax_scale=np.zeros(1, "V7")), "softmax_scale: expected one positive"),
    "a layer without q": (
        {f"layers.{i}.{k}": v for i in (0, 1) for k, v in small_arrays().items() if i or k != "q"},
        r"layers\.0\.q: expected an array of this name, got layers\.0\.k_pe, layers\.0\.kv_c",
    ),
    "text scale": (_with(softmax_scale=np.array("x")), "softmax_scale: expected one positive"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arrays_are_refused_by_name(case: str) -> None:
    arrays, message = REFUSED[case]
    with pytest.raises(ArgumentError, match=message):
        layers_of(arrays)


def test_the_layer_is_part_of_the_name() -> None:
    arrays = {f"layers.7.{k}": v for k, v in _poked("k_pe", (0, 0), np.nan).items()}
    with pytest.raises(ArgumentError, match=r"^layers\.7\.k_pe: "):
        layers_of(arrays)


def test_a_misspelt_array_is_listed_among_those_found(tmp_path: Path) -> None:
    """Whatever its dtype, and none of the file's other arrays is left out."""
    arrays = small_arrays(np.float32)
    arrays["Q"] = arrays.pop("q")
    np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    (tmp_path / "a.safetensors").write_bytes(library_safetensors(arrays, None))
    bits = {**arrays, "Q": arrays["Q"].astype(np.int64)}
    (tmp_path / "b.safetensors").write_bytes(library_safetensors(bits, None))
    for name in ("a.npz", "a.safetensors", "b.safetensors"):
        with pytest.raises(ArgumentError, match=r"got Q, k_pe, kv_c, softmax_scale$") as caught:
            read_capture(tmp_path / name)
        assert name in str(caught.value)
    arrays["q"] = arrays.pop("Q")
    arrays["kvc"] = arrays.pop("kv_c")
    np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"a\.npz: kv_c: .*got k_pe, kvc, q, softmax_scale$"):
        read_capture(tmp_path / "a.npz")
    many = {f"layers.{i}.Q": np.zeros(1, np.float32) for i in range(40)}
    with pytest.raises(ArgumentError, match=r"got layers\.0\.Q, .* and 28 more$"):
        layers_of(many)


@pytest.mark.parametrize(
    "content", [b"", b"just text", bytes(64), b"\x80\x04K\x01.", b"PK\x03\x04 no"]
)
def test_garbage_is_called_no_npz_without_numpys_words(tmp_path: Path, content: bytes) -> None:
    """NumPy takes it for a pickle and speaks of loading that unsafely."""
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"a\.npz: expected a \.npz archive, got ") as caught:
        read_capture(path)
    text = str(caught.value)
    assert not any(word in text for word in ("pickle", "unsafe", "trust", "No data left"))


def test_members_of_an_npz_that_are_no_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **small_arrays(np.float32))  # type: ignore[arg-type]
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("layers.1.q", b"bytes that are no array")
    with pytest.raises(ArgumentError, match=r"a\.npz: layers\.1\.q: expected a \.npy array"):
        read_capture(tmp_path / "a.npz")
    objects = {**small_arrays(np.float32), "q": np.array([{}], object)}
    np.savez(tmp_path / "a.npz", **objects)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"a\.npz: q: expected .*plain arrays") as caught:
        read_capture(tmp_path / "a.npz")
    assert "allow_pickle" not in str(caught.value)


def test_files_that_are_not_what_they_say(tmp_path: Path) -> None:
    npz, st_ = tmp_path / "a.npz", tmp_path / "a.safetensors"
    cases: list[tuple[Path, bytes | None, str]] = [
        (npz, None, "no such file"),
        (npz, b"", "a .npz archive"),
        (npz, b"PK\x03\x04 not really", "a .npz archive"),
        (npz, b"just text", "a .npz archive"),
        (st_, b"", "0 bytes"),
        (st_, b"\xff" * 64, "header length"),
        (st_, struct.pack("<Q", 4) + b"nope", "no JSON"),
        (st_, struct.pack("<Q", 2) + b"[]", "a JSON object"),
        (st_, struct.pack("<Q", 7) + b'{"q":1}', "q: expected dtype, shape and data_offsets"),
        (st_, b"PK\x03\x04" + b"\0" * 60, "arrays q|header length|no JSON"),
        (tmp_path / "a.bin", b"x", "ending in .safetensors or .npz"),
    ]
    for path, content, message in cases:
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ArgumentError, match=message) as caught:
            read_capture(path)
        assert path.name in str(caught.value)
    with pytest.raises(ArgumentError, match="a directory"):
        read_capture(tmp_path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "one.npy").rename(npz)
    with pytest.raises(ArgumentError, match=r"single \.npy"):
        read_capture(npz)


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, Any]:
            return (Path.touch, (tmp_path / "sprung",))

    arrays = {**small_arrays(), "q": np.array([Trap()], object)}
    np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="plain arrays"):
        read_capture(tmp_path / "a.npz")
    assert not (tmp_path / "sprung").exists()


def test_a_dtype_that_no_capture_has_is_named(tmp_path: Path) -> None:
    arrays = {**small_arrays(np.float32), "q": np.zeros((2, 1, 2, 576), np.int64)}
    (tmp_path / "a.safetensors").write_bytes(library_safetensors(arrays, None))
    with pytest.raises(ArgumentError, match="q: expected BF16, F16 or F32, got I64"):
        read_capture(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "change",
    [{"data_offsets": [0, 10**9]}, {"data_offsets": [8, 4]}, {"shape": [-1, 4]}, {"shape": "x"},
     {"shape": [1, 2, 3]}, {"data_offsets": [0]}, {"dtype": ["F32"]}],
)  # fmt: skip
def test_lying_headers_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **change}
    header = json.dumps({"q": entry}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(ArgumentError, match="q"):
        read_capture(path)


@given(
    cut=st.integers(0, 400),
    flips=st.lists(st.tuples(st.integers(0, 399), st.integers(1, 255)), max_size=4),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_damaged_headers_never_escape_as_another_error(
    tmp_path: Path, cut: int, flips: list[tuple[int, int]]
) -> None:
    """Every damage to the first 400 bytes ends in ArgumentError or in a checked capture."""
    good = bytearray(encode_safetensors(small_arrays()))
    for position, bits in flips:
        good[position] ^= bits
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(bytes(good[:cut]) if cut < 390 else bytes(good))
    try:
        layers = read_capture(path)
    except ArgumentError:
        return
    assert all(np.isfinite(layer.kv_c.astype(np.float32)).all() for layer in layers)


@given(flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), max_size=6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_damaged_archives_never_escape_as_another_error(
    tmp_path: Path, flips: list[tuple[int, int]]
) -> None:
    """Compressed, so that zlib has its say, too."""
    path = tmp_path / "damaged.npz"
    if not (tmp_path / "good.npz").exists():
        arrays = small_arrays(np.float32, tokens=2, steps=1)
        np.savez_compressed(tmp_path / "good.npz", **arrays)  # type: ignore[arg-type]
    data = bytearray((tmp_path / "good.npz").read_bytes())
    for position, bits in flips:
        data[position % len(data)] ^= bits
    path.write_bytes(bytes(data))
    try:
        read_capture(path)
    except ArgumentError as error:
        assert "damaged.npz" in str(error)


# --- the made-up distribution ---------------------------------------------------------------------


def test_the_made_up_layer_has_the_papers_distribution() -> None:
    layer = paper_distribution()
    latent, rope = layer.kv_c.astype(np.float32), layer.k_pe.astype(np.float32)
    assert layer.q.dtype == layer.kv_c.dtype == layer.k_pe.dtype == BF16
    assert np.abs(latent).max() == 10.0 and 0.5 < latent.std() < 3.0
    assert np.abs(rope).max() == 1000.0
    # heavy tails: N(0, s) of this width would have an excess kurtosis of 0
    spread = rope / rope.std(axis=0)
    assert (spread**4).mean() > 6.0
    # the outliers sit in a few channels; most of the RoPE part is small
    assert (np.abs(rope).max(axis=0) > 300).sum() <= 12 and np.median(np.abs(rope)) < 2.0


def test_attention_over_it_is_neither_flat_nor_decided_by_one_token() -> None:
    layer = paper_distribution()
    keys = np.concatenate([layer.kv_c, layer.k_pe], axis=1).astype(np.float64)
    scores = layer.q[0, 0].astype(np.float64) @ keys.T * layer.softmax_scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    effective = 1.0 / np.square(weights).sum(axis=1)
    assert 100 < np.median(effective) < 3000 and effective.max() < 4096 * 0.9


def test_it_depends_on_the_seed_and_on_nothing_else() -> None:
    one, same, other = (paper_distribution(70, 2, 3, 2, seed) for seed in (5, 5, 6))
    assert one.q.tobytes() == same.q.tobytes() and one.k_pe.tobytes() == same.k_pe.tobytes()
    assert one.kv_c.tobytes() != other.kv_c.tobytes()
    assert (one.num_steps, one.seq_len_q, one.num_heads_q, one.prefill_tokens) == (3, 2, 2, 64)
