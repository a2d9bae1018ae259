"""Sensitivities by backpropagation: the effect of errors in cached keys or values on next-token distributions.

For small errors δ the KLD of a distribution p from its disturbed self is ½ δᵀ F δ with the Fisher information
F = E_y [g gᵀ], g = ∂ ln p(y)/∂(cached vector), y drawn from p (for example Amari, Natural Gradient Works Efficiently in
Learning, 1998). One backward pass through a chunk gives one draw of g for every cached vector and, since the draws of
different positions are independent with mean zero, the sum of the positions' F in expectation. As in every evaluation
here, the second half of a chunk is scored: a cache matters at depth. Extra `torch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from research.float32.caches import Cache, coded_cache, run, stock_coder
from research.float32.reference import Reference, attend
from subkv.base.progress import progress_bar
from subkv.format.arrays import F64
from subkv.format.calibration import Calibration, LayerSensitivity, Sensitivity
from subkv.format.window import Window
from subkv.native.gguf import Gguf
from subkv.plan.pipeline import TARGET, Fit, Options

SEED = 1  # of the labels drawn
PROBE_BITS = 4.5  # bits per element of the layout that is run to correct predictions
ROWS_ONLY = 1 << 40  # a context in which window and bases count nothing


def measure(
    reference: Reference,
    calibration: Calibration,
    chunks: Sequence[Sequence[int]],
    n_recent: int,
    progress: bool = False,
) -> Calibration:
    """The calibration with sensitivities measured on `chunks`, each run from an empty cache, per scored token.

    reference.key_order must be the calibration's (Reference.match), its shapes too (check_shapes). Every cell from
    calibration.n_skip on enters.
    """
    import torch

    sums: list[dict[str, F64]] = [  # by layer of the calibration
        {key: np.zeros_like(layer.k2 if key.startswith("k") else layer.v2) for key in ("k", "v", "k0", "v0")}
        for layer in calibration.layers
    ]
    tokens = 0
    generator = torch.Generator().manual_seed(SEED)
    with progress_bar("sensitivity", len(chunks), "chunk", progress) as bar:
        for chunk in chunks:
            for i, gradients in enumerate(_gradients(reference, chunk, calibration.n_skip, n_recent, generator)):
                for key, rows in gradients.items():
                    sums[i][key] += torch.einsum("hti,htj->hij", rows, rows).double().numpy()
            tokens += len(chunk) - len(chunk) // 2
            bar.update()
    measured = Sensitivity("fisher", tokens, n_recent, max(len(chunk) for chunk in chunks))
    layers = tuple(
        replace(layer, sensitivity=LayerSensitivity(**{key: total / tokens for key, total in own.items()}))
        for layer, own in zip(calibration.layers, sums, strict=True)
    )
    return replace(calibration, layers=layers, sensitivity=measured, sha256="")


def _gradients(
    reference: Reference, chunk: Sequence[int], n_skip: int, n_recent: int, generator: Any
) -> Iterator[dict[str, Any]]:
    """Per reference.layers k, v of readings beyond the window, k0, v0 of all: [n_head_kv, n − n_skip, d] f32."""
    import torch
    from torch.utils.checkpoint import checkpoint

    leaves: dict[int, Any] = {}

    def hook(il: int, q: Any, k: Any, v: Any, scale: float) -> Any:
        # Separate zeros on the coded and on the exact reading of a cell separate their gradients.
        zeros = [torch.zeros_like(x, requires_grad=True) for x in (k, k, v, v)]
        leaves[il] = zeros

        def piece(q: Any, k: Any, v: Any, k_far: Any, k_near: Any, v_far: Any, v_near: Any) -> Any:
            return attend(q, k + k_near, v + v_near, (k + k_far, v + v_far), scale, n_skip, n_recent)

        # recomputed in the backward pass: the score matrices of all layers do not fit in memory together
        return checkpoint(piece, q, k, v, *zeros, use_reentrant=False)

    with torch.enable_grad(), reference.hooked(hook):
        ids = torch.tensor(chunk)[None]
        embedded = reference.model.get_input_embeddings()(ids).detach().requires_grad_(True)
        hidden = reference.model.get_decoder()(inputs_embeds=embedded, use_cache=False).last_hidden_state[0]
        hidden = hidden[len(chunk) // 2 :]
        # the head's logits are large: their gradient is taken piece by piece
        cut = hidden.detach().requires_grad_(True)
        for rows in torch.split(cut, 512):
            log_p = torch.log_softmax(reference.model.get_output_embeddings()(rows), -1)
            drawn = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
            log_p.gather(1, drawn).sum().backward()
        hidden.backward(cut.grad)
    order = torch.from_numpy(reference.key_order)
    for il in reference.layers:
        k_far, k_near, v_far, v_near = (leaf.grad[0, :, n_skip:] for leaf in leaves[il])
        yield {"k": k_far[..., order], "k0": (k_far + k_near)[..., order], "v": v_far, "v0": v_far + v_near}


def probe(base: Gguf, calibration: Calibration, n_recent: int) -> Fit:
    """The calibration's bases as `convert` would fit them. Raises SubkvError where convert would."""
    options = Options(window=Window(calibration.n_skip, n_recent), bpe_context=ROWS_ONLY)
    return Fit(base, calibration, options, progress=True)


def with_corrections(
    reference: Reference, base: Gguf, calibration: Calibration, chunks: Sequence[Sequence[int]], n_threads: int
) -> Calibration:
    """The calibration with its predictions corrected by measurements on `chunks`, text that did not enter it.

    Second order, with errors taken as independent of how much a cell is attended, predicts too little where attention
    is rare and decisive (SmolLM2: half of the KLD beyond a window of 128 tokens, all of it without a window). So one
    layout and q8_0 are run for real. A factor that cannot be measured (a KLD of zero, a head size that q8_0 refuses)
    stays 1.
    """
    assert calibration.sensitivity is not None
    fit = probe(base, calibration, calibration.sensitivity.n_recent)
    caches = [coded_cache(fit, PROBE_BITS, "kv")]
    predicted = fit.stock_error(TARGET)
    if predicted is not None:
        caches.append(Cache(TARGET, stock_coder(TARGET), 0.0, 0.0, predicted=predicted))
    run(reference, caches, chunks, n_threads, progress=True)
    factors: dict[str, Any] = {}
    for name, cache in zip(("correction", "correction0"), caches, strict=False):
        kld = cache.scores.summary()["mean_kld"]
        factors[name] = kld / cache.predicted if kld > 0.0 and cache.predicted else 1.0
    return replace(calibration, sensitivity=replace(calibration.sensitivity, **factors), sha256="")
