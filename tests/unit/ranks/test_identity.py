"""Identity from variables; from the process group in tests/distributed."""

import multiprocessing

import pytest
import torch.distributed as dist

from torchinstruments.errors import ConfigurationError
from torchinstruments.ranks.identity import configured_run_id, discover, new_process_id, world_of_one
from torchinstruments.store.layout import safe_run_id

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Starts every test without a launcher's variables."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def _setenv(monkeypatch, **values):
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def _in_child(queue):
    identity = discover("0a0a0a0a")
    queue.put(None if identity is None else (identity.launcher, identity.rank))


def _ask_child():
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    answer = queue.get()
    child.join()
    return answer


def test_a_process_without_group_and_variables_cannot_know_its_rank_yet():
    """Under mp.spawn such a process is a rank, alone it is a world: only time tells."""
    assert discover("0a0a0a0a") is None


def test_a_world_of_one_is_rank_0_of_1():
    """What a process takes itself for that has waited in vain."""
    identity = world_of_one("0a0a0a0a", "cpu")
    assert (identity.rank, identity.world_size, identity.local_rank, identity.launcher) == (0, 1, 0, "none")
    assert (identity.process, identity.device, identity.local_world_size) == ("0a0a0a0a", "cpu", 1)


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({}, "process_group"),
        ({"RANK": 0, "WORLD_SIZE": 1}, "torchrun"),
        ({"SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": 1}, "slurm"),
        ({"RANK": 3, "WORLD_SIZE": 4}, "process_group"),
        ({"RANK": "first", "WORLD_SIZE": 4}, "process_group"),
    ],
)
def test_the_launcher_is_whose_variables_name_the_groups_rank(monkeypatch, variables, launcher):
    """The group knows rank and world; variables of another world, as around a nested job, started nothing."""
    _setenv(monkeypatch, **variables)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        identity = discover("0a0a0a0a")
    finally:
        dist.destroy_process_group()
    assert identity is not None
    assert (identity.rank, identity.world_size, identity.launcher) == (0, 1, launcher)


def test_torchruns_variables_give_rank_world_host_and_restarts(monkeypatch):
    """Before the group is initialised they are the best that there is."""
    _setenv(
        monkeypatch,
        RANK=5,
        WORLD_SIZE=8,
        LOCAL_RANK=1,
        LOCAL_WORLD_SIZE=4,
        GROUP_RANK=1,
        TORCHELASTIC_RESTART_COUNT=2,
    )
    identity = discover("0a0a0a0a", "cuda:1")
    assert identity is not None
    assert (identity.rank, identity.world_size, identity.local_rank, identity.local_world_size) == (
        5,
        8,
        1,
        4,
    )
    assert (identity.node_rank, identity.restart_count, identity.launcher) == (1, 2, "torchrun")
    assert identity.device == "cuda:1"
    assert identity.pid > 0


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"RANK": "zero", "WORLD_SIZE": "2"}, ["RANK", "'zero'"]),
        ({"RANK": "0", "WORLD_SIZE": "two"}, ["WORLD_SIZE", "'two'"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK=2", "WORLD_SIZE=2", "0 to 1"]),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK=-1", "WORLD_SIZE=2"]),
        ({"RANK": "0"}, ["RANK=0", "WORLD_SIZE"]),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE=0", "RANK=0"]),
        ({"SLURM_PROCID": "4", "SLURM_STEP_NUM_TASKS": "4"}, ["SLURM_PROCID=4", "SLURM_STEP_NUM_TASKS=4"]),
    ],
)
def test_impossible_variables_are_refused_in_one_sentence_that_names_them(monkeypatch, values, names):
    """The sentence holds both variables and their values."""
    _setenv(monkeypatch, **values)
    with pytest.raises(ConfigurationError) as caught:
        discover("0a0a0a0a")
    message = str(caught.value)
    assert all(name in message for name in names), message
    assert "\n" not in message


def test_slurms_step_gives_rank_and_world(monkeypatch):
    """A process that srun started is a task of a step."""
    _setenv(
        monkeypatch,
        SLURM_PROCID=3,
        SLURM_STEP_NUM_TASKS=4,
        SLURM_NTASKS=4,
        SLURM_LOCALID=1,
        SLURM_NODEID=1,
        SLURM_RESTART_COUNT=1,
    )
    identity = discover("0a0a0a0a")
    assert identity is not None
    assert (identity.rank, identity.world_size, identity.local_rank, identity.node_rank) == (3, 4, 1, 1)
    assert (identity.launcher, identity.restart_count) == ("slurm", 1)


def test_a_batch_script_without_srun_is_not_a_rank_of_slurms_tasks(monkeypatch):
    """It sees SLURM_PROCID and SLURM_NTASKS though it is one process."""
    _setenv(monkeypatch, SLURM_PROCID=0, SLURM_NTASKS=4)
    assert discover("0a0a0a0a") is None


def test_torchrun_inside_slurm_wins(monkeypatch):
    """One srun task per host starts torchrun, whose ranks are the world."""
    _setenv(monkeypatch, SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2, RANK=6, WORLD_SIZE=8)
    identity = discover("0a0a0a0a")
    assert identity is not None
    assert (identity.rank, identity.world_size, identity.launcher) == (6, 8, "torchrun")


def test_a_child_of_a_slurm_task_is_not_that_task(monkeypatch):
    """Children of mp.spawn inherit the variables of their parent."""
    _setenv(monkeypatch, SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2)
    assert _ask_child() is None


def test_a_child_that_was_given_its_own_rank_has_it(monkeypatch):
    """mp.spawn with RANK set by hand is the other way to start ranks."""
    _setenv(monkeypatch, RANK=1, WORLD_SIZE=2)
    assert _ask_child() == ("torchrun", 1)


def test_a_loopback_rendezvous_proves_one_host(monkeypatch):
    """Then the local rank is the rank, though no launcher says so."""
    _setenv(monkeypatch, RANK=3, WORLD_SIZE=4, MASTER_ADDR="127.0.0.1")
    identity = discover("0a0a0a0a")
    assert identity is not None
    assert (identity.local_rank, identity.local_world_size) == (3, 4)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"TORCHELASTIC_RUN_ID": "default"}, None),
        ({"TORCHELASTIC_RUN_ID": "job-7"}, "job-7"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}, "12.0"),
        ({"TORCHELASTIC_RUN_ID": "job-7", "SLURM_JOB_ID": "12"}, "job-7"),
        ({"SLURM_JOB_ID": "12"}, "12"),
    ],
)
def test_the_run_id_is_torchelastics_unless_it_is_its_default_else_slurms(monkeypatch, values, expected):
    """`none` is what torchrun says when nobody gave an id."""
    _setenv(monkeypatch, **values)
    assert configured_run_id() == expected


@pytest.mark.parametrize(
    ("values", "variables"),
    [
        ({"TORCHELASTIC_RUN_ID": "../.."}, "TORCHELASTIC_RUN_ID"),
        ({"SLURM_JOB_ID": ".."}, "SLURM_JOB_ID"),
        ({"SLURM_JOB_ID": "..", "SLURM_STEP_ID": "/"}, "SLURM_JOB_ID and SLURM_STEP_ID"),
        ({"SLURM_JOB_ID": "-", "SLURM_STEP_ID": "\u00e9"}, "SLURM_JOB_ID and SLURM_STEP_ID"),
    ],
)
def test_a_run_id_that_names_no_folder_is_refused_by_its_variable(monkeypatch, values, variables):
    """Nobody gave a run id, so the sentence says where it comes from, and how to give one."""
    _setenv(monkeypatch, **values)
    with pytest.raises(ConfigurationError, match=f"of {variables} has no letter.*or give run_id"):
        configured_run_id()


@pytest.mark.parametrize("step", ["_", "0", "./x", "9-"])
def test_a_run_id_of_the_launcher_that_is_taken_can_be_made_safe(monkeypatch, step):
    """What names a folder here names one in the store's layout."""
    _setenv(monkeypatch, SLURM_JOB_ID="..", SLURM_STEP_ID=step)
    found = configured_run_id()
    assert found is not None
    assert safe_run_id(found)


def test_process_ids_are_8_hex_digits_and_differ():
    """They name processes over all restarts of a run."""
    ids = {new_process_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(one) == 8 and set(one) <= set("0123456789abcdef") for one in ids)
