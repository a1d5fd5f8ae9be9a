"""One tiny random model, and one engine that serves it, for all tests of the engine."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parent))  # the helper beside this file

from running_engine import CONTEXT, VOCABULARY, RunningEngine, make_tokenizer, running_engine


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 whose weights are large enough that its probabilities are far from equal."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    path = tmp_path_factory.mktemp("policy") / "tiny"
    Qwen3ForCausalLM(config).save_pretrained(path)
    make_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def model(folder: Path) -> Qwen3ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


@pytest.fixture(scope="session")
def engine(folder: Path) -> Iterator[RunningEngine]:
    """Serves the folder's own weights."""
    with running_engine(folder) as running:
        yield running
