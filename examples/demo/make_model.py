"""Build the demo's policy: a byte-level BPE tokenizer and a small Qwen3 model, warm-started on poor demonstrations.

    python make_model.py OUT [--seed S]

The demo's command runs this once; OUT is then an ordinary model folder that transformers opens offline and whose
tokenizer and chat template need only `tokenizers` and `jinja2`. The warm start teaches the format of the conversation
and exact copying, and little else: the choices in it are poor (see `demonstrations.py`) and are left to training.
"""

import argparse
import itertools
import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import tasks
import torch
from demonstrations import CHAT_TEMPLATE, STOP, Text, Turn, demonstrate
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

PAD = "<|endoftext|>"
CONTEXT = 2048
STEPS = 250
EPISODES_PER_STEP = 32
LEARNING_RATE = 4e-3
WARMUP_STEPS = 20
REPORT_SECONDS = 5.0


def main() -> None:
    """Build the model folder beside OUT and move it there when it is complete."""
    parser = argparse.ArgumentParser(description="Build the demo's policy.")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make; must not exist")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives another model (default: 0)")
    options = parser.parse_args()
    out: Path = options.out.absolute()
    if out.exists():
        parser.error(f"{out} exists already: remove it, or choose another folder")
    started = time.monotonic()
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        build(unfinished, options.seed)
        # The folder and the weights are made private; the model is for whoever may read the parent.
        unfinished.chmod(0o755)
        for file in unfinished.iterdir():
            file.chmod(0o644)
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    print(f"wrote {out} in {time.monotonic() - started:.1f} s", flush=True)


def build(folder: Path, seed: int) -> None:
    """Write the complete model folder."""
    # Tiny matrices: a second thread costs more than it brings.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    episodes = demonstrations(seed)
    tokenizer = make_tokenizer(list(itertools.islice(episodes, 1000)))
    model = make_policy(tokenizer)
    print(
        f"policy of {model.num_parameters():,} parameters, {tokenizer.get_vocab_size()} tokens; warm start:", flush=True
    )
    warm_start(model, tokenizer, episodes)
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def demonstrations(seed: int) -> Iterator[list[Turn]]:
    """Endless episodes of the poor demonstrator, on training tasks of a seed that no run trains on."""
    rng = random.Random(f"demonstrations/{seed}")
    text = Text()
    for task in tasks.train(-1 - seed):
        yield demonstrate(task, text, rng)


def make_tokenizer(episodes: list[list[Turn]]) -> Tokenizer:
    """A byte-level BPE of the episodes' words; the fixed parts of the conversation are one token each.

    Words, numbers, white space and punctuation are apart, so that a word is the same token wherever it stands and can
    be copied. Every byte has a token and nothing is normalised, so that decoding gives back exactly what was encoded.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}|\s|[^\p{L}\p{N}\s]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=[PAD, "<|im_start|>", STOP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ("".join(turn.segment + turn.answer for turn in turns) for turns in episodes)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(part, normalized=False) for part in fixed_parts(Text())])
    return tokenizer


def fixed_parts(text: Text) -> list[str]:
    """The conversation's unchanging text. None of it holds the stop token, which has to stay a token of its own."""
    marker = "\0"
    answer = f"```bash\n{marker}\n```"
    conversation = [
        text.chat(text.opening(tasks.QUESTION.format(key=marker))),
        answer,
        text.after(answer, [text.observation(marker, 0)]),
        text.after(answer, [text.format_error()]),
    ]
    pieces = {piece for part in conversation for whole in part.split(STOP) for piece in whole.split(marker)}
    # A single character is a token anyway.
    fixed = {piece for piece in pieces if len(piece) > 1}
    return sorted(fixed | {".conf", "echo ", "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", " && echo "})


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that has to be there."""
    number = tokenizer.token_to_id(token)
    if number is None:
        raise ValueError(f"the tokenizer has no token {token!r}")
    return number


def make_policy(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """A Qwen3 of half a million random parameters."""
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        # At the usual 0.02 so small a model does not learn to copy in the few steps that it gets.
        initializer_range=0.08,
        eos_token_id=token_id(tokenizer, STOP),
        pad_token_id=token_id(tokenizer, PAD),
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    # Sampling as in training, for whoever generates from the folder without saying how.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    return model


def warm_start(model: Qwen3ForCausalLM, tokenizer: Tokenizer, episodes: Iterator[list[Turn]]) -> None:
    """Supervised training on the answers of the demonstrations, with a cosine schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    reported = time.monotonic()
    for step in range(1, STEPS + 1):
        decay = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / WARMUP_STEPS) * decay
        ids, targets = batch(tokenizer, list(itertools.islice(episodes, EPISODES_PER_STEP)))
        loss = answer_loss(model, ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == STEPS or time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
            print(f"  step {step} of {STEPS}: loss {loss.item():.3f}", flush=True)
    model.eval()


def answer_loss(model: Qwen3ForCausalLM, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood of the target tokens; ids and targets are [episode, position]."""
    # Padding is on the right, so causal attention alone keeps it away from the targets.
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    wanted = targets[:, 1:]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[wanted]), ids[:, 1:][wanted])


def batch(tokenizer: Tokenizer, episodes: list[list[Turn]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and whether each is a target, both [episode, position] and padded on the right.

    Segments and answers are encoded one by one, as they are in a rollout.
    """
    pad = token_id(tokenizer, PAD)
    rows: list[list[int]] = []
    flags: list[list[bool]] = []
    for turns in episodes:
        ids: list[int] = []
        targets: list[bool] = []
        for turn in turns:
            for part, is_target in ((turn.segment, False), (turn.answer, True)):
                encoded = tokenizer.encode(part, add_special_tokens=False).ids
                ids += encoded
                targets += [is_target] * len(encoded)
        rows.append(ids)
        flags.append(targets)
    width = max(map(len, rows))
    padded = [row + [pad] * (width - len(row)) for row in rows]
    padded_flags = [flag + [False] * (width - len(flag)) for flag in flags]
    return torch.tensor(padded), torch.tensor(padded_flags)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and its configuration; written here, since transformers' own form changes with its version."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": STOP,
        "pad_token": PAD,
        "additional_special_tokens": ["<|im_start|>"],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
