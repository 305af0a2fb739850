"""What a build shows: each entry and stage while it runs, and a table of times and sizes at the end."""

import time
from collections import defaultdict
from types import TracebackType

from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table

from aot_compiler.pipeline import Progress
from artifacts.folder import Artifact

_STAGES = ("trace", "lower", "compile")


class BuildView:
    """Shows progress on a console; a context manager around the build.

    On a terminal a table is redrawn in place; elsewhere each finished stage is one line.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._rows: dict[str, dict[str, Progress]] = defaultdict(dict)
        self._whole: dict[str, Progress] = {}
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=4, transient=True)
        self._started = time.perf_counter()

    def __enter__(self) -> "BuildView":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def report(self, progress: Progress) -> None:
        """Take in one finished stage."""
        if progress.entry:
            self._rows[progress.entry][progress.stage] = progress
        else:
            self._whole[progress.stage] = progress
        if progress.warning:
            self.console.print(f"warning: {progress.warning}", style="yellow", markup=False, highlight=False)
        if not self.console.is_terminal:
            size = f", {decimal(progress.bytes)}" if progress.bytes else ""
            where = f"{progress.entry}: " if progress.entry else ""
            self.console.print(f"{where}{progress.stage} {progress.seconds:.1f} s{size}", highlight=False)

    def summary(self, artifact: Artifact) -> None:
        """Print the closing table."""
        self.console.print(self._table())
        files = artifact.manifest.files
        sizes = {
            kind: sum(record.size for path, record in files.items() if path.startswith(f"{kind}/"))
            for kind in ("weights", "programs", "graphs")
        }
        self.console.print(
            f"{artifact.root}: weights {decimal(sizes['weights'])}, programs {decimal(sizes['programs'])}, "
            f"graphs {decimal(sizes['graphs'])}; built in {time.perf_counter() - self._started:.1f} s",
            highlight=False,
            soft_wrap=True,
        )

    def _table(self) -> Table:
        table = Table(title_justify="left")
        table.add_column("entry", no_wrap=True)
        for stage in _STAGES:
            table.add_column(f"{stage} s", justify="right")
        table.add_column("graph", justify="right")
        table.add_column("program", justify="right")
        for entry, stages in self._rows.items():
            table.add_row(
                entry,
                *(f"{stages[stage].seconds:.1f}" if stage in stages else "..." for stage in _STAGES),
                *(decimal(stages[stage].bytes) if stage in stages else "" for stage in ("lower", "compile")),
            )
        for stage, progress in self._whole.items():
            size = decimal(progress.bytes) if progress.bytes else ""
            table.add_row(f"{stage} {progress.seconds:.1f} s {size}".strip())
        return table
