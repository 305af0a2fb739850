"""``aot-run``: generate from an artifact, and measure its steps."""

import difflib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import typer

from artifacts import command_line
from artifacts.errors import EntryNotFoundError, PromptError

if TYPE_CHECKING:
    from runtime.outputs import CompletionOutput

app = typer.Typer(
    name="aot-run",
    help="Generate from an artifact, and measure its steps.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PathArgument = Annotated[Path, typer.Argument(metavar="PATH", help="Folder of the artifact.")]
LayoutOption = Annotated[
    str | None, typer.Option("--layout", metavar="NAME", help="Layout; needed where there are several.")
]
ThreadsOption = Annotated[int | None, typer.Option("--threads", metavar="N", min=1, help="Size of XLA's thread pool.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Entry point of the console script."""
    command_line.run(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{app.info.name} {version('aot-compiler')}")
        raise typer.Exit


@app.callback()
def aot_run(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Generate from an artifact, and measure its steps."""


@app.command(short_help="Generate from one prompt.")
def generate(
    path: PathArgument,
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="The prompt as text.")] = None,
    prompt_token_ids: Annotated[
        str | None, typer.Option("--prompt-token-ids", metavar="IDS", help="The prompt as token ids: 1,2,3.")
    ] = None,
    prompt_embeds: Annotated[
        Path | None,
        typer.Option(
            "--prompt-embeds",
            metavar="FILE",
            help="The prompt as rows: .npy, or .safetensors with prompt_embeds and, to mix rows and ids, "
            "prompt_token_ids and prompt_is_token_ids.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", help="Tokens to generate at most.")] = 64,
    layout: LayoutOption = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the chat template.")] = False,
    temperature: Annotated[float, typer.Option("--temperature", metavar="X", help="0 takes the best token.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", metavar="N", help="0 takes all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", metavar="X", help="1 takes all.")] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Makes sampling repeatable.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="Stop string. May be repeated.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of text.")] = False,
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", metavar="N", help="Also print so many best tokens of each step.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check every file's digest first.")] = False,
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Generate from a text, from token ids or from embeddings."""
    from runtime.llm import LLM
    from runtime.sampling import SamplingParams

    given = _prompt(prompt, prompt_token_ids, prompt_embeds)
    if chat and prompt is None:
        raise PromptError(
            found="--chat without --prompt",
            expected="--chat with --prompt: a template is text",
            action="render the template before encoding or embedding it",
        )
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    llm = LLM(path, layout, verify=verify, threads=threads)
    if chat:
        (output,) = llm.chat([{"role": "user", "content": prompt or ""}], params)
    else:
        (output,) = llm.generate([given], params)
    llm.close()
    if output.error is not None:
        raise output.error
    completion = output.outputs[0]
    if json:
        document = {"output": output, "stats": llm.stats}
        typer.echo(msgspec.json.format(msgspec.json.encode(document, enc_hook=_plain), indent=2))
        return
    if llm.tokenizer is None:
        typer.echo(" ".join(str(token_id) for token_id in completion.token_ids))
    else:
        typer.echo(completion.text)
    _print_logprobs(completion)


@app.command(short_help="Time the steps of every entry.")
def bench(
    path: PathArgument,
    layout: LayoutOption = None,
    entry: Annotated[
        list[str] | None, typer.Option("--entry", metavar="NAME", help="Time this entry alone. May be repeated.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Timed steps of each entry, at most.")] = 20,
    seconds: Annotated[
        float,
        typer.Option("--seconds", metavar="X", min=0, help="Time for each entry, at most; 3 steps are always done."),
    ] = 5.0,
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Time the steps of every entry: median and 95th percentile."""
    from runtime.bench import heading, line, measure
    from runtime.program import load

    program = load(path, layout, threads=threads)
    names = _known_entries(entry or [], list(program.entries))
    timings = []
    if not json:
        typer.echo(heading(names))
    program.preload()
    for name in names:
        timings.append(measure(program, name, steps, seconds))
        if not json:
            typer.echo(line(timings[-1], names))
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode({"entries": timings, "stats": program.stats}), indent=2))


def _prompt(text: str | None, token_ids: str | None, embeds: Path | None) -> object:
    """The one prompt that the options give, in a form that ``LLM.generate`` takes."""
    from runtime.embeds_file import read_prompt_embeds

    options = {"--prompt": text, "--prompt-token-ids": token_ids, "--prompt-embeds": embeds}
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        raise PromptError(
            found=f"both {' and '.join(given)}" if given else "no prompt",
            expected="one of --prompt TEXT, --prompt-token-ids IDS and --prompt-embeds FILE",
            action="give one of them",
        )
    if text is not None:
        return {"prompt": text}
    return {"prompt_token_ids": _ids(token_ids)} if token_ids is not None else read_prompt_embeds(embeds or Path())


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise PromptError(
            found=f"--prompt-token-ids {text!r}", expected="integers, as in 1,2,3", action="give text to --prompt"
        ) from None


def _known_entries(wanted: Sequence[str], known: list[str]) -> list[str]:
    """The entries to time, each once; all of them where none is named."""
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise EntryNotFoundError(
                found=f"entry {name!r}",
                expected=f"one of {', '.join(known)}",
                action=f"did you mean {near[0]}?" if near else "name one of these",
            )
    return list(dict.fromkeys(wanted)) or known


def _print_logprobs(completion: "CompletionOutput") -> None:
    """Print each step's tokens, the chosen one marked; nothing where none were asked for."""
    if completion.logprobs is None:
        return
    typer.echo("\nstep  chosen  rank   logprob      id  text")
    for step, (chosen, ranked) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True), start=1):
        for token_id, token in sorted(ranked.items(), key=lambda item: item[1].rank):
            mark = "*" if token_id == chosen else ""
            shown = "" if token.decoded_token is None else repr(token.decoded_token)
            line = f"{step:4}  {mark:^6}  {token.rank:4}  {token.logprob:8.4f}  {token_id:6}  {shown}"
            typer.echo(line.rstrip())


def _plain(value: object) -> object:
    """What msgspec does not know: numpy scalars, and errors as their text."""
    return value.item() if isinstance(value, np.generic) else str(value)


if __name__ == "__main__":
    main()
