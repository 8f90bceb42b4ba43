"""The page that says what becomes of every type of model."""

from pathlib import Path

import torch
import transformers

from tests.sweep.tiny import KINDS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

HEAD = """# Models

What `pamm.convert` does with every type of model in Transformers {version} (torch {torch}). Each
was built small with random weights and trained for a step: exactly, with PAMM (ratio 1/4, q, k, v)
and with `method="recompute"` (q, k, v and the MLP's first layers). Checked for each: all gradients
but those of converted weights equal exact training's bit for bit, and the bytes freed between
forward and backward are those the report predicts. `python -m tests.sweep` writes this page, and
`tests/sweep` compares every line with a run.

"N groups" were converted with PAMM; what was not, and why, follows; "N recomputed" is
`method="recompute"`, and the default, `"sampled"`, converts what that does. "Not tried" are types
that cannot be built small by the sweep's simple rules.

| | types | run | with converted groups |
| --- | --- | --- | --- |
"""


def write(results: dict[str, dict[str, str]]) -> None:
    """Write the page from kind -> type -> outcome."""
    text = HEAD.format(version=transformers.__version__, torch=torch.__version__.split("+")[0])
    for kind, lines in results.items():
        ran = [line for line in lines.values() if not line.startswith("not tried")]
        some = [line for line in ran if " groups" in line.split(":")[0]]
        text += f"| {kind} | {len(lines)} | {len(ran)} | {len(some)} |\n"
    for kind, lines in results.items():
        text += f"\n## {kind}\n\n| type | what happens |\n| --- | --- |\n"
        text += "".join(f"| `{name}` | {line} |\n" for name, line in lines.items())
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")


def read() -> dict[str, dict[str, str]]:
    """The outcomes on the page."""
    results: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
    kind = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            kind = line.removeprefix("## ")
        elif line.startswith("| `"):
            name, result = line.removeprefix("| `").removesuffix(" |").split("` | ", 1)
            results[kind][name] = result
    return results
