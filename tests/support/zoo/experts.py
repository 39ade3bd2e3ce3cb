"""Language models with a mixture of experts."""

import transformers as hf

from tests.support.zoo.language import LLAMA
from tests.support.zoo.networks import tokens, words

# The other way of computing experts asks, at run time, which of them have work.
STATIC = {"experts_implementation": "batched_mm"}


def mixtral():
    config = hf.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2, **STATIC)
    return hf.MixtralForCausalLM(config), (words(),)


def qwen2_moe():
    config = hf.Qwen2MoeConfig(
        **LLAMA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        shared_expert_intermediate_size=24, **STATIC,
    )  # fmt: skip
    return hf.Qwen2MoeForCausalLM(config), (words(),)


def qwen3_moe():
    config = hf.Qwen3MoeConfig(
        **LLAMA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, **STATIC,
    )  # fmt: skip
    return hf.Qwen3MoeForCausalLM(config), (words(),)


NETWORKS = {
    "mixtral": tokens(mixtral),
    "qwen2-moe": tokens(qwen2_moe),
    "qwen3-moe": tokens(qwen3_moe),
}
