"""``pamm analyze``: what compression does to the inputs of a trained model, on real text."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.utils.benchmark import Timer

from pamm import ops
from pamm.analysis import theory
from pamm.analysis.fidelity import (
    Recorded,
    as_row,
    energy,
    find_groups,
    gradient_errors,
    principal_plane,
    record,
)
from pamm.compressors import compressor
from pamm.config import METHODS, PammConfig
from pamm.errors import PammError, said
from pamm.extras import require
from pamm.recipes.files import read_json, write_json
from pamm.recipes.text.read import find_files, read_texts

RATIOS = (1 / 32, 1 / 64, 1 / 128, 1 / 256, 1 / 512, 1 / 1024)
TOLERANCES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, None)
NEAR = (0.5, 0.7, 0.8, 0.9, 0.95)  # of Lemma 2, which is for 0 < eps < 1
DELTA = 0.05
ANALYSIS = "analysis.json"
_MODEL = "config.json"
_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)  # of directions and of tokens
_RATIOS_OF = {"subspace": (1 / 8, 3 / 8), "sampled": (1 / 8, 1 / 4, 1 / 2, 2 / 3)}
_PASS = 4096  # tokens that the model sees at a time
_LONGEST = 1024


def analyze(
    checkpoint: Path,
    output: Path,
    console: Console,
    *,
    text: Sequence[str] = (),
    tokenizer: str | None = None,
    tokens: int = 8192,
    layers: Sequence[int] | None = None,
    draws: int = 8,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Measure on a checkpoint and a text; write ``analysis.json`` and pictures.

    Args:
        checkpoint: folder of a causal language model, as ``save_pretrained`` writes it; or one that
            was written here: then its pictures, but for those of PCA, are drawn again, from
            ``analysis.json`` alone, and nothing else is looked at.
        output: folder of what is written.
        console: shows what is done.
        text: files or folders; without them, the validation tokens of the run that the checkpoint
            is of.
        tokenizer: ``tokenizer.json``, or what ``AutoTokenizer`` loads; without it, that of the run.
        tokens: how many to look at: the b of every compression.
        layers: numbers of groups; the first, the middle and the last one by default.
        draws: of generators, for each error.
        device: where.

    Raises:
        PammError: if the checkpoint, the text or the layers cannot be used.
    """
    require("plots", "matplotlib")
    if (checkpoint / ANALYSIS).is_file() and not (checkpoint / _MODEL).is_file():
        return _draw(checkpoint, console)
    require("train", "transformers", "tokenizers")
    from pamm.analysis.figures import pca

    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = _load(checkpoint).to(device).train()
    run = _run_folder(checkpoint)
    numbers = _tokens(run, text, tokenizer, tokens)
    names = list(groups := find_groups(model))
    chosen = _chosen(layers, len(names))
    length = min(getattr(model.config, "max_position_embeddings", _LONGEST), _LONGEST)
    passes = _passes(model, numbers.to(device), length)
    recorded = record(model, {names[each]: groups[names[each]] for each in chosen}, passes)
    del model, passes

    result: dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "tokens": len(next(iter(recorded.values())).x),
        "draws": draws,
        "delta": DELTA,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "layers": chosen,
        **{
            key: []
            for key in ("errors", "methods", "energy", "coverage", "bound", "density", "complexity")
        },
    }
    for number, part in zip(chosen, recorded.values(), strict=True):
        console.print(f"layer {number}: {part.x.shape[0]:,} tokens x {part.x.shape[1]}")
        for key, rows in _measure(part, draws).items():
            result[key] += [{"layer": number, **row} for row in rows]
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / ANALYSIS, result)
    console.print(f"  {output / ANALYSIS}", markup=False, highlight=False, soft_wrap=True)
    for number, part in zip(chosen, recorded.values(), strict=True):
        plane = principal_plane(part.x, PammConfig("pamm", 1 / 512))
        figure = pca(plane, f"PAMM, r = 1/512: layer {number}, {len(part.x):,} tokens")
        _write(figure, output / f"layer-{number}-pca.png", console)
    return _draw(output, console)


def _measure(part: Recorded, draws: int) -> dict[str, list[dict[str, Any]]]:
    tokens, width = part.x.shape
    rows: dict[str, list[dict[str, Any]]] = {"errors": [], "methods": [], "coverage": []}
    for config in (PammConfig("pamm", r, tolerance=e) for r in RATIOS for e in TOLERANCES):
        state = ops.compress(part.x, _index(config, part.x), config.tolerance)
        covered = float((state.coefficients != 0).float().mean())
        rows["coverage"].append(as_row(config, tokens, coverage=covered))
        for name, error in gradient_errors(part, config, draws).items():
            rows["errors"].append(as_row(config, tokens, projection=name, **error._asdict()))
    methods = [method for method in METHODS if not PammConfig(method).is_exact]
    for config in (PammConfig(m, r) for m in methods for r in _RATIOS_OF.get(m, RATIOS)):
        held = compressor(config).state_bytes(tokens, width, torch.bfloat16) / tokens
        for name, error in gradient_errors(part, config, draws).items():
            row = as_row(config, tokens, projection=name, held_bytes_per_token=held)
            rows["methods"].append(row | error._asdict())
    uneven = energy(part, _SHARES)
    return rows | {
        "energy": [{"part": k, "shares": [*_SHARES], "energy": v} for k, v in uneven.items()],
        "bound": [_bound(part.x, tolerance) for tolerance in NEAR],
        "density": [row for tolerance in NEAR for row in _density(part.x, tolerance)],
        "complexity": [_complexity(part, PammConfig("pamm", ratio)) for ratio in RATIOS],
    }


def _index(config: PammConfig, x: Tensor) -> Tensor:
    return theory.draw_orders(len(x), 1, x.device)[0, : config.generators(len(x))]


def _bound(x: Tensor, tolerance: float) -> dict[str, Any]:
    """Lemma 2 against what draws of generators really cover."""
    tokens = len(x)
    smallest = int(theory.neighbourhood_sizes(x, tolerance).min())
    first = theory.first_covered(x, tolerance, theory.draw_orders(tokens, 20, x.device))
    curve = [2**power for power in range(tokens.bit_length())]
    return {
        "tolerance": tolerance,
        "n_min": smallest,
        "k_bound": theory.k_bound(tokens, smallest, DELTA),
        # The k that covers all rows in a share 1 - delta of the draws.
        "k_for_all": int(first.amax(1).sort().values[math.ceil(20 * (1 - DELTA)) - 1]),
        "curve_k": curve,
        "curve_coverage": [float((first <= k).float().mean()) for k in curve],
    }


def _density(x: Tensor, tolerance: float) -> list[dict[str, Any]]:
    rows, tokens = [], len(x)
    while tokens >= 256:
        sizes = theory.neighbourhood_sizes(x[:tokens], tolerance)
        rows.append(
            {
                "tolerance": tolerance,
                "tokens": tokens,
                "smallest": int(sizes.min()),
                "median": int(sizes.median()),
            }
        )
        tokens //= 2
    return rows


def _complexity(part: Recorded, config: PammConfig) -> dict[str, Any]:
    """Multiplications counted, and microseconds measured, of a group's whole weight gradient.

    On a GPU it is measured in bf16, as models are trained there.
    """
    x, grad = part.x, torch.cat(list(part.grads.values()), dim=1)
    if x.is_cuda:
        x, grad = x.bfloat16(), grad.bfloat16()
    (tokens, n), m = x.shape, grad.shape[1]
    k, index = config.generators(tokens), _index(config, x)

    def time_us(work: Callable[[], object]) -> float:
        timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
        return 1e6 * timer.blocked_autorange(min_run_time=0.2).median

    counts = theory.pamm_multiplications(tokens, n, m, k)
    return {
        "k": k,
        "dtype": str(x.dtype).removeprefix("torch."),
        "n": n,
        "m": m,
        "gamma": theory.gamma(tokens, m, k),
        "exact_multiplications": theory.exact_multiplications(tokens, n, m),
        "pamm_multiplications": counts,
        "exact_us": time_us(lambda: grad.T @ x),
        "pamm_us": time_us(lambda: ops.weight_grad(ops.compress(x, index), grad)),
    }


def _draw(folder: Path, console: Console) -> dict[str, Any]:
    """Every picture but PCA's, from the ``analysis.json`` in the folder, which is returned."""
    from pamm.analysis import figures

    result = read_analysis(folder)
    for layer in result["layers"]:
        for key, figure in figures.of_layer(result, layer).items():
            _write(figure, folder / f"layer-{layer}-{key}.png", console)
    return result


def _write(figure: Any, path: Path, console: Console) -> None:
    from pamm.analysis.plots import png

    path.write_bytes(png(figure))
    console.print(f"  {path}", markup=False, highlight=False, soft_wrap=True)


def _load(checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM

    if not (checkpoint / _MODEL).is_file():
        raise PammError(f"{checkpoint} holds no model; give a checkpoint folder of a run.")
    try:
        return AutoModelForCausalLM.from_pretrained(
            checkpoint, use_safetensors=True, dtype=torch.float32, trust_remote_code=False
        )
    except Exception as error:  # of many kinds, by what is wrong with the files
        raise PammError(f"cannot load the model in {checkpoint}: {said(error)}.") from error


def _run_folder(checkpoint: Path) -> Path | None:
    """Where the tokens of the checkpoint's run lie: that of ``pretrain``, or of a study."""
    for parent in list(checkpoint.absolute().parents)[:4]:
        for folder in (parent, parent / "data"):
            if (folder / "tokens.json").exists():
                return folder
    return None


def _tokens(run: Path | None, text: Sequence[str], tokenizer: str | None, count: int) -> Tensor:
    from pamm.recipes.pretraining.tokens import Tokens, load_tokenizer

    if not text and run is not None:
        numbers = [int(number) for number in Tokens.open(run).validation[:count]]
    elif not text:
        raise PammError("the checkpoint lies in no folder of a run; give a text with --text.")
    else:
        if tokenizer is None and run is None:
            raise PammError("the checkpoint lies in no folder of a run; give a --tokenizer.")
        chosen = load_tokenizer(tokenizer or str(run / "tokenizer.json"))[0]  # type: ignore[operator]
        numbers = []
        for each in read_texts(find_files([*text])):
            numbers += chosen.encode(each, add_special_tokens=False).ids
            if len(numbers) >= count:
                break
    if len(numbers) < min(count, 512):
        raise PammError(f"the text has {len(numbers):,} tokens; give more text.")
    return torch.tensor(numbers[:count])


def _chosen(layers: Sequence[int] | None, count: int) -> list[int]:
    if layers is None:
        return sorted({0, count // 2, count - 1})
    if bad := [layer for layer in layers if not 0 <= layer < count]:
        raise PammError(f"layer {bad[0]} was asked for; this model has 0 to {count - 1}.")
    return sorted(set(layers))


def _passes(model: Any, numbers: Tensor, length: int) -> list[Callable[[], Tensor]]:
    blocks = numbers[: len(numbers) // length * length].view(-1, length)
    return [
        lambda ids=ids: model(input_ids=ids, labels=ids).loss
        for ids in blocks.split(max(1, _PASS // length))
    ]


def read_analysis(folder: Path) -> dict[str, Any]:
    """What ``analyze`` wrote."""
    return read_json(folder / ANALYSIS)
