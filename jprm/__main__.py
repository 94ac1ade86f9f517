"""`python -m jprm`, the same as `jprm`."""

import sys

from jprm.apps.cli import main

sys.exit(main())
