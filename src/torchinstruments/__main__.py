"""``python -m torchinstruments``: the same as the ``torchinstruments`` command."""

import sys

from torchinstruments.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
