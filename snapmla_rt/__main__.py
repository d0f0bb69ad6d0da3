"""`python -m snapmla_rt` is the same as `snapmla`."""

import sys

from snapmla_rt.cli import main

if __name__ == "__main__":
    sys.exit(main())
