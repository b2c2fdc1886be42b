"""The pictures of the reports: what ended when, memory and descriptors over time. Judges nothing."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.chaos.sampler import Sample
from tests.chaos.trial import Result

_DPI = 110


def plot_trial(result: Result, path: Path) -> None:
    """Requests that ended, with the faults as lines; memory and descriptors of every process."""
    figure = Figure(figsize=(11, 9), layout="constrained")
    ended, *others = figure.subplots(3, 1, sharex=True)
    ends = [record.ended - result.began for record in result.records]
    ended.hist(ends, bins=max(10, int(result.ended - result.began) // 2), histtype="step")
    ended.set_ylabel("requests ended")
    for fault_done in result.injected:
        ended.axvline(fault_done.at - result.began, color="red", alpha=0.2, linewidth=0.7)
    _processes(others, result.samples, result.began)
    figure.savefig(path, dpi=_DPI)


def plot_samples(samples: Sequence[Sample], path: Path) -> None:
    """Memory and descriptors of every process, from the first sample on."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    _processes(list(figure.subplots(2, 1, sharex=True)), samples, samples[0].at)
    figure.savefig(path, dpi=_DPI)


def _processes(axes: Sequence[Axes], samples: Sequence[Sample], began: float) -> None:
    memory, descriptors = axes
    _lines(memory, samples, lambda sample: sample.rss / 2**20, began)
    memory.set_ylabel("RSS, MiB")
    memory.legend(ncols=4, fontsize="small")
    _lines(descriptors, samples, lambda sample: float(sample.descriptors), began)
    descriptors.set_ylabel("descriptors")
    descriptors.set_xlabel("seconds")


def _lines(axis: Axes, samples: Sequence[Sample], value: Callable[[Sample], float], began: float) -> None:
    """A process that was started again has another line of the same colour."""
    names = list(dict.fromkeys(sample.name for sample in samples))
    for number, name in enumerate(names):
        for index, pid in enumerate(dict.fromkeys(sample.pid for sample in samples if sample.name == name)):
            own = [sample for sample in samples if sample.pid == pid]
            times, values = [sample.at - began for sample in own], [value(sample) for sample in own]
            axis.plot(times, values, color=f"C{number}", label=name if index == 0 else None, linewidth=1)
