"""Checkpoints: from ``model.source`` to tensors by Hugging Face name, whatever the format on disk."""

from model_defs.checkpoint.interface import Checkpoint, GgufTokenizer, HfTokenizerFiles, TensorInfo, TokenizerSource
from model_defs.checkpoint.match import match_tensors
from model_defs.checkpoint.source import open_checkpoint

__all__ = [
    "Checkpoint",
    "GgufTokenizer",
    "HfTokenizerFiles",
    "TensorInfo",
    "TokenizerSource",
    "match_tensors",
    "open_checkpoint",
]
