"""Model and cache dtypes other than float32, from checkpoint to logits."""

import copy
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from runtime.llm import LLM
from runtime.sampling import SamplingParams
from tests.conftest import build_yaml
from tests.oracle import oracle_logits

YAML = """\
model: {{source: {source}, dtype: {dtype}}}
buckets: {{prefill: [16], decode: [2], context: [32]}}
kv_cache: {{block_size: 8, tokens: 64, dtype: {cache}}}
output: {output}
"""
IDS = [5, 9, 31, 7, 40, 2, 77, 13, 5, 5, 60]


@pytest.mark.parametrize(("dtype", "cache"), [("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_logprobs_are_those_of_float32_within_bfloat16(
    tmp_path: Path, tiny_checkpoint: Path, tiny_llama: LlamaForCausalLM, dtype: str, cache: str
) -> None:
    build_yaml(tmp_path / "out", YAML, source=str(tiny_checkpoint), dtype=dtype, cache=cache)
    oracle = copy.deepcopy(tiny_llama)
    if dtype == "bfloat16":
        oracle = oracle.bfloat16().float()  # the same rounded weights, computed exactly
    with LLM(tmp_path / "out") as llm:
        rows = llm.embed(IDS)
        assert rows.dtype == (ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=20)
        by_id, by_row, by_float = llm.generate(
            [IDS, {"prompt_embeds": rows}, {"prompt_embeds": rows.astype(np.float32)}], params
        )
        completion = by_id.outputs[0]
        assert by_row.outputs[0].token_ids == by_float.outputs[0].token_ids == completion.token_ids
        assert by_row.outputs[0].cumulative_logprob == completion.cumulative_logprob
    embeds = oracle.model.embed_tokens(torch.tensor([*IDS, *completion.token_ids[:-1]]))
    expected = torch.log_softmax(torch.tensor(oracle_logits(oracle, embeds)), -1)[len(IDS) - 1 :]
    assert completion.logprobs is not None
    errors = [
        abs(logprob.logprob - float(step[token_id]))
        for step, logprobs in zip(expected, completion.logprobs, strict=True)
        for token_id, logprob in logprobs.items()
    ]
    assert 1e-5 < np.max(errors) < 0.15  # bfloat16 keeps 8 bits: it differs, and not by more than its rounding
