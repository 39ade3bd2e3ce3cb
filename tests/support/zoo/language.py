"""Language models: decoders, encoders, and encoders with decoders."""

import transformers as hf

from tests.support.zoo.networks import LENGTH, WORDS, Called, classifier, tokens, words

WIDTH, HEADS, LAYERS = 32, 4, 2

# Of the configurations that name things as Llama does.
LLAMA = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 48, "head_dim": 8,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Of those that name things as BERT does; dropout is on unless QUIET is added.
BERT = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 48, "pad_token_id": 0,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "max_position_embeddings": 32,
}  # fmt: skip
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2(**options):
    config = hf.GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **options},
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config), (words(),)


def gpt2_dropout():
    return gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.0)


def llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)), (words(),)


def llama_tied():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, tie_word_embeddings=True)), (words(),)


def qwen2():
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**LLAMA)), (words(),)


def qwen3():
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**LLAMA)), (words(),)


def mistral():
    return hf.MistralForCausalLM(hf.MistralConfig(**LLAMA, sliding_window=4)), (words(),)


def gemma():
    return hf.GemmaForCausalLM(hf.GemmaConfig(**LLAMA)), (words(),)


def gemma2():
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**LLAMA, sliding_window=4)), (words(),)


def phi():
    sizes = {name: LLAMA[name] for name in LLAMA if name != "head_dim"}
    config = hf.PhiConfig(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0)
    return hf.PhiForCausalLM(config), (words(),)


def opt():
    config = hf.OPTConfig(
        vocab_size=WORDS, hidden_size=WIDTH, ffn_dim=48, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, max_position_embeddings=32, word_embed_proj_dim=WIDTH,
        dropout=0.0, attention_dropout=0.0, layerdrop=0.0,
    )  # fmt: skip
    return hf.OPTForCausalLM(config), (words(),)


def bloom():
    config = hf.BloomConfig(
        vocab_size=WORDS, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS,
        hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return hf.BloomForCausalLM(config), (words(),)


def gpt_neox():
    sizes = {n: LLAMA[n] for n in LLAMA if n not in ("head_dim", "num_key_value_heads")}
    config = hf.GPTNeoXConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0)
    return hf.GPTNeoXForCausalLM(config), (words(),)


def falcon(**options):
    config = hf.FalconConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        hidden_dropout=0.0, attention_dropout=0.0, **options,
    )  # fmt: skip
    return hf.FalconForCausalLM(config), (words(),)


def bert():
    return hf.BertForMaskedLM(hf.BertConfig(**BERT, **QUIET)), (words(),)


def bert_dropout():
    """With a mask of attention and classes for sentences, as BERT is fine-tuned."""
    module = hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=3))
    return module, (words(), words().fill_(1))


def roberta():
    return hf.RobertaForMaskedLM(hf.RobertaConfig(**BERT, **QUIET)), (words().clamp_min(1),)


def albert():
    config = hf.AlbertConfig(**BERT, **QUIET, embedding_size=16, classifier_dropout_prob=0.0)
    return hf.AlbertForMaskedLM(config), (words(),)


def electra():
    config = hf.ElectraConfig(**BERT, **QUIET, embedding_size=16)
    return hf.ElectraForMaskedLM(config), (words(),)


def distilbert():
    config = hf.DistilBertConfig(
        vocab_size=WORDS, dim=WIDTH, hidden_dim=48, n_layers=LAYERS, n_heads=HEADS,
        max_position_embeddings=32, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
    )  # fmt: skip
    return hf.DistilBertForMaskedLM(config), (words(),)


def deberta():
    config = hf.DebertaConfig(
        **BERT, **QUIET, relative_attention=True, pos_att_type="c2p|p2c", type_vocab_size=0,
    )  # fmt: skip
    return hf.DebertaForMaskedLM(config), (words(),)


def deberta_v2():
    config = hf.DebertaV2Config(
        **BERT, **QUIET, relative_attention=True, pos_att_type="c2p|p2c", share_att_key=True,
        position_buckets=4, norm_rel_ebd="layer_norm", type_vocab_size=0,
    )  # fmt: skip
    return hf.DebertaV2ForMaskedLM(config), (words(),)


def t5(**options):
    config = hf.T5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=LAYERS, num_heads=HEADS,
        dropout_rate=0.0, decoder_start_token_id=0, **options,
    )  # fmt: skip
    module = hf.T5ForConditionalGeneration(config)
    return Called(module, "input_ids", "decoder_input_ids"), (words(), words(2, LENGTH - 2))


def bart():
    config = hf.BartConfig(
        vocab_size=WORDS, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS,
        encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, max_position_embeddings=32, dropout=0.0,
    )  # fmt: skip
    module = hf.BartForConditionalGeneration(config)
    return Called(module, "input_ids", "decoder_input_ids"), (words(), words(2, LENGTH - 2))


NETWORKS = {
    "gpt2": tokens(gpt2),
    "gpt2-dropout": tokens(gpt2_dropout, draws=True),
    "llama": tokens(llama),
    "llama-tied": tokens(llama_tied),
    "qwen2": tokens(qwen2),
    "qwen3": tokens(qwen3),
    "mistral": tokens(mistral),
    "gemma": tokens(gemma),
    "gemma2": tokens(gemma2),
    "phi": tokens(phi),
    "opt": tokens(opt),
    "bloom": tokens(bloom),
    "gpt-neox": tokens(gpt_neox),
    "falcon": tokens(falcon),
    "bert": tokens(bert),
    "bert-dropout": classifier(bert_dropout, draws=True),
    "roberta": tokens(roberta),
    "albert": tokens(albert),
    "electra": tokens(electra),
    "distilbert": tokens(distilbert),
    "deberta": tokens(deberta),
    "deberta-v2": tokens(deberta_v2),
    "t5": tokens(t5),
    "bart": tokens(bart),
}
