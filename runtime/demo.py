"""One question answered three times: from text, from the embeddings of the same text, and from a mix of both.

``python -m runtime.demo PATH`` exits 1 unless all three answers are equal and nothing was compiled. It shows how the
three kinds of prompt are made; ``make demo`` builds the artifact and runs it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from artifacts import command_line
from runtime.llm import LLM
from runtime.outputs import RequestOutput
from runtime.sampling import SamplingParams

QUESTION = "What is the capital of France?"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Folder of an artifact with a chat template.")],
    question: Annotated[str, typer.Option("--question", help="What to ask.")] = QUESTION,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens to generate at most.")] = 48,
) -> None:
    """Answer one question from text, from the embeddings of the same text, and from a mix of both."""
    llm = LLM(path)
    outputs = ask(llm, question, SamplingParams(temperature=0, max_tokens=max_tokens))
    stats = llm.stats
    llm.close()
    equal = count_equal(outputs)
    show(question, outputs, equal, stats["load_ms"], stats["compilations"])
    if equal != len(outputs) or stats["compilations"]:
        raise typer.Exit(1)


def ask(llm: LLM, question: str, params: SamplingParams) -> Mapping[str, RequestOutput]:
    """Ask one question in three ways; one output for each, by the name of its source.

    Raises:
        RequestError: the artifact has no tokenizer or no chat template, or the question is too long.
    """
    (from_text,) = llm.chat([{"role": "user", "content": question}], params)

    token_ids = np.asarray(from_text.prompt_token_ids)
    rows = llm.embed(token_ids)
    (from_embeddings,) = llm.generate({"prompt_embeds": rows}, params)

    is_token_ids = np.arange(len(token_ids)) >= len(token_ids) // 2  # the first half embeddings, the rest ids
    mixed = {"prompt_token_ids": token_ids, "prompt_embeds": rows, "prompt_is_token_ids": is_token_ids}
    (from_both,) = llm.generate(mixed, params)

    outputs = {"text": from_text, "embeddings": from_embeddings, "both": from_both}
    for output in outputs.values():
        if output.error is not None:
            raise output.error
    return outputs


def count_equal(outputs: Mapping[str, RequestOutput]) -> int:
    """How many outputs have the token ids of the first, itself included."""
    token_ids = [output.outputs[0].token_ids for output in outputs.values()]
    return sum(ids == token_ids[0] for ids in token_ids)


def show(
    question: str,
    outputs: Mapping[str, RequestOutput],
    equal: int,
    load_ms: Mapping[str, float],
    compilations: int,
) -> None:
    """Print question, answers, and what loading took."""
    console = Console(highlight=False, markup=False)
    console.print(Text("\nquestion", "bold"))
    console.print(Padding(Text(question), (0, 0, 0, 2), expand=False))
    for source, output in outputs.items():
        ids = sum(token_id is not None for token_id in output.prompt_token_ids)
        rows = f"{ids} token ids, {len(output.prompt_token_ids) - ids} embeddings"
        console.print(Text.assemble(("\nanswer from " + source, "bold"), (f"  {rows}", "dim")))
        console.print(Padding(Text(output.outputs[0].text.strip()), (0, 0, 0, 2), expand=False))
    console.print(f"\nequal: {equal} of {len(outputs)}")

    programs = [milliseconds for stage, milliseconds in load_ms.items() if stage.startswith("program ")]
    stages = {stage: milliseconds for stage, milliseconds in load_ms.items() if not stage.startswith("program ")}
    stages[f"{len(programs)} programs, on first need and in the background"] = sum(programs)
    console.print(Text("\nload", "bold"))
    for stage, milliseconds in stages.items():
        console.print(f"{milliseconds:10.1f} ms  {stage}")
    console.print(f"compilations: {compilations}")


if __name__ == "__main__":
    command_line.run(app)
