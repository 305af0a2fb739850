import os
import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import artifacts.cpu
from artifacts.errors import (
    ClosedError,
    CompilationForbiddenError,
    CorruptArtifactError,
    EntryInputError,
    EntryNotFoundError,
    LayoutNotFoundError,
    LoadOptionError,
    MissingCpuFeaturesError,
)
from artifacts.folder import file_record, open_artifact
from runtime.llm import LLM
from runtime.pjrt import Devices
from runtime.program import Program, load
from runtime.sampling import SamplingParams
from tests.oracle import oracle_logits

IDS = list(range(5, 25))


@pytest.fixture
def program(tiny_artifact: Path) -> Iterator[Program]:
    program = load(tiny_artifact)
    yield program
    program.close()


def prefill_inputs(ids: list[int], blocks: list[int], rows: int = 32, context: int = 32) -> dict[str, np.ndarray]:
    """One prefill of ``ids`` into ``blocks`` of 8 tokens, padded to the bucket."""
    n = len(ids)
    inputs = {name: np.zeros(rows, np.int32) for name in ("input_ids", "positions", "slot_mapping")}
    inputs["input_ids"][:n] = ids
    inputs["positions"][:n] = np.arange(n)
    inputs["slot_mapping"][:n] = [blocks[i // 8] * 8 + i % 8 for i in range(n)]
    table = np.zeros((1, context // 8), np.int32)
    table[0, : len(blocks)] = blocks
    return {**inputs, "block_table": table, "output_positions": np.array([n - 1], np.int32)}


def expected_logits(model: LlamaForCausalLM, ids: list[int]) -> np.ndarray:
    return oracle_logits(model, model.model.embed_tokens(torch.tensor(ids)))[-1]


def test_run_gives_the_logits_of_transformers(program: Program, tiny_llama: LlamaForCausalLM) -> None:
    logits = program.run("prefill_t32_c32", **prefill_inputs(IDS, [3, 1, 7]))
    np.testing.assert_allclose(logits[0], expected_logits(tiny_llama, IDS), atol=1e-4)


def test_entries_are_those_of_the_configuration(program: Program) -> None:
    assert sorted(program.entries) == [
        "decode_b1_c32",
        "decode_b1_c96",
        "decode_b4_c32",
        "decode_b4_c96",
        "prefill_t32_c32",
        "prefill_t32_c96",
        "prefill_t8_c32",
        "prefill_t8_c96",
    ]
    assert [spec.name for spec in program.entries["decode_b4_c32"].inputs] == [
        "input_ids",
        "positions",
        "inputs_embeds",
        "is_token_ids",
        "slot_mapping",
        "block_table",
    ]


def test_a_block_that_held_nan_and_is_reused_changes_nothing(program: Program, tiny_llama: LlamaForCausalLM) -> None:
    nan_rows = np.full((32, 32), np.nan, np.float32)
    inputs = prefill_inputs([0] * 32, [1, 2, 3, 4])
    logits = program.run("prefill_t32_c32", **inputs, inputs_embeds=nan_rows, is_token_ids=np.zeros(32, bool))
    assert np.isnan(logits).all()  # the caches of blocks 1 to 4 now hold NaN
    for rows, context in ((32, 32), (32, 96)):
        logits = program.run(f"prefill_t{rows}_c{context}", **prefill_inputs(IDS, [4, 2, 1], rows, context))
        np.testing.assert_allclose(logits[0], expected_logits(tiny_llama, IDS), atol=1e-4)
    table = np.zeros((1, 4), np.int32)
    table[0] = [4, 2, 1, 3]  # block 3 still holds NaN, beyond the last position
    logits = program.run(
        "decode_b1_c32",
        input_ids=np.array([9]),
        positions=np.array([20]),
        slot_mapping=np.array([1 * 8 + 4]),
        block_table=table,
    )
    np.testing.assert_allclose(logits[0], expected_logits(tiny_llama, [*IDS, 9]), atol=1e-4)


def test_nan_in_the_null_block_changes_nothing(program: Program, tiny_llama: LlamaForCausalLM) -> None:
    inputs = prefill_inputs([0] * 8, [0], 8)
    nan_rows = np.full((8, 32), np.nan, np.float32)
    program.run("prefill_t8_c32", **inputs, inputs_embeds=nan_rows, is_token_ids=np.zeros(8, bool))
    logits = program.run("prefill_t32_c32", **prefill_inputs(IDS, [3, 1, 7]))
    np.testing.assert_allclose(logits[0], expected_logits(tiny_llama, IDS), atol=1e-4)


def test_an_input_changed_after_dispatch_changes_nothing(program: Program, tiny_llama: LlamaForCausalLM) -> None:
    """Every buffer is its step's own: the caller's array is free as soon as it has been handed over."""
    array = np.arange(32 * 512, dtype=np.float32).reshape(32, 512)
    devices = Devices(1)
    before = array.copy()
    buffer = devices.copy(array)
    array[:] = -1
    np.testing.assert_array_equal(np.asarray(buffer), before)
    inputs = prefill_inputs(IDS, [3, 1, 7])
    first = program.run("prefill_t32_c32", **inputs)
    for value in inputs.values():
        value[:] = 0
    np.testing.assert_allclose(first[0], expected_logits(tiny_llama, IDS), atol=1e-4)


def test_logits_are_not_overwritten_by_later_steps(program: Program) -> None:
    first = program.run("prefill_t32_c32", **prefill_inputs(IDS, [3, 1, 7]))
    copy = first.copy()
    for other in range(5):
        program.run("prefill_t32_c32", **prefill_inputs([other] * 20, [3, 1, 7]))
    np.testing.assert_array_equal(first, copy)


def test_weight_files_are_never_written_and_map_read_only(tiny_artifact: Path, program: Program) -> None:
    (weights,) = (tiny_artifact / "weights").iterdir()
    recorded = open_artifact(tiny_artifact).manifest.files[f"weights/{weights.name}"]
    for blocks in ([1, 2, 3], [4, 5, 6]):
        program.run("prefill_t32_c32", **prefill_inputs(IDS, blocks))
    assert file_record(weights) == recorded
    mappings = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(weights.name)]
    assert mappings
    assert {line.split()[1][:2] for line in mappings} == {"r-"}
    with pytest.raises(ValueError, match="read-only"):
        program.embedding_table[0, 0] = 1.0


def test_two_llms_of_one_artifact_in_one_process(tiny_artifact: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    first, second = LLM(tiny_artifact), LLM(tiny_artifact)
    (alone,) = first.generate([IDS], params)
    outputs = {}

    def generate(name: str, llm: LLM, ids: list[int]) -> None:
        outputs[name] = [llm.generate([ids], params)[0].outputs[0].token_ids for _ in range(3)]

    threads = [
        threading.Thread(target=generate, args=("first", first, IDS)),
        threading.Thread(target=generate, args=("second", second, IDS)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {"first": [alone.outputs[0].token_ids] * 3, "second": [alone.outputs[0].token_ids] * 3}
    first.close()
    second.close()


def test_run_from_two_threads(program: Program, tiny_llama: LlamaForCausalLM) -> None:
    prompts = {"a": (IDS, [1, 2, 3]), "b": ([7, 3, 9, 11, 40], [5])}
    results: dict[str, list[np.ndarray]] = {name: [] for name in prompts}

    def step(name: str) -> None:
        ids, blocks = prompts[name]
        for _ in range(10):
            results[name].append(program.run("prefill_t32_c32", **prefill_inputs(ids, blocks)))

    threads = [threading.Thread(target=step, args=(name,)) for name in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, (ids, _) in prompts.items():
        expected = expected_logits(tiny_llama, ids)
        assert len(results[name]) == 10
        for logits in results[name]:
            np.testing.assert_allclose(logits[0], expected, atol=1e-4)
    assert program.stats["steps"] == 20


def test_a_step_without_embeddings_copies_none(program: Program) -> None:
    inputs = prefill_inputs(IDS, [3, 1, 7])
    program.run("prefill_t32_c32", **inputs)
    assert program.stats["embedding_bytes_copied"] == 0
    program.run(
        "prefill_t32_c32", **inputs, inputs_embeds=np.zeros((32, 32), np.float32), is_token_ids=np.ones(32, bool)
    )
    assert program.stats["embedding_bytes_copied"] == 32 * 32 * 4


def test_standing_inputs_equal_explicit_ones(program: Program) -> None:
    inputs = prefill_inputs(IDS, [3, 1, 7])
    omitted = program.run("prefill_t32_c32", **inputs)
    explicit = program.run(
        "prefill_t32_c32", **inputs, inputs_embeds=np.zeros((32, 32), np.float32), is_token_ids=np.ones(32, bool)
    )
    np.testing.assert_array_equal(omitted, explicit)


def test_padding_rows_are_counted(program: Program) -> None:
    program.run("prefill_t32_c32", **prefill_inputs(IDS, [3, 1, 7]))
    assert (program.stats["rows"], program.stats["padding_rows"]) == (32, 12)


def test_nothing_is_compiled_by_jax_own_count(tiny_artifact: Path) -> None:
    events: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        llm = LLM(tiny_artifact, preload=True, warmup=True)
        llm.generate([IDS, {"prompt_embeds": llm.embed(IDS)}], SamplingParams(max_tokens=12, seed=1, top_p=0.9))
        compiled = [event for event in events if event.startswith("/jax/core/compile/")]
        assert compiled == []
        assert llm.stats["compilations"] == 0
        jax.jit(lambda x: x + 1)(np.ones(3))  # the listener does hear compilations
        assert "/jax/core/compile/backend_compile_duration" in events
        assert llm.stats["compilations"] == 0  # and jax may be used beside the runtime
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
        llm.close()


def test_a_compilation_in_a_step_is_an_error(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Devices.copy

    def careless_copy(devices: Devices, array: np.ndarray) -> jax.Array:
        return copy(devices, np.asarray(jax.jit(lambda x: x * 1)(array)))

    monkeypatch.setattr(Devices, "copy", careless_copy)
    with pytest.raises(CompilationForbiddenError) as caught:
        program.run("prefill_t32_c32", **prefill_inputs(IDS, [3, 1, 7]))
    assert str(caught.value) == (
        "jax event /jax/core/compile/jaxpr_trace_duration while a program was loaded or stepped; expected no tracing "
        "and no compilation after the artifact was built; report this: a step must only run what the artifact holds"
    )
    assert program.stats["compilations"] == 1
    monkeypatch.undo()
    program.run("prefill_t32_c32", **prefill_inputs(IDS, [3, 1, 7]))


def test_a_failed_step_leaves_the_program_usable(
    program: Program, tiny_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = prefill_inputs(IDS, [3, 1, 7])
    program.run("prefill_t32_c32", **inputs)
    executable = program._executable("prefill_t32_c32")
    execute = executable.execute

    def consume_then_fail(arguments: list[jax.Array]) -> list[jax.Array]:
        execute(arguments)
        raise RuntimeError("after dispatch")

    monkeypatch.setattr(executable, "execute", consume_then_fail)
    with pytest.raises(RuntimeError, match="after dispatch"):
        program.run("prefill_t32_c32", **inputs)
    monkeypatch.undo()
    logits = program.run("prefill_t32_c32", **inputs)
    np.testing.assert_allclose(logits[0], expected_logits(tiny_llama, IDS), atol=1e-4)


def test_a_cpu_that_lacks_a_feature_is_refused_before_xla_sees_the_program(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = open_artifact(tiny_artifact).layout(None)
    required = {feature for entry in layout.entries if entry.program for feature in entry.program.requires}
    assert {"avx2", "fma"} <= required
    present = artifacts.cpu.cpu_features()
    monkeypatch.setattr(artifacts.cpu, "cpu_features", lambda *_: present - {"avx2", "fma"})

    def forbidden(*_: object) -> None:
        raise AssertionError("XLA was asked")

    monkeypatch.setattr("runtime.program.Devices", forbidden)
    with pytest.raises(MissingCpuFeaturesError, match=r"avx2, fma"):
        load(tiny_artifact)


def test_more_cpu_features_than_needed_are_fine(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    present = artifacts.cpu.cpu_features()
    monkeypatch.setattr(artifacts.cpu, "cpu_features", lambda *_: present | {"avx512f", "amx_tile"})
    load(tiny_artifact).close()


@pytest.mark.parametrize(
    ("entry", "change", "text"),
    [
        (
            "prefill_t9_c32",
            {},
            "entry 'prefill_t9_c32'; expected one of prefill_t8_c32, prefill_t8_c96, prefill_t32_c32, prefill_t32_c96, "
            "decode_b1_c32, decode_b1_c96, decode_b4_c32, decode_b4_c96; name one of these, or add the bucket to the "
            "configuration and rebuild",
        ),
        (
            "prefill_t32_c32",
            {"input_ids": np.zeros(31, np.int32)},
            "entry prefill_t32_c32: input_ids is int32[31]; expected input_ids int32[32]; pad to the entry's "
            "shape, or choose another entry",
        ),
        (
            "prefill_t32_c32",
            {"input_ids": np.zeros(32, np.float32)},
            "entry prefill_t32_c32: input_ids is float32[32]; expected input_ids int32[32]; pad to the entry's "
            "shape, or choose another entry",
        ),
        (
            "prefill_t32_c32",
            {"token_ids": np.zeros(32, np.int32)},
            "entry prefill_t32_c32: unknown input token_ids; expected input_ids, positions, inputs_embeds, "
            "is_token_ids, slot_mapping, block_table, output_positions; pass each input of the entry's signature",
        ),
    ],
)
def test_wrong_inputs_are_refused(program: Program, entry: str, change: dict[str, np.ndarray], text: str) -> None:
    kind = EntryNotFoundError if entry == "prefill_t9_c32" else EntryInputError
    with pytest.raises(kind) as caught:
        program.run(entry, **{**prefill_inputs(IDS, [3, 1, 7]), **change})
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("slot_mapping", 33 * 8, "slot_mapping holds 0 to 264; expected 0 to 263"),
        ("slot_mapping", -1, "slot_mapping holds -1 to"),
        ("block_table", 33, "block_table holds 0 to 33; expected 0 to 32"),
        ("positions", 32, "positions holds 0 to 32; expected 0 to 31"),
        ("output_positions", 32, "output_positions holds 32 to 32; expected 0 to 31"),
        ("input_ids", 10**6, "input_ids holds 0 to 1000000; expected 0 to"),
    ],
)
def test_indices_outside_the_cache_or_the_vocabulary_are_refused(
    program: Program, name: str, value: int, text: str
) -> None:
    inputs = prefill_inputs(IDS, [3, 1, 7])
    inputs[name].reshape(-1)[0] = value
    with pytest.raises(EntryInputError, match=text):
        program.run("prefill_t32_c32", **inputs)


def test_a_closed_program_says_so(tiny_artifact: Path) -> None:
    with load(tiny_artifact) as program:
        program.run("prefill_t32_c32", **prefill_inputs(IDS, [3, 1, 7]))
    program.close()
    with pytest.raises(ClosedError, match=r"has been closed; expected an open program; load it again"):
        program.run("prefill_t32_c32", **prefill_inputs(IDS, [3, 1, 7]))


def test_a_program_loaded_before_a_fork_says_so(program: Program) -> None:
    program.run("prefill_t32_c32", **prefill_inputs(IDS, [3, 1, 7]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of forks in processes with threads, as this one has
        child = os.fork()
    if child == 0:
        try:
            program.run("prefill_t32_c32", **prefill_inputs(IDS, [3, 1, 7]))
        except ClosedError as error:
            os._exit(42 if "load it in the child" in str(error) else 1)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 42


@pytest.mark.parametrize("threads", [0, -1, 1025, True, 1.5, "x"])
def test_a_thread_count_out_of_range_is_refused(tiny_artifact: Path, threads: Any) -> None:
    with pytest.raises(LoadOptionError, match="expected None or an integer from 1 to 1024"):
        load(tiny_artifact, threads=threads)


def test_a_program_whose_bytes_changed_is_refused_when_it_loads(tiny_artifact: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_artifact, copy)
    for path in (copy / "programs" / "cpu").iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 4
        path.write_bytes(data)
    with load(copy) as program, pytest.raises(CorruptArtifactError, match=r"has SHA-256 .*; expected"):
        program.run("prefill_t32_c32", **prefill_inputs(IDS, [3, 1, 7]))


@pytest.mark.parametrize("value", [None, [[1], [2, 3]], torch.zeros(32, requires_grad=True), 2**40])
def test_what_is_no_array_of_the_entry_is_refused(program: Program, value: Any) -> None:
    with pytest.raises(EntryInputError):
        program.run("prefill_t32_c32", **{**prefill_inputs(IDS, [3, 1, 7]), "input_ids": value})


def test_an_absent_layout_is_refused_with_those_there_are(tiny_artifact: Path) -> None:
    with pytest.raises(LayoutNotFoundError) as caught:
        load(tiny_artifact, "tp4-sp")
    assert str(caught.value) == "layout tp4-sp; expected one of tp1; name one of these, or build the layout"


def test_a_program_that_has_gone_since_the_load_is_an_error_of_the_artifact(
    tiny_artifact: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_artifact, copy)
    program = load(copy)
    shutil.rmtree(copy / "programs")
    with pytest.raises(
        CorruptArtifactError, match=r"programs/cpu/.*\.xla cannot be read \(No such file or directory\)"
    ):
        program.run("prefill_t32_c32", **prefill_inputs(IDS, [3, 1, 7]))
    program.close()


def test_a_tokenizer_that_the_manifest_does_not_list_is_not_used(tiny_artifact: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_artifact, copy)
    (copy / "tokenizer" / "extra.jinja").write_text("unlisted")
    listed = open_artifact(copy).read_folder("tokenizer")
    assert sorted(listed) == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
