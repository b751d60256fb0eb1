"""What ``make demo`` runs: two ranks train, what they wrote is merged, and a short table is printed.

    python launch/demo.py [FOLDER]

The exit code is that of the first command that failed, else the merge's: 0 when every rank was there.
"""
# ruff: noqa: INP001  a script, not a package

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
TIME_LIMIT_S = 170.0
NUM_LAYERS = 6
"""Layers in the table, spread evenly over the model."""

METRIC = "std"


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


def series(layer: dict[str, Any], signal: str) -> dict[str, dict[str, Any]]:
    """Returns the summaries of a layer's first tensor of this signal, by rank; empty where it has none."""
    for tensor in layer["tensors"]:
        if tensor["signal"] == signal:
            for statistic in tensor["statistics"]:
                if statistic["metric"] == METRIC:
                    return statistic["ranks"]
    return {}


def print_table(result: dict[str, Any]) -> None:
    """Prints what each rank wrote, and the last value of a few layers rank by rank."""
    print("\nrank  status    samples    rows  dropped")
    for rank in result["ranks"]:
        counts = f"{rank['samples']:7d} {rank['rows']:7d} {rank['rows_dropped']:8d}"
        print(f"{rank['rank']:4d}  {rank['status']:9s} {counts}")
    measured = [layer for layer in result["layers"] if series(layer, "output")]
    chosen = measured[:: max(1, len(measured) // NUM_LAYERS)][:NUM_LAYERS]
    ranks = [str(rank) for rank in result["coverage"]["present_ranks"]]
    for signal in ("output", "output_gradient"):
        print(
            f"\n{f'{METRIC} of {signal}, latest':40s}" + "".join(f"{f'rank {rank}':>12s}" for rank in ranks)
        )
        for layer in chosen:
            values = series(layer, signal)
            cells = [values.get(rank, {}).get("latest", {}).get("value") for rank in ranks]
            print(
                f"{layer['layer']:40s}"
                + "".join("           -" if v is None else f"{v:12.4g}" for v in cells)
            )


def main() -> int:
    """Runs the demonstration into a new folder and returns its exit code."""
    new = PROJECT / f"demo-run-{datetime.now():%Y%m%d-%H%M%S}"  # noqa: DTZ005  a folder's name, local time
    folder = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else new
    programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    environment = os.environ | {"PATH": programs, "OUTPUT_DIR": str(folder), "NPROC": "2"}
    code = run([str(PROJECT / "launch" / "local.sh")], environment)
    if code == 0:
        code = run([sys.executable, "-m", "torchinstruments", "merge", str(folder)], environment)
    path = folder / "merged" / "result.json"
    if path.exists():
        print_table(json.loads(path.read_text(encoding="utf-8")))
        print(f"\nresult: {path}")
    return code


if __name__ == "__main__":
    sys.exit(main())
