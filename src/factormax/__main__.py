"""`python -m factormax`: the same as the command `factormax`."""

import sys

from factormax.cli import main

if __name__ == "__main__":
    sys.exit(main())
