"""The embedded base's tokenizers and text encoders, and the probes that teach the encoders what captions mean.

Shape letters: B batch, L tokens, D width. Both encoders are 96 wide and read up to 32 tokens.
"""

from __future__ import annotations

import json
import random
import string
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

from engine.embedded.scenes import (
    COLOURS,
    EXTRA_SHAPES,
    FILLER,
    POSITIONS,
    RADII,
    SHAPES,
    STYLE_WORDS,
    Pairs,
    Scene,
    caption,
    sample_scenes,
    vocabulary,
)

WIDTH = 96
MAX_TOKENS = 32
_BOS, _EOS = "<|startoftext|>", "<|endoftext|>"
# CLIP's own splitting rule, so that merges are learned on the pieces the real tokenizer will see.
_CLIP_SPLIT = r"""<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""


def new_clip_tokenizer() -> CLIPTokenizer:
    """Byte-level BPE in which every word of `vocabulary` is one token and any other text falls back to bytes."""
    trained = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    trained.normalizer = normalizers.Lowercase()
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_CLIP_SPLIT), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=10_000, min_frequency=1, show_progress=False, end_of_word_suffix="</w>", special_tokens=[]
    )
    trained.train_from_iterator(vocabulary(), trainer)
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(letter + "</w>" for letter in alphabet), *(first + second for first, second in merges)]
    pieces = [*dict.fromkeys(pieces), _BOS, _EOS]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=MAX_TOKENS)


def new_t5_tokenizer() -> T5TokenizerFast:
    """Unigram pieces: each word of `vocabulary`, plain and capitalised, then single characters.

    T5's tokenizer class has no byte fallback, so characters outside printable ASCII become the unknown token.
    """
    words = vocabulary()
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -4.0)]
    names = list(dict.fromkeys(words + [word.capitalize() for word in words]))
    pieces += [("\u2581" + name, -1.0) for name in names]
    pieces += [(letter, -8.0) for letter in string.printable.strip()]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=MAX_TOKENS)


@dataclass
class TextParts:
    """Both tokenizers and both encoders."""

    clip_tokenizer: CLIPTokenizer
    clip: CLIPTextModel
    t5_tokenizer: T5TokenizerFast
    t5: T5EncoderModel

    def clip_ids(self, captions: list[str]) -> Tensor:
        """(B, 32) token ids, padded as StableDiffusionPipeline pads."""
        return _ids(self.clip_tokenizer, captions)

    def t5_ids(self, captions: list[str]) -> Tensor:
        """(B, 32) token ids, padded as FluxPipeline pads (and, like there, used without a mask)."""
        return _ids(self.t5_tokenizer, captions)


def _ids(tokenizer: CLIPTokenizer | T5TokenizerFast, captions: list[str]) -> Tensor:
    encoded = tokenizer(captions, padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    ids: Tensor = encoded.input_ids
    return ids


def new_text() -> TextParts:
    """Tokenizers ready to use and untrained encoders."""
    clip_tokenizer, t5_tokenizer = new_clip_tokenizer(), new_t5_tokenizer()
    clip_config = CLIPTextConfig(
        vocab_size=len(clip_tokenizer),
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=clip_tokenizer.bos_token_id,
        eos_token_id=clip_tokenizer.eos_token_id,
        pad_token_id=clip_tokenizer.pad_token_id,
    )
    t5_config = T5Config(
        vocab_size=len(t5_tokenizer),
        d_model=WIDTH,
        d_kv=24,
        d_ff=2 * WIDTH,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=MAX_TOKENS,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
        pad_token_id=0,
        eos_token_id=1,
    )
    return TextParts(clip_tokenizer, CLIPTextModel(clip_config), t5_tokenizer, T5EncoderModel(t5_config))


# -------------------------------------------------------------------------------------------------------- probes

_SHAPE_CLASSES = (*SHAPES, *EXTRA_SHAPES, "")
_COLOUR_CLASSES = (*COLOURS, "")
_STYLE_CLASSES = tuple(STYLE_WORDS)
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "shape": _SHAPE_CLASSES,
    "colour": _COLOUR_CLASSES,
    "size": (*RADII, ""),
    "position": (*POSITIONS, ""),
    "background": _COLOUR_CLASSES,
    "background_bottom": _COLOUR_CLASSES,
    "style": _STYLE_CLASSES,
    "second_shape": _SHAPE_CLASSES,
    "second_colour": _COLOUR_CLASSES,
}


def _labels(scene: Scene, text: str) -> list[int]:
    """One class index per attribute of `ATTRIBUTES`; attributes that the caption leaves out get the empty class."""
    top, bottom = (scene.background, "") if isinstance(scene.background, str) else scene.background
    ground = f"{top} to {bottom} background" if bottom else f"{top} background"
    second = scene.second
    place = scene.position if f"at the {scene.position}" in text or f", {scene.position}" in text else ""
    values = {
        "shape": scene.shape,
        "colour": scene.colour,
        "size": scene.size if scene.size in RADII and scene.size in text.replace(",", " ").split() else "",
        "position": place if second is None else "",
        "background": top if ground in text else "",
        "background_bottom": bottom if ground in text else "",
        "style": scene.style,
        "second_shape": second.shape if second else "",
        "second_colour": second.colour if second else "",
    }
    return [classes.index(values[name]) for name, classes in ATTRIBUTES.items()]


def _with_filler(text: str, rng: random.Random) -> str:
    """A caption with meaningless words or letters around it, as users write prompts."""
    extra = [
        rng.choice(FILLER) if rng.random() < 0.8 else "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 5)))
        for _ in range(rng.randint(1, 5))
    ]
    words = " ".join(extra)
    return rng.choice((f"{words} {text}", f"{words}, {text}", f"{text}, {words}"))


def caption_batch(count: int, rng: random.Random, *, pairs: Pairs = "all") -> tuple[list[str], Tensor]:
    """Captions, a quarter with filler and a fifth capitalised, and their (B, attributes) class indices.

    Like a real text encoder these have read of every pair; only the denoisers are kept from the held-out ones. Trained
    on seen pairs alone, CLIP named the shape of a held-out pair in 92 % of captions.
    """
    scenes = sample_scenes(
        rng.getrandbits(30),
        count,
        pairs=pairs,
        shapes=SHAPES if pairs == "held_out" else SHAPES + EXTRA_SHAPES,
        styles=("filled", "filled", "filled", "outline", "checker"),
        two_objects=0.2,
        gradients=0.2,
    )
    texts, labels = [], []
    for scene in scenes:
        text = caption(scene, rng)
        labels.append(_labels(scene, text))
        if rng.random() < 0.25:
            text = _with_filler(text, rng)
        texts.append(text[0].upper() + text[1:] if rng.random() < 0.2 else text)
    return texts, torch.tensor(labels)


class _TokenProbe(nn.Module):
    """Reads each attribute with one attention query, as the cross-attention of a denoiser will."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(0.3 * torch.randn(len(ATTRIBUTES), WIDTH))
        self.keys = nn.Linear(WIDTH, WIDTH, bias=False)
        self.values = nn.Linear(WIDTH, WIDTH, bias=False)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, len(classes)) for classes in ATTRIBUTES.values())

    def forward(self, states: Tensor) -> list[Tensor]:
        """``states`` (B, L, D) to one (B, classes) tensor of logits per attribute."""
        scores = torch.einsum("ad,bld->bal", self.queries, self.keys(states)) / WIDTH**0.5
        read = torch.einsum("bal,bld->bad", scores.softmax(-1), self.values(states))
        return [head(read[:, index]) for index, head in enumerate(self.heads)]


class _PooledProbe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, len(classes)) for classes in ATTRIBUTES.values())

    def forward(self, pooled: Tensor) -> list[Tensor]:
        """``pooled`` (B, D) to one (B, classes) tensor of logits per attribute."""
        return [head(pooled) for head in self.heads]


def _loss(logits: list[Tensor], labels: Tensor) -> Tensor:
    terms = [nn.functional.cross_entropy(part, labels[:, index]) for index, part in enumerate(logits)]
    return torch.stack(terms).mean()


def train_text(
    *,
    steps: int,
    seed: int,
    learning_rate: float = 2e-3,
    batch_size: int = 64,
    log: Callable[[str], None] = print,
) -> TextParts:
    """Train both encoders until probes can read every attribute of a caption from their outputs."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    parts = new_text()
    probes = nn.ModuleDict({"clip": _TokenProbe(), "pooled": _PooledProbe(), "t5": _TokenProbe()})
    weights = [*parts.clip.parameters(), *parts.t5.parameters(), *probes.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    parts.clip.train()
    parts.t5.train()

    def read(captions: list[str]) -> dict[str, list[Tensor]]:
        clip = parts.clip(input_ids=parts.clip_ids(captions))
        t5 = parts.t5(input_ids=parts.t5_ids(captions))
        return {
            "clip": probes["clip"](clip.last_hidden_state),
            "pooled": probes["pooled"](clip.pooler_output),
            "t5": probes["t5"](t5.last_hidden_state),
        }

    start = time.process_time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 40, 0.02 + 2.0 * (1 - step / steps))
        captions, labels = caption_batch(batch_size, rng)
        losses = {name: _loss(logits, labels) for name, logits in read(captions).items()}
        optimizer.zero_grad(set_to_none=True)
        torch.stack(list(losses.values())).sum().backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            shown = " ".join(f"{name} {loss.item():.3f}" for name, loss in losses.items())
            log(f"text step {step} {shown} cpu {time.process_time() - start:.0f}s")
    parts.clip.eval()
    parts.t5.eval()
    captions, labels = caption_batch(512, random.Random(seed + 1), pairs="held_out")
    with torch.no_grad():
        for name, logits in read(captions).items():
            hits = [(part.argmax(-1) == labels[:, i]).float().mean().item() for i, part in enumerate(logits)]
            shown = " ".join(f"{attribute} {100 * hit:.1f}" for attribute, hit in zip(ATTRIBUTES, hits, strict=True))
            log(f"fresh captions of held-out pairs, {name}: {shown}")
    return parts


def save_text(parts: TextParts, folder: Path) -> None:
    """Write the four parts as ``tokenizer``, ``text_encoder``, ``tokenizer_2`` and ``text_encoder_2``."""
    parts.clip_tokenizer.save_pretrained(folder / "tokenizer")
    parts.clip.save_pretrained(folder / "text_encoder")
    parts.t5_tokenizer.save_pretrained(folder / "tokenizer_2")
    parts.t5.save_pretrained(folder / "text_encoder_2")
