"""A Hugging Face folder: config.json beside model.safetensors, or beside shards with their index."""

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from artifacts.errors import CheckpointNotFoundError, CorruptCheckpointError
from model_defs.checkpoint.interface import HfTokenizerFiles, TensorInfo, TokenizerSource
from model_defs.checkpoint.listing import listing
from model_defs.checkpoint.safetensors_file import read_safetensors, safetensors_infos

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = (".bin", ".ckpt", ".pt", ".pth")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class HfFolder:
    """A checkpoint in a Hugging Face folder."""

    description: str
    folder: Path
    config: Mapping[str, object]
    generation_config: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]
    files: Mapping[str, str]  # tensor name -> file inside the folder
    tokenizer: TokenizerSource

    def read(self, name: str) -> torch.Tensor:
        """Map one tensor; see Checkpoint."""
        file = self.files[name]
        return read_safetensors(self.folder / file, os.path.join(self.description, file), name)


def open_hf_folder(folder: Path, description: str, *, fetch: str | None = None) -> HfFolder:
    """Open a folder; only headers are read.

    Args:
        folder: where it is.
        description: the folder as the user wrote it.
        fetch: command that fetches the whole folder, where one is known.

    Raises:
        CheckpointNotFoundError: config.json or safetensors weights are not in the folder.
        CorruptCheckpointError: a file is damaged, or index and shards disagree.
        UnsupportedModelError: a tensor is of a type that this project does not read.
    """
    if not (folder / "config.json").is_file():
        raise _no_config(folder, description, fetch)
    config = _read_json(folder / "config.json", description)
    if (folder / _WEIGHTS).is_file():
        tensors = safetensors_infos(folder / _WEIGHTS, os.path.join(description, _WEIGHTS))
        files = dict.fromkeys(tensors, _WEIGHTS)
    elif (folder / _INDEX).is_file():
        tensors, files = _open_shards(folder, description, fetch)
    else:
        raise _no_weights(folder, description, fetch)
    has_generation = (folder / "generation_config.json").is_file()
    return HfFolder(
        description=description,
        folder=folder,
        config=config,
        generation_config=_read_json(folder / "generation_config.json", description) if has_generation else {},
        tensors=tensors,
        files=files,
        tokenizer=HfTokenizerFiles(folder=folder) if _present(folder, _TOKENIZER_FILES) else None,
    )


def _open_shards(folder: Path, description: str, fetch: str | None) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors and their files by the index, which is the authority: a tensor that it leaves out is not read."""
    files = _weight_map(folder, description)
    names_by_file: dict[str, list[str]] = defaultdict(list)
    for name, file in files.items():
        names_by_file[file].append(name)
    absent = [file for file in names_by_file if not (folder / file).is_file()]
    if absent:
        raise CorruptCheckpointError(
            found=f"{description} lacks {len(absent)} of the {len(names_by_file)} files that {_INDEX} names: "
            f"{listing(absent)}",
            expected="every one of them beside the index",
            action=f"fetch the rest with `{fetch}`" if fetch else "fetch or copy the absent files",
        )
    tensors: dict[str, TensorInfo] = {}
    for file, names in names_by_file.items():
        infos = safetensors_infos(folder / file, os.path.join(description, file))
        strangers = [name for name in names if name not in infos]
        if strangers:
            raise CorruptCheckpointError(
                found=f"{os.path.join(description, file)} lacks {len(strangers)} tensors that {_INDEX} places in it: "
                f"{listing(strangers)}",
                expected="an index and shards of the same checkpoint",
                action="fetch index and shards again",
            )
        tensors |= {name: infos[name] for name in names}
    return tensors, files


def _weight_map(folder: Path, description: str) -> dict[str, str]:
    """The index's map from tensor to file, with every file a plain name inside the folder."""
    weight_map = _read_json(folder / _INDEX, description).get("weight_map")
    files = weight_map if isinstance(weight_map, dict) else {}
    bad = [file for file in files.values() if not isinstance(file, str) or file != Path(file).name]
    if bad or not files:
        raise CorruptCheckpointError(
            found=f"{os.path.join(description, _INDEX)} "
            + (f"places tensors in {bad[0]!r}" if bad else "has no weight_map"),
            expected="a weight_map from tensor names to file names of the same folder",
            action="fetch it again",
        )
    return files


def _read_json(path: Path, description: str) -> dict[str, object]:
    label = os.path.join(description, path.name)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        fault = f"cannot be read ({error.strerror or error})"
    except (ValueError, RecursionError) as error:
        fault = f"is not valid JSON ({error})"
    else:
        if isinstance(value, dict):
            return value
        fault = "is not a JSON object"
    raise CorruptCheckpointError(found=f"{label} {fault}", expected="a JSON object", action="fetch it again")


def _no_config(folder: Path, description: str, fetch: str | None) -> CheckpointNotFoundError:
    ggufs = sorted(str(path) for path in folder.glob("*.gguf"))
    if ggufs:
        action = f"set model.source to a file of it: {listing(ggufs)}"
    elif fetch:
        action = f"fetch the rest with `{fetch}`"
    else:
        action = "point model.source to a folder that save_pretrained or `hf download` wrote"
    return CheckpointNotFoundError(
        found=f"{description} has no config.json", expected=f"config.json beside {_WEIGHTS} or {_INDEX}", action=action
    )


def _no_weights(folder: Path, description: str, fetch: str | None) -> CheckpointNotFoundError:
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLED)
    if pickled:
        found = f"{description} has its weights only in pickled form: {listing(pickled)}"
        action = (
            "convert it with transformers: "
            "`m = AutoModelForCausalLM.from_pretrained(OLD); m.save_pretrained(NEW)`, and copy the tokenizer files"
        )
    else:
        found = f"{description} has no weights"
        action = (
            f"fetch the rest with `{fetch}`" if fetch else "add the weights, or point model.source to another folder"
        )
    return CheckpointNotFoundError(found=found, expected=f"safetensors: {_WEIGHTS} or {_INDEX}", action=action)


def _present(folder: Path, names: Sequence[str]) -> bool:
    return any((folder / name).is_file() for name in names)
