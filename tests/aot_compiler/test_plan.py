import json
from pathlib import Path

import pytest

from aot_compiler.config_file import load_config
from aot_compiler.plan import CompilePlan, make_plan
from artifacts.errors import CheckpointNotFoundError, PlanError, UnsupportedModelError

CONFIGS = Path(__file__).parents[2] / "configs"


def plan(name: str, *overrides: str, with_weights: bool = False) -> CompilePlan:
    return make_plan(load_config(CONFIGS / name, overrides), with_weights=with_weights)


def test_llama_8b_plans_from_its_architecture_alone() -> None:
    made = plan("llama-3.1-8b.yaml")
    assert made.architecture == "LlamaForCausalLM"
    assert made.checkpoint is None
    assert made.weight_bytes == 8_030_261_248 * 2  # the published number of parameters, in bfloat16
    (layout,) = made.layouts
    assert len(layout.parameters) == 291
    assert layout.caches[0].shape == (16384 // 32 + 1, 8, 32, 128)
    assert made.cache_bytes == 64 * (16384 + 32) * 8 * 128 * 2
    assert made.eos_token_ids == (128001, 128008, 128009)
    assert [entry.name for entry in layout.entries][:3] == [
        "prefill_t128_c512",
        "prefill_t128_c2048",
        "prefill_t128_c8192",
    ]


def test_llama_1b_is_tied() -> None:
    made = plan("llama-3.2-1b.yaml")
    assert made.weight_bytes == 1_235_814_400 * 4
    assert "lm_head.weight" not in [spec.name for spec in made.layouts[0].parameters]


def test_a_prefill_has_every_context_that_holds_it() -> None:
    made = plan("llama-3.1-8b.yaml", "buckets={prefill: [128, 1024], decode: [2], context: [512, 2048]}")
    assert [entry.name for entry in made.layouts[0].entries] == [
        "prefill_t128_c512",
        "prefill_t128_c2048",
        "prefill_t1024_c2048",
        "decode_b2_c512",
        "decode_b2_c2048",
    ]


def test_two_entries_of_a_kind_never_differ_in_input_names_or_order() -> None:
    for kind in ("prefill", "decode"):
        entries = [e for e in plan("llama-3.1-8b.yaml").layouts[0].entries if e.kind == kind]
        names = {tuple(spec.name for spec in entry.inputs) for entry in entries}
        assert len(names) == 1
        assert {"inputs_embeds", "is_token_ids"} <= set(names.pop())


def test_weights_need_a_checkpoint() -> None:
    with pytest.raises(CheckpointNotFoundError, match="meta-llama/Llama-3\\.1-8B-Instruct"):
        plan("llama-3.1-8b.yaml", with_weights=True)


def test_layouts_of_more_ranks_are_refused_in_words() -> None:
    with pytest.raises(PlanError) as caught:
        plan("llama-3.1-8b.yaml", "layouts=[tp1, tp8]")
    assert str(caught.value) == ("layout tp8; expected tp1, the only one of this version; set layouts to [tp1]")


@pytest.mark.parametrize("content", ["[1, 2]", "{", '{"architectures": []}', '{"architectures": ["GPT2LMHeadModel"]}'])
def test_a_bad_architecture_file_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "model.yaml").write_text(
        json.dumps(
            {
                "model": {"config": "config.json"},
                "buckets": {"prefill": [8], "decode": [1], "context": [32]},
                "kv_cache": {"tokens": 64},
                "output": "out",
            }
        )
    )
    with pytest.raises(UnsupportedModelError) as caught:
        make_plan(load_config(tmp_path / "model.yaml"), with_weights=False)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)
