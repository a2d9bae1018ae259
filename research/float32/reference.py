"""The float32 reference: a model in transformers whose attention reads its keys and values through a codec.

Extra `torch`. No engine noise: weights are dequantized once, activations stay float32. Frames: transformers orders the
rotary pairs of some architectures differently from llama.cpp; everything that leaves or enters this module is in
llama.cpp's order (`Reference.key_order`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from subkv.base.errors import SubkvError, need_packages
from subkv.format.arrays import F32, F64
from subkv.format.calibration import Calibration
from subkv.native.gguf import Gguf
from subkv.plan.positions import halves_of_neighbours

Coder = Callable[[int, F32, F32], tuple[F32, F32]]  # (il, k, v) [n_head_kv, n, d] -> as attention reads them

QUERIES = 256  # query rows per piece: bounds the score matrix
NAME = "subkv_reference"
# members of a config and arguments of attention that change attention or logits in unsupported ways
UNSUPPORTED = (
    *("attn_logit_softcapping", "attn_logit_softcap", "final_logit_softcapping"),
    *("logit_scale", "logits_scaling"),
)
EXTRAS = ("s_aux", "softcap", "position_bias")


def _not_here(reason: str) -> SubkvError:
    """A model that this module does not support, and the program that does."""
    engine = "`subkv perplexity --compare f16,q8_0,subkv` compares caches in the engine, which supports it"
    return SubkvError("model", f"{reason}; {engine}")


def attend(
    q: Any,
    k: Any,
    v: Any,
    coded: tuple[Any, Any] | None,
    scale: float,
    n_sink: int,
    n_recent: int,
    window: int | None = None,
) -> Any:
    """Causal attention in which the first n_sink and the last n_recent keys of every query are exact.

    q [1, n_head, n, d_k], k, v [1, n_head_kv, n, d]: exact. coded: k̂, v̂ shaped as k, v, read for all other keys; None
    reads everything exactly. A query's own key is the last of its n_recent. window: a query sees only so many last
    keys; None: all. Returns [1, n, n_head, d_v].
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    n_head, n, d = q.shape[1:]
    n_kv = k.shape[1]
    group = n_head // n_kv
    if coded is None and window is None:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
    k_coded, v_coded = (k, v) if coded is None else coded
    reach = n if window is None else window
    grouped = q.view(1, n_kv, group, n, d)
    pieces = []
    for low in range(0, n, QUERIES):
        high = min(low + QUERIES, n)
        first = max(0, low - reach + 1)  # of the visible keys
        sinks = max(first, min(n_sink, high))
        far = max(sinks, high - n_recent)  # coded keys [sinks, far): no query of the piece has a later one
        near = max(sinks, low - n_recent + 1)  # exact keys [near, high)
        i = torch.arange(low, high)[:, None]
        j = torch.arange(first, high)[None]
        visible, is_recent = (j <= i) & (j > i - reach), j > i - n_recent
        parts = ((visible, first, sinks), (visible & ~is_recent, sinks, far), (visible & is_recent, near, high))
        mask = torch.cat([seen[:, start - first : end - first] for seen, start, end in parts], 1)
        keys = torch.cat([k[:, :, first:sinks], k_coded[:, :, sinks:far], k[:, :, near:high]], 2)
        values = torch.cat([v[:, :, first:sinks], v_coded[:, :, sinks:far], v[:, :, near:high]], 2)
        rows = grouped[:, :, :, low:high].reshape(1, n_kv, group * (high - low), d)
        out = scaled_dot_product_attention(rows, keys, values, attn_mask=mask.repeat(group, 1)[None, None], scale=scale)
        pieces.append(out.view(1, n_kv, group, high - low, -1))
    return torch.cat(pieces, 3).permute(0, 3, 1, 2, 4).reshape(1, n, n_head, -1)


class Reference:
    """One model in float32. Raises SubkvError when it cannot be loaded or its attention is not supported.

    layers: those with full attention, whose cells coders replace; others have a sliding window. n_layer: their number.
    n_head, n_head_kv, d: attention shapes. key_order: [d] index into a key of transformers for every coordinate of
    llama.cpp's key; the identity until `match` has found it.
    """

    def __init__(self, path: Path, n_threads: int) -> None:
        need_packages("torch", ("torch", "transformers", "accelerate"))
        import torch
        import transformers

        torch.set_num_threads(n_threads)
        transformers.utils.logging.set_verbosity_error()
        if not sys.stderr.isatty():
            transformers.utils.logging.disable_progress_bar()
        where: dict[str, Any] = {"pretrained_model_name_or_path": path}
        if not path.is_dir():
            where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
            if not path.exists():
                raise SubkvError("model", f"expected a GGUF or a Hugging Face folder, found nothing at {path}")
            with Gguf(path) as base:  # refuses what is not a whole GGUF with a better message than transformers'
                if len(base.files) > 1:
                    raise SubkvError(
                        "model",
                        f"expected a Hugging Face folder or a GGUF of one file, since transformers reads no "
                        f"others, found a model split into {len(base.files)}",
                    )
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
            self.model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        except (ValueError, OSError, KeyError, ImportError, NotImplementedError, RuntimeError) as error:
            reason = str(error).strip().split("\n")[0]
            raise _not_here(f"{path}: transformers cannot load it: {reason.rstrip('.')}") from error
        self.model.eval().requires_grad_(False)
        config = self.model.config
        for key in UNSUPPORTED:
            if getattr(config, key, None) not in (None, 0, 1, 1.0):
                raise _not_here(f"expected plain attention and logits, found {key} in {config.model_type}")
        self.n_head = int(config.num_attention_heads)
        self.n_head_kv = int(getattr(config, "num_key_value_heads", None) or self.n_head)
        self.d = int(getattr(config, "head_dim", None) or config.hidden_size // self.n_head)
        scalar = getattr(config, "query_pre_attn_scalar", self.d)
        if not path.is_dir() and scalar != self.d:
            raise _not_here(
                f"expected a Hugging Face folder, since transformers does not read the scale of attention from a GGUF, "
                f"found a GGUF with heads of {self.d} and a scale for {scalar:g}"
            )
        self.n_ctx_train = int(getattr(config, "max_position_embeddings", None) or 1 << 30)
        self.key_order = np.arange(self.d)
        self._hook: Callable[..., Any] | None = None
        self._sliding_hook: Callable[..., Any] | None = None
        self._register(transformers)
        self.layers = self._probe()
        self.n_layer = len(self.layers)

    def _probe(self) -> list[int]:
        """The layers with full attention.

        Raises SubkvError unless all layers call our attention with arguments that it supports, and some are full.
        """
        seen: dict[int, int | None] = {}  # layers' windows

        def hook(il: int, q: Any, k: Any, v: Any, scale: float, window: int | None = None) -> Any:
            seen[il] = window
            return attend(q, k, v, None, scale, 0, 0, window)

        try:
            with self.hooked(hook, hook):
                self.logits([0, 1], 1)
        except SubkvError:
            raise
        except Exception as error:
            raise _not_here(f"expected a model that runs with another attention, found {error}") from error
        config = self.model.config
        n_layer = int(config.num_hidden_layers)
        if set(seen) != set(range(n_layer)):
            raise _not_here(
                f"expected ordinary attention in {n_layer} layers, found it in {len(seen)} of this "
                f"{config.model_type} model"
            )
        windows = _windows(config)
        if [seen[il] for il in range(n_layer)] != windows:
            raise _not_here(
                f"expected attention with the sliding windows of its config, found others in {config.model_type}"
            )
        full = [il for il, window in enumerate(windows) if window is None]
        if not full:
            raise _not_here(f"expected a layer with full attention, found a sliding window in all {n_layer}")
        return full

    def _register(self, transformers: Any) -> None:
        """Give this model our attention; other models of the process keep theirs."""

        def attention(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: Any = None, **rest: Any) -> Any:
            scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
            window = rest.get("sliding_window")
            extra = [name for name in EXTRAS if rest.get(name) is not None]
            if extra:
                raise _not_here(f"expected plain softmax attention, found {', '.join(extra)}")
            hook, sliding_hook = module.config._subkv_hooks()
            if window is not None and sliding_hook is not None:
                return sliding_hook(int(module.layer_idx), q, k, v, scale, window), None
            if window is not None or hook is None:
                return attend(q, k, v, None, scale, 0, 0, window), None
            return hook(int(module.layer_idx), q, k, v, scale), None

        transformers.AttentionInterface.register(NAME, attention)
        transformers.AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
        for module in self.model.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation = NAME
                object.__setattr__(module.config, "_subkv_hooks", lambda: (self._hook, self._sliding_hook))

    @contextlib.contextmanager
    def hooked(self, hook: Callable[..., Any], sliding: Callable[..., Any] | None = None) -> Iterator[None]:
        """Within: attention of the full layers is hook(il, q, k, v, scale), tensors as in attend(); of other layers
        sliding(il, q, k, v, scale, window), None: exact.
        """
        self._hook, self._sliding_hook = hook, sliding
        try:
            yield
        finally:
            self._hook = self._sliding_hook = None

    def tokenize(self, text: bytes, special: bool = False) -> list[int]:
        """As corpus.Tokenizer."""
        how = {"add_special_tokens": False, "split_special_tokens": not special}
        return [int(token) for token in self._tokenizer(text.decode(), **how)["input_ids"]]

    @property
    def bos(self) -> int | None:
        """The token every chunk starts with, None when the tokenizer adds none."""
        token = self._tokenizer.bos_token_id
        return int(token) if getattr(self._tokenizer, "add_bos_token", False) and token is not None else None

    def logits(self, tokens: Sequence[int], first: int) -> F32:
        """Logits [n − first, n_vocab] of the positions from `first` on."""
        import torch

        with torch.inference_mode():
            ids = torch.tensor(tokens)[None]
            hidden = self.model.get_decoder()(ids, use_cache=False).last_hidden_state[:, first:]
            out: F32 = self.model.get_output_embeddings()(hidden)[0].numpy()
        return out

    def coded_logits(
        self,
        tokens: Sequence[int],
        first: int,
        coder: Coder,
        n_sink: int,
        n_recent: int,
        recent: Coder | None = None,
        sliding: Coder | None = None,
    ) -> F32:
        """As logits(), with all keys and values outside the exact window replaced by those of `coder`.

        recent: coder of those in the window except sinks; None: they are exact. sliding: coder of layers with a sliding
        window; None: they are exact.
        """
        import torch

        order = self.key_order
        back = np.argsort(order)

        def seen(code: Coder, il: int, k: Any, v: Any) -> tuple[Any, Any]:
            k_seen, v_seen = code(il, k[0].numpy()[:, :, order], v[0].numpy())
            return torch.from_numpy(k_seen[:, :, back])[None], torch.from_numpy(v_seen)[None]

        def hook(il: int, q: Any, k: Any, v: Any, scale: float) -> Any:
            coded = seen(coder, il, k, v)
            if recent is not None:
                held = seen(recent, il, k, v)
                k, v = (torch.cat([x[:, :, :n_sink], y[:, :, n_sink:]], 2) for x, y in zip((k, v), held, strict=True))
            return attend(q, k, v, coded, scale, n_sink, n_recent)

        def sliding_hook(il: int, q: Any, k: Any, v: Any, scale: float, window: int) -> Any:
            assert sliding is not None
            return attend(q, k, v, seen(sliding, il, k, v), scale, n_sink, n_recent, window)

        with self.hooked(hook, sliding_hook if sliding else None):
            return self.logits(tokens, first)

    def match(self, calibration: Calibration, tokens: Sequence[int]) -> None:
        """Find key_order: the order of key coordinates under which this model has, on `tokens`, the calibration's Σ_k.

        Tried: the same order, and rotary pairs that are neighbours in llama.cpp but half a head apart here. Raises
        SubkvError when neither fits: another model.
        """
        import torch

        seen: dict[int, Any] = {}

        def hook(il: int, q: Any, k: Any, v: Any, scale: float) -> Any:
            rows = k[0, :, calibration.n_skip :].double()
            seen[il] = torch.einsum("hti,htj->hij", rows, rows).numpy()
            return attend(q, k, v, None, scale, 0, 0)

        with self.hooked(hook):
            self.logits(tokens, len(tokens) - 1)
        orders = [np.arange(self.d), halves_of_neighbours(self.d)]
        fits = []
        for order in orders:
            layers = ((seen[layer.shape.il], layer.k2) for layer in calibration.layers)
            pairs = ((_uneven(a[:, order][:, :, order]), _uneven(k2)) for a, k2 in layers)
            fits.append(float(np.mean([np.sum(a * b) / (np.linalg.norm(a) * np.linalg.norm(b)) for a, b in pairs])))
        # measured: 0.8 between contexts of 512 and 2048 tokens of one model, 0.05 in the wrong order
        if max(fits) < 0.5:
            raise SubkvError(
                "calibration",
                f"expected a calibration of this model, found one of other keys "
                f"(cosine of their second moments {max(fits):.2f}, expected above 0.5)",
            )
        self.key_order = orders[int(np.argmax(fits))]


def _windows(config: Any) -> list[int | None]:
    """The layers' sliding windows by a config of transformers."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * int(config.num_hidden_layers)
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise _not_here(
            f"expected full attention or a sliding window in every layer, found {', '.join(sorted(unknown))}"
        )
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _uneven(moments: F64) -> F64:
    """Second moments [n, d, d] less those of an isotropic distribution of equal energy: the differences of models."""
    d = moments.shape[-1]
    even = np.trace(moments, axis1=1, axis2=2)[:, None, None] / d * np.eye(d)
    return moments - even + np.finfo(np.float64).tiny


def check_shapes(reference: Reference, calibration: Calibration) -> None:
    """Refuse a calibration of other attention shapes than the model's. Raises SubkvError."""
    expected = (reference.n_head, reference.n_head_kv, reference.d)
    shapes = [layer.shape for layer in calibration.layers]
    found = {(s.n_head, s.n_head_kv, s.d_k) for s in shapes if s.d_k == s.d_v}
    if found != {expected} or [s.il for s in shapes] != reference.layers:
        raise SubkvError(
            "calibration",
            f"expected {reference.n_layer} layers, {expected[0]} heads, {expected[1]} KV heads of size {expected[2]} "
            f"as in the model, found another calibration",
        )


def check_length(reference: Reference, n_ctx: int) -> None:
    """Refuse chunks beyond the positions a model was trained with. Raises SubkvError."""
    if n_ctx > reference.n_ctx_train:
        raise SubkvError("n_ctx", f"expected at most the trained {reference.n_ctx_train} tokens, found {n_ctx}")
