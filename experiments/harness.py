"""What an experiment is, and how its cases are run: each in a fresh process, none of them twice.

A finished case is a file of its own at once, so that a run which was stopped goes on where it was,
and so that other machines may measure some of the cases (:mod:`experiments.cluster`). When all
are there, they replace the experiment's older results (:mod:`experiments.results`).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from tqdm import tqdm

from . import results
from .results import Parts, Plain, Record

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from matplotlib.figure import Figure

Config = TypeVar("Config")
Case = TypeVar("Case")
GIB = 1 << 30
SIZES = ("tiny", "quick", "default", "paper")


@dataclass(frozen=True)
class Experiment(Generic[Config, Case]):
    """An artefact, as functions: which cases there are, what is measured, how it is shown.

    Attributes:
        sizes: Configurations by size. A size that is not there is as the default. They are frozen
            dataclasses; their fields are options of the command line.
        case: The type of the cases, a frozen dataclass of numbers and strings.
        cases: The cases of a configuration.
        measure: Figures of a case, which JSON can hold. Runs in a fresh process.
        table: The records as Markdown.
        summary: What the READMEs, of the repository or of this folder, show of them; by default the
            table.
        summarized: Of which cases.
        misses: What of the records is above its target, a sentence each.
        plot: The records as a figure.
        memory: Bytes that it takes to measure a case; on an accelerator where there is one.
        exact: Whether the figures are counts, which do not mind what else the machine does.
        accelerator: Whether it is measured on one where there is one. (Counts, and kernels of the
            CPU, are not.)
        libraries: Whose versions are told besides those of the framework.
        choices: The values that some of the options know.
        backend: Processes of "torch" start as forks of one that has imported the experiment and
            done nothing else. JAX does not like forks.
    """

    sizes: Mapping[str, Config]
    case: type[Case]
    cases: Callable[[Config], Iterable[Case]]
    measure: Callable[[Case], dict[str, Any]]
    table: Callable[[Sequence[Record[Case]]], str]
    misses: Callable[[Sequence[Record[Case]]], Iterable[str]] = lambda records: ()
    plot: Callable[[Sequence[Record[Case]]], Figure] | None = None
    summary: Callable[[Sequence[Record[Case]]], str] | None = None
    summarized: Callable[[Case], bool] = lambda case: True
    memory: Callable[[Case], int] = lambda case: 2 * GIB
    exact: bool = False
    accelerator: bool = True
    libraries: Sequence[str] = ()
    choices: Mapping[str, Collection[Any]] = field(default_factory=dict)
    backend: Literal["torch", "jax"] = "torch"

    @property
    def name(self) -> str:
        """On the command line, and of the results: that of the module."""
        return self.measure.__module__.rpartition(".")[2]

    @property
    def settings(self) -> dict[str, Any]:
        """Those with which a case is measured here."""
        return results.settings(self.backend, self.accelerator, self.libraries)

    def unknown(self, config: Config) -> str:
        """Of a value that an option does not know, a sentence."""
        for option, known in self.choices.items():
            given = getattr(config, option)
            for value in given if isinstance(given, tuple) else (given,):
                if value not in known:
                    there_are = ", ".join(map(str, known))
                    return f"{self.name} has no {option} {value!r}; there are {there_are}"
        return ""

    def config(self, size: str) -> Config:
        """The configuration of a size."""
        return self.sizes.get(size, self.sizes["default"])

    def typed(self, records: Iterable[Plain]) -> list[Record[Case]]:
        """Records as they were before JSON."""
        return [Record(self.case(**r.case), r.figures, r.settings) for r in records]


@dataclass
class Run(Generic[Case]):
    """Cases to be measured.

    Attributes:
        size, options, command: To be told in the results.
        whole: Whether these are all cases of that size by these options, so that they replace all
            older ones.
        folder: Of the results.
        workers: How many processes at once. Times are measured by one at once, whatever this is.
        one_process: Whether one process measures all cases, where it takes long to begin one.
        failed: Cases that could not be measured, and why.
    """

    experiment: Experiment[Any, Case]
    cases: list[Case]
    size: str
    command: str
    options: str = ""
    whole: bool = True
    folder: Path = results.FOLDER
    workers: int = 1
    one_process: bool = False
    failed: dict[Case, str] = field(default_factory=dict)
    _shared: ProcessPoolExecutor | None = None

    @property
    def parts(self) -> Parts:
        """Where finished cases are until all are."""
        return Parts(self.folder, self.experiment.name, self.size)

    def too_large(self) -> list[Case]:
        """The cases for which this machine has too little memory."""
        free = results.free_memory(self.experiment.accelerator)
        return [case for case in self.cases if self.experiment.memory(case) > free]

    def left(self, anywhere: bool = False) -> list[Case]:
        """What an earlier run, stopped, has not measured: on a machine like this, or on any."""
        here = {"options": self.options} | ({} if anywhere else self.experiment.settings)

        def is_done(case: Case) -> bool:
            record = self.parts.read(plain(case))
            return record is not None and here.items() <= record.settings.items()

        return [case for case in self.cases if not is_done(case)]

    def measure(self, case: Case) -> Exception | None:
        """Measure a case in a process, and keep what came out."""
        experiment, process = self.experiment, self._process()
        try:
            taken = (experiment.backend, experiment.accelerator, experiment.libraries)
            record = process.submit(_record, experiment.measure, taken, case).result()
        except Exception as error:
            if isinstance(error, BrokenExecutor):
                self._shared = None
            return error
        finally:
            if process is not self._shared:
                process.shutdown()
        self.parts.write(record, options=self.options, command=self.command, **results.state())
        return None

    def _process(self) -> ProcessPoolExecutor:
        if self._shared is not None:
            return self._shared
        process = ProcessPoolExecutor(1, mp_context=self._context())
        if self.one_process:
            self._shared = process
        return process

    def _context(self) -> BaseContext:
        if self.experiment.backend == "jax":
            return multiprocessing.get_context("spawn")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([self.experiment.measure.__module__])
        return context

    def run(self) -> list[Record[Case]]:
        """Measure what is left, and put all in the place of older results."""
        left = self.left()
        bar = tqdm(total=len(self.cases), initial=len(self.cases) - len(left))
        bar.set_description(self.experiment.name)
        for case, error in zip(left, self._measured(left), strict=True):
            bar.update()
            if error is not None:
                self.failed[case] = f"{type(error).__name__}: {error}"
                bar.write(f"failed: {case}: {self.failed[case]}\n{error.__cause__ or ''}")
        bar.close()
        if self._shared is not None:
            self._shared.shutdown()
        return self.collect()

    def _measured(self, cases: list[Case]) -> Iterator[Exception | None]:
        at_once = self.workers if self.experiment.exact and not self.one_process else 1
        with ThreadPoolExecutor(at_once) as threads:
            try:
                yield from threads.map(self.measure, cases)
            except BaseException:  # an interruption
                threads.shutdown(cancel_futures=True)
                raise

    def collect(self) -> list[Record[Case]]:
        """Put the finished cases, wherever they were measured, in the place of older results."""
        found = [self.parts.read(plain(case)) for case in self.cases if case not in self.failed]
        fresh = [record for record in found if record is not None]
        finished = len(fresh) == len(self.cases)
        name = self.experiment.name
        whole = self.whole and finished
        results.replace(self.folder, name, fresh, whole)
        if finished:
            self.parts.forget(map(plain, self.cases))
        return self.experiment.typed(fresh)


def plain(case: Any) -> dict[str, Any]:
    """As JSON has it."""
    return asdict(case)


def _record(measure: Callable[[Any], dict[str, Any]], taken: tuple[Any, ...], case: Any) -> Plain:
    return Record(plain(case), measure(case), results.settings(*taken))
