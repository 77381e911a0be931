"""`python -m attnwatch`: the command line, with this Python. So that torchrun can start `-m attnwatch run train.py`."""

import sys

from attnwatch.monitor.cli import main

sys.exit(main())
