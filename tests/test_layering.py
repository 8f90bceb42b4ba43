"""The import law: a file imports only from its layer and those above; heavy packages stay out."""

import ast
import subprocess
import sys
from pathlib import Path

import jaxtyping
import pytest
import torch

import pamm
from pamm import reference

SOURCE = Path(pamm.__file__).parent

LAYERS = (
    {"errors", "config", "types", "swap", "naming", "example"},
    {"extras"},
    {"permutation", "reference", "subspace", "sampling"},
    {"fp8"},
    {"kernels"},
    {"ops"},
    {"stream"},
    {"compressors"},
    {"autograd", "functional"},
    {"sharing", "nn", "recomputation", "recompute", "weightless"},
    {"adapters", "groups", "probe"},
    {"report", "bypass", "surgery", "resume", "optim", "fidelity", "padding"},
    {"integrations"},
    {"analysis"},
    {"recipes"},
    {"recipes.text"},
    {"recipes.finetuning"},
    {"recipes.pretraining"},
    {"recipes.studies"},
    {"recipes.report"},
    {"bench"},
    {"cli", "__main__"},
)
THIRD_PARTY = {
    "integrations": {
        *("transformers", "safetensors", "peft", "lightning", "axolotl", "pydantic", "torchtitan")
    },
    "analysis": {"matplotlib", "transformers", "huggingface_hub", "numpy"},
    "recipes": {
        "transformers",
        "tokenizers",
        "numpy",
        "datasets",
        "accelerate",
        "jinja2",
        "matplotlib",
        "peft",
        "PIL",
        "pyarrow",
    },
    "kernels": {"triton"},
    "bench": {"transformers"},
}
EVERYWHERE = {"torch", "jaxtyping", "yaml", "rich", "typer", "pamm"}


def layer_of(module: str) -> int:
    """Of ``recipes.report.tables``: that of ``recipes.report``, the longest name in the list."""
    name = module
    while not any(module in names for names in LAYERS):
        assert module, f"{name} has no layer: give it one in LAYERS and in DESIGN.md"
        module = module.rpartition(".")[0]
    return next(number for number, names in enumerate(LAYERS) if module in names)


def imports(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            base = node.module or ""
            found += [f"pamm.{a.name}" if base == "pamm" else base for a in node.names]
    return found


def violations(module: str, tree: ast.AST) -> list[str]:
    """What the file ``module``, such as ``recipes.files``, imports and should not."""
    wrong = []
    allowed = EVERYWHERE | THIRD_PARTY.get(module.partition(".")[0], set())
    for name in imports(tree):
        parts = name.split(".")
        if parts[0] == "pamm":
            known = len(parts) > 1 and any(parts[1] in names for names in LAYERS)
            if known and layer_of(".".join(parts[1:])) > layer_of(module):
                wrong.append(f"{module} imports {name}, a layer below it")
        elif parts[0] not in sys.stdlib_module_names and parts[0] not in allowed:
            wrong.append(f"{module} imports {name}")
    return wrong


FILES = [file for file in sorted(SOURCE.rglob("*.py")) if file != SOURCE / "__init__.py"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_follow_the_layers(file: Path) -> None:
    module = ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    assert not violations(module, ast.parse(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ops", "from pamm.surgery import convert"),
        ("ops", "from pamm import nn"),
        ("ops", "import transformers"),
        ("recipes.workers", "from pamm.recipes.studies import study"),
        ("recipes.finetuning.glue.tasks", "from pamm.recipes.pretraining.tokens import Tokens"),
    ],
)
def test_the_law_can_be_broken(module: str, source: str) -> None:
    assert violations(module, ast.parse(source))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_file_is_longer_than_400_lines(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 400


def loaded_by(statement: str) -> set[str]:
    script = f"import sys\n{statement}\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in run.stdout.split()}


def test_using_the_core_loads_no_framework_but_torch() -> None:
    heavy = {"transformers", "peft", "lightning", "accelerate", "datasets", "triton", "matplotlib"}
    use = "import torch, pamm; names = [getattr(pamm, name) for name in pamm.__all__]"
    assert not (loaded_by(use) & heavy) - loaded_by("import torch")
    assert "transformers" in loaded_by("import pamm.integrations.transformers")  # it can fail


def test_shapes_of_public_signatures_are_checked_in_tests() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        reference.assign(torch.randn(4, 3), torch.randn(2, 5))


def test_every_exported_name_exists_and_is_documented() -> None:
    for name in pamm.__all__:
        assert getattr(pamm, name).__doc__, name
