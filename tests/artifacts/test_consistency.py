from typing import Any

import msgspec
import pytest

from artifacts.consistency import check_consistency, is_relative_inside
from artifacts.errors import CorruptArtifactError
from artifacts.manifest import FileRecord, Manifest, WeightRecord
from artifacts.signature import TensorSpec
from tests.artifacts.example import build_example

replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return build_example(tmp_path_factory.mktemp("example"))


def test_the_example_agrees_with_itself(example: Manifest) -> None:
    check_consistency(example, "m.json")
    check_consistency(replace(example, weights=None), "m.json")
    entries = example.layouts[0].entries
    check_consistency(with_layout(example, entries=(replace(entries[0], program=None),)), "m.json")


@pytest.mark.parametrize(
    "path", ["config.yaml", "graphs/a.hlo.pb", "tokenizer/a b.json", "..a/b..", "W\u00fcrde/\u4f60"]
)
def test_paths_inside(path: str) -> None:
    assert is_relative_inside(path)


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "..",
        "/",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a/..",
        "./a",
        "a//b",
        "a/",
        "a/./b",
        "a\\b",
        "a\0b",
        "a\nb",
        "\x1b[2J",
    ],
)
def test_paths_that_leave_or_have_another_spelling(path: str, example: Manifest) -> None:
    assert not is_relative_inside(path)
    files = {**example.files, path: FileRecord(size=0, sha256="0" * 64)}
    with pytest.raises(CorruptArtifactError) as caught:
        check_consistency(replace(example, files=files), "m.json")
    assert str(caught.value) == (
        f"m.json: path {path!r} leaves the folder; expected relative paths inside the artifact; "
        "do not use this artifact"
    )


def with_layout(manifest: Manifest, **changes: Any) -> Manifest:
    return replace(manifest, layouts=(replace(manifest.layouts[0], **changes),))


def with_entry(manifest: Manifest, **changes: Any) -> Manifest:
    return with_layout(manifest, entries=(replace(manifest.layouts[0].entries[0], **changes),))


def with_signature(manifest: Manifest, **changes: Any) -> Manifest:
    return with_entry(manifest, signature=replace(manifest.layouts[0].entries[0].signature, **changes))


def without_file(manifest: Manifest, start: str) -> Manifest:
    return replace(
        manifest, files={path: record for path, record in manifest.files.items() if not path.startswith(start)}
    )


def swapped(manifest: Manifest) -> Manifest:
    """The graph and the program under each other's digest."""
    graph, program = (
        next(path for path in manifest.files if path.startswith(start)) for start in ("graphs", "programs")
    )
    files = {**manifest.files, graph: manifest.files[program], program: manifest.files[graph]}
    return replace(manifest, files=files)


NORM = TensorSpec(name="model.norm.weight", shape=(3,), dtype="float32")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            lambda m: without_file(m, "graphs"),
            "layout tp1: entry decode_b1_c8 uses graphs/*.hlo.pb, which files does not list",
        ),
        (
            lambda m: without_file(m, "prog"),
            "layout tp1: entry decode_b1_c8 uses programs/cpu/*.xla, which files does not list",
        ),
        (
            lambda m: without_file(m, "weights"),
            "weight model.embed_tokens.weight is in weights/*.safetensors, which files does not list",
        ),
        (swapped, "graphs/*.hlo.pb does not bear its SHA-256 * as its name"),
        (lambda m: replace(m, layouts=()), "there is no layout"),
        (lambda m: replace(m, layouts=m.layouts * 2), "layout tp1 stands 2 times"),
        (lambda m: with_layout(m, entries=()), "layout tp1: there is no entry"),
        (lambda m: with_layout(m, entries=m.layouts[0].entries * 3), "layout tp1: entry decode_b1_c8 stands 3 times"),
        (lambda m: with_layout(m, caches=m.layouts[0].caches * 2), "layout tp1: tensor layers.0.k stands 2 times"),
        (
            lambda m: with_layout(m, parameters=(*m.layouts[0].parameters, m.layouts[0].caches[0])),
            "layout tp1: tensor layers.0.k stands 2 times",
        ),
        (
            lambda m: with_signature(m, rows=2),
            "layout tp1: entry decode_b1_c8 is decode_b2_c8 by its kind, rows and context",
        ),
        (
            lambda m: with_signature(m, inputs=m.layouts[0].entries[0].signature.inputs * 2),
            "layout tp1: decode_b1_c8 input input_ids stands 2 times",
        ),
        (
            lambda m: replace(m, model=replace(m.model, embedding="wte")),
            "layout tp1: the embedding wte is not a parameter",
        ),
        (
            lambda m: replace(m, weights={k: w for k, w in m.weights.items() if k != NORM.name}),
            "layout tp1: parameter model.norm.weight has no weight",
        ),
        (
            lambda m: replace(
                m,
                weights={
                    **m.weights,
                    NORM.name: WeightRecord(file=m.weights[NORM.name].file, shape=(3, 1), dtype="bfloat16"),
                },
            ),
            "layout tp1: parameter model.norm.weight float32[3] is stored as bfloat16[3, 1]",
        ),
    ],
)
def test_references_that_disagree(example: Manifest, change: Any, fault: str) -> None:
    with pytest.raises(CorruptArtifactError) as caught:
        check_consistency(change(example), "m.json")
    error = caught.value
    start, _, end = fault.partition("*")
    assert error.found.startswith(f"m.json: {start}"), error.found
    assert error.found.endswith(end.rpartition("*")[2] if end else start), error.found
    assert error.expected == "a manifest whose parts agree (artifacts/FORMAT.md)"
    assert error.action == "rebuild the artifact"


def test_ranks_may_hold_other_shapes_than_the_file(example: Manifest) -> None:
    parameters = tuple(replace(spec, shape=(1, *spec.shape[1:])) for spec in example.layouts[0].parameters)
    check_consistency(with_layout(example, name="tp7", ranks=7, parameters=parameters), "m.json")
