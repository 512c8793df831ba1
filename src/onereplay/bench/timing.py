"""The one clock of all benchmarks, and the card that says where it ran.

One measured call gives up to three times, each with its own start and stop:

* wall: `perf_counter` from before the call until the device is idle again;
* device: between two CUDA events around the call on the current stream. It includes gaps in which the device waits for
  the host, so a launch-bound call shows its launch time here;
* host: `perf_counter` from before the call until it returns, without waiting for the device.

The device is idle before every call, the garbage collector is off, and the first calls are not counted. On a CPU there
is the wall time alone.
"""

import contextlib
import datetime
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

from onereplay.core.graphs import no_garbage_collection

MIN_REPEATS = 5
MAX_WARMUP = 5
_REPOSITORY = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds over the counted calls."""

    median: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        """From seconds a call."""
        milliseconds = np.asarray(seconds) * 1e3
        return cls(float(np.median(milliseconds)), float(np.percentile(milliseconds, 99)))


@dataclass(frozen=True, slots=True)
class Timing:
    """What one call costs."""

    inside: str
    """What is inside the clock."""
    repeats: int
    """Counted calls. With fewer than 100 the p99 is next to the slowest."""
    wall_ms: Spread
    device_ms: Spread | None
    host_ms: Spread | None
    peak_mib: float | None
    """Device memory that the calls allocated at their highest, above what was there before."""

    @property
    def best_ms(self) -> Spread:
        """The time to compare by: of the device where there is one, else of the wall."""
        return self.device_ms or self.wall_ms


def measure(
    call: Callable[[], object], device: torch.device, *, inside: str, repeats: int = 50, seconds: float = 1.0
) -> Timing:
    """Time a call.

    Args:
        call: what to time, on the current stream. Its result is dropped at once.
        device: where it runs.
        inside: what the call does, for the reader of the result.
        repeats: counted calls at most.
        seconds: stop counting calls when they have taken this long together, but not before five.
    """
    _warm_up(call, device, seconds)
    clock = _CudaClock(device) if device.type == "cuda" else _HostClock()
    samples: list[_Sample] = []
    with no_garbage_collection():
        while len(samples) < repeats and (len(samples) < MIN_REPEATS or sum(s.wall for s in samples) < seconds):
            samples.append(clock.sample(call))
    device_seconds = [sample.device for sample in samples if sample.device is not None]
    host_seconds = [sample.host for sample in samples if sample.host is not None]
    return Timing(
        inside=inside,
        repeats=len(samples),
        wall_ms=Spread.of([sample.wall for sample in samples]),
        device_ms=Spread.of(device_seconds) if device_seconds else None,
        host_ms=Spread.of(host_seconds) if host_seconds else None,
        peak_mib=clock.peak_mib(),
    )


@dataclass(frozen=True, slots=True)
class _Sample:
    """Seconds of one call."""

    wall: float
    device: float | None = None
    host: float | None = None


class _HostClock:
    def sample(self, call: Callable[[], object]) -> _Sample:
        start = time.perf_counter()
        call()
        return _Sample(time.perf_counter() - start)

    def peak_mib(self) -> float | None:
        return None


class _CudaClock:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for event in self._events:  # the first record creates the event
            event.record()
        torch.cuda.reset_peak_memory_stats(device)
        self._before = torch.cuda.memory_allocated(device)

    def sample(self, call: Callable[[], object]) -> _Sample:
        first, last = self._events
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        first.record()
        call()
        last.record()
        returned = time.perf_counter()
        torch.cuda.synchronize(self._device)
        end = time.perf_counter()
        return _Sample(wall=end - start, device=first.elapsed_time(last) / 1e3, host=returned - start)

    def peak_mib(self) -> float | None:
        return (torch.cuda.max_memory_allocated(self._device) - self._before) / 2**20


def _warm_up(call: Callable[[], object], device: torch.device, seconds: float) -> None:
    """One call, and up to four more while they fit the time."""
    start = time.perf_counter()
    for _ in range(MAX_WARMUP):
        call()
        synchronize(device)
        if time.perf_counter() - start > seconds:
            return


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------------------------------------------------------------
# Where it ran
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Card:
    """Where and with what a benchmark ran."""

    gpu: str
    """Empty on a CPU."""
    driver: str
    cpu: str
    cpus: int
    """Logical CPUs that the process may use."""
    python: str
    torch: str
    cuda: str
    transformers: str
    onereplay: str
    commit: str
    """`+` behind it means that tracked files differed from the commit."""
    date: str

    @property
    def device_slug(self) -> str:
        """The device's name for a file name: `h200`, `a100-sxm4-80gb`, `cpu`."""
        words = self.gpu.lower().removeprefix("nvidia ") or "cpu"
        return "-".join("".join(c if c.isalnum() else " " for c in words).split())


def card(device: torch.device, commit: str | None = None) -> Card:
    """The card of this process; `commit` names the tree where git cannot."""
    on_gpu = device.type == "cuda"
    return Card(
        gpu=torch.cuda.get_device_name(device) if on_gpu else "",
        driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else "",
        cpu=_cpu_name(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        transformers=_version("transformers"),
        onereplay=_version("onereplay"),
        commit=commit or _commit(),
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    )


def _commit() -> str:
    commit = _output("git", "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+" if commit and changed else commit


def _output(*command: str) -> str:
    """The first line that a command prints; empty if it cannot run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=_REPOSITORY, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().partition("\n")[0].strip() if done.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "run from its sources"


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
