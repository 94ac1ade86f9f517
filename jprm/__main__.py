"""`python -m jprm`, the same as `jprm`."""

import sys

from jprm.cli import main

sys.exit(main())
