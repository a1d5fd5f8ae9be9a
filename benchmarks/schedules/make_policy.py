"""Build the policy of `../schedules.py`: the demo's, with so many more weights that computing with it takes its time.

    PYTHONPATH=examples/demo python benchmarks/schedules/make_policy.py OUT [--seed S]

Tokenizer, demonstrations and warm start are those of `examples/demo/make_model.py`.
"""

import make_model
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

WIDER = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "layer_types": ["full_attention"] * 6,
    "initializer_range": 0.04,
}

make_demo_policy = make_model.make_policy


def make_policy(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """Of nineteen million random parameters."""
    demo = make_demo_policy(tokenizer)
    demo.config.update(WIDER)
    model = Qwen3ForCausalLM(demo.config)
    model.generation_config = demo.generation_config
    return model


if __name__ == "__main__":
    make_model.make_policy = make_policy
    make_model.STEPS, make_model.LEARNING_RATE = 150, 1.2e-3
    make_model.main()
