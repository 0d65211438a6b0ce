"""`python -m pulse_bpf`: the same as the command `pulse`."""

import sys

from pulse_bpf.cli import main

sys.exit(main())
