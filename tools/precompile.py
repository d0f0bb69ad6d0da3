"""Compile check: `python tools/precompile.py --check [--all] [--kernel NAME] [--log]`.

Compiles every kernel of the table for sm_90a in child processes with whatever NVRTC is installed,
and exits non-zero on a compile error, a compiler crash, a C75xx line or resources over the table.
Without `--check` it fills the disk cache, as `snapmla precompile` does.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from snapmla_rt.jit.precompile import main

if __name__ == "__main__":
    sys.exit(main())
