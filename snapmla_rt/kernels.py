"""The project's kernel table: which `.cu` exist, their parameters, variants and limits.

`jit` and `driver` know no MLA; this module tells them. To add a kernel:

1. write `cuda_src/<stage>.cu` with `#include "<stage>_params.h"` (rendered from the row below) and
   `extern "C" __global__ void <stage>(const __grid_constant__ <Stage>Params p)`;
2. add a `KernelSpec` row to `SPECS`:

       KernelSpec(
           name="append_kv",                     # struct AppendKvParams in append_kv_params.h
           source="append_kv.cu",
           params=(
               ("kv_c", "ptr<const void>"),      # fields in order; i32 u32 i64 u64 f32 ptr ptr<T>
               ("num_tokens", "i64"),            # tensor_map, or Struct(stage, fields) to nest
           ),
           threads=256,
           variants=(                            # one compilation each; omit for a single one
               Variant("bf16", defines=(("INPUT_DTYPE", 0),)),
               Variant("f32", defines=(("INPUT_DTYPE", 2),), dynamic_smem_bytes=1024),
           ),
           max_registers=64,                     # what ptxas may report; spills: 0 unless stated
       )

3. check it here: `python tools/precompile.py --check --kernel append_kv`;
4. launch it: `kernel("append_kv", "bf16", device_index).launch(grid, stream, *values)`, the values
   in the order of the fields.

Constants that the device needs are named in `CONSTANTS`; `TILE_M` becomes `kTileM` in
`snapmla_config.h`, `LN2_BITS` becomes both `kLn2Bits` (unsigned) and `kLn2` (float).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from . import config, cuda_src
from .data_kernels import DATA_SPECS
from .decode_kernels import DECODE_SPECS
from .dropin_kernels import DROPIN_SPECS
from .jit.loader import KernelLoader
from .jit.spec import KernelSpec, KernelTable

if TYPE_CHECKING:
    from .driver.launch import Kernel

CONSTANTS = (
    "KV_LORA_RANK",
    "QK_ROPE_HEAD_DIM",
    "HEAD_DIM_QK",
    "HEAD_DIM_V",
    "BLOCK_SIZE",
    "BYTES_PER_TOKEN",
    "RECORD_ROPE_OFFSET",
    "RECORD_SCALE_OFFSET",
    "RECORD_BYTES",
    "TILE_M",
    "MAX_NUM_HEADS_Q",
    "MAX_CACHE_SEQLEN",
    "FP8_MAX",
    "SCALE_MIN",
    "ROPE_GUARD",
    "LOG2_FP8_MAX_BITS",
    "RAISE_THRESHOLD",
    "LOGIT_MAX",
    "LOGIT_SAFE",
    "LN2_BITS",
    "SQRT_HALF_BITS",
    "LOG2_COEFFS_BITS",
    "FLT_MIN_NORMAL",
    "PLAN_OVERHEAD_BLOCKS",
    "PLAN_FIELDS",
    "INVARIANT_SPLIT_TOKENS",
)

SPECS: tuple[KernelSpec, ...] = (*DECODE_SPECS, *DATA_SPECS, *DROPIN_SPECS)


def _source_root() -> Path:
    return Path(str(cuda_src.__file__)).resolve().parent


TABLE = KernelTable(
    specs=SPECS,
    source_root=_source_root(),
    constants=tuple((name, getattr(config, name)) for name in CONSTANTS),
    constants_header="snapmla_config.h",
)

LOADER = KernelLoader(TABLE)


def kernel(name: str, variant: str = "", device_index: int = 0) -> Kernel:
    """A kernel of the project, compiled and loaded for a device; see KernelLoader.kernel."""
    return LOADER.kernel(name, variant, device_index)
