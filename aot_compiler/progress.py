"""What a build shows: each entry and stage while it runs, and a table of times and sizes at the end."""

import shlex
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aot_compiler.config import CompileConfig
from aot_compiler.pipeline import Progress
from aot_compiler.plan import entry_sizes
from artifacts.folder import Artifact

_STAGES = ("trace", "lower", "compile")


class BuildView:
    """Shows progress on a console; a context manager around the build.

    On a terminal a table is redrawn in place; elsewhere each finished stage is one line.

    Args:
        console: where to.
        config: what is built.
        output: folder of the artifact; None takes the configuration's.
        with_weights: whether weights are packed.
    """

    def __init__(self, console: Console, config: CompileConfig, *, output: Path | None, with_weights: bool) -> None:
        self.console = console
        self._config = config
        self._output = output or Path(config.output)
        self._with_weights = with_weights
        self._total = len(list(entry_sizes(config))) * len(config.layouts)
        self._done: Counter[str] = Counter()
        self._rows: dict[str, dict[str, Progress]] = defaultdict(dict)
        self._whole: dict[str, Progress] = {}
        self._live = Live(console=console, get_renderable=self._progress, refresh_per_second=4, transient=True)
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
        if not self._done and not self._whole:  # from here on the configuration is known to be sound
            self._print_opening()
        if progress.entry:
            self._rows[progress.entry][progress.stage] = progress
            self._done[progress.stage] += 1
        else:
            self._whole[progress.stage] = progress
        if progress.warning:
            self._print(f"warning: {progress.warning}", style="yellow")
        if not self.console.is_terminal:
            which = f" {self._done[progress.stage]}/{self._total} {progress.entry}:" if progress.entry else ":"
            self._print(f"{progress.stage}{which} {_cost(progress)}")

    def summary(self, artifact: Artifact) -> None:
        """Print the closing table, where the artifact is, and what to do with it."""
        self.console.print(self._table())
        files = artifact.manifest.files
        sizes = {
            kind: sum(record.size for path, record in files.items() if path.startswith(f"{kind}/"))
            for kind in ("weights", "programs", "graphs")
        }
        weights = "no weights" if artifact.manifest.weights is None else f"weights {decimal(sizes['weights'])}"
        self._print(
            f"{self._output}: {weights}, programs {decimal(sizes['programs'])}, graphs {decimal(sizes['graphs'])}; "
            f"built in {time.perf_counter() - self._started:.1f} s"
        )
        self._print(f"next: {self._next_command(artifact)}")

    def _print_opening(self) -> None:
        model, target = self._config.model, self._config.target
        self._print(
            f"building {self._output} from {model.source or model.config}: {self._total} entries, {model.dtype}, for "
            f"{target.platform} (isa {target.isa}), {'with' if self._with_weights else 'without'} weights"
        )

    def _next_command(self, artifact: Artifact) -> str:
        path = shlex.quote(str(self._output))
        if artifact.manifest.weights is None:
            return f"aot-artifact inspect {path}"
        if "tokenizer/tokenizer.json" not in artifact.manifest.files:
            return f"aot-run generate {path} --prompt-token-ids 1,2,3"
        return f"aot-run generate {path} --prompt 'The capital of France is'"

    def _progress(self) -> Group:
        stages = [f"{stage} {self._done[stage]}/{self._total}" for stage in _STAGES]
        stages += [f"{stage} {_cost(progress)}" for stage, progress in self._whole.items()]
        return Group(self._table(), Text(", ".join(stages)))

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
        return table

    def _print(self, line: str, style: str | None = None) -> None:
        """One line as it is: no markup in it, and broken by the terminal alone, so that a pipe gets it whole."""
        self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _cost(progress: Progress) -> str:
    return f"{progress.seconds:.1f} s" + (f", {decimal(progress.bytes)}" if progress.bytes else "")
