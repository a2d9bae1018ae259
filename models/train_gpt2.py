"""Train the second test model: a small GPT-2 from scratch, exported as GGUF and, on request, for transformers.

    python models/train_gpt2.py -f wikitext2.valid.txt -o gpt2.gguf [--hf DIR] [--steps N]

A toy whose cache has another shape than the demo model's: learned absolute positions (so keys keep their mean over
positions), biases, LayerNorm, head size 128, as many KV heads as query heads. Nothing of subkv is tuned on it.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import click
import numpy as np
from gguf import GGUFWriter, LlamaFileType, TokenType
from tqdm import tqdm

from converter.corpus import INTERRUPTED, read_text
from subkv.base.command import command
from subkv.base.errors import SubkvError, concerning, install
from subkv.base.files import check_writable

try:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from torch.nn.functional import cross_entropy
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
except ImportError as error:
    sys.exit(f"train_gpt2: expected torch, transformers and tokenizers, {error}; {install('torch')}")

N_VOCAB = 2048
N_CTX = 1024
N_EMBD, N_HEAD, N_LAYER = 384, 3, 6
END = "<|endoftext|>"

HELD_OUT = 20  # the last 1/20 of the text
SHORT = 256  # window of the first part of the training, which costs less per token
SHORT_PART = 0.6
LEARNING_RATE = 1e-3
WARMUP = 0.05
WEIGHT_DECAY = 0.1
DROPOUT = 0.1
EVALUATIONS = 12


@dataclass(frozen=True)
class Tokens:
    """Token ids [n] int64 of the two parts of a text; held_bytes: UTF-8 length of the held-out part."""

    train: torch.Tensor
    held: torch.Tensor
    held_bytes: int


#
# text to tokens
#


def split(data: bytes) -> tuple[str, str]:
    """The text's first part and its last 1/HELD_OUT, cut at a line."""
    at = data.rfind(b"\n", 0, len(data) - len(data) // HELD_OUT) + 1
    return data[:at].decode(), data[at:].decode()


def train_tokenizer(text: str) -> Tokenizer:
    """Byte-level BPE with GPT-2's split into words; END is token 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=N_VOCAB,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def tokenize(tokenizer: Tokenizer, train: str, held: str) -> Tokens:
    """Raises SubkvError for a text too short to train and to judge on."""
    ids = [torch.tensor(tokenizer.encode(part).ids, dtype=torch.int64) for part in (train, held)]
    for name, part, least in (("training", ids[0], N_CTX + 1), ("held-out", ids[1], 2)):
        if len(part) < least:
            raise SubkvError("text", f"expected at least {least} tokens in the {name} part, found {len(part)}")
    return Tokens(ids[0], ids[1], len(held.encode()))


#
# training
#


def new_model(n_vocab: int) -> GPT2LMHeadModel:
    """GPT-2 with random weights; the output matrix is the token embedding."""
    config = GPT2Config(
        vocab_size=n_vocab,
        n_positions=N_CTX,
        n_embd=N_EMBD,
        n_head=N_HEAD,
        n_layer=N_LAYER,
        activation_function="gelu_pytorch_tanh",  # GPT-2's formula in one call
        resid_pdrop=DROPOUT,
        embd_pdrop=DROPOUT,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def windows(tokens: torch.Tensor, length: int, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, targets and positions, each [N_CTX / length, length].

    A window starts anywhere in the text. A short one also starts at any position, so that every position is trained.
    """
    starts = [rng.randrange(len(tokens) - length) for _ in range(N_CTX // length)]
    offsets = [rng.randrange(N_CTX - length + 1) for _ in starts]
    inputs = torch.stack([tokens[s : s + length] for s in starts])
    targets = torch.stack([tokens[s + 1 : s + 1 + length] for s in starts])
    return inputs, targets, torch.tensor(offsets)[:, None] + torch.arange(length)


def loss_of(model: GPT2LMHeadModel, inputs: torch.Tensor, targets: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Mean negative log-likelihood of the targets, nats per token."""
    logits = model(input_ids=inputs, use_cache=False, **kwargs).logits
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.inference_mode()
def held_out_loss(model: GPT2LMHeadModel, tokens: torch.Tensor) -> float:
    """Nats per token over windows of N_CTX from an empty cache; every token but the first is predicted once."""
    model.eval()
    total = 0.0
    for at in range(0, len(tokens) - 1, N_CTX):
        part = tokens[at : at + N_CTX + 1]
        total += loss_of(model, part[None, :-1], part[None, 1:]).item() * (len(part) - 1)
    model.train()
    return total / (len(tokens) - 1)


def rate(step: int, steps: int) -> float:
    """Learning rate: linear warm-up, then a cosine down to a tenth."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return LEARNING_RATE * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return LEARNING_RATE * (0.55 + 0.45 * math.cos(math.pi * done))


def optimizer_of(model: GPT2LMHeadModel) -> torch.optim.AdamW:
    """AdamW that decays the layers' matrices only."""
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay} for decay in (0.0, WEIGHT_DECAY)]
    for name, weight in model.named_parameters():
        groups[weight.ndim > 1 and ".h." in name]["params"].append(weight)
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def train(model: GPT2LMHeadModel, tokens: Tokens, steps: int, seed: int) -> tuple[int, float]:
    """Trains in place and keeps the weights of the lowest held-out loss. Returns its step and that loss."""
    rng = random.Random(seed)
    optimizer = optimizer_of(model)
    best: tuple[float, int, dict[str, torch.Tensor]] = (math.inf, 0, {})
    model.train()
    with tqdm(range(steps), unit="step", file=sys.stderr) as bar:
        for step in bar:
            for group in optimizer.param_groups:
                group["lr"] = rate(step, steps)
            length = SHORT if step < SHORT_PART * steps else N_CTX
            inputs, targets, positions = windows(tokens.train, length, rng)
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, inputs, targets, position_ids=positions)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % max(1, steps // EVALUATIONS) == 0 or step + 1 == steps:
                held = held_out_loss(model, tokens.held)
                tqdm.write(f"step {step + 1}: loss {loss.item():.3f}, held-out {held:.3f}", file=sys.stderr)
                if not math.isfinite(held):
                    raise SubkvError("steps", f"expected a finite held-out loss, found {held} at step {step + 1}")
                if held < best[0]:
                    best = (held, step + 1, {name: w.detach().clone() for name, w in model.state_dict().items()})
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.load_state_dict(best[2])
    model.eval()
    return best[1], best[0]


#
# export
#


def tensors(model: GPT2LMHeadModel) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Tensors by GGUF name, numpy order [n_out, n_in]; without an output matrix llama.cpp takes the token embedding."""
    own = {"ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm"}
    own |= {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
    names = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}
    names |= {f"h.{il}.{theirs}": f"blk.{il}.{ours}" for il in range(N_LAYER) for theirs, ours in own.items()}
    out = {}
    for name, weight in model.transformer.named_parameters():
        module, _, kind = name.rpartition(".")
        # transformers stores GPT-2's matrices [n_in, n_out], but embeddings as GGUF does
        transposed = weight.T if weight.ndim > 1 and module.startswith("h.") else weight
        out[f"{names[module]}.{kind}"] = np.ascontiguousarray(transposed.detach().float().numpy())
    return out


def write_gguf(path: Path, model: GPT2LMHeadModel, tokenizer: Tokenizer, about: str) -> None:
    """Writes float32 tensors, so that what differs from torch is llama.cpp's arithmetic and the cache.

    Half precision in the weights would make llama.cpp round the activations too.
    """
    writer = GGUFWriter(path, "gpt2")
    writer.add_name("subkv second test model")
    writer.add_description(about)
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(N_LAYER)
    writer.add_feed_forward_length(4 * N_EMBD)
    writer.add_head_count(N_HEAD)
    writer.add_layer_norm_eps(model.config.layer_norm_epsilon)
    bpe = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if t == END else TokenType.NORMAL for t in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in bpe["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    for name, data in tensors(model).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_hf(folder: Path, model: GPT2LMHeadModel, tokenizer: Tokenizer) -> None:
    """config.json, model.safetensors and the tokenizer, as transformers' Auto classes read them."""
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, model_max_length=N_CTX
    ).save_pretrained(folder)


@command("train_gpt2", interrupted=INTERRUPTED)
@click.option("-f", "--file", "text", required=True, type=click.Path(path_type=Path), help="Text, UTF-8.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="GGUF to write.")
@click.option("--hf", type=click.Path(path_type=Path), help="Folder for transformers: config, safetensors, tokenizer.")
@click.option("--steps", type=click.IntRange(1), default=2000, show_default=True, help=f"Of {N_CTX} tokens each.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("-t", "--threads", type=click.IntRange(1), help="[default: torch's]")
def main(text: Path, output: Path, hf: Path | None, steps: int, seed: int, threads: int | None) -> None:
    """Train a small GPT-2 on TEXT and write it as GGUF."""
    with concerning(files="text"):
        data = read_text(text).data
    check_writable(output)
    if hf and hf.exists() and (not hf.is_dir() or any(hf.iterdir())):
        raise SubkvError("hf", f"expected a new or empty folder, found {hf}")
    torch.manual_seed(seed)
    if threads:
        torch.set_num_threads(threads)
    parts = split(data)
    tokenizer = train_tokenizer(parts[0])
    tokens = tokenize(tokenizer, *parts)
    model = new_model(tokenizer.get_vocab_size())
    step, loss = train(model, tokens, steps, seed)
    bits = loss * (len(tokens.held) - 1) / tokens.held_bytes / math.log(2)
    digest = sha256(data).hexdigest()
    about = (
        f"A toy for tests: {steps} steps of {N_CTX} tokens, seed {seed}, from {len(tokens.train)} tokens of "
        f"{text.name} (SHA-256 {digest}); held-out loss {loss:.3f} nats per token after step {step}"
    )
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        write_gguf(temporary, model, tokenizer, about)
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
    if hf:
        write_hf(hf, model, tokenizer)
    click.echo(f"{about}, {bits:.3f} bits per byte")


if __name__ == "__main__":
    main()
