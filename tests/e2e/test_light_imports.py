"""What must not be loaded: torch offline, Polars and network clients in training, anything at import."""

import subprocess
import sys

import pytest

OFFLINE = "import sys, torchinstruments.merge, torchinstruments.cli; assert 'torch' not in sys.modules"
ENGINE = (
    "import sys; from torchinstruments import merge_run, open_run; import torchinstruments.cli.main; "
    "assert 'torch' not in sys.modules"
)
BARE = (
    "import sys, torchinstruments; "
    "assert not {'torch', 'polars', 'pyarrow', 'numpy', 'fsspec'} & set(sys.modules), sorted(sys.modules)"
)
TRAINING = (
    "import sys; from torchinstruments import inject_observer; "
    "assert not {'polars', 's3fs', 'aiohttp', 'botocore'} & set(sys.modules)"
)


@pytest.mark.parametrize("program", [OFFLINE, ENGINE, BARE, TRAINING])
def test_a_side_loads_only_what_it_needs(program: str) -> None:
    """The interpreter ends without an AssertionError about a module that was loaded."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
