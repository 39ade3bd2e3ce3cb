"""State-space models."""

import transformers as hf

from tests.support.zoo.networks import WORDS, tokens, words


def mamba():
    config = hf.MambaConfig(
        vocab_size=WORDS, hidden_size=16, state_size=4, num_hidden_layers=2, expand=2,
        time_step_rank=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return hf.MambaForCausalLM(config), (words(2, 6),)


def mamba2():
    config = hf.Mamba2Config(
        vocab_size=WORDS, hidden_size=16, state_size=4, num_hidden_layers=2, expand=2, head_dim=8,
        num_heads=4, n_groups=1, chunk_size=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return hf.Mamba2ForCausalLM(config), (words(),)


NETWORKS = {"mamba": tokens(mamba), "mamba2": tokens(mamba2)}
