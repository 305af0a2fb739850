"""``aot-run``: generate from an artifact, and measure its steps."""

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich.console import Console

from artifacts import command_line
from artifacts.errors import PromptError

app = typer.Typer(
    name="aot-run",
    help="Generate from an artifact, and measure its steps.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PathArgument = Annotated[Path, typer.Argument(metavar="PATH", help="Folder of the artifact.")]
LayoutOption = Annotated[str | None, typer.Option("--layout", help="Layout; needed where there are several.")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", min=1, help="Size of XLA's thread pool.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Entry point of the console script."""
    command_line.run(app)


@app.command()
def generate(
    path: PathArgument,
    prompt: Annotated[str | None, typer.Option("--prompt", help="The prompt as text.")] = None,
    prompt_embeds: Annotated[
        Path | None,
        typer.Option(
            "--prompt-embeds", metavar="FILE", help="The prompt as rows: .npy, or .safetensors (key prompt_embeds)."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens to generate at most.")] = 64,
    layout: LayoutOption = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the chat template.")] = False,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the best token.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="0 takes all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="1 takes all.")] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Stop string. May be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of text.")] = False,
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", help="Log-probabilities of so many best tokens.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check every file's digest first.")] = False,
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Generate from a text or from embeddings."""
    from runtime.embeds_file import read_prompt_embeds
    from runtime.llm import LLM
    from runtime.sampling import SamplingParams

    if (prompt is None) == (prompt_embeds is None):
        raise PromptError(
            found="both --prompt and --prompt-embeds" if prompt is not None else "no prompt",
            expected="one of --prompt TEXT and --prompt-embeds FILE",
            action="give one of the two",
        )
    if chat and prompt is None:
        raise PromptError(
            found="--chat with --prompt-embeds",
            expected="--chat with --prompt: a template is text",
            action="render the template before embedding it",
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
    rows = None if prompt_embeds is None else read_prompt_embeds(prompt_embeds)
    llm = LLM(path, layout, verify=verify, threads=threads)
    if chat:
        (output,) = llm.chat([{"role": "user", "content": prompt or ""}], params)
    else:
        (output,) = llm.generate([{"prompt": prompt} if rows is None else {"prompt_embeds": rows}], params)
    llm.close()
    if output.error is not None:
        raise output.error
    if json:
        document = {"output": output, "stats": llm.stats}
        typer.echo(msgspec.json.format(msgspec.json.encode(document, enc_hook=_plain), indent=2))
    elif llm.tokenizer is None:
        typer.echo(" ".join(str(token_id) for token_id in output.outputs[0].token_ids))
    else:
        typer.echo(output.outputs[0].text)


@app.command()
def bench(
    path: PathArgument,
    layout: LayoutOption = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Timed steps of each entry.")] = 20,
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Time the steps of every entry: median and 95th percentile."""
    from runtime.bench import measure, print_timings
    from runtime.program import load

    program = load(path, layout, preload=True, threads=threads)
    timings = [measure(program, name, steps) for name in program.entries]
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode({"entries": timings, "stats": program.stats}), indent=2))
    else:
        print_timings(timings, Console())


def _plain(value: object) -> object:
    """What msgspec does not know: numpy scalars, and errors as their text."""
    return value.item() if isinstance(value, np.generic) else str(value)
