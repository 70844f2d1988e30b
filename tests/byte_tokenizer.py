"""A tokenizer whose tokens are bytes."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EOS = 256


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with a token for each byte, and ``EOS``."""
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<eos>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer
