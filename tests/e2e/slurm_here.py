#!/usr/bin/env python3
"""Slurm's commands, as far as the launch recipes use them, for one machine that is all nodes of every job.

Called as ``sbatch``, ``srun`` and ``scontrol``. A batch script runs to its end before ``sbatch`` returns, in
a copy, as with Slurm; a step starts one real process a task and hands SIGTERM on to all of them. What became
of the jobs lies in ``$SLURM_HERE``: ``<job>.json`` and ``<job>.out``.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

FIRST_JOB = 4711
DEPENDENCY = re.compile(r"--dependency=(after\w+):(\d+)")


def sbatch(arguments: list[str]) -> int:
    """Runs a batch script with the variables of its job, once the job that it waits for has ended."""
    jobs = Path(os.environ["SLURM_HERE"])
    options = [one for one in arguments[: first_plain(arguments)] if one.startswith("--")]
    script, *further = arguments[len(options) :]
    job = FIRST_JOB + len(list(jobs.glob("*.json")))
    for option in options:
        found = DEPENDENCY.fullmatch(option)
        if found is not None:
            ended = json.loads((jobs / f"{found[2]}.json").read_text())
            assert found[1] == "afterany" or ended["exit_code"] == 0, "the dependency is never satisfied"
    text = Path(script).read_text(encoding="utf-8")
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.MULTILINE))
    nodes = int(asked.get("nodes", "1"))
    copy = shutil.copy(script, jobs / "slurm_script")
    variables = {
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NAME": asked["job-name"],
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": f"node[1-{nodes}]",
        "SLURM_NTASKS": str(nodes * int(asked.get("ntasks-per-node", "1"))),
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_SUBMIT_DIR": str(Path.cwd()),
    }
    with (jobs / f"{job}.out").open("w", encoding="utf-8") as output:
        done = subprocess.run(
            [copy, *further], env=os.environ | variables, stdout=output, stderr=output, check=False
        )
    record = {"exit_code": done.returncode, "options": options, "asked": asked}
    (jobs / f"{job}.json").write_text(json.dumps(record), encoding="utf-8")
    print(job)
    return 0


def srun(arguments: list[str]) -> int:
    """Starts the tasks of a step, hands SIGTERM on to them, and returns the worst code."""
    command = arguments[first_plain(arguments) :]
    tasks = int(os.environ["SLURM_NTASKS"])
    running = [
        subprocess.Popen(
            command,
            env=os.environ
            | {
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": str(task),
                "SLURM_NODEID": str(task),
                "SLURM_LOCALID": "0",
                "SLURM_STEP_NUM_TASKS": str(tasks),
            },
        )
        for task in range(tasks)
    ]

    def end(_number: int, _frame: object) -> None:
        for one in running:
            one.terminate()

    signal.signal(signal.SIGTERM, end)
    return max(abs(one.wait()) for one in running)


def scontrol(arguments: list[str]) -> int:
    """Prints the address of each node of a list, one a line."""
    assert arguments[:2] == ["show", "hostnames"]
    print("127.0.0.1\n" * int(os.environ["SLURM_JOB_NUM_NODES"]), end="")
    return 0


def first_plain(arguments: list[str]) -> int:
    """Returns where the options end; here each is one word."""
    return next(place for place, one in enumerate(arguments) if not one.startswith("-"))


if __name__ == "__main__":
    commands = {"sbatch": sbatch, "srun": srun, "scontrol": scontrol}
    sys.exit(commands[Path(sys.argv[0]).name](sys.argv[1:]))
