"""A small network that reads text, as the service has it."""

import torch
from transformers import BertConfig, BertTokenizerFast

from alight import from_transformers, save_model
from alight.engine.settings import RunSettings
from alight.policies.policy import Threshold
from alight.serve.model import load_served_model

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] bread soup train hotel song the a".split()
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3, "intermediate_size": 32}


def save_text_network(home):
    """The network, saved in a folder with its tokenizer."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = from_transformers(BertConfig(vocab_size=len(WORDS), **SIZES), num_classes=3, count=2)
    save_model(model, home)
    (home / "words.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(vocab_file=str(home / "words.txt")).save_pretrained(home / "tokenizer")
    return model


def text_model(home, max_tokens):
    """The network of a new folder under a policy that lets some leave early."""
    model = save_text_network(home)
    policy = Threshold(thresholds=(0.05,) * (model.num_exits - 1), costs=tuple(range(1, model.num_exits + 1)))
    return load_served_model(home, {"policy": policy}, max_tokens=max_tokens, settings=RunSettings(threads=1))
