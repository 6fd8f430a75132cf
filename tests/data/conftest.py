"""A character tokenizer with a chat template, and parquet files."""

import string

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ extra | default('') }}{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|system|>", "<|assistant|>"]
    # padding is not token 0, so that tests see where it comes from
    vocabulary = ["!", *special, *(c for c in string.printable if c != "!")]
    core = Tokenizer(models.WordLevel({token: index for index, token in enumerate(vocabulary)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


@pytest.fixture
def tokenized(tokenizer, monkeypatch):
    """Lengths of all texts that are tokenized."""
    kind, lengths = type(tokenizer), []
    encode = kind.__call__

    def counting(self, text, *args, **kwargs):
        lengths.extend([len(text)] if isinstance(text, str) else map(len, text))
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", counting)
    return lengths


@pytest.fixture
def question_rows():
    """Rows in verl's schema; the prompt of row i has ``i + 1`` characters in addition to the template's 3 tokens."""

    def rows(count: int):
        return [
            {
                "prompt": [{"role": "user", "content": "x" * (row + 1)}],
                "data_source": "toy",
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(row)},
                "extra_info": {"split": "train", "index": row},
            }
            for row in range(count)
        ]

    return rows


@pytest.fixture
def write(tmp_path):
    """Write rows to a parquet file and return its path."""

    def write_rows(rows, name="train.parquet", schema=None):
        path = str(tmp_path / name)
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
        return path

    return write_rows
