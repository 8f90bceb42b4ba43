"""Other forms of PAMM, to see what each is worth in quality: prototypes, which save no memory.

    python benchmarks/leads.py train STUDY.jsonl --tokens tokens --results leads.jsonl
    python benchmarks/leads.py plot leads.jsonl leads.png

A study is one JSON object a line, as of benchmarks/quality.py (whose loop and tokens these are):

    {"arm": "two generators", "lead": {"form": "pursuit", "terms": 2}, "lr": 0.0015, "steps": 1000}

A lead is a form of ``FORMS`` with its settings; "share" (1/512) of the tokens are generators,
"readers" says which of q, k and v have it (all), "rotating" that every n-th block is exact, each
in its turn. Without a lead it is exact training. X itself is kept: only dW is approximated.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pamm.analysis.plots import COLOURS, new_figure
from pamm.ops import no_autocast
from quality import Training, add_train, train_study

READERS = ("q_proj", "k_proj", "v_proj")


def plain(x: Tensor, g: Tensor, index: Tensor) -> Tensor:
    """X~.T @ G of the paper's X~: each row by the generator of the largest absolute cosine."""
    return _combined(x[index], g, *_assigned(x, x[index]))


def norm(x: Tensor, g: Tensor, index: Tensor) -> Tensor:
    """The same direction with the row's own norm: alpha = sign ||x|| / ||c||."""
    c = x[index]
    f, alpha = _assigned(x, c)
    return _combined(c, g, f, alpha.sign() * x.norm(dim=1) / c.norm(dim=1)[f])


def pursuit(x: Tensor, g: Tensor, index: Tensor, terms: int = 2) -> Tensor:
    """Several generators a row, one after the other for what the ones before have left."""
    total, rest, c = 0, x, x[index]
    for _ in range(terms):
        f, alpha = _assigned(rest, c)
        total = total + _combined(c, g, f, alpha)
        rest = rest - alpha[:, None] * c[f]
    return total


def parts(x: Tensor, g: Tensor, index: Tensor, number: int = 8) -> Tensor:
    """The features in so many parts, each with its own assignment and alpha."""
    return torch.cat([plain(part, g, index) for part in x.chunk(number, dim=1)])


def mean(x: Tensor, g: Tensor, index: Tensor) -> Tensor:
    """The mean of the rows exactly, and PAMM for what they differ from it."""
    middle = x.mean(0)
    return torch.outer(middle, g.sum(0)) + plain(x - middle, g, index)


def refined(x: Tensor, g: Tensor, index: Tensor) -> Tensor:
    """Generators moved once to the mean of their rows, signs and norms taken out (k-means)."""
    c = x[index]
    f, alpha = _assigned(x, c)
    unit = x / x.norm(dim=1, keepdim=True)
    c = _sums(f, unit * alpha.sign()[:, None], len(c))
    return _combined(c, g, *_assigned(x, c))


FORMS: dict[str, Callable[..., Tensor]] = {
    form.__name__: form for form in (plain, norm, pursuit, parts, mean, refined)
}


def _assigned(x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """f and alpha of the paper's Lemma 1; a generator of zeros stands for none."""
    inverse = torch.where((size := c.norm(dim=1)) > 0, 1 / size, 0)
    similarity = (x @ c.T) * inverse
    f = similarity.abs().argmax(dim=1)
    return f, similarity.gather(1, f[:, None]).squeeze(1) * inverse[f]


def _combined(c: Tensor, g: Tensor, f: Tensor, alpha: Tensor) -> Tensor:
    """C.T @ B~."""
    return c.T @ _sums(f, alpha[:, None] * g, len(c))


def _sums(f: Tensor, rows: Tensor, k: int) -> Tensor:
    """Of the rows of each generator."""
    return (f[:, None] == torch.arange(k, device=f.device)).to(rows.dtype).T @ rows


class _Function(torch.autograd.Function):
    """x W.T, exact but for dW."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        index: Tensor,
        is_exact: Tensor,
        form: str,
        settings: tuple[tuple[str, int], ...],
    ):
        ctx.save_for_backward(x, weight, index, is_exact)
        ctx.form, ctx.settings = form, settings
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        x, weight, index, is_exact = ctx.saved_tensors
        rows, g = x.flatten(0, -2), grads[0].flatten(0, -2)
        with no_autocast(g):
            approximate = FORMS[ctx.form](rows.float(), g.float(), index, **dict(ctx.settings)).T
            dw = torch.where(is_exact, (g.T @ rows).float(), approximate)
            return grads[0] @ weight, dw.to(weight.dtype), None, None, None, None


class LeadLinear(nn.Linear):
    """A linear layer whose weight gradient is a lead's; ``turn`` counts its forward passes."""

    def begin(self, lead: dict[str, Any], block: int) -> None:
        """Take the settings."""
        settings = dict(lead)
        self.share, self.every = settings.pop("share", 1 / 512), settings.pop("rotating", 0)
        settings.pop("readers", None)
        self.form, self.settings = settings.pop("form"), tuple(settings.items())
        self.register_buffer("turn", torch.tensor(block, device=self.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        tokens = x.shape[:-1].numel()
        index = torch.randperm(tokens, device=x.device)[: max(1, round(self.share * tokens))]
        is_exact = self.turn % self.every == 0 if self.every else torch.zeros_like(self.turn) > 0
        self.turn += 1
        weight = self.weight.to(torch.bfloat16)
        return _Function.apply(
            x.to(torch.bfloat16), weight, index, is_exact, self.form, self.settings
        )


class Lead(Training):
    """A training of a lead."""

    def prepare(self) -> dict[str, int]:
        if lead := self.run.get("lead"):
            for block, layer in enumerate(self.model.model.layers):  # type: ignore[union-attr]
                for reader in lead.get("readers", READERS):
                    linear = getattr(layer.self_attn, reader)
                    linear.__class__ = LeadLinear
                    linear.begin(lead, block)
        return {}


def plot(results: Path, output: Path) -> None:
    """Perplexity of each above exact's, in a row."""
    records = [json.loads(line) for line in results.read_text().splitlines()]
    exact = next(r["perplexity"] for r in records if "lead" not in r["run"])
    cost = {
        r["run"]["arm"]: 100 * (r["perplexity"] / exact - 1) for r in records if "lead" in r["run"]
    }
    names = sorted(cost, key=cost.__getitem__, reverse=True)
    figure, axes = new_figure(8, 0.4 * len(names) + 1)
    bars = axes.barh(names, [cost[name] for name in names], color=COLOURS[1])
    axes.bar_label(bars, fmt="%+.1f %%", padding=3)
    axes.margins(x=0.15)
    axes.set(xlabel=f"perplexity above exact's ({exact:.2f}), %")
    axes.grid(visible=False, axis="y")
    figure.savefig(output, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    add_train(commands)
    command = commands.add_parser("plot")
    command.add_argument("results", type=Path)
    command.add_argument("output", type=Path)
    options = parser.parse_args()
    if options.command == "plot":
        plot(options.results, options.output)
    else:
        train_study(options, Lead)


if __name__ == "__main__":
    main()
