"""A store that fails under a training job: no step waits for it, and no row is lost or doubled."""

import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from storage.uploaders import until
from torchinstruments import EveryNStepsSampler, inject_observer, open_run, remove_observer
from torchinstruments.environment import SPOOL_DIR
from torchinstruments.store.local import LocalStorage
from torchinstruments.store.spool_folder import WANTED, process_folders, read_progress
from torchinstruments.testing.fault_proxy import FaultProxy
from torchinstruments.testing.object_store import ObjectStore

pytestmark = pytest.mark.timeout(300)

FAULTS: dict[str, Callable[[FaultProxy], None]] = {
    "refuses": FaultProxy.down,
    "resets": FaultProxy.reset,
    "stalls": FaultProxy.stall,
    "slow_down": lambda proxy: proxy.status(503, "SlowDown"),
    "internal_error": lambda proxy: proxy.status(500, "InternalError"),
    "expired_token": lambda proxy: proxy.status(403, "ExpiredToken"),
    "loses_responses": lambda proxy: proxy.drop_response(method="PUT"),
    "slow": lambda proxy: proxy.delay(0.5),
}
STEPS = 40
PAUSE_S = 0.03
NUM_STATISTICS = 9
NOTICEABLE_S = 1.0
"""Less than this is the scheduler of a busy machine; a request that was waited for takes longer."""


class _Training:
    """A small model under observation, and how long each of its steps took."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.num_steps = 0

    def steps(self) -> list[float]:
        """Trains, with pauses in which an uploader meets the store, and returns the seconds of each step."""
        found = []
        for _ in range(STEPS):
            began_s = time.perf_counter()
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 16)).sum().backward()
            self.optimizer.step()
            found.append(time.perf_counter() - began_s)
            time.sleep(PAUSE_S)
        self.num_steps += STEPS
        return found


@pytest.fixture
def spools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of this test's spools."""
    monkeypatch.setenv(SPOOL_DIR, str(tmp_path / "spools"))
    return tmp_path / "spools"


def ask_for_upload(spools: Path) -> Callable[[], bool]:
    """Asks for everything that is spooled, as a close does; the function says whether it is up."""
    (folder,) = (folder for spool in spools.iterdir() for folder in process_folders(spool))
    token = uuid.uuid4().hex
    LocalStorage(str(folder)).replace(WANTED, token.encode())

    def is_up() -> bool:
        return read_progress(folder).served == token

    return is_up


def test_no_step_waits_for_a_store_that_fails(
    seaweed: ObjectStore,
    bucket: str,
    spools: Path,
    fault_proxy: FaultProxy,
    proxied: Callable[..., dict[str, object]],
) -> None:
    """The longest step of each outage is within three times the longest without; all rows arrive."""
    url = f"s3://{bucket}/run"
    training = _Training()
    observer = inject_observer(
        training.model,
        output_dir=url,
        storage_options=proxied(),
        sampler=EveryNStepsSampler(1),
        histograms=(),
        optimizer=training.optimizer,
        scaler=None,
    )
    training.steps()
    assert observer.flush(60.0)
    assert until(ask_for_upload(spools))
    longest_s = max(training.steps())
    bound_s = max(3 * longest_s, NOTICEABLE_S)
    lines = [f"none: {longest_s * 1000:.1f} ms"]
    for name, fault in FAULTS.items():
        num_seen = len(fault_proxy.log)
        fault(fault_proxy)
        assert observer.flush(60.0)  # durable means in the spool, so that an outage holds no flush up
        is_up = ask_for_upload(spools)
        times_s = training.steps()
        lines.append(f"{name}: {max(times_s) * 1000:.1f} ms")
        assert [one for one in times_s if one > bound_s] == [], name
        assert name == "refuses" or len(fault_proxy.log) > num_seen, name
        fault_proxy.clear()
        fault_proxy.down()  # resets what still stalls
        fault_proxy.up()
        assert until(is_up), name
    print("longest step by fault:", ", ".join(lines))
    remove_observer(training.model)
    assert until(lambda: not list(spools.iterdir()))

    counters = observer.counters
    # Two tensors of three layers.
    assert counters.rows == training.num_steps * 2 * 3 * NUM_STATISTICS
    assert counters.rows_dropped == 0
    history = open_run(url, storage_options=seaweed.storage_options).history().collect()
    assert history.height == counters.rows
    assert history.unique(["sample_id", "layer", "signal", "metric"]).height == history.height
    assert history["sample_id"].n_unique() == training.num_steps
