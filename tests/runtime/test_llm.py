from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from artifacts.errors import PromptEmbedsError, PromptError, SamplingParamsError
from runtime.llm import LLM
from runtime.sampling import SamplingParams
from tests.oracle import oracle_logits

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0)
QUICK = settings(max_examples=15, deadline=None, derandomize=True)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The oracle is too small for threads: with two, torch takes ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llm(tiny_artifact: Path) -> Iterator[LLM]:
    llm = LLM(tiny_artifact)
    yield llm
    llm.close()


def assert_greedy(model: LlamaForCausalLM, rows: np.ndarray, token_ids: list[int]) -> None:
    """These are the greedy tokens of Transformers after a prompt of embedding rows.

    One pass over prompt and output: if its best token is ours at every position, its own greedy run is ours.
    """
    embeds = torch.cat([torch.tensor(rows), model.model.embed_tokens(torch.tensor(token_ids[:-1]))])
    assert np.argmax(oracle_logits(model, embeds)[len(rows) - 1 :], axis=-1).tolist() == token_ids


@st.composite
def prompts(draw: st.DrawFn, llm_vocab: int = 300) -> tuple[list[int], list[bool]]:
    ids = draw(st.lists(st.integers(3, llm_vocab), min_size=1, max_size=80))
    mask = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    return ids, mask


@QUICK
@given(batch=st.lists(prompts(), min_size=1, max_size=7))
def test_any_batch_gives_each_request_the_tokens_of_transformers(
    llm: LLM, tiny_llama: LlamaForCausalLM, batch: list[tuple[list[int], list[bool]]]
) -> None:
    """Token, embedding and mixed prompts of any length, chunked or not, more of them than cache and buckets hold."""
    vocab = llm.program.model.vocab_size
    rng = np.random.default_rng(len(batch))
    requests, rows_of = [], []
    for ids, mask in batch:
        ids = [i % vocab for i in ids]
        table = llm.embed(ids)
        rows = np.where(np.array(mask)[:, None], table, rng.normal(0, 0.3, table.shape)).astype(np.float32)
        requests.append({"prompt_token_ids": ids, "prompt_embeds": rows, "prompt_is_token_ids": mask})
        rows_of.append(rows)
    outputs = llm.generate(requests, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    for output, rows in zip(outputs, rows_of, strict=True):
        assert len(output.outputs[0].token_ids) == 4
        assert_greedy(tiny_llama, rows, output.outputs[0].token_ids)
    assert llm._engine.pool.free == llm.program.kv_cache.blocks - 1


def test_text_ids_embeddings_and_a_mix_give_the_same_tokens(llm: LLM) -> None:
    text = "The quick brown fox jumps over the lazy dog and more than one chunk."
    (from_text,) = llm.generate(text, GREEDY)
    ids = from_text.prompt_token_ids
    rows = llm.embed(ids)
    mask = np.arange(len(ids)) % 3 == 0
    others = llm.generate(
        [
            {"prompt_token_ids": ids},
            {"prompt_embeds": rows},
            {"prompt_embeds": rows[None]},
            {"prompt_token_ids": ids, "prompt_embeds": rows, "prompt_is_token_ids": mask},
            {"prompt_embeds": torch.tensor(rows)},
        ],
        GREEDY,
    )
    assert from_text.prompt == text
    for output in others:
        assert output.outputs[0].token_ids == from_text.outputs[0].token_ids
        assert output.outputs[0].text == from_text.outputs[0].text
    assert others[1].prompt_token_ids == [None] * len(ids)


def test_ids_at_embedding_positions_are_never_looked_up(llm: LLM) -> None:
    ids = [5, 6, 7, 8]
    rows = llm.embed(ids)
    wild = [-1, 10**6, 7, -5]
    mask = [False, False, True, False]
    outputs = llm.generate(
        [{"prompt_token_ids": ids}, {"prompt_token_ids": wild, "prompt_embeds": rows, "prompt_is_token_ids": mask}],
        GREEDY,
    )
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_one_embedding_row_is_a_prefill(llm: LLM) -> None:
    outputs = llm.generate([[9], {"prompt_embeds": llm.embed([9])}], GREEDY)
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_generation_ends_at_the_largest_context(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    for length, generated in ((95, 1), (90, 6)):
        (output,) = llm.generate([[5] * length], params)
        assert len(output.outputs[0].token_ids) == generated
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("length", [96, 97, 500])
def test_a_prompt_that_leaves_no_room_is_refused(llm: LLM, length: int) -> None:
    with pytest.raises(PromptError) as caught:
        llm.generate([{"prompt_embeds": np.zeros((length, 32), np.float32)}])
    assert str(caught.value) == (
        f"a prompt of {length} tokens; expected at most 95, as a sequence holds 96 and at least one is generated; "
        "shorten the prompt, or compile a larger context bucket"
    )


def test_a_bad_request_leaves_the_engine_as_it_was(llm: LLM) -> None:
    (before,) = llm.generate([[5, 6, 7]], GREEDY)
    for bad in (
        {"prompt_embeds": np.full((2, 32), np.nan, np.float32)},
        {"prompt_embeds": np.zeros((2, 31), np.float32)},
    ):
        with pytest.raises(PromptEmbedsError):
            llm.generate([[5, 6, 7], bad], GREEDY)
    (after,) = llm.generate([[5, 6, 7]], GREEDY)
    assert before.outputs == after.outputs


def test_stop_token_and_eos_end_a_request(llm: LLM) -> None:
    (free,) = llm.generate([[5, 6, 7]], GREEDY)
    tokens = free.outputs[0].token_ids
    stop = tokens[4]
    (stopped,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=10, stop_token_ids=[stop]))
    completion = stopped.outputs[0]
    assert completion.token_ids == tokens[: tokens.index(stop) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_a_stop_string_ends_a_request_and_is_cut(llm: LLM) -> None:
    (free,) = llm.generate("The quick brown fox", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    text = free.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    (stopped,) = llm.generate(
        "The quick brown fox", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=stop)
    )
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)


def test_sampling_does_not_depend_on_the_batch(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=11, max_tokens=8, ignore_eos=True)
    (alone,) = llm.generate([[5, 6, 7]], params)
    batch = llm.generate([[9, 9], [5, 6, 7], [30] * 40, [5, 6, 7], [1]], params)
    assert [output.outputs[0].token_ids for output in (batch[1], batch[3])] == [alone.outputs[0].token_ids] * 2
    other = llm.generate([[5, 6, 7]], SamplingParams(temperature=1.0, seed=12, max_tokens=8, ignore_eos=True))[0]
    assert other.outputs[0].token_ids != alone.outputs[0].token_ids


def test_logprobs_are_those_of_transformers(llm: LLM, tiny_llama: LlamaForCausalLM) -> None:
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=4))
    completion = output.outputs[0]
    embeds = tiny_llama.model.embed_tokens(torch.tensor([5, 6, 7, *completion.token_ids]))
    expected = torch.log_softmax(torch.tensor(oracle_logits(tiny_llama, embeds)), -1)[2:5]
    assert completion.logprobs is not None
    for step, logprobs in zip(expected, completion.logprobs, strict=True):
        assert list(logprobs) == step.topk(4).indices.tolist()
        for token_id, logprob in logprobs.items():
            assert logprob.logprob == pytest.approx(float(step[token_id]), abs=1e-4)
        assert [logprob.rank for logprob in logprobs.values()] == [1, 2, 3, 4]


def test_usage_counts_embedding_rows(llm: LLM) -> None:
    (output,) = llm.generate([{"prompt_embeds": llm.embed([3] * 20)}], GREEDY)
    assert len(output.prompt_token_ids) == output.metrics.prefill_tokens == 20
    assert output.metrics.output_tokens == 10


def test_chat_uses_the_template(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "fox"}], GREEDY)
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False) == "user: fox\n"


def test_chat_takes_many_conversations_and_reports_the_text(llm: LLM) -> None:
    one, two = [{"role": "user", "content": "fox"}], [{"role": "user", "content": "lazy dog"}]
    outputs = llm.chat([one, two], GREEDY)
    assert [output.prompt for output in outputs] == ["user: fox\n", "user: lazy dog\n"]
    (alone,) = llm.chat(one, GREEDY)
    assert outputs[0].outputs[0].token_ids == alone.outputs[0].token_ids


def test_an_array_of_ids_is_one_prompt(llm: LLM) -> None:
    expected = llm.generate([[5, 6, 7]], GREEDY)[0].outputs
    for prompt in (np.array([5, 6, 7]), torch.tensor([5, 6, 7]), (5, 6, 7), [np.int64(5), 6, 7]):
        (output,) = llm.generate(prompt, GREEDY)
        assert output.outputs == expected


@pytest.mark.parametrize("params", [{"temperature": 0}, 0.5, [{"temperature": 0}], [GREEDY, GREEDY]])
def test_sampling_parameters_of_a_wrong_kind_are_refused(llm: LLM, params: object) -> None:
    with pytest.raises(SamplingParamsError, match="SamplingParams"):
        llm.generate([[5, 6, 7]], params)  # type: ignore[arg-type]


def test_no_prompt_is_refused_and_no_prompts_give_no_outputs(llm: LLM) -> None:
    with pytest.raises(PromptError, match="a prompt of type NoneType"):
        llm.generate(None)
    assert llm.generate([]) == []


def test_an_iterator_is_refused_and_not_half_read(llm: LLM) -> None:
    with pytest.raises(PromptError, match="a prompt of type generator"):
        llm.generate(prompt for prompt in [[1, 2, 3]])


def test_calls_from_several_threads_take_turns(llm: LLM) -> None:
    prompts = [[5 + i, 9, 11] for i in range(6)]
    expected = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda prompt: llm.generate([prompt], GREEDY)[0].outputs[0].token_ids, prompts))
    assert found == expected


def test_logits_that_are_not_finite_end_their_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,) = llm.generate([[5, 6, 7]], GREEDY)
    run = llm.program.run

    def poisoned(entry: str, **inputs: np.ndarray) -> np.ndarray:
        logits = run(entry, **inputs).copy()
        if entry.startswith("decode"):
            logits[0] = np.nan
        return logits

    monkeypatch.setattr(llm.program, "run", poisoned)
    bad, good = llm.generate([[9, 9], [5, 6, 7]], GREEDY)
    assert (bad.outputs[0].finish_reason, len(bad.outputs[0].token_ids)) == ("error", 1)
    assert "finite logits" in str(bad.error)
    assert good.error is None or len(good.outputs[0].token_ids) > 1  # the poison follows the first row
    assert good.outputs[0].token_ids == alone.outputs[0].token_ids[: len(good.outputs[0].token_ids)]
    monkeypatch.undo()
    assert llm._engine.pool.free == llm.program.kv_cache.blocks - 1


def test_embed_returns_rows_of_its_own(llm: LLM, tiny_llama: LlamaForCausalLM) -> None:
    rows = llm.embed([1, 5, 1])
    np.testing.assert_array_equal(rows, tiny_llama.model.embed_tokens.weight.detach().numpy()[[1, 5, 1]])
    rows[:] = 0
    assert np.abs(llm.embed([1])).max() > 0
    for bad in ([-1], [llm.program.model.vocab_size]):
        with pytest.raises(PromptError):
            llm.embed(bad)
