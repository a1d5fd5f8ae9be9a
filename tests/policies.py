"""Policy folders made on the spot: a byte-level tokenizer and a ChatML template, with or without a tiny model."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CALLING = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes reasoning and calls as Qwen3 does."""


def make_tokenizer(merges: tuple[tuple[str, str], ...] = ()) -> Tokenizer:
    """Every byte is a token, and every merge; three special ones follow."""
    known = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={text: id for id, text in enumerate(known)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    return tokenizer


def make_policy(folder: Path, template: str = TEMPLATE, merges: tuple[tuple[str, str], ...] = ()) -> Path:
    """A folder that the gateway can serve; without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(merges)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": template}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id("<|im_end|>")}))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    return folder


def add_model(folder: Path, seed: int = 0, hidden: int = 32, spread: float = 0.02) -> Path:
    """Put a random Qwen3 of two layers into the folder; `spread` of its weights: with 0.3 some tokens are far likelier
    than others."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=make_tokenizer().get_vocab_size(),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=258,
        pad_token_id=256,
        initializer_range=spread,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
