"""What SIGTERM does to a process while something is open, and what the program sees of that."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import ctypes, faulthandler, os, signal, sys, threading, time
from torchinstruments import termination
from torchinstruments.termination import unwatch, watch

class Ending:
    def __init__(self, name="told", act=lambda: None):
        self.name, self.act = name, act
    def flush_at_signal(self, timeout_s):
        print("flushed", flush=True)
    def end_at_signal(self, timeout_s):
        self.act()
        print(self.name, flush=True)

def block():
    '''Waits for ever in C, with the interpreter's lock released, as a collective does.'''
    print("ready", flush=True)
    reading, _ = os.pipe()
    while True:
        ctypes.CDLL(None).read(reading, ctypes.create_string_buffer(1), 1)

def is_caught():
    status = open("/proc/self/status").read()
    (caught,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)

ending = Ending()
"""


def run(body: str, *, sends: int | None = signal.SIGTERM, times: int = 1) -> tuple[int, list[str], str]:
    """Runs a program, sends it a signal once it is ready, and returns how it ended and what it said."""
    program = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "", "OMP_NUM_THREADS": "1"},
    )
    try:
        said = []
        if sends is not None:
            assert program.stdout is not None
            for line in program.stdout:
                said.append(line.strip())
                if said[-1] == "ready":
                    break
            for _ in range(times):
                program.send_signal(sends)
        out, err = program.communicate(timeout=60)
    finally:
        program.kill()
        program.wait()
    return program.returncode, [*[one for one in said if one != "ready"], *out.split()], err


@pytest.mark.parametrize("times", [1, 5])
def test_a_process_that_is_blocked_in_c_is_seen_to_and_ends_by_the_signal(times: int) -> None:
    """Its exit status is the signal's, nothing is printed, and it is told once however often it comes."""
    assert run("watch(ending); block()", times=times) == (-signal.SIGTERM, ["told"], "")


def test_a_thread_may_be_the_one_that_opens_something() -> None:
    """The signal is caught whichever thread asked for that."""
    body = "thread = threading.Thread(target=watch, args=(ending,)); thread.start(); thread.join(); block()"
    assert run(body) == (-signal.SIGTERM, ["told"], "")


def test_a_thread_that_python_does_not_know_may_get_the_signal() -> None:
    """Where the main thread holds it back, the kernel chooses any other one."""
    body = """
    watch(ending)
    libc = ctypes.CDLL(None)
    # A thread of C alone, in the only call that no Python is behind.
    libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.sleep, ctypes.c_void_p(600))
    time.sleep(0.2)
    held = {signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    (watcher,) = [one for one in threading.enumerate() if one.name == termination.THREAD_NAME]
    block()
    """
    assert run(body) == (-signal.SIGTERM, ["told"], "")


def test_nothing_of_it_shows_in_python() -> None:
    """Handlers and wakeup descriptor are what they were, so that whoever looks at them finds the default."""
    body = """
    watch(ending)
    print(is_caught(), signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.set_wakeup_fd(-1))
    unwatch(ending)
    print(is_caught(), threading.active_count())
    """
    code, said, err = run(body, sends=None)
    assert (code, said[:4], err) == (0, ["True", "True", "-1", "False"], "")


def test_after_the_last_one_was_closed_the_signal_has_its_default_effect() -> None:
    """While another one is open it is still caught; the thread ends with the last one."""
    body = """
    other = Ending("other")
    watch(ending); watch(other); unwatch(other)
    assert is_caught()
    unwatch(ending)
    end_s = time.monotonic() + 30.0
    while threading.active_count() > 1 and time.monotonic() < end_s:
        time.sleep(0.01)
    print(threading.active_count(), is_caught(), flush=True)
    block()
    """
    assert run(body) == (-signal.SIGTERM, ["1 False"], "")


def test_one_that_is_gone_is_not_told() -> None:
    """Nothing is kept alive by being watched."""
    body = "watch(ending); other = Ending('other'); watch(other); del ending; block()"
    assert run(body) == (-signal.SIGTERM, ["other"], "")


def test_what_is_opened_again_is_seen_to_again() -> None:
    """Many times, without a further descriptor."""
    body = """
    watch(ending)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        unwatch(ending)
        watch(ending)
    print(len(os.listdir("/proc/self/fd")) - before, flush=True)
    block()
    """
    assert run(body) == (-signal.SIGTERM, ["0", "told"], "")


HANDLER = "signal.signal(signal.SIGTERM, lambda *_: (print('mine', flush=True), os._exit(7)))"


@pytest.mark.parametrize("body", [f"{HANDLER}; watch(ending)", f"watch(ending); {HANDLER}"])
@pytest.mark.parametrize("end", ["", "unwatch(ending)", "unwatch(ending); watch(ending)"])
def test_a_handler_of_the_program_counts(body: str, end: str) -> None:
    """Whether it was there before or came later, and through any number of attaches and detaches."""
    code, said, err = run(f"{body}\n{end}\nprint('ready', flush=True)\nwhile True: time.sleep(0.01)")
    assert (code, said, err) == (7, ["mine"], "")


def test_a_handler_that_calls_the_one_before_it_works() -> None:
    """It finds the default there, as without anything open, and what it does then has its effect."""
    body = """
    watch(ending)
    before = signal.getsignal(signal.SIGTERM)
    def handle(number, frame):
        print("mine", flush=True)
        signal.signal(number, before)
        os.kill(os.getpid(), number)
    signal.signal(signal.SIGTERM, handle)
    print("ready", flush=True)
    while True: time.sleep(0.01)
    """
    assert run(body) == (-signal.SIGTERM, ["mine"], "")


def test_a_program_that_gives_the_default_back_is_seen_to_again() -> None:
    """As a trainer does after its fit."""
    body = """
    termination.LOOK_AGAIN_S = 0.02
    watch(ending)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    time.sleep(0.1)
    assert signal.getsignal(signal.SIGTERM) is not before
    signal.signal(signal.SIGTERM, before)
    end_s = time.monotonic() + 30.0
    while not is_caught() and time.monotonic() < end_s:
        time.sleep(0.01)
    block()
    """
    assert run(body) == (-signal.SIGTERM, ["told"], "")


@pytest.mark.parametrize(
    ("own", "effect"),
    [
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", (0, ["passed"])),
        ("faulthandler.register(signal.SIGTERM, file=open('/dev/null', 'w'))", (0, ["passed"])),
        ("ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(1))", (0, ["passed"])),
    ],
    ids=["ignored", "dumped", "ignored in C"],
)
def test_another_effect_than_the_default_stays(own: str, effect: tuple[int, list[str]]) -> None:
    """What the program decided on counts, also where Python knows nothing of it."""
    body = f"""
    {own}
    watch(ending)
    print("ready", flush=True)
    time.sleep(0.5)
    unwatch(ending)
    os.kill(os.getpid(), signal.SIGTERM)
    print("passed")
    """
    assert run(body)[:2] == effect


def test_signals_of_an_event_loop_go_on() -> None:
    """The loop has Python's one wakeup descriptor for itself, and SIGTERM is still seen to."""
    body = """
    import asyncio
    watch(ending)
    async def main():
        loop = asyncio.get_running_loop()
        came = asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, came.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        await came.wait()
        print("usr1", flush=True)
        block()
    asyncio.run(main())
    """
    assert run(body) == (-signal.SIGTERM, ["usr1", "told"], "")


def test_one_that_hangs_or_fails_holds_up_neither_the_others_nor_the_end() -> None:
    """The process ends within its bound, and who could be told was."""
    body = """
    termination.END_TIMEOUT_S = 0.5
    def fail():
        raise OSError("no folder")
    endings = [Ending("never", threading.Event().wait), Ending("failed", fail), Ending("fine")]
    for one in endings:
        watch(one)
    block()
    """
    code, said, err = run(body)
    assert (code, said) == (-signal.SIGTERM, ["fine"])
    assert err == "torchinstruments: at SIGTERM: OSError: no folder\n"


def test_a_forked_child_has_the_default_effect_and_tells_its_parent_nothing() -> None:
    """Its end by SIGTERM is its own, from its first instruction on; one that opens something is seen to."""
    body = """
    watch(ending)
    codes = []
    for turn in range(100):
        child = os.fork()
        if child == 0:
            if turn % 2:
                # The parent sends at once; the other children are sure to have come as far as this.
                block.__globals__["print"] = lambda *_, **__: None
            block()
        if not turn % 2:
            time.sleep(0.001)
        os.kill(child, signal.SIGTERM)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(sorted(set(codes)), flush=True)
    child = os.fork()
    if child == 0:
        own = Ending("child")
        watch(own)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), is_caught(), flush=True)
    """
    code, said, err = run(body.replace("block()", "time.sleep(60)"), sends=None)
    assert (code, said, err) == (0, ["[-15]", "child", "-15", "True"], "")


def test_processes_of_multiprocessing_are_ended_as_ever() -> None:
    """``terminate`` ends them, and the parent's thread hears nothing of it."""
    body = """
    import multiprocessing
    watch(ending)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join()
    print(child.exitcode, is_caught(), flush=True)
    block()
    """
    assert run(body) == (-signal.SIGTERM, ["-15 True", "told"], "")


def test_at_the_end_of_the_interpreter_nothing_waits_for_the_signal() -> None:
    """What runs after the exit handlers, a destructor that hangs, is ended by SIGTERM as ever."""
    body = """
    import atexit
    watch(ending)
    class Last:
        def __del__(self, write=os.write, sleep=time.sleep, handler=termination._watch._handler):
            write(1, b"%d\\nready\\n" % handler.is_installed)
            sleep(60)
    last = Last()
    """
    assert run(body) == (-signal.SIGTERM, ["0"], "")


@pytest.mark.system
def test_the_first_process_of_a_container_is_flushed_and_goes_on() -> None:
    """The kernel keeps it from the default effect, so nothing is closed under it."""
    body = "watch(ending); os.kill(1, signal.SIGTERM); time.sleep(1.0); print(os.getpid(), is_caught())"
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", PRELUDE + body],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["flushed", "1", "True"], "")


def test_signals_disturb_nothing_that_runs() -> None:
    """Hundreds of them come while the stacks of several threads grow and shrink, and the program goes on."""
    body = """
    import subprocess
    num_told = [0]
    class Going(Ending):
        def flush_at_signal(self, timeout_s):
            num_told[0] += 1
    pid, os.getpid = os.getpid(), lambda: 1
    ending = Going()
    watch(ending)
    def descend(depth):
        return depth and descend(depth - 1)
    for _ in range(3):
        threading.Thread(target=lambda: [descend(200) for _ in iter(int, 1)], daemon=True).start()
    sender = f"import os, time\\nfor _ in range(500): os.kill({pid}, 15); time.sleep(1e-3)"
    sending = subprocess.Popen([sys.executable, "-S", "-c", sender])
    while sending.poll() is None:
        descend(100)
    print(num_told[0] > 0, flush=True)
    os._exit(0)
    """
    assert run(body, sends=None) == (0, ["True"], "")
