"""What ``make demo`` runs: two ranks train, and the merge of what they wrote says how they compare.

    python launch/demo.py [FOLDER]

The exit code is that of the first command that failed, else the merge's: 0 when every rank was there.
"""
# ruff: noqa: INP001  a script, not a package

import argparse
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
TIME_LIMIT_S = 170.0


def run(command: list[str], environment: dict[str, str]) -> int:
    """Runs a command to its end, for at most `TIME_LIMIT_S`, and returns its exit code."""
    print("$", *command, flush=True)
    with subprocess.Popen(command, env=environment) as process:
        try:
            return process.wait(TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"stopped after {TIME_LIMIT_S:.0f} s", file=sys.stderr)
            process.terminate()
            return 124


def main() -> int:
    """Runs the demonstration into a new folder and returns its exit code."""
    parser = argparse.ArgumentParser(description="Trains two ranks and merges what they wrote.")
    new = PROJECT / f"demo-run-{datetime.now():%Y%m%d-%H%M%S}"  # noqa: DTZ005  a folder's name, local time
    parser.add_argument("folder", nargs="?", type=Path, default=new, help="folder of the run; a new one here")
    folder = parser.parse_args().folder.resolve()
    programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    environment = os.environ | {"PATH": programs, "OUTPUT_DIR": str(folder), "NPROC": "2"}
    code = run([str(PROJECT / "launch" / "local.sh")], environment)
    if code == 0:
        code = run([sys.executable, "-m", "torchinstruments", "merge", str(folder)], environment)
    return code


if __name__ == "__main__":
    sys.exit(main())
