"""Runs commands of this project as a user starts them."""

import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PROGRAMS = str(Path(sys.executable).parent)


def run(
    *command: str | Path | int, cwd: Path, expected_code: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end and returns it; its output is shown where it failed."""
    environment = os.environ | {"PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"} | variables
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == expected_code, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done


def run_example(name: str, *arguments: str | Path | int, cwd: Path, ranks: int = 0) -> str:
    """Runs a script of ``examples/``, by torchrun where ranks are given, and returns what it printed."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    script = PROJECT / "examples" / f"{name}.py"
    done = run(
        *(sys.executable, *(torchrun if ranks else ()), script, *arguments),
        cwd=cwd,
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    return done.stdout
