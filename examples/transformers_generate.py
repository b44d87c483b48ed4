"""Generate text with a Transformers mixture-of-experts model whose experts run on Expertile.

    python examples/transformers_generate.py

The model is a small one with random weights, made from a configuration, so that nothing is
downloaded. For a real one, put in `AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16",
experts_implementation="expertile")`, once `expertile.transformers` is imported: experts of FP8 and
gpt-oss checkpoints then stay in their format (docs/transformers.md).
"""

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import expertile
import expertile.transformers  # registers the experts implementation "expertile"

config = Qwen3MoeConfig(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=32,
    num_experts_per_tok=4,
)


def main() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.set_experts_implementation("expertile")
    prompt = torch.tensor([[1, 2, 3, 4, 5]])
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False
    )
    print("tokens:", *tokens[0].tolist())
    print("expert layers computed by Expertile:", expertile.calls())


if __name__ == "__main__":
    main()
